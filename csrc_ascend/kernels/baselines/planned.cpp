// Kernel entry: the table of steps comes behind the arguments every prefill kernel has.
#include "planned.h"

extern "C" __global__ __aicore__ void planned(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial,
                                              GM_ADDR out, GM_ADDR final_state, GM_ADDR workspace, GM_ADDR tasks,
                                              GM_ADDR block_tasks, GM_ADDR shape, GM_ADDR program) {
    vllm_ext::Planned kernel;
    kernel.Init(q, k, v, g, beta, initial, out, final_state, workspace, tasks, block_tasks, vllm_ext::ReadShape(shape), program);
    kernel.Run();
}
