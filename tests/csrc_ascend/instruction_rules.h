// Kernels that must be refused for an instruction: its parameters, or that the chip lacks it.
#pragma once
#include "rule_support.h"

namespace {

void repeat_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    Duplicate(buffer.Get<float>(), 0.0f, 64, 256, 1, 8);
}
VLLM_EXT_REGISTER(repeat_limit, repeat_limit);

void stride_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    Duplicate(buffer.Get<float>(), 0.0f, 16384);
    PipeBarrier<PIPE_V>();
    Adds(buffer.Get<float>(), buffer.Get<float>(), 1.0f, 64, 2, UnaryRepeatParams(1, 1, 256, 256));
}
VLLM_EXT_REGISTER(stride_limit, stride_limit);

void mask_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 1024);
    Duplicate(buffer.Get<float>(), 0.0f, 65, 1, 1, 8);
}
VLLM_EXT_REGISTER(mask_limit, mask_limit);

void block_count_limit(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 4096 * 32);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), DataCopyParams(4096, 1, 0, 0));
}
VLLM_EXT_REGISTER(block_count_limit, block_count_limit);

void missing_fixpipe(const GM_ADDR*) {
    TPipe pipe;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l0c, 1024);
    pipe.InitBuffer(ub, 1024);
    Fixpipe(ub.Get<float>(), l0c.Get<float>(), FixpipeParamsM300());
}
VLLM_EXT_REGISTER(missing_fixpipe, missing_fixpipe);

void missing_datacopy_pad(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 64);
    DataCopyPad(buffer.Get<half>(), Gm<half>(gm[0]), DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>());
}
VLLM_EXT_REGISTER(missing_datacopy_pad, missing_datacopy_pad);

void missing_load_data_with_transpose(const GM_ADDR*) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(l0a, 512);
    LoadDataWithTranspose(l0a.Get<half>(), l1.Get<half>(), LoadData2dTransposeParams());
}
VLLM_EXT_REGISTER(missing_load_data_with_transpose, missing_load_data_with_transpose);

void missing_l1_to_gm(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    pipe.InitBuffer(l1, 512);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 256);
    Order<HardEvent::MTE2_MTE3>();
    DataCopy(Gm<half>(gm[1]), l1.Get<half>(), 256);
}
VLLM_EXT_REGISTER(missing_l1_to_gm, missing_l1_to_gm);

void missing_ub_to_l1(const GM_ADDR*) {
    TPipe pipe;
    L1Buf l1;
    V ub;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(ub, 512);
    Duplicate(ub.Get<half>(), half(0), 256);
    Order<HardEvent::V_MTE3>();
    DataCopy(l1.Get<half>(), ub.Get<half>(), 256);
}
VLLM_EXT_REGISTER(missing_ub_to_l1, missing_ub_to_l1);

void missing_round_mode(const GM_ADDR*) {
    TPipe pipe;
    V wide, narrow;
    pipe.InitBuffer(wide, 256);
    pipe.InitBuffer(narrow, 128);
    Duplicate(wide.Get<float>(), 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Cast(narrow.Get<half>(), wide.Get<float>(), RoundMode::CAST_RINT, 64);
}
VLLM_EXT_REGISTER(missing_round_mode, missing_round_mode);

}  // namespace
