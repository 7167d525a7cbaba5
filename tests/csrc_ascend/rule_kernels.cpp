// Small kernels for the tests of the simulator: some with results worked out by hand, one for each rule it enforces.
#include "c_api.h"

using namespace AscendC;

namespace {

using V = TBuf<TPosition::VECCALC>;
using L1Buf = TBuf<TPosition::A1>;
using L0ABuf = TBuf<TPosition::A2>;
using L0BBuf = TBuf<TPosition::B2>;
using L0CBuf = TBuf<TPosition::CO1>;

template <typename T>
GlobalTensor<T> Gm(GM_ADDR pointer) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<T*>(pointer));
    return tensor;
}

template <HardEvent event>
void Order() {
    SetFlag<event>(0);
    WaitFlag<event>(0);
}

// ---- kernels that are right ------------------------------------------------------------------------------------------

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

// ---- kernels that must be refused --------------------------------------------------------------------------------------

void capacity(const GM_ADDR*) {
    TPipe pipe;
    V first, second;
    pipe.InitBuffer(first, 200 * 1024);
    pipe.InitBuffer(second, 56 * 1024);
}

void bounds(const GM_ADDR*) {
    TPipe pipe;
    V first, second;
    pipe.InitBuffer(first, 256);
    pipe.InitBuffer(second, 256);
    Duplicate(first.Get<float>(), 0.0f, 72);
}

void view_bounds(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    buffer.GetWithOffset<float>(32, 192);
}

void alignment_ub(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 512);
    Duplicate(buffer.Get<float>()[4], 0.0f, 64);
}

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

void repeat_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    Duplicate(buffer.Get<float>(), 0.0f, 64, 256, 1, 8);
}

void stride_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    Duplicate(buffer.Get<float>(), 0.0f, 16384);
    PipeBarrier<PIPE_V>();
    Adds(buffer.Get<float>(), buffer.Get<float>(), 1.0f, 64, 2, UnaryRepeatParams(1, 1, 256, 256));
}

void mask_limit(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 1024);
    Duplicate(buffer.Get<float>(), 0.0f, 65, 1, 1, 8);
}

void block_count_limit(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 4096 * 32);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), DataCopyParams(4096, 1, 0, 0));
}

void missing_fixpipe(const GM_ADDR*) {
    TPipe pipe;
    L0CBuf l0c;
    V ub;
    pipe.InitBuffer(l0c, 1024);
    pipe.InitBuffer(ub, 1024);
    Fixpipe(ub.Get<float>(), l0c.Get<float>(), FixpipeParamsM300());
}

void missing_datacopy_pad(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 64);
    DataCopyPad(buffer.Get<half>(), Gm<half>(gm[0]), DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<half>());
}

void missing_load_data_with_transpose(const GM_ADDR*) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(l0a, 512);
    LoadDataWithTranspose(l0a.Get<half>(), l1.Get<half>(), LoadData2dTransposeParams());
}

void missing_l1_to_gm(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    pipe.InitBuffer(l1, 512);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 256);
    Order<HardEvent::MTE2_MTE3>();
    DataCopy(Gm<half>(gm[1]), l1.Get<half>(), 256);
}

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

void missing_round_mode(const GM_ADDR*) {
    TPipe pipe;
    V wide, narrow;
    pipe.InitBuffer(wide, 256);
    pipe.InitBuffer(narrow, 128);
    Duplicate(wide.Get<float>(), 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Cast(narrow.Get<half>(), wide.Get<float>(), RoundMode::CAST_RINT, 64);
}

void queue_not_freed(const GM_ADDR* gm) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    auto tensor = queue.AllocTensor<half>();
    DataCopy(tensor, Gm<half>(gm[0]), 256);
    queue.EnQue(tensor);
    queue.DeQue<half>();
}

void queue_exhausted(const GM_ADDR*) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    queue.AllocTensor<half>();
    queue.AllocTensor<half>();
}

void queue_empty(const GM_ADDR*) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> queue;
    pipe.InitBuffer(queue, 1, 512);
    queue.DeQue<half>();
}

void read_unwritten(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 512);
    Duplicate(buffer.Get<float>(), 1.0f, 63);
    PipeBarrier<PIPE_V>();
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}

void race_read_after_write(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}

void race_write_after_read(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer, other;
    pipe.InitBuffer(buffer, 256);
    pipe.InitBuffer(other, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_V>();
    Muls(other.Get<float>(), buffer.Get<float>(), 2.0f, 64);
    PipeBarrier<PIPE_MTE2>();
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
}

void race_write_after_write(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
}

void race_within_vector(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}

// Each repeat reads what the repeat before it wrote: legal to issue, wrong on a pipeline.
void race_within_instruction(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 1024);
    Duplicate(buffer.Get<float>(), 1.0f, 256);
    PipeBarrier<PIPE_V>();
    Add(buffer.Get<float>()[64], buffer.Get<float>(), buffer.Get<float>()[64], 64, 3, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
}

// The flag is there, but of another pair of pipes.
void race_wrong_event(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_MTE3>();
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}

void race_small_mmad(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(l0a, 512);
    pipe.InitBuffer(l0b, 512);
    pipe.InitBuffer(l0c, 1024);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 256);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 16, 0, false, true));
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 16, 0, false, false));
}

void flag_deadlock(const GM_ADDR*) { WaitFlag<HardEvent::MTE2_V>(0); }

void flag_left_set(const GM_ADDR*) { SetFlag<HardEvent::MTE2_V>(3); }

void flag_set_twice(const GM_ADDR*) {
    SetFlag<HardEvent::MTE2_V>(1);
    SetFlag<HardEvent::MTE2_V>(1);
}

void event_ids(const GM_ADDR*) {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) pipe.AllocEventID<HardEvent::MTE2_V>();
}

void gm_bounds(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 65536);
    DataCopy(buffer.Get<half>(), Gm<half>(gm[0]), 32768);
}

void gm_read_only(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[0]), buffer.Get<float>(), 64);
}

void gm_cross_block(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), static_cast<float>(GetBlockIdx()), 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 64);
}

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

void output_unwritten(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Order<HardEvent::V_MTE3>();
    DataCopy(Gm<float>(gm[1]), buffer.Get<float>(), 56);
}

VLLM_EXT_REGISTER(mmad_16x16x32, mmad_16x16x32);
VLLM_EXT_REGISTER(load_data, load_data);
VLLM_EXT_REGISTER(cast_rounding, cast_rounding);
VLLM_EXT_REGISTER(brcb_and_reduce, brcb_and_reduce);
VLLM_EXT_REGISTER(vector_forms, vector_forms);
VLLM_EXT_REGISTER(transpose, transpose);
VLLM_EXT_REGISTER(nd2nz, nd2nz);
VLLM_EXT_REGISTER(functions, functions);
VLLM_EXT_REGISTER(fixpipe, fixpipe);
VLLM_EXT_REGISTER(capacity, capacity);
VLLM_EXT_REGISTER(bounds, bounds);
VLLM_EXT_REGISTER(view_bounds, view_bounds);
VLLM_EXT_REGISTER(alignment_ub, alignment_ub);
VLLM_EXT_REGISTER(alignment_l0, alignment_l0);
VLLM_EXT_REGISTER(repeat_limit, repeat_limit);
VLLM_EXT_REGISTER(stride_limit, stride_limit);
VLLM_EXT_REGISTER(mask_limit, mask_limit);
VLLM_EXT_REGISTER(block_count_limit, block_count_limit);
VLLM_EXT_REGISTER(missing_fixpipe, missing_fixpipe);
VLLM_EXT_REGISTER(missing_datacopy_pad, missing_datacopy_pad);
VLLM_EXT_REGISTER(missing_load_data_with_transpose, missing_load_data_with_transpose);
VLLM_EXT_REGISTER(missing_l1_to_gm, missing_l1_to_gm);
VLLM_EXT_REGISTER(missing_ub_to_l1, missing_ub_to_l1);
VLLM_EXT_REGISTER(missing_round_mode, missing_round_mode);
VLLM_EXT_REGISTER(queue_not_freed, queue_not_freed);
VLLM_EXT_REGISTER(queue_exhausted, queue_exhausted);
VLLM_EXT_REGISTER(queue_empty, queue_empty);
VLLM_EXT_REGISTER(read_unwritten, read_unwritten);
VLLM_EXT_REGISTER(race_read_after_write, race_read_after_write);
VLLM_EXT_REGISTER(race_write_after_read, race_write_after_read);
VLLM_EXT_REGISTER(race_write_after_write, race_write_after_write);
VLLM_EXT_REGISTER(race_within_vector, race_within_vector);
VLLM_EXT_REGISTER(race_within_instruction, race_within_instruction);
VLLM_EXT_REGISTER(race_wrong_event, race_wrong_event);
VLLM_EXT_REGISTER(race_small_mmad, race_small_mmad);
VLLM_EXT_REGISTER(flag_deadlock, flag_deadlock);
VLLM_EXT_REGISTER(flag_left_set, flag_left_set);
VLLM_EXT_REGISTER(flag_set_twice, flag_set_twice);
VLLM_EXT_REGISTER(event_ids, event_ids);
VLLM_EXT_REGISTER(gm_bounds, gm_bounds);
VLLM_EXT_REGISTER(gm_read_only, gm_read_only);
VLLM_EXT_REGISTER(gm_cross_block, gm_cross_block);
VLLM_EXT_REGISTER(gm_race, gm_race);
VLLM_EXT_REGISTER(output_unwritten, output_unwritten);

}  // namespace
