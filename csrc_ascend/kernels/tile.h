// Tiles as the prefill kernels keep them, and the few movements and vector loops all of them share.
//
// In UB a tile [rows, columns] of float is NZ: strips of 16 columns, each strip rows x 16, so that a row of a strip is two
// blocks of 32 bytes. That is how results leave L0C and how operands enter L1, so nothing between two products changes
// layout; inputs and outputs change it inside the Cast that converts their type. A number for each row is kept "spread":
// [rows, 8], one block a row, which a vector instruction reads with block stride 1 beside every second block of a strip.
#pragma once
#include "chip_ways.h"

namespace vllm_ext {

// ---- vector loops on NZ tiles ---------------------------------------------------------------------------------------
// Elements of strip `strip`, from row `row` on, in a tile of `rows` rows.
__aicore__ inline int32_t At(int32_t strip, int32_t row, int32_t rows) { return (strip * rows + row) * kTile; }

// dst = src * row vector, for rows [first, rows) of the strips [strip, strip + strips).
__aicore__ inline void ScaleRows(const FloatTile& dst, const FloatTile& src, const FloatTile& spread, int32_t rows,
                                 int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = At(strip, 0, rows) + side * 8;
            Mul(dst[at], src[at], spread, kFloatMask, rows / 8, BinaryRepeatParams(2, 2, 1, 16, 16, 8));
        }
    }
}

// dst = src * column vector (one float a column), likewise.
__aicore__ inline void ScaleColumns(const FloatTile& dst, const FloatTile& src, const FloatTile& columns, int32_t rows,
                                    int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = At(strip, 0, rows) + side * 8;
            Mul(dst[at], src[at], columns[strip * kTile + side * 8], kFloatMask, rows / 8,
                BinaryRepeatParams(2, 2, 0, 16, 16, 0));
        }
    }
}

// ---- layouts at the ends of the vector chain --------------------------------------------------------------------------
// Rows of half [rows, strips * 16] to NZ float: a repeat takes 4 rows of one strip.
__aicore__ inline void RowsToNz(const FloatTile& dst, const HalfTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        Cast(dst[At(strip, 0, rows)], src[strip * kTile], RoundMode::CAST_NONE, kFloatMask, rows / 4,
             UnaryRepeatParams(1, strips, 8, 4 * strips));
    }
}
// And back.
__aicore__ inline void NzToRows(const HalfTile& dst, const FloatTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        Cast(dst[strip * kTile], src[At(strip, 0, rows)], RoundMode::CAST_NONE, kFloatMask, rows / 4,
             UnaryRepeatParams(strips, 1, 4 * strips, 8));
    }
}
// Rows of half in UB to NZ in L1, a strip at a time.
__aicore__ inline void RowsToL1(const WayToL1& way, const HalfTile& dst, const HalfTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip)
        way.Copy(dst[At(strip, 0, rows)], src[strip * kTile], DataCopyParams(rows, 1, strips - 1, 0));
}

// ---- operands of the cube ---------------------------------------------------------------------------------------------
// Left operand [m, k] tiles from NZ [m, k]: row blocks one after another. `stride` is the row blocks of the whole NZ tile.
__aicore__ inline void LoadLeft(const HalfTile& dst, const HalfTile& src, int32_t m, int32_t k, int32_t stride) {
    for (int32_t row = 0; row < m; ++row)
        LoadData(dst[row * k * kSquare], src, LoadData2DParams(row, k, stride, 0, 0, false, 0));
}
// Left operand [m, k] from its transpose, NZ [k, m]: strips are row blocks already, each fractal is turned.
__aicore__ inline void LoadLeftTransposed(const HalfTile& dst, const HalfTile& src, int32_t m, int32_t k) {
    LoadData(dst, src, LoadData2DParams(0, m * k, 1, 0, 0, true, 0));
}
// Right operand [k, n] from NZ [k, n].
__aicore__ inline void LoadRight(const HalfTile& dst, const HalfTile& src, int32_t k, int32_t n) {
    for (int32_t row = 0; row < k; ++row)
        LoadData(dst[row * n * kSquare], src, LoadData2DParams(row, n, k, 0, 0, true, 0));
}
// Right operand [k, n] from its transpose, NZ [n, k]: in order already.
__aicore__ inline void LoadRightTransposed(const HalfTile& dst, const HalfTile& src, int32_t k, int32_t n) {
    LoadData(dst, src, LoadData2DParams(0, k * n, 1, 0, 0, false, 0));
}
// C = A B, or C += A B, sizes in tiles.
__aicore__ inline void Multiply(const FloatTile& c, const HalfTile& a, const HalfTile& b, int32_t m, int32_t n, int32_t k,
                                bool fresh = true) {
    Mmad(c, a, b, MmadParams(m * kTile, n * kTile, k * kTile, 0, false, fresh));
}
// ---- triangles --------------------------------------------------------------------------------------------------------
// Square tiles [kChunk, kChunk] are used on and below the diagonal only: strip c from row 16 c on, `LowerTiles` fractals.
__aicore__ inline int32_t LowerAt(int32_t strip) { return At(strip, strip * kTile, kChunk); }
__aicore__ inline int32_t LowerTiles(int32_t strip) { return kChunkTiles - strip; }

// Fractals of the strips before `strip`, where the strips of a lower triangle follow each other.
__aicore__ inline int32_t PackedAt(int32_t strip) { return (strip * kChunkTiles - strip * (strip - 1) / 2) * kSquare; }

// A lower triangle between global memory, where it is packed, and L1 or UB.
template <typename Destination, typename Source>
__aicore__ inline void Unpack(const Destination& dst, const Source& packed) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DataCopy(dst[LowerAt(strip)], packed[PackedAt(strip)], LowerTiles(strip) * kSquare);
}
template <typename Destination, typename Source>
__aicore__ inline void Pack(const Destination& packed, const Source& src) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DataCopy(packed[PackedAt(strip)], src[LowerAt(strip)], LowerTiles(strip) * kSquare);
}

// Right operand for `MultiplyLower`: the transpose of NZ [kChunk, k], one column of tiles after another.
__aicore__ inline void LoadColumnsTransposed(const HalfTile& dst, const HalfTile& src, int32_t k) {
    for (int32_t column = 0; column < kChunkTiles; ++column)
        LoadData(dst[column * k * kSquare], src, LoadData2DParams(column, k, kChunkTiles, 0, 0, false, 0));
}
// The lower triangle of A B, A [kChunk, k] by rows of tiles, B [k, kChunk] by columns of tiles.
__aicore__ inline void MultiplyLower(const FloatTile& c, const HalfTile& a, const HalfTile& b, int32_t k) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Multiply(c[LowerAt(strip)], a[strip * k * kSquare], b[strip * k * kSquare], LowerTiles(strip), 1, k);
}
// Left operand for `LowerTimes`, from NZ: row block i has i + 1 tiles.
__aicore__ inline void LoadLower(const HalfTile& dst, const HalfTile& src) {
    for (int32_t row = 0; row < kChunkTiles; ++row)
        LoadData(dst[row * kChunkTiles * kSquare], src, LoadData2DParams(row, row + 1, kChunkTiles, 0, 0, false, 0));
}
// L B for a lower triangular L, or added to what is there; row blocks of the result follow each other in C.
__aicore__ inline void LowerTimes(const FloatTile& c, const HalfTile& lower, const HalfTile& b, int32_t n, bool fresh = true) {
    for (int32_t row = 0; row < kChunkTiles; ++row)
        Multiply(c[row * n * kSquare], lower[row * kChunkTiles * kSquare], b, 1, n, row + 1, fresh);
}

// ---- out of L0C -------------------------------------------------------------------------------------------------------
// Rows [first, first + rows) of every strip of a tile with `total` row blocks; all sizes in fractals.
__aicore__ inline void Drain(const FloatTile& dst, const FloatTile& src, int32_t first, int32_t rows, int32_t total,
                             int32_t strips) {
    DrainBursts(dst, src[first * kSquare], DataCopyParams(strips, rows, total - rows, 0));
}
// The result of `MultiplyLower`.
__aicore__ inline void DrainLower(const FloatTile& dst, const FloatTile& src) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DrainBursts(dst[LowerAt(strip)], src[LowerAt(strip)], DataCopyParams(1, LowerTiles(strip), 0, 0));
}
// The result of `LowerTimes`, to NZ.
__aicore__ inline void DrainRows(const FloatTile& dst, const FloatTile& src, int32_t n) {
    constexpr int32_t fractal_blocks = kSquare * 4 / 32;
    for (int32_t row = 0; row < kChunkTiles; ++row)
        DrainBursts(dst[row * kSquare], src[row * n * kSquare], DataCopyParams(n, 1, 0, (kChunkTiles - 1) * fractal_blocks));
}

}  // namespace vllm_ext
