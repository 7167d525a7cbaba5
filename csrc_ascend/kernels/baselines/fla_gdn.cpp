// Kernel entry of the staged baseline: `phase` of the shape is the stage, a block works through its tasks.
#include "fla_gdn.h"

extern "C" __global__ __aicore__ void fla_gdn(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial,
                                              GM_ADDR out, GM_ADDR final_state, GM_ADDR workspace, GM_ADDR tasks,
                                              GM_ADDR block_tasks, GM_ADDR shape) {
    vllm_ext::FlaGdn kernel;
    kernel.Init(q, k, v, g, beta, initial, out, final_state, workspace, vllm_ext::ReadShape(shape));
    const __gm__ int32_t* bounds = reinterpret_cast<__gm__ int32_t*>(block_tasks) + AscendC::GetBlockIdx();
    for (int32_t task = bounds[0]; task < bounds[1]; ++task) kernel.Process(vllm_ext::ReadTask(tasks, task));
}
