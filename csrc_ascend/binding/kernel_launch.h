// What the host code hands to a kernel launch: the same for the compiled kernels and for the simulated ones. Plain C++,
// because the device compiler reads it too.
#pragma once
#include <cstdint>

namespace vllm_ext {

enum class Op : int32_t { kGdn, kKda };

// How a launch uses an argument; the numbers are the simulator's. kTable: small integers, read as scalars.
enum class Use : int32_t { kInput, kOutput, kWorkspace, kTable };

struct Argument {
    const char* name;
    void* data;        // null when absent
    uint64_t bytes;
    Use use;
};

constexpr int kArguments = 12;

// One launch of a call's `count`; they run one after another on `stream`. `chip` is the planner's name of the device.
struct LaunchRequest {
    Op op;
    const char* chip;
    void* stream;
    uint32_t blocks, index, count;
    Argument arguments[kArguments];   // in the order of the kernels' parameters
};

// Null, or why the launch failed.
using LaunchFunction = const char* (*)(const LaunchRequest& request);

// Kernels in this object, by the compiler's --npu-arch. The list ends with a null arch; setup.py generates it.
struct CompiledTarget {
    const char* arch;
    LaunchFunction launch;
};
extern const CompiledTarget kCompiledTargets[];

}  // namespace vllm_ext
