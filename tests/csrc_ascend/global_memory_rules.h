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

void gm_write_after_write(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
}
VLLM_EXT_REGISTER(gm_write_after_write, gm_write_after_write);

void gm_write_after_read(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer, again;
    pipe.InitBuffer(buffer, 256);
    pipe.InitBuffer(again, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
    Order<HardEvent::MTE3_MTE2>();
    DataCopy(again.Get<float>(), Gm<float>(gm[1]), 64);
    PipeBarrier<PIPE_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
}
VLLM_EXT_REGISTER(gm_write_after_read, gm_write_after_read);

void gm_read_unwritten(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[1]), 64);
}
VLLM_EXT_REGISTER(gm_read_unwritten, gm_read_unwritten);

// The second block reads what the first has written.
void gm_cross_block_read(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    if (GetBlockIdx() == 1) {
        DataCopy(buffer.Get<float>(), Gm<float>(gm[1]), 64);
        return;
    }
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
}
VLLM_EXT_REGISTER(gm_cross_block_read, gm_cross_block_read);

// Two blocks write 16 bytes of one cell of 32: block 1 beside block 0, or over it.
void WritePartOfACell(GM_ADDR out, bool over) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 64);
    Duplicate(buffer.Get<float>(), 1.0f, 8);
    Order<HardEvent::V_MTE3>();
    const int64_t at = GetBlockIdx() == 0 || over ? 0 : 4;
    DataCopyPad(Gm<float>(out)[at], buffer.Get<float>(), DataCopyExtParams(1, 16, 0, 0, 0));
}
void gm_parts_of_a_cell(const GM_ADDR* gm) { WritePartOfACell(gm[1], false); }
VLLM_EXT_REGISTER(gm_parts_of_a_cell, gm_parts_of_a_cell);
void gm_same_part_of_a_cell(const GM_ADDR* gm) { WritePartOfACell(gm[1], true); }
VLLM_EXT_REGISTER(gm_same_part_of_a_cell, gm_same_part_of_a_cell);

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
