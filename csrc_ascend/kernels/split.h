// Operands of the cube in two halves: what rounding to half takes away becomes a second operand, and a product three.
//
// x = high + low holds to 22 bits, so products of split operands are as good as those of floats. The accumulator takes
// all three, the largest first; low times low is left out.
#pragma once
#include "inverse.h"

namespace vllm_ext {

// The two halves of an operand in L1, or of a tile of it.
struct SplitTile {
    HalfTile high, low;
    __aicore__ inline SplitTile operator[](uint32_t elements) const { return {high[elements], low[elements]}; }
};

// low = x - high, rounded, in `rest` floats of scratch. All three tiles are `count` long; V orders itself.
__aicore__ inline void TakeRest(const HalfTile& low, const FloatTile& x, const HalfTile& high, const FloatTile& rest,
                                int32_t count) {
    Cast(rest, high, RoundMode::CAST_NONE, count);
    HA_VECTOR_BARRIER();
    Sub(rest, x, rest, count);
    HA_VECTOR_BARRIER();
    Cast(low, rest, RoundMode::CAST_NONE, count);
}

// x, float in UB, to L1 as two halves, in bursts as `params` says; `staging` takes twice, `rest` once the elements.
__aicore__ inline void SplitToL1(const WayToL1& way, const SplitTile& l1, const FloatTile& x, int32_t count,
                                 const HalfTile& staging, const FloatTile& rest, const DataCopyParams& params) {
    HA_ORDER(MTE3_V);
    Cast(staging, x, RoundMode::CAST_NONE, count);
    HA_VECTOR_BARRIER();
    TakeRest(staging[count], x, staging, rest, count);
    HA_ORDER(V_MTE3);
    way.Copy(l1.high, staging, params);
    way.Copy(l1.low, staging[count], params);
}

// `InverseBuffers` of a split inversion: in L0A and L0B the low halves follow the high ones.
struct SplitInverseBuffers {
    InverseBuffers plain;
    SplitTile negative, inverse, sums;
    FloatTile rest;   // UB [64, 16]
};

// C = A B of tiles in L0 of which the low halves lie `left` and `right` fractals behind the high ones.
__aicore__ inline void MultiplySplit(const FloatTile& c, const HalfTile& a, const HalfTile& b, int32_t left, int32_t right,
                                     int32_t n, int32_t k) {
    Multiply(c, a, b, 1, n, k);
    PipeBarrier<PIPE_M>();
    Multiply(c, a, b[right * kSquare], 1, n, k, false);
    PipeBarrier<PIPE_M>();
    Multiply(c, a[left * kSquare], b, 1, n, k, false);
}

// Block row i of T below the diagonal, as `MergeRow`.
__aicore__ inline void MergeRowSplit(const SplitInverseBuffers& s, int32_t i) {
    const InverseBuffers& b = s.plain;
    const FloatTile product = b.staging.ReinterpretCast<float>();
    const HalfTile halves = b.staging[2 * (kChunkTiles - 1) * kSquare];
    constexpr int32_t tile_blocks = kSquare / 16;
    HA_ORDER(MTE3_MTE1);
    const int32_t pairs = i * (i + 1) / 2;
    for (int32_t half = 0; half < 2; ++half) {
        const HalfTile negative = half ? s.negative.low : s.negative.high, inverse = half ? s.inverse.low : s.inverse.high;
        LoadData(b.left[half * i * kSquare], negative, LoadData2DParams(i, i, kChunkTiles, 0, 0, false, 0));
        int32_t loaded = half * pairs;
        for (int32_t j = 0; j < i; ++j) {
            LoadData(b.right[loaded * kSquare], inverse, LoadData2DParams(j * kChunkTiles + j, i - j, 1, 0, 0, true, 0));
            loaded += i - j;
        }
    }
    HA_ORDER(MTE1_M);
    int32_t loaded = 0;
    for (int32_t j = 0; j < i; ++j) {
        MultiplySplit(b.product[j * kSquare], b.left[j * kSquare], b.right[loaded * kSquare], i, pairs, 1, i - j);
        loaded += i - j;
    }
    HA_ORDER(M_V);
    DrainBursts(product, b.product, DataCopyParams(1, i, 0, 0));
    HA_VECTOR_BARRIER();
    SplitToL1(b.way, s.sums, product, i * kSquare, halves, s.rest, DataCopyParams(1, i * tile_blocks, 0, 0));
    HA_ORDER(MTE3_MTE1);
    for (int32_t half = 0; half < 2; ++half) {
        const HalfTile inverse = half ? s.inverse.low : s.inverse.high, sums = half ? s.sums.low : s.sums.high;
        LoadData(b.left[half * kSquare], inverse, LoadData2DParams(i * kChunkTiles + i, 1, 1, 0, 0, false, 0));
        LoadData(b.right[half * i * kSquare], sums, LoadData2DParams(0, i, 1, 0, 0, true, 0));
    }
    HA_ORDER(MTE1_M);
    MultiplySplit(b.product[3 * kSquare], b.left, b.right, 1, i, i, 1);
    HA_ORDER(M_V);
    DrainBursts(product, b.product[3 * kSquare], DataCopyParams(1, i, 0, 0));
    HA_VECTOR_BARRIER();
    SplitToL1(b.way, s.inverse[i * kSquare], product, i * kSquare, halves, s.rest,
              DataCopyParams(i, tile_blocks, 0, (kChunkTiles - 1) * tile_blocks));
}

__aicore__ inline void InvertSplit(const SplitInverseBuffers& s, const FloatTile& identity) {
    const InverseBuffers& b = s.plain;
    constexpr int32_t tile_blocks = kSquare / 16;
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Adds(b.diagonal[tile * kSquare], identity, 0.0f, kSquare);
    SubstituteDiagonal(b);
    SplitToL1(b.way, s.inverse, b.diagonal, kChunk * kTile, b.staging, s.rest,
              DataCopyParams(kChunkTiles, tile_blocks, 0, kChunkTiles * tile_blocks));
    for (int32_t row = 1; row < kChunkTiles; ++row) MergeRowSplit(s, row);
}

}  // namespace vllm_ext
