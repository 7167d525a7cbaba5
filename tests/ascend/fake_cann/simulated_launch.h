// A launch of a compiled kernel, on the host simulator: memory of the stub device is host memory.
#pragma once
#include "kernel_launch.h"
#include "launch.h"

namespace {

std::unique_ptr<AscendC::sim::Session> session;
std::string failure;

void SimulatedLaunch(const vllm_ext::LaunchRequest& request, const char* name, uint8_t* const* addresses,
                     AscendC::sim::KernelBody body) {
    failure.clear();
    try {
        if (request.index == 0) {
            session.reset();
            for (const auto& chip : AscendC::sim::kChips)
                if (std::string(chip.name) == request.chip) session = std::make_unique<AscendC::sim::Session>(chip, 2);
            if (!session) throw std::runtime_error(std::string("no simulated chip ") + request.chip);
            for (const auto& argument : request.arguments)
                if (argument.data && argument.bytes && argument.use != vllm_ext::Use::kTable)
                    session->AddRegion(argument.name, argument.data, argument.bytes, static_cast<int>(argument.use), false);
        }
        session->Launch(name, body, request.blocks, addresses);
        if (request.index + 1 == request.count) session->CheckOutputs();
    } catch (const std::exception& error) {
        failure = error.what();
    }
}

const char* SimulatedFailure() { return failure.empty() ? nullptr : failure.c_str(); }

}  // namespace
