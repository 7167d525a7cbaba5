// The kernels of one target and their launch. Compiled by bisheng, once for each target, with
//   -DVLLM_EXT_SUFFIX=dav_2002 and -DVLLM_EXT_LAUNCH=vllm_ext_launch_dav_2002
// The kernels' names carry the target, so that two targets can be linked into one object.
#define VLLM_EXT_JOIN_(name, suffix) name##_##suffix
#define VLLM_EXT_JOIN(name, suffix) VLLM_EXT_JOIN_(name, suffix)
#define gdn_prefill VLLM_EXT_JOIN(gdn_prefill, VLLM_EXT_SUFFIX)
#define kda_prefill VLLM_EXT_JOIN(kda_prefill, VLLM_EXT_SUFFIX)
#include "gdn_prefill.cpp"
#include "kda_prefill.cpp"
#include "kernel_launch.h"

namespace vllm_ext {

static_assert(sizeof(Task) == 8 * 4 && sizeof(PrefillShape) == 12 * 4 && kChunk == 64 && kLowerSize == 10 * 16 * 16,
              "prefill.h lays launches out for other kernels than these");

const char* VLLM_EXT_LAUNCH(const LaunchRequest& request) {
    uint8_t* a[kArguments];
    for (int i = 0; i < kArguments; ++i) a[i] = static_cast<uint8_t*>(request.arguments[i].data);
    const uint32_t blocks = request.blocks;
    void* stream = request.stream;
    if (request.op == Op::kGdn) {
        gdn_prefill<<<blocks, nullptr, stream>>>(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    } else {
        kda_prefill<<<blocks, nullptr, stream>>>(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    }
    return nullptr;
}

}  // namespace vllm_ext
