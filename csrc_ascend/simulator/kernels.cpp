// Every kernel, for the simulator's shared object.
#include "c_api.h"
#include "gdn_prefill.cpp"
#include "kda_prefill.cpp"
#include "baselines/planned.cpp"

namespace {

void run_gdn_prefill(const GM_ADDR* a) {
    gdn_prefill(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}
void run_kda_prefill(const GM_ADDR* a) {
    kda_prefill(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}

void run_planned(const GM_ADDR* a) {
    planned(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]);
}

VLLM_EXT_REGISTER(planned, run_planned);
VLLM_EXT_REGISTER(gdn_prefill, run_gdn_prefill);
VLLM_EXT_REGISTER(kda_prefill, run_kda_prefill);

}  // namespace
