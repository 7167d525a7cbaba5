// Every kernel, for the simulator's shared object.
#include "c_api.h"
#include "gdn_prefill.cpp"
#include "kda_prefill.cpp"
#include "baselines/fla_gdn.cpp"

namespace {

void run_gdn_prefill(const GM_ADDR* a) {
    gdn_prefill(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}
void run_kda_prefill(const GM_ADDR* a) {
    kda_prefill(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}

void run_fla_gdn(const GM_ADDR* a) {
    fla_gdn(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}

VLLM_EXT_REGISTER(fla_gdn, run_fla_gdn);
VLLM_EXT_REGISTER(gdn_prefill, run_gdn_prefill);
VLLM_EXT_REGISTER(kda_prefill, run_kda_prefill);

}  // namespace
