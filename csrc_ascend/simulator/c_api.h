// The C interface of the built shared object. Include once.
#pragma once
#include <cstdio>

#include "launch.h"

namespace {

// Stores the message and returns 1; 0 means that all went well.
template <typename Action>
int Guarded(char* error, uint64_t error_size, Action action) {
    try {
        action();
        return 0;
    } catch (const std::exception& failure) {
        std::snprintf(error, error_size, "%s", failure.what());
        return 1;
    }
}

}  // namespace

extern "C" {

void* sim_open(const char* chip, int threads) {
    for (const auto& spec : AscendC::sim::kChips)
        if (std::string(spec.name) == chip) return new AscendC::sim::Session(spec, threads);
    return nullptr;
}
void sim_close(void* session) { delete static_cast<AscendC::sim::Session*>(session); }

void sim_region(void* session, const char* name, void* begin, uint64_t size, int mode, int written) {
    static_cast<AscendC::sim::Session*>(session)->AddRegion(name, begin, size, mode, written != 0);
}
int sim_launch(void* session, const char* kernel, uint32_t blocks, uint8_t* const* arguments, char* error, uint64_t error_size) {
    return Guarded(error, error_size, [&] {
        const auto found = AscendC::sim::Kernels().find(kernel);
        if (found == AscendC::sim::Kernels().end()) throw std::runtime_error(std::string("no kernel named ") + kernel);
        static_cast<AscendC::sim::Session*>(session)->Launch(found->first.c_str(), found->second, blocks, arguments);
    });
}
int sim_check_outputs(void* session, char* error, uint64_t error_size) {
    return Guarded(error, error_size, [&] { static_cast<AscendC::sim::Session*>(session)->CheckOutputs(); });
}
void sim_mutate(void* session, const char* kind, const char* file, int place) {
    static_cast<AscendC::sim::Session*>(session)->Mutate(kind, file, place);
}
void sim_cooperate(void* session) { static_cast<AscendC::sim::Session*>(session)->Cooperate(); }
void sim_watch_places(void* session) { static_cast<AscendC::sim::Session*>(session)->WatchPlaces(); }
// Writes "kind file place" lines and returns the bytes they take.
uint64_t sim_places(void* session, char* out, uint64_t size) {
    const std::string text = static_cast<AscendC::sim::Session*>(session)->Places();
    std::snprintf(out, size, "%s", text.c_str());
    return text.size();
}
void sim_counters(void* session, uint64_t* out) {
    std::memcpy(out, &static_cast<AscendC::sim::Session*>(session)->counters(), sizeof(AscendC::sim::Counters));
}

}  // extern "C"
