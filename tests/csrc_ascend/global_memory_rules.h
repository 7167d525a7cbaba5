// Kernels that must be refused for what they do to global memory.
#pragma once
#include "rule_support.h"

namespace {

void gm_bounds(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), 32768);
}
VLLM_EXT_REGISTER(gm_bounds, gm_bounds);

void gm_read_only(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[0]), buffer.Get<float>(), 64);
}
VLLM_EXT_REGISTER(gm_read_only, gm_read_only);

void gm_cross_block(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), static_cast<float>(GetBlockIdx()), 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
}
VLLM_EXT_REGISTER(gm_cross_block, gm_cross_block);

void gm_race(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer, again;
    pipe.InitBuffer(buffer, 256);
    pipe.InitBuffer(again, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
    DataCopy(again.Get<float>(), Gm<float>(gm[1]), 64);
}
VLLM_EXT_REGISTER(gm_race, gm_race);

void output_unwritten(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 56);
}
VLLM_EXT_REGISTER(output_unwritten, output_unwritten);

}  // namespace
