// Kernel entry of Kimi Delta Attention: a block works through its tasks.
#include "kda_prefill.h"

extern "C" __global__ __aicore__ void kda_prefill(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial,
                                                  GM_ADDR out, GM_ADDR final_state, GM_ADDR workspace, GM_ADDR tasks,
                                                  GM_ADDR block_tasks, GM_ADDR shape) {
    vllm_ext::KdaPrefill kernel;
    kernel.Init(q, k, v, g, beta, initial, out, final_state, workspace, vllm_ext::ReadShape(shape));
    vllm_ext::RunTasks(kernel, tasks, block_tasks);
}
