// T = (I + A)^-1 for a strictly lower triangular A [64, 64], in tiles of 16.
//
// The diagonal tiles are inverted in float by substitution, all four at once: powers of a tile would overflow half where
// keys repeat. Block row i then follows from the rows above it, T_ij = T_ii sum_k (-A_ik) T_kj, 16 products in all; every
// factor of these products is bounded by one for normalised keys, so rounding them to half is harmless.
#pragma once
#include "tile.h"

namespace vllm_ext {

struct InverseBuffers {
    FloatTile multipliers;   // UB: -A of the diagonal tiles, spread; element (row, column) of tile i in block
                             // row * row_blocks + column * column_blocks + 16 i
    int32_t row_blocks, column_blocks;
    FloatTile diagonal;      // UB [64, 16]: the inverses of the diagonal tiles, stacked
    HalfTile staging;        // UB [64, 16] and more
    HalfTile negative;       // L1 NZ [64, 64]: -A
    HalfTile inverse;        // L1 NZ [64, 64]: T on and below the diagonal
    HalfTile sums;           // L1 [3] tiles
    HalfTile left, right;    // L0A 3 tiles, L0B 6 tiles
    FloatTile product;       // L0C [6] tiles
    WayToL1 way;
};

// For columns j = 0..14: rows below j of every diagonal tile lose A_rj times row j. Row j is finished by then.
__aicore__ inline void SubstituteDiagonal(const InverseBuffers& b) {
    constexpr int32_t tile_blocks = kTile * 2;
    for (int32_t j = 0; j + 1 < kTile; ++j) {
        HA_VECTOR_BARRIER();
        for (int32_t row = j + 1; row < kTile; row += 8) {
            const int32_t rows = kTile - row < 8 ? kTile - row : 8;
            for (int32_t side = 0; side * 8 <= j; ++side) {
                MulAddDst(b.diagonal[row * kTile + side * 8], b.multipliers[(row * b.row_blocks + j * b.column_blocks) * 8],
                          b.diagonal[j * kTile + side * 8], rows * 8, kChunkTiles,
                          BinaryRepeatParams(2, b.row_blocks, 0, tile_blocks, kTile, tile_blocks));
            }
        }
    }
    HA_VECTOR_BARRIER();
}

// The four inverted tiles to their places on the diagonal of T.
__aicore__ inline void PlaceDiagonal(const InverseBuffers& b) {
    Cast(b.staging, b.diagonal, RoundMode::CAST_NONE, kChunk * kTile);
    HA_ORDER(V_MTE3);
    constexpr int32_t tile_blocks = kSquare / 16;
    b.way.Copy(b.inverse, b.staging, DataCopyParams(kChunkTiles, tile_blocks, 0, kChunkTiles * tile_blocks));
}

// Block row i of T below the diagonal.
__aicore__ inline void MergeRow(const InverseBuffers& b, int32_t i) {
    HA_ORDER(MTE3_MTE1);
    LoadData(b.left, b.negative, LoadData2DParams(i, i, kChunkTiles, 0, 0, false, 0));
    int32_t loaded = 0;
    for (int32_t j = 0; j < i; ++j) {
        LoadData(b.right[loaded * kSquare], b.inverse, LoadData2DParams(j * kChunkTiles + j, i - j, 1, 0, 0, true, 0));
        loaded += i - j;
    }
    HA_ORDER(MTE1_M);
    loaded = 0;
    for (int32_t j = 0; j < i; ++j) {
        Multiply(b.product[j * kSquare], b.left[j * kSquare], b.right[loaded * kSquare], 1, 1, i - j);
        loaded += i - j;
    }
    HA_ORDER(M_V);
    DrainBursts(b.staging, b.product, DataCopyParams(1, i, 0, 0));
    HA_ORDER(V_MTE3);
    b.way.Copy(b.sums, b.staging, i * kSquare);
    HA_ORDER(MTE3_MTE1);
    LoadData(b.left, b.inverse, LoadData2DParams(i * kChunkTiles + i, 1, 1, 0, 0, false, 0));
    LoadData(b.right, b.sums, LoadData2DParams(0, i, 1, 0, 0, true, 0));
    HA_ORDER(MTE1_M);
    Multiply(b.product[3 * kSquare], b.left, b.right, 1, i, 1);
    HA_ORDER(M_V);
    DrainBursts(b.staging, b.product[3 * kSquare], DataCopyParams(1, i, 0, 0));
    HA_ORDER(V_MTE3);
    constexpr int32_t tile_blocks = kSquare / 16;
    b.way.Copy(b.inverse[i * kSquare], b.staging, DataCopyParams(i, tile_blocks, 0, (kChunkTiles - 1) * tile_blocks));
}

// T from -A, whose diagonal tiles come spread by columns in `multipliers`.
__aicore__ inline void Invert(const InverseBuffers& b, const FloatTile& identity) {
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Adds(b.diagonal[tile * kSquare], identity, 0.0f, kSquare);
    SubstituteDiagonal(b);
    PlaceDiagonal(b);
    for (int32_t row = 1; row < kChunkTiles; ++row) MergeRow(b, row);
}

}  // namespace vllm_ext
