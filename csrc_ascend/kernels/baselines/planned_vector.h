// Planned: the vector steps.
#pragma once

namespace vllm_ext {

__aicore__ inline void Planned::Vector(const StepRow& s) {
    const FloatTile to = Ub(s.destination), a = Ub(s.source), b = Ub(s.second);
    const int32_t count = IsVector(s) && s.rows * s.columns < 8 ? 8 : s.rows * s.columns;
    switch (s.code) {
        case kExp: Exp(to, a, count); break;
        case kMul: Mul(to, a, b, count); break;
        case kAdd: Add(to, a, b, count); break;
        case kSub: Sub(to, a, b, count); break;
        case kScale: Adds(to, a, 0.0f, count); break;
        case kRowScale:
            Spread(Scratch(), b, kChunk);
            Settle();
            ScaleRows(to, a, Scratch(), s.rows, s.columns / kTile);
            break;
        case kLower:
        case kStrictLower: Lower(s); break;
        case kStateUpdate: UpdateState(s); break;
        case kSolve:
        case kSolvePowers: Solve(s); break;
        case kSolveRows: SolveRows(s); break;
        default: Gate(s);
    }
    const float factor = reinterpret_cast<const float&>(s.scale_bits);
    if (factor == 1.0f) return;
    Settle();
    Muls(to, to, factor, count);
}

// What walks down the rows of gates. `sizes` is the number of columns of what a step reads.
__aicore__ inline void Planned::Gate(const StepRow& s) {
    switch (s.code) {
        case kCumsum:
            if (s.sizes == 1) {
                CumsumVector(s);
            } else {
                CumsumTile(s);
            }
            break;
        case kExpLast:
            if (s.sizes == 1) {
                Spread(Scratch(), Ub(s.source), kChunk);
                Settle();
                Exp(Ub(s.destination), Scratch()[(kChunk - 1) * 8], 8);
            } else {
                Exp(Ub(s.destination), Ub(s.source)[(kChunk - 1) * kTile], kTile, s.columns / kTile,
                    UnaryRepeatParams(1, 1, 2, kChunk * 2));
            }
            break;
        case kExpTail: Relative(s, kChunk - 1, true); break;
        case kExpFromMiddle: Relative(s, kChunk / 2, false); break;
        case kExpToMiddle: Relative(s, kChunk / 2, true); break;
        default: Decay(s);
    }
}

__aicore__ inline void Planned::CumsumVector(const StepRow& s) {
    FloatTile from = Scratch(), to = Scratch()[kSpread];
    Spread(from, Ub(s.source), kChunk);
    for (int32_t step = 1; step < kChunk; step *= 2) {
        HA_VECTOR_BARRIER();
        Adds(to, from, 0.0f, step * 8);
        Add(to[step * 8], from[step * 8], from, (kChunk - step) * 8);
        const FloatTile last = from;
        from = to;
        to = last;
    }
    HA_VECTOR_BARRIER();
    WholeReduceSum(Ub(s.destination), from, 1, kChunk, 1, 1, 1);
}

// Row by row, in place.
__aicore__ inline void Planned::CumsumTile(const StepRow& s) {
    const FloatTile x = Ub(s.destination);
    if (s.destination != s.source) Adds(x, Ub(s.source), 0.0f, s.rows * s.columns);
    for (int32_t row = 1; row < s.rows; ++row) {
        HA_VECTOR_BARRIER();
        Add(x[row * kTile], x[row * kTile], x[(row - 1) * kTile], kTile, s.columns / kTile,
            BinaryRepeatParams(1, 1, 1, kChunk * 2, kChunk * 2, kChunk * 2));
    }
}

// exp of the difference of every row and one row, which comes first or second.
__aicore__ inline void Planned::Relative(const StepRow& s, int32_t row, bool row_first) {
    const FloatTile to = Ub(s.destination), x = Ub(s.source);
    if (s.sizes == 1) {
        const FloatTile spread = Scratch(), other = Scratch()[kSpread];
        Spread(spread, x, kChunk);
        Settle();
        Sub(other, spread[row * 8], spread, kFloatMask, kChunk / 8, BinaryRepeatParams(1, 0, 1, 8, 0, 8));
        HA_VECTOR_BARRIER();
        if (!row_first) Muls(other, other, -1.0f, kSpread);
        HA_VECTOR_BARRIER();
        WholeReduceSum(to, other, 1, kChunk, 1, 1, 1);
        HA_VECTOR_BARRIER();
        Exp(to, to, kChunk);
        return;
    }
    const int32_t strips = s.columns / kTile;
    const FloatTile line = Scratch();
    Adds(line, x[row * kTile], 0.0f, kTile, strips, UnaryRepeatParams(1, 1, 2, kChunk * 2));
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < strips; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = At(strip, 0, s.rows) + side * 8;
            Sub(to[at], line[strip * kTile + side * 8], x[at], kFloatMask, s.rows / 8, BinaryRepeatParams(2, 0, 2, 16, 0, 16));
        }
    }
    HA_VECTOR_BARRIER();
    if (!row_first) Muls(to, to, -1.0f, s.rows * s.columns);
    HA_VECTOR_BARRIER();
    Exp(to, to, s.rows * s.columns);
}

// exp(G_i - G_j) on and below the diagonal, zero above.
__aicore__ inline void Planned::Decay(const StepRow& s) {
    const FloatTile to = Ub(s.destination), sums = Ub(s.source), spread = Scratch();
    Spread(spread, sums, kChunk);
    Duplicate(to, 0.0f, kChunk * kChunk);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        for (int32_t side = 0; side < 2; ++side)
            Sub(to[LowerAt(strip) + side * 8], spread[strip * kTile * 8], sums[strip * kTile + side * 8], kFloatMask,
                LowerTiles(strip) * 2, BinaryRepeatParams(2, 1, 0, 16, 8, 0));
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        for (int32_t row = 0; row + 1 < kTile; ++row) {
            uint64_t above[2] = {((1ull << kTile) - 1) & ~((2ull << row) - 1), 0};
            Duplicate(to[LowerAt(strip) + row * kTile], kNever, above, 1, 1, 8);
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) Exp(to[LowerAt(strip)], to[LowerAt(strip)], LowerTiles(strip) * kSquare);
}

// Zero above the diagonal, and on it if strict.
__aicore__ inline void Planned::Lower(const StepRow& s) {
    const FloatTile to = Ub(s.destination);
    if (s.destination != s.source) Adds(to, Ub(s.source), 0.0f, kChunk * kChunk);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        if (strip > 0) Duplicate(to[At(strip, 0, kChunk)], 0.0f, strip * kSquare);
        for (int32_t row = 0; row < kTile; ++row) {
            const uint64_t kept = s.code == kStrictLower ? (1ull << row) - 1 : (2ull << row) - 1;
            uint64_t dropped[2] = {((1ull << kTile) - 1) & ~kept, 0};
            if (dropped[0] != 0) Duplicate(to[LowerAt(strip) + row * kTile], 0.0f, dropped, 1, 1, 8);
        }
    }
}

// S exp(G_last) + change: `third` is the decay, one number or one a column of [V, K].
__aicore__ inline void Planned::UpdateState(const StepRow& s) {
    const FloatTile to = Ub(s.destination), state = Ub(s.source), decay = Ub(s.third);
    const int32_t strips = s.columns / kTile, strip_floats = s.rows * kTile;
    if (s.sizes == 1) {
        for (int32_t strip = 0; strip < strips; ++strip)
            Mul(to[strip * strip_floats], state[strip * strip_floats], decay, kFloatMask, strip_floats / kFloatMask,
                BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    } else {
        ScaleColumns(to, state, decay, s.rows, strips);
    }
    HA_VECTOR_BARRIER();
    Add(to, to, Ub(s.second), s.rows * s.columns);
}

}  // namespace vllm_ext
