// Planned: the three ways to invert I + A that plans know (`ha_npu/inversion.py`).
#pragma once

namespace vllm_ext {

// T from A: diagonal tiles by substitution on the vector unit or by powers on the cube, block rows by products. -A and T
// lie in L1 at `second`, products in L0C at `third`; the queue and A's own place are scratch.
__aicore__ inline void Planned::Solve(const StepRow& s) {
    const FloatTile a = Ub(s.source);
    InverseBuffers b;
    b.negative = L1(s.second);
    b.inverse = b.negative[kChunk * kChunk];
    b.sums = b.negative[At(kChunkTiles - 1, 0, kChunk)];   // the last strip of -A is a diagonal tile
    b.left = l0a_.Get<half>();
    b.right = l0b_.Get<half>();
    b.product = L0c(s.third);
    Muls(a, a, -1.0f, kChunk * kChunk);
    Settle();
    Cast(HalfScratch(), a, RoundMode::CAST_NONE, kChunk * kChunk);
    Duplicate(HalfScratch()[kChunk * kChunk], half(0.0f), kChunk * kChunk);
    Settle();
    DataCopy(b.negative, HalfScratch(), 2 * kChunk * kChunk);
    Settle();
    if (s.code == kSolve) {
        SubstituteTiles(b, a);
    } else {
        b.diagonal = Scratch();
        b.staging = HalfScratch()[kChunk * kChunk];
        for (int32_t tile = 0; tile < kChunkTiles; ++tile) PowersOfTile(b, a[LowerAt(tile)], tile);
    }
    Settle();
    PlaceDiagonal(b);
    for (int32_t row = 1; row < kChunkTiles; ++row) MergeRow(b, row);
    Settle();
    DataCopy(HalfScratch(), b.inverse, kChunk * kChunk);
    Settle();
    Cast(Ub(s.destination), HalfScratch(), RoundMode::CAST_NONE, kChunk * kChunk);
}

// All diagonal tiles at once. The queue holds their multipliers, A's place the rest.
__aicore__ inline void Planned::SubstituteTiles(InverseBuffers& b, const FloatTile& a) {
    // Rows of the diagonal tiles interleaved, [row, tile, column].
    const FloatTile rows = Scratch();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile)
        for (int32_t side = 0; side < 2; ++side)
            Adds(rows[tile * kTile + side * 8], a[LowerAt(tile) + side * 8], 0.0f, kFloatMask, 2,
                 UnaryRepeatParams(kChunkTiles * 2, 2, kChunkTiles * 16, 16));
    Settle();
    Adds(a, rows, 0.0f, kChunk * kTile);
    Settle();
    Spread(Scratch(), a, kChunk * kTile);
    b.multipliers = Scratch();
    b.row_blocks = kChunkTiles * kTile;
    b.column_blocks = 1;
    b.diagonal = a[kChunk * kTile];
    b.staging = a[2 * kChunk * kTile].ReinterpretCast<half>();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Identity(b.diagonal[tile * kSquare]);
    SubstituteDiagonal(b);
}

__aicore__ inline void Planned::Identity(const FloatTile& tile) {
    Duplicate(tile, 0.0f, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t row = 0; row < kTile; ++row) {
        uint64_t self[2] = {1ull << row, 0};
        Duplicate(tile[row * kTile], 1.0f, self, 1, 1, 8);
    }
    HA_VECTOR_BARRIER();
}

// A product of one tile of 16 x 16 from L1, operands that are null being in L0 already; out to UB as it is.
__aicore__ inline void Planned::TileProduct(const InverseBuffers& b, const FloatTile& to, int32_t left, const HalfTile* from_left,
                                            int32_t right, const HalfTile* from_right, int32_t place) {
    Settle();
    if (from_left) LoadLeft(b.left[left * kSquare], *from_left, 1, 1, 1);
    if (from_right) LoadRight(b.right[right * kSquare], *from_right, 1, 1);
    Settle();
    Multiply(b.product[place * kSquare], b.left[left * kSquare], b.right[right * kSquare], 1, 1, 1);
    Settle();
    DrainBursts(to, b.product[place * kSquare], DataCopyParams(1, 1, 0, 0));
    HA_VECTOR_BARRIER();
}

// (I + a)^-1 = (I - a)(I + a^2)(I + a^4)(I + a^8), n = -a in float at `negative`; to its place in b.diagonal.
__aicore__ inline void Planned::PowersOfTile(const InverseBuffers& b, const FloatTile& negative, int32_t tile) {
    const FloatTile inverse = b.diagonal[tile * kSquare], power = Scratch()[kChunk * kChunk], change = power[kSquare];
    const HalfTile n = b.negative[LowerAt(tile)], power_l1 = b.sums, inverse_l1 = b.sums[kSquare];
    auto round = [&](const HalfTile& to, const FloatTile& from) {
        Cast(b.staging, from, RoundMode::CAST_NONE, kSquare);
        Settle();
        DataCopy(to, b.staging, kSquare);
        Settle();
    };
    TileProduct(b, power, 0, &n, 0, &n, 0);
    round(power_l1, power);
    TileProduct(b, change, 0, nullptr, 1, &power_l1, 1);
    Identity(inverse);
    for (const FloatTile& term : {negative, power, change}) {
        Add(inverse, inverse, term, kSquare);
        HA_VECTOR_BARRIER();
    }
    for (int32_t step = 0; step < 2; ++step) {
        TileProduct(b, power, 1, &power_l1, 1 + step, nullptr, 2 + 2 * step);
        round(power_l1, power);
        round(inverse_l1, inverse);
        TileProduct(b, change, 2, &inverse_l1, 2 + step, &power_l1, 3 + 2 * step);
        Add(inverse, inverse, change, kSquare);
        HA_VECTOR_BARRIER();
    }
}

// T from A by columns, all on the vector unit, as a loop over rows in plain torch does it.
__aicore__ inline void Planned::SolveRows(const StepRow& s) {
    const FloatTile a = Scratch(), column = Scratch()[kChunk * kChunk], spread = column[kChunk], t = Ub(s.destination);
    Adds(a, Ub(s.source), 0.0f, kChunk * kChunk);
    HA_VECTOR_BARRIER();
    Muls(a, a, -1.0f, kChunk * kChunk);
    Duplicate(t, 0.0f, kChunk * kChunk);
    HA_VECTOR_BARRIER();
    for (int32_t row = 0; row < kChunk; ++row) {
        uint64_t self[2] = {1ull << (row % kTile), 0};
        Duplicate(t[At(row / kTile, row, kChunk)], 1.0f, self, 1, 1, 8);
    }
    for (int32_t j = 0; j + 1 < kChunk; ++j) {
        HA_VECTOR_BARRIER();
        uint64_t one[2] = {1ull << (j % kTile), 0};
        WholeReduceSum(column, a[At(j / kTile, 0, kChunk)], one, kChunk, 1, 1, 2);
        HA_VECTOR_BARRIER();
        Spread(spread, column, kChunk);
        HA_VECTOR_BARRIER();
        const int32_t rest = kChunk - 1 - j, whole = rest / 8 * 8;
        for (int32_t strip = 0; strip <= j / kTile; ++strip) {
            for (int32_t side = 0; side < 2; ++side) {
                const FloatTile source = t[At(strip, j, kChunk) + side * 8];
                const int32_t at = At(strip, j + 1, kChunk) + side * 8;
                if (whole > 0)
                    MulAddDst(t[at], spread[(j + 1) * 8], source, kFloatMask, whole / 8, BinaryRepeatParams(2, 1, 0, 16, 8, 0));
                if (rest > whole)
                    MulAddDst(t[at + whole * kTile], spread[(j + 1 + whole) * 8], source, (rest - whole) * 8, 1,
                              BinaryRepeatParams(2, 1, 0, 16, 8, 0));
            }
        }
    }
}

}  // namespace vllm_ext
