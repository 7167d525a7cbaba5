// Kernels that must be refused for what they do to the buffers: room, bounds, alignment, unwritten bytes, queues.
#pragma once
#include "rule_support.h"

namespace {

void capacity(const GM_ADDR*) {
    TPipe pipe;
    V first, second;
    pipe.InitBuffer(first, 200 * 1024);
    pipe.InitBuffer(second, 56 * 1024);
}
VLLM_EXT_REGISTER(capacity, capacity);

void bounds(const GM_ADDR*) {
    TPipe pipe;
    V first, second;
    pipe.InitBuffer(first, 256);
    pipe.InitBuffer(second, 256);
    Duplicate(first.Get<float>(), 0.0f, 72);
}
VLLM_EXT_REGISTER(bounds, bounds);

void view_bounds(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    buffer.GetWithOffset<float>(32, 192);
}
VLLM_EXT_REGISTER(view_bounds, view_bounds);

void alignment_ub(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 512);
    Duplicate(buffer.Get<float>()[4], 0.0f, 64);
}
VLLM_EXT_REGISTER(alignment_ub, alignment_ub);

void alignment_l0(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    pipe.InitBuffer(l1, 1024);
    pipe.InitBuffer(l0a, 2048);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 512);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>()[128], l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
}
VLLM_EXT_REGISTER(alignment_l0, alignment_l0);

void alignment_l0c(const GM_ADDR*) {
    TPipe pipe;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l0c, 2048);
    pipe.InitBuffer(ub, 1024);
    DataCopyEnhancedParams matrix;
    matrix.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    DataCopy(ub.Get<float>(), l0c.Get<float>()[8], DataCopyParams(1, 1, 0, 0), matrix);
}
VLLM_EXT_REGISTER(alignment_l0c, alignment_l0c);

void read_unwritten(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 512);
    Duplicate(buffer.Get<float>(), 1.0f, 63);
    PipeBarrier<PIPE_V>();
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}
VLLM_EXT_REGISTER(read_unwritten, read_unwritten);

void queue_not_freed(const GM_ADDR* gm) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    auto tensor = queue.AllocTensor<half>();
    DataCopy(tensor, Gm<half>(gm[0]), 256);
    queue.EnQue(tensor);
    queue.DeQue<half>();
}
VLLM_EXT_REGISTER(queue_not_freed, queue_not_freed);

void queue_exhausted(const GM_ADDR*) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    queue.AllocTensor<half>();
    queue.AllocTensor<half>();
}
VLLM_EXT_REGISTER(queue_exhausted, queue_exhausted);

void queue_empty(const GM_ADDR*) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    queue.DeQue<half>();
}
VLLM_EXT_REGISTER(queue_empty, queue_empty);

void queue_of_another(const GM_ADDR* gm) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    V other;
    pipe.InitBuffer(queue, 1, 512);
    pipe.InitBuffer(other, 512);
    auto tensor = other.Get<half>();
    DataCopy(tensor, Gm<half>(gm[0]), 256);
    queue.EnQue(tensor);
}
VLLM_EXT_REGISTER(queue_of_another, queue_of_another);

void queue_too_deep(const GM_ADDR*) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 9, 512);
}
VLLM_EXT_REGISTER(queue_too_deep, queue_too_deep);

}  // namespace
