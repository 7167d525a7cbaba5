// The host side of a prefill: checks every operand and the launch table, allocates results and workspace, and hands the
// launches to a device. Knows no device: NPU and simulator run through it alike.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernel_launch.h"

namespace vllm_ext {

// What the kernels are compiled for; device_kernels.cpp checks that they agree.
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTaskFields = 8;       // int32: token_begin, token_count, sequence, head, column_begin, column_count,
                                         // gate_begin, 0
constexpr int64_t kShapeFields = 12;
constexpr int64_t kPackedLower = 10 * 16 * 16;
constexpr int64_t kAlignment = 32;       // bytes, of a tensor in global memory

enum Phase : int32_t { kWhole, kMap, kReduce, kOutput, kPhases };

struct PrefillCall {
    Op op;
    at::Tensor q, k, v;                  // FP16 [B, T, H, K] twice, [B, T, HV, V]
    at::Tensor g;                        // FP32 [HV, P], KDA [HV, P, K]; P: tokens, each sequence padded to whole chunks
    at::Tensor beta;                     // FP32 [HV, P]
    std::optional<at::Tensor> initial_state;   // state_dtype [N, HV, V, K] when state_v_first, else [N, HV, K, V]
    at::Tensor tasks;                    // int32 [n, 8] on the CPU
    at::Tensor launches;                 // int32 [L, 2 + blocks + 1] on the CPU: phase, number of blocks, first tasks
    double scale;
    int64_t num_sequences;
    std::string chip;
    bool output_final_state, state_v_first, normalise;
    at::ScalarType state_dtype;          // FP16 or FP32
};

class Device {
  public:
    virtual ~Device() = default;
    virtual void* stream() = 0;
    // Run the requests in order; `keep` holds their memory until the last one is done with it.
    virtual void Submit(const std::vector<LaunchRequest>& requests, const std::vector<at::Tensor>& keep) = 0;
};

// o [B, T, HV, V] and the final state, which is empty unless asked for. Raises ValueError naming what does not fit.
std::tuple<at::Tensor, at::Tensor> RunPrefill(const PrefillCall& call, Device& device);

// --npu-arch of the kernels a chip runs; empty for a chip without any.
std::string ArchOf(const std::string& chip);

// The simulator built by vllm_ext.ops.linear_attention.ascend_sim, as a launch function; one object for each target.
const char* LaunchSimulated(const LaunchRequest& request);
void LoadSimulator(const std::string& arch, const std::string& path, int64_t threads);

}  // namespace vllm_ext
