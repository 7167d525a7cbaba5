// The operators: schemas, shapes for tracing, and the CPU's kernels, which are the simulated ones.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "prefill.h"

namespace vllm_ext {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;

// Runs the requests on the host simulator, at once.
class SimulatedDevice : public Device {
  public:
    void* stream() override { return nullptr; }
    void Submit(const std::vector<LaunchRequest>& requests, const std::vector<at::Tensor>&) override {
        for (const LaunchRequest& request : requests) {
            const char* failure = LaunchSimulated(request);
            TORCH_CHECK(failure == nullptr, "simulator: ", failure);
        }
    }
};

template <Op op>
Result PrefillOnCpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                    const at::Tensor& beta, const std::optional<at::Tensor>& initial_state, const at::Tensor& tasks,
                    const at::Tensor& launches, double scale, int64_t num_sequences, c10::string_view chip,
                    bool output_final_state, bool state_v_first, bool normalise, at::ScalarType state_dtype) {
    SimulatedDevice device;
    return RunPrefill({op, q, k, v, g, beta, initial_state, tasks, launches, scale, num_sequences, std::string(chip),
                       output_final_state, state_v_first, normalise, state_dtype},
                      device);
}

// Shapes may be symbolic here, so nothing is compared.
Result PrefillShapes(const at::Tensor& q, const at::Tensor&, const at::Tensor& v, const at::Tensor&, const at::Tensor&,
                     const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, double,
                     c10::SymInt num_sequences, c10::string_view, bool output_final_state, bool state_v_first, bool,
                     at::ScalarType state_dtype) {
    const auto options = q.options();
    at::Tensor o = at::empty_symint(v.sym_sizes(), options);
    if (!output_final_state) return {o, at::empty({0}, options.dtype(state_dtype))};
    const c10::SymInt key = q.sym_size(3), value = v.sym_size(3);
    const std::vector<c10::SymInt> sizes{num_sequences, v.sym_size(2), state_v_first ? value : key,
                                         state_v_first ? key : value};
    return {o, at::empty_symint(sizes, options.dtype(state_dtype))};
}

std::string Targets() {
    std::string names;
    for (const CompiledTarget* target = kCompiledTargets; target->arch; ++target)
        names += (names.empty() ? "" : ",") + std::string(target->arch);
    return names;
}

}  // namespace

#define VLLM_EXT_PREFILL_SCHEMA(name)                                                                                    \
    name                                                                                                                 \
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor tasks, Tensor launches, *, "    \
    "float scale, SymInt num_sequences, str chip, bool output_final_state, bool state_v_first, bool normalise, "         \
    "ScalarType state_dtype) -> (Tensor o, Tensor final_state)"

TORCH_LIBRARY_FRAGMENT(vllm_ext, library) {
    library.def(VLLM_EXT_PREFILL_SCHEMA("ascend_gdn_prefill"));
    library.def(VLLM_EXT_PREFILL_SCHEMA("ascend_kda_prefill"));
    library.def("ascend_targets() -> str", Targets);
    library.def("ascend_load_simulator(str arch, str path, int threads) -> ()",
                [](c10::string_view arch, c10::string_view path, int64_t threads) {
                    LoadSimulator(std::string(arch), std::string(path), threads);
                });
}

TORCH_LIBRARY_IMPL(vllm_ext, CPU, library) {
    library.impl("ascend_gdn_prefill", PrefillOnCpu<Op::kGdn>);
    library.impl("ascend_kda_prefill", PrefillOnCpu<Op::kKda>);
}

TORCH_LIBRARY_IMPL(vllm_ext, Meta, library) {
    library.impl("ascend_gdn_prefill", PrefillShapes);
    library.impl("ascend_kda_prefill", PrefillShapes);
}

}  // namespace vllm_ext
