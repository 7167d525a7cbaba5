// The NPU's kernels: the host code of prefill.cpp, launched on torch_npu's current stream through its task queue.
#include <torch/library.h>

#include <cstdio>

#include "prefill.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace vllm_ext {
namespace {

class NpuDevice : public Device {
  public:
    NpuDevice(const char* name, const std::string& chip, c10::Device device)
        : name_(name), stream_(c10_npu::getCurrentNPUStream(device.index()).stream(false)) {
        const std::string arch = ArchOf(chip);
        for (const CompiledTarget* target = kCompiledTargets; target->arch; ++target)
            if (arch == target->arch) launch_ = target->launch;
        TORCH_CHECK(launch_, name, ": this build has no kernels for ", arch, " (chip ", chip,
                    "); build again with VLLM_EXT_ASCEND_TARGETS=", arch);
    }
    void* stream() override { return stream_; }

    // Queued behind whatever torch_npu has queued already; the copies keep the tensors until it has run.
    void Submit(const std::vector<LaunchRequest>& requests, const std::vector<at::Tensor>& keep) override {
        at_npu::native::OpCommand command;
        command.Name(name_);
        command.SetCustomHandler([launch = launch_, requests, keep, chip = std::string(requests.front().chip)]() -> int {
            for (LaunchRequest request : requests) {
                request.chip = chip.c_str();
                if (const char* failure = launch(request)) {
                    std::fprintf(stderr, "vllm_ext: %s\n", failure);
                    return 1;
                }
            }
            return 0;
        });
        command.Run();
    }

  private:
    const char* name_;
    void* stream_;
    LaunchFunction launch_ = nullptr;
};

template <Op op>
std::tuple<at::Tensor, at::Tensor> PrefillOnNpu(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
    const std::optional<at::Tensor>& initial_state, const at::Tensor& tasks, const at::Tensor& launches, double scale,
    int64_t num_sequences, c10::string_view chip, bool output_final_state, bool state_v_first, bool normalise,
    at::ScalarType state_dtype) {
    const c10::DeviceGuard guard(q.device());
    NpuDevice device(op == Op::kGdn ? "ascend_gdn_prefill" : "ascend_kda_prefill", std::string(chip), q.device());
    return RunPrefill({op, q, k, v, g, beta, initial_state, tasks, launches, scale, num_sequences, std::string(chip),
                       output_final_state, state_v_first, normalise, state_dtype},
                      device);
}

}  // namespace

TORCH_LIBRARY_IMPL(vllm_ext, PrivateUse1, library) {
    library.impl("ascend_gdn_prefill", PrefillOnNpu<Op::kGdn>);
    library.impl("ascend_kda_prefill", PrefillOnNpu<Op::kKda>);
}

}  // namespace vllm_ext
