// What the chips do in different ways: out of L0C, from UB to L1, a number to a whole block.
//
// 310P (dav-2002): DataCopy from L0C to UB and from UB to L1, Brcb.
// 310B (dav-3002): Fixpipe from L0C to UB; UB to L1 and Brcb are in its headers but not in its documents, so operands go
// through global memory, and numbers are spread by reductions of a single element.
// Pipes are ordered so that callers see the same on both: what they order with V is out of L0C, what they order with MTE3
// has arrived in L1.
#pragma once
#include "task.h"

namespace vllm_ext {

// Bursts of whole fractals from L0C to UB, rounded to half if `dst` is; the source's gaps are in fractals.
template <typename T>
__aicore__ inline void DrainBursts(const LocalTensor<T>& dst, const FloatTile& src, const DataCopyParams& params) {
#if __CCE_AICORE__ == 300
    FixpipeParamsM300 fix;
    fix.nSize = params.blockCount * kTile;
    fix.mSize = params.blockLen * kTile;
    fix.srcStride = (params.blockLen + params.srcStride) * kTile;
    fix.dstStride = params.blockLen * (kSquare * sizeof(T) / 32) + params.dstStride;
    fix.quantPre = sizeof(T) == 2 ? QuantMode_t::F322F16 : QuantMode_t::NoQuant;
    // No event joins V and FIX; M does.
    HA_ORDER(V_M);
    HA_ORDER(M_FIX);
    Fixpipe<T, float, CFG_NZ>(dst, src, fix);
    HA_ORDER(FIX_M);
    HA_ORDER(M_V);
#else
    DataCopyEnhancedParams matrix;
    matrix.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    DataCopy(dst, src, params, matrix);
#endif
}

// From UB to L1.
class WayToL1 {
  public:
    // Takes `bytes` of scratch for each block where there is no direct way.
    __aicore__ inline void Init(const Workspace& workspace, int64_t bytes) {
#if __CCE_AICORE__ == 300
        scratch_ = workspace.Scratch(bytes);
#else
        (void)workspace;
        (void)bytes;
#endif
    }
    template <typename T>
    __aicore__ inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params) const {
#if __CCE_AICORE__ == 300
        GlobalTensor<T> scratch;
        scratch.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(scratch_));
        DataCopy(scratch, src, DataCopyParams(params.blockCount, params.blockLen, params.srcStride, 0));
        HA_ORDER(MTE3_MTE2);
        DataCopy(dst, scratch, DataCopyParams(params.blockCount, params.blockLen, 0, params.dstStride));
        HA_ORDER(MTE2_MTE3);
#else
        DataCopy(dst, src, params);
#endif
    }
    template <typename T>
    __aicore__ inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count) const {
        Copy(dst, src, DataCopyParams(1, count * static_cast<int32_t>(sizeof(T)) / 32, 0, 0));
    }

  private:
    GM_ADDR scratch_ = nullptr;
};

// One float a row to spread form. On a 310B element e of every source block goes to place p of the blocks that want it.
__aicore__ inline void Spread(const FloatTile& dst, const FloatTile& compact, int32_t rows) {
#if __CCE_AICORE__ == 300
    for (int32_t place = 0; place < 8; ++place) {
        if (place > 0) HA_VECTOR_BARRIER();
        for (int32_t element = 0; element < 8; ++element) {
            uint64_t one[2] = {1ull << element, 0};
            WholeReduceSum(dst[element * 8 + place], compact, one, rows / 8, kFloatMask, 1, 1);
        }
    }
#else
    Brcb(dst, compact, rows / 8, BrcbRepeatParams(1, 8));
#endif
}

}  // namespace vllm_ext
