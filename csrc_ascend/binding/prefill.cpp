#include "prefill.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <cstring>
#include <limits>
#include <sstream>

#include "launch_table.h"

namespace vllm_ext {
namespace {

const char* Name(Op op) { return op == Op::kGdn ? "ascend_gdn_prefill" : "ascend_kda_prefill"; }

// One operand: shape, dtype, device, contiguity and alignment, with the numbers.
void CheckOperand(const PrefillCall& call, const char* name, const at::Tensor& tensor, at::IntArrayRef shape,
                  at::ScalarType dtype) {
    TORCH_CHECK_VALUE(tensor.sizes() == shape, Name(call.op), ": ", name, " must be ", shape, ", got ", tensor.sizes());
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, Name(call.op), ": ", name, " must be ", dtype, ", got ",
                      tensor.scalar_type(), "; convert it, or serve the model with --dtype float16");
    TORCH_CHECK_VALUE(tensor.device() == call.q.device(), Name(call.op), ": ", name, " is on ", tensor.device(),
                      " and q on ", call.q.device(), "; move them to one device");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), Name(call.op), ": ", name, " must be contiguous, got strides ",
                      tensor.strides(), "; call .contiguous()");
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    TORCH_CHECK_VALUE(address % kAlignment == 0, Name(call.op), ": ", name, " begins ", address % kAlignment,
                      " bytes behind a multiple of ", kAlignment, ", which the copy engines cannot read; call .clone()");
}

void CheckHeadSize(const PrefillCall& call, const char* name, int64_t size) {
    TORCH_CHECK_VALUE(size == 64 || size == 128, Name(call.op), ": ", name, " must be 64 or 128, got ", size);
}

Sizes CheckCall(const PrefillCall& call) {
    const char* where = Name(call.op);
    TORCH_CHECK_VALUE(call.q.dim() == 4 && call.v.dim() == 4, where, ": q and v must be [B, T, heads, size], got ",
                      call.q.sizes(), " and ", call.v.sizes());
    const int64_t batch = call.q.size(0), length = call.q.size(1);
    Sizes sizes{batch * length, call.q.size(2), call.v.size(2), call.q.size(3), call.v.size(3), 0, call.num_sequences};
    CheckHeadSize(call, "K", sizes.key_dim);
    CheckHeadSize(call, "V", sizes.value_dim);
    TORCH_CHECK_VALUE(sizes.key_heads > 0 && sizes.value_heads > 0 && sizes.value_heads % sizes.key_heads == 0, where,
                      ": value heads must be a multiple of key heads, got ", sizes.value_heads, " and ", sizes.key_heads);
    TORCH_CHECK_VALUE(sizes.sequences >= 0 && sizes.tokens <= std::numeric_limits<int32_t>::max(), where, ": got ",
                      sizes.sequences, " sequences and ", sizes.tokens, " tokens; tasks count in 32 bits");
    CheckOperand(call, "q", call.q, {batch, length, sizes.key_heads, sizes.key_dim}, at::kHalf);
    CheckOperand(call, "k", call.k, call.q.sizes(), at::kHalf);
    CheckOperand(call, "v", call.v, {batch, length, sizes.value_heads, sizes.value_dim}, at::kHalf);
    TORCH_CHECK_VALUE(call.beta.dim() == 2 && call.beta.size(1) >= kChunkTokens && call.beta.size(1) % kChunkTokens == 0,
                      where, ": beta must be [HV, P] with P a positive multiple of ", kChunkTokens, ", got ",
                      call.beta.sizes());
    sizes.gate_stride = call.beta.size(1);
    TORCH_CHECK_VALUE(sizes.gate_stride <= std::numeric_limits<int32_t>::max(), where, ": P must fit 32 bits, got ",
                      sizes.gate_stride);
    CheckOperand(call, "beta", call.beta, {sizes.value_heads, sizes.gate_stride}, at::kFloat);
    std::vector<int64_t> gates{sizes.value_heads, sizes.gate_stride};
    if (call.op == Op::kKda) gates.push_back(sizes.key_dim);
    CheckOperand(call, "g", call.g, gates, at::kFloat);
    TORCH_CHECK_VALUE(call.state_dtype == at::kHalf || call.state_dtype == at::kFloat, where,
                      ": states are kept in FP16 or FP32, got ", call.state_dtype);
    if (call.initial_state) {
        std::vector<int64_t> state{sizes.sequences, sizes.value_heads, sizes.key_dim, sizes.value_dim};
        if (call.state_v_first) std::swap(state[2], state[3]);
        CheckOperand(call, "initial_state", *call.initial_state, state, call.state_dtype);
    }
    return sizes;
}

// The kernels' PrefillShape, phase 0.
std::vector<int32_t> ShapeFields(const PrefillCall& call, const Sizes& sizes) {
    const float scale = static_cast<float>(call.scale);
    int32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
    return {narrow(sizes.key_heads), narrow(sizes.value_heads), narrow(sizes.key_dim), narrow(sizes.value_dim),
            narrow(sizes.gate_stride), call.initial_state.has_value(), call.output_final_state,
            call.state_dtype == at::kHalf, call.state_v_first, call.normalise, bits, 0};
}

// FP16 elements that the launches of chunk-head-chunk leave for one another: T and P packed, V' and the state before
// each chunk of each head. A 310B has no way from UB to L1, so there every block also passes operands through global
// memory, a state in float at the most. The formulas are the kernels' classes Workspace and Prefill.
int64_t WorkspaceElements(const Sizes& sizes, const LaunchTable& table, bool passes_through_memory) {
    if (!table.needs_workspace() && !passes_through_memory) return 0;
    const int64_t units = sizes.value_heads * (sizes.gate_stride / kChunkTokens);
    const int64_t between = units * (2 * kPackedLower + (kChunkTokens + sizes.key_dim) * sizes.value_dim);
    return between + (passes_through_memory ? table.most_blocks() * 2 * sizes.key_dim * sizes.value_dim : 0);
}

Argument Of(const char* name, const at::Tensor& tensor, Use use) {
    return {name, tensor.data_ptr(), static_cast<uint64_t>(tensor.nbytes()), use};
}

}  // namespace

std::string ArchOf(const std::string& chip) {
    if (chip.rfind("310p", 0) == 0) return "dav-2002";
    if (chip.rfind("310b", 0) == 0) return "dav-3002";
    return "";
}

std::tuple<at::Tensor, at::Tensor> RunPrefill(const PrefillCall& call, Device& device) {
    const Sizes sizes = CheckCall(call);
    const LaunchTable table(Name(call.op), call, sizes);
    const std::string arch = ArchOf(call.chip);
    TORCH_CHECK_VALUE(!arch.empty(), Name(call.op), ": no kernels for chip '", call.chip,
                      "': they are written for 310P and 310B, whose cores hold matrix and vector unit together");

    const auto options = call.q.options();
    at::Tensor o = at::empty(call.v.sizes(), options), final_state = at::empty({0}, options.dtype(call.state_dtype));
    if (call.output_final_state) {
        std::vector<int64_t> state{sizes.sequences, sizes.value_heads, sizes.key_dim, sizes.value_dim};
        if (call.state_v_first) std::swap(state[2], state[3]);
        final_state = at::empty(state, options.dtype(call.state_dtype));
    }
    at::Tensor workspace;
    const int64_t elements = WorkspaceElements(sizes, table, arch == "dav-3002");
    if (elements > 0) workspace = at::empty({elements}, options);

    const PackedTable packed = table.Pack(ShapeFields(call, sizes));
    // Blocking copy: the host vector ends with this call.
    const at::Tensor fields = at::tensor(packed.fields, at::dtype(at::kInt)).to(call.q.device());
    int32_t* base = static_cast<int32_t*>(fields.data_ptr());

    const Argument none{"", nullptr, 0, Use::kInput};
    auto named = [](Argument argument, const char* name) { return argument.name = name, argument; };
    std::vector<LaunchRequest> requests;
    for (int64_t launch = 0; launch < table.launches(); ++launch) {
        LaunchRequest request{call.op, call.chip.c_str(), device.stream(), static_cast<uint32_t>(table.blocks(launch)),
                              static_cast<uint32_t>(launch), static_cast<uint32_t>(table.launches()),
                              {Of("q", call.q, Use::kInput), Of("k", call.k, Use::kInput), Of("v", call.v, Use::kInput),
                               Of("g", call.g, Use::kInput), Of("beta", call.beta, Use::kInput),
                               call.initial_state ? Of("initial_state", *call.initial_state, Use::kInput)
                                                  : named(none, "initial_state"),
                               Of("o", o, Use::kOutput),
                               call.output_final_state ? Of("final_state", final_state, Use::kOutput)
                                                       : named(none, "final_state"),
                               workspace.defined() ? Of("workspace", workspace, Use::kWorkspace) : named(none, "workspace"),
                               {"tasks", base, static_cast<uint64_t>(fields.nbytes()), Use::kTable},
                               {"block_tasks", base + packed.starts_at[launch], 0, Use::kTable},
                               {"shape", base + packed.shape_at[launch], kShapeFields * 4, Use::kTable}}};
        requests.push_back(request);
    }
    std::vector<at::Tensor> keep{call.q, call.k, call.v, call.g, call.beta, o, final_state, fields};
    if (call.initial_state) keep.push_back(*call.initial_state);
    if (workspace.defined()) keep.push_back(workspace);
    device.Submit(requests, keep);
    return {o, final_state};
}

}  // namespace vllm_ext
