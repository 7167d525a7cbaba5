// Kernels whose results the tests work out by hand.
#pragma once
#include "rule_support.h"

namespace {

// in0 [16, 32] half and in1 [32, 16] half, both as NZ in GM; out [16, 16] float.
void mmad_16x16x32(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l1, 2048);
    pipe.InitBuffer(l0a, 1024);
    pipe.InitBuffer(l0b, 1024);
    pipe.InitBuffer(l0c, 1024);
    pipe.InitBuffer(ub, 1024);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 512);
    DataCopy(l1.Get<half>()[512], Gm<half>(gm[1]), 512);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 2, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), l1.Get<half>()[512], LoadData2DParams(0, 2, 1, 0, 0, true, 0));
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 32, 0, false, true));
    Order<HardEvent::M_V>();
    DataCopyEnhancedParams matrix;
    matrix.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    DataCopy(ub.Get<float>(), l0c.Get<float>(), DataCopyParams(1, 1, 0, 0), matrix);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[2]), ub.Get<float>(), 256);
}
VLLM_EXT_REGISTER(mmad_16x16x32, mmad_16x16x32);

// in [2, 16, 16] half fractals; out [2, 16, 16]: fractal 1 transposed, then fractal 0, through L0A is not readable, so
// the product with the identity in in1 shows what LoadData delivered.
void load_data(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l1, 1536);
    pipe.InitBuffer(l0a, 1024);
    pipe.InitBuffer(l0b, 512);
    pipe.InitBuffer(l0c, 2048);
    pipe.InitBuffer(ub, 2048);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 512);
    DataCopy(l1.Get<half>()[512], Gm<half>(gm[1]), 256);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(1, 1, 1, 0, 0, true, 0));
    LoadData(l0a.Get<half>()[256], l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), l1.Get<half>()[512], LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(32, 16, 16, 0, false, true));
    Order<HardEvent::M_V>();
    DataCopyEnhancedParams matrix;
    matrix.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    DataCopy(ub.Get<float>(), l0c.Get<float>(), DataCopyParams(1, 2, 0, 0), matrix);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[2]), ub.Get<float>(), 512);
}
VLLM_EXT_REGISTER(load_data, load_data);

// in [64] float; out [64] half (nearest even), [64] half (odd), [64] float back from the first.
void cast_rounding(const GM_ADDR* gm) {
    TPipe pipe;
    V in, even, odd, back;
    pipe.InitBuffer(in, 256);
    pipe.InitBuffer(even, 128);
    pipe.InitBuffer(odd, 128);
    pipe.InitBuffer(back, 256);
    DataCopy(in.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_V>();
    Cast(even.Get<half>(), in.Get<float>(), RoundMode::CAST_NONE, 64);
    Cast(odd.Get<half>(), in.Get<float>(), RoundMode::CAST_ODD, 64, 1, UnaryRepeatParams(1, 1, 4, 8));
    PipeBarrier<PIPE_V>();
    Cast(back.Get<float>(), even.Get<half>(), RoundMode::CAST_NONE, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<half>(gm[1]), even.Get<half>(), 64);
    DataCopy(Gm<half>(gm[2]), odd.Get<half>(), 64);
    DataCopy(Gm<float>(gm[3]), back.Get<float>(), 64);
}
VLLM_EXT_REGISTER(cast_rounding, cast_rounding);

// in [16] float; out0 [16, 8] each element spread; out1 [8] sums of the first 5 of each of 2 rows of in, 4 apart.
void brcb_and_reduce(const GM_ADDR* gm) {
    TPipe pipe;
    V in, wide, sums;
    pipe.InitBuffer(in, 64);
    pipe.InitBuffer(wide, 512);
    pipe.InitBuffer(sums, 32);
    DataCopy(in.Get<float>(), Gm<float>(gm[0]), 16);
    Order<HardEvent::MTE2_V>();
    Brcb(wide.Get<float>(), in.Get<float>(), 2, BrcbRepeatParams(1, 8));
    Duplicate(sums.Get<float>(), 0.0f, 8);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(sums.Get<float>(), in.Get<float>(), 5, 2, 4, 1, 1);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), wide.Get<float>(), 128);
    DataCopy(Gm<float>(gm[2]), sums.Get<float>(), 8);
}
VLLM_EXT_REGISTER(brcb_and_reduce, brcb_and_reduce);

// in [16] float; out [8] sums of elements 1 and 6 of each of the two blocks of in, 4 apart.
void reduce_by_bits(const GM_ADDR* gm) {
    TPipe pipe;
    V in, sums;
    pipe.InitBuffer(in, 64);
    pipe.InitBuffer(sums, 32);
    DataCopy(in.Get<float>(), Gm<float>(gm[0]), 16);
    Duplicate(sums.Get<float>(), 0.0f, 8);
    Order<HardEvent::MTE2_V>();
    PipeBarrier<PIPE_V>();
    uint64_t two[] = {0x42, 0};
    WholeReduceSum(sums.Get<float>(), in.Get<float>(), two, 2, 4, 1, 1);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), sums.Get<float>(), 8);
}
VLLM_EXT_REGISTER(reduce_by_bits, reduce_by_bits);

// in [2, 64] float; out [64]: strided, masked arithmetic. Rows of 8 blocks; see the test for the hand computation.
void vector_forms(const GM_ADDR* gm) {
    TPipe pipe;
    V in, out;
    pipe.InitBuffer(in, 512);
    pipe.InitBuffer(out, 256);
    const auto x = in.Get<float>(), y = out.Get<float>();
    DataCopy(x, Gm<float>(gm[0]), 128);
    Order<HardEvent::MTE2_V>();
    Duplicate(y, 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Add(y, x, x[64], 20, 1, BinaryRepeatParams(2, 1, 0, 8, 8, 8));
    PipeBarrier<PIPE_V>();
    Muls(y, y, 2.0f, 64);
    PipeBarrier<PIPE_V>();
    Axpy(y, x, -1.0f, 8);
    PipeBarrier<PIPE_V>();
    MulAddDst(y[56], x, x[64], 8);
    PipeBarrier<PIPE_V>();
    uint64_t odd[] = {0xaaaaaaaaaaaaaaaaull, 0};
    Duplicate(y, 0.5f, odd, 1, 1, 8);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), y, 64);
}
VLLM_EXT_REGISTER(vector_forms, vector_forms);

// in [16, 16] half; out its transpose.
void transpose(const GM_ADDR* gm) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 1, 512);
    pipe.InitBuffer(out, 1, 512);
    for (int i = 0; i < 2; ++i) {
        auto loaded = in.AllocTensor<half>();
        DataCopy(loaded, Gm<half>(gm[0])[i * 256], 256);
        in.EnQue(loaded);
        loaded = in.DeQue<half>();
        auto turned = out.AllocTensor<half>();
        Transpose(turned, loaded);
        in.FreeTensor(loaded);
        out.EnQue(turned);
        turned = out.DeQue<half>();
        DataCopy(Gm<half>(gm[1])[i * 256], turned, 256);
        out.FreeTensor(turned);
    }
}
VLLM_EXT_REGISTER(transpose, transpose);

// in [32, 64] half rows; out the same rows after GM to L1 as NZ and L1 to UB.
void nd2nz(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    V ub;
    pipe.InitBuffer(l1, 4096);
    pipe.InitBuffer(ub, 4096);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), Nd2NzParams(1, 32, 64, 0, 64, 32, 1, 0));
    Order<HardEvent::MTE2_MTE1>();
    DataCopy(ub.Get<half>(), l1.Get<half>(), 2048);
    Order<HardEvent::MTE1_MTE3>();
    DataCopy(Gm<half>(gm[1]), ub.Get<half>(), 2048);
}
VLLM_EXT_REGISTER(nd2nz, nd2nz);

// in [16, 32] half rows; out0 [2, 16, 16] float strips by way of Cast, out1 the same in half by way of L1.
void relaying(const GM_ADDR* gm) {
    TPipe pipe;
    V in, wide, back, spare;
    L1Buf l1;
    pipe.InitBuffer(in, 1024);
    pipe.InitBuffer(wide, 2048);
    pipe.InitBuffer(back, 1024);
    pipe.InitBuffer(spare, 128);
    pipe.InitBuffer(l1, 1024);
    const auto rows = in.Get<half>();
    DataCopy(rows, Gm<half>(gm[0]), 512);
    Order<HardEvent::MTE2_V>();
    Order<HardEvent::MTE2_MTE3>();
    for (int strip = 0; strip < 2; ++strip) {
        Cast(wide.Get<float>()[strip * 256], rows[strip * 16], RoundMode::CAST_NONE, 64, 4, UnaryRepeatParams(1, 2, 8, 8));
        DataCopy(l1.Get<half>()[strip * 256], rows[strip * 16], DataCopyParams(16, 1, 1, 0));
    }
    // Half a tile, gathered: one row of each strip.
    PipeBarrier<PIPE_V>();
    Adds(spare.Get<float>(), wide.Get<float>(), 0.0f, 16, 2, UnaryRepeatParams(1, 1, 2, 32));
    Order<HardEvent::MTE3_MTE1>();
    DataCopy(back.Get<half>(), l1.Get<half>(), 512);
    Order<HardEvent::V_MTE3>();
    Order<HardEvent::MTE1_MTE3>();
    DataCopy(Gm<float>(gm[1]), wide.Get<float>(), 512);
    DataCopy(Gm<half>(gm[2]), back.Get<half>(), 512);
}
VLLM_EXT_REGISTER(relaying, relaying);

// exp, rsqrt of in [64]; out [2, 64].
void functions(const GM_ADDR* gm) {
    TPipe pipe;
    V in, out;
    pipe.InitBuffer(in, 256);
    pipe.InitBuffer(out, 512);
    DataCopy(in.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_V>();
    Exp(out.Get<float>(), in.Get<float>(), 64);
    Rsqrt(out.Get<float>()[64], in.Get<float>(), 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), out.Get<float>(), 128);
}
VLLM_EXT_REGISTER(functions, functions);

// m300: the same product as mmad_16x16x32, out by Fixpipe.
void fixpipe(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l1, 2048);
    pipe.InitBuffer(l0a, 1024);
    pipe.InitBuffer(l0b, 1024);
    pipe.InitBuffer(l0c, 1024);
    pipe.InitBuffer(ub, 1024);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 512);
    DataCopy(l1.Get<half>()[512], Gm<half>(gm[1]), 512);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 2, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), l1.Get<half>()[512], LoadData2DParams(0, 2, 1, 0, 0, true, 0));
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 32, 0, false, true));
    Order<HardEvent::M_FIX>();
    FixpipeParamsM300 params;
    params.nSize = 16;
    params.mSize = 16;
    params.srcStride = 16;
    params.dstStride = 16;
    Fixpipe(ub.Get<float>(), l0c.Get<float>(), params);
    Order<HardEvent::FIX_MTE3>();
    DataCopy(Gm<float>(gm[2]), ub.Get<float>(), 256);
}
VLLM_EXT_REGISTER(fixpipe, fixpipe);

// Two blocks; each writes 64 floats of out0, waits for the other, and writes what the other wrote, plus its index, to out1.
void exchange(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    const auto x = buffer.Get<float>();
    const int32_t mine = GetBlockIdx(), other = 1 - mine;
    Duplicate(x, 10.0f + mine, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[0])[mine * 64], x, 64);
    SyncAll();
    DataCopy(x, Gm<float>(gm[0])[other * 64], 64);
    Order<HardEvent::MTE2_V>();
    Adds(x, x, static_cast<float>(mine), 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1])[mine * 64], x, 64);
}
VLLM_EXT_REGISTER(exchange, exchange);

}  // namespace
