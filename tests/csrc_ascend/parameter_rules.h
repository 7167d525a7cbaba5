// Kernels that must be refused for a parameter or an operand that no chip takes, or that the simulator does not model.
#pragma once
#include "rule_support.h"

namespace {

void wrong_memory_load(const GM_ADDR* gm) {
    TPipe pipe;
    L0ABuf l0a;
    pipe.InitBuffer(l0a, 512);
    DataCopy(l0a.Get<half>(), Gm<half>(gm[0]), 256);
}
VLLM_EXT_REGISTER(wrong_memory_load, wrong_memory_load);

void wrong_memory_fractals(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    V ub;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(ub, 512);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 256);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(ub.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
}
VLLM_EXT_REGISTER(wrong_memory_fractals, wrong_memory_fractals);

void wrong_memory_vector(const GM_ADDR*) {
    TPipe pipe;
    L1Buf l1;
    pipe.InitBuffer(l1, 256);
    Duplicate(l1.Get<float>(), 0.0f, 64);
}
VLLM_EXT_REGISTER(wrong_memory_vector, wrong_memory_vector);

// A load of fractals, then a product, both with the parameters given.
void LoadAndMultiply(GM_ADDR operand, const LoadData2DParams& load, const MmadParams& product) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(l0a, 512);
    pipe.InitBuffer(l0b, 512);
    pipe.InitBuffer(l0c, 1024);
    DataCopy(l1.Get<half>(), Gm<half>(operand), 256);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), load);
    LoadData(l0b.Get<half>(), l1.Get<half>(), load);
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), product);
}

void load_of_nothing(const GM_ADDR* gm) {
    LoadAndMultiply(gm[0], LoadData2DParams(0, 0, 1, 0, 0, false, 0), MmadParams(16, 16, 16, 0, false, true));
}
VLLM_EXT_REGISTER(load_of_nothing, load_of_nothing);

void load_downwards(const GM_ADDR* gm) {
    LoadAndMultiply(gm[0], LoadData2DParams(0, 1, 1, 0, 0, false, 1), MmadParams(16, 16, 16, 0, false, true));
}
VLLM_EXT_REGISTER(load_downwards, load_downwards);

void product_without_rows(const GM_ADDR* gm) {
    LoadAndMultiply(gm[0], LoadData2DParams(0, 1, 1, 0, 0, false, 0), MmadParams(0, 16, 16, 0, false, true));
}
VLLM_EXT_REGISTER(product_without_rows, product_without_rows);

void product_with_bias(const GM_ADDR* gm) {
    LoadAndMultiply(gm[0], LoadData2DParams(0, 1, 1, 0, 0, false, 0), MmadParams(16, 16, 16, 0, true, true));
}
VLLM_EXT_REGISTER(product_with_bias, product_with_bias);

void copy_of_empty_blocks(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 64);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), DataCopyParams(2, 0, 0, 0));
}
VLLM_EXT_REGISTER(copy_of_empty_blocks, copy_of_empty_blocks);

void copy_of_part_of_a_block(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 64);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), 20);
}
VLLM_EXT_REGISTER(copy_of_part_of_a_block, copy_of_part_of_a_block);

void nd2nz_of_half_blocks(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    pipe.InitBuffer(l1, 512);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), Nd2NzParams(1, 16, 8, 0, 8, 16, 1, 0));
}
VLLM_EXT_REGISTER(nd2nz_of_half_blocks, nd2nz_of_half_blocks);

void drain_in_normal_mode(const GM_ADDR*) {
    TPipe pipe;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l0c, 1024);
    pipe.InitBuffer(ub, 1024);
    DataCopy(ub.Get<float>(), l0c.Get<float>(), DataCopyParams(1, 1, 0, 0), DataCopyEnhancedParams());
}
VLLM_EXT_REGISTER(drain_in_normal_mode, drain_in_normal_mode);

void fixpipe_strips_to_gm(const GM_ADDR* gm) {
    TPipe pipe;
    L0CBuf l0c;
    pipe.InitBuffer(l0c, 1024);
    Fixpipe<float, float, CFG_NZ>(Gm<float>(gm[1]), l0c.Get<float>(), FixpipeParamsV220());
}
VLLM_EXT_REGISTER(fixpipe_strips_to_gm, fixpipe_strips_to_gm);

void vector_of_nothing(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 0.0f, 0);
}
VLLM_EXT_REGISTER(vector_of_nothing, vector_of_nothing);

void mask_of_no_bits(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    uint64_t none[2] = {0, 0};
    Duplicate(buffer.Get<float>(), 0.0f, none, 1, 1, 8);
}
VLLM_EXT_REGISTER(mask_of_no_bits, mask_of_no_bits);

void odd_rounding_by_count(const GM_ADDR*) {
    TPipe pipe;
    V wide, narrow;
    pipe.InitBuffer(wide, 256);
    pipe.InitBuffer(narrow, 128);
    Duplicate(wide.Get<float>(), 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Cast(narrow.Get<half>(), wide.Get<float>(), RoundMode::CAST_ODD, 64);
}
VLLM_EXT_REGISTER(odd_rounding_by_count, odd_rounding_by_count);

void brcb_with_gaps(const GM_ADDR*) {
    TPipe pipe;
    V narrow, wide;
    pipe.InitBuffer(narrow, 32);
    pipe.InitBuffer(wide, 512);
    Duplicate(narrow.Get<float>(), 1.0f, 8);
    PipeBarrier<PIPE_V>();
    Brcb(wide.Get<float>(), narrow.Get<float>(), 1, BrcbRepeatParams(2, 16));
}
VLLM_EXT_REGISTER(brcb_with_gaps, brcb_with_gaps);

}  // namespace
