// GdnPrefill: everything that follows from the gates, steps and norms of a chunk alone.
#pragma once

namespace vllm_ext {

// Spread vectors of the chunk's gates and steps: local_ the sums of gates within a tile of 16 rows, from_start exp(G),
// tail exp(G_last - G), minus_beta -beta/|k|, key_norm 1/|k|, query_scale s/|q|.
// What lies between two rows is added up and never the difference of two sums, so a steep gate costs no accuracy.
__aicore__ inline void GdnPrefill::Gates() {
    Maxs(gate_, gate_, kLowestGate, kChunk);
    HA_VECTOR_BARRIER();
    Spread(local_, gate_, kChunk);
    if (UsesKeys()) Spread(beta_spread_, beta_compact_, kChunk);
    PairSums();
    // Doubling within tiles: after step s every row holds the sum of the last 2 s gates; the two buffers swap roles.
    FloatTile from = local_, to = tail_;
    for (int32_t step = 1; step < kTile; step *= 2) {
        HA_VECTOR_BARRIER();
        Adds(to, from, 0.0f, step * 8, kChunkTiles, UnaryRepeatParams(1, 1, kTile, kTile));
        for (int32_t row = step; row < kTile; row += 8) {
            const int32_t rows = kTile - row < 8 ? kTile - row : 8;
            Add(to[row * 8], from[row * 8], from[(row - step) * 8], rows * 8, kChunkTiles,
                BinaryRepeatParams(1, 1, 1, kTile, kTile, kTile));
        }
        const FloatTile last = from;
        from = to;
        to = last;
    }
    // Four steps: the sums end where they began, in local_.
    HA_VECTOR_BARRIER();
    TileEdges();
    if (UsesKeys()) {
        Muls(minus_beta_, beta_spread_, -1.0f, kSpread);
        Muls(minus_columns_, beta_compact_, -1.0f, kChunk);
    }
    if (Normalises()) {
        if (UsesKeys()) {
            InverseNorm(key_norm_, norm_columns_, key_rows_);
            HA_VECTOR_BARRIER();
            Mul(minus_beta_, minus_beta_, key_norm_, kSpread);
            Mul(minus_columns_, minus_columns_, norm_columns_, kChunk);
        }
        if (UsesQueries()) {
            InverseNorm(query_scale_, norm_scratch_, query_rows_);
            HA_VECTOR_BARRIER();
            Muls(query_scale_, query_scale_, shape_.scale, kSpread);
        }
    } else {
        Duplicate(query_scale_, shape_.scale, kSpread);
    }
}

// The gates between rows j < i of a diagonal tile, local_ holding the gates themselves: by rows in the tile's place in decay_,
// by columns [j, tile, i] in pair_columns_; those behind row j of its tile in behind_, a float each.
__aicore__ inline void GdnPrefill::PairSums() {
    constexpr int32_t tile_blocks = (kChunk * kTile + kSquare) / 8, columns = kChunkTiles * kTile;
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Duplicate(decay_[LowerAt(tile)], 0.0f, kSquare);
    Duplicate(pair_columns_, 0.0f, kTile * columns);
    for (int32_t row = 1; row < kTile; ++row) {
        HA_VECTOR_BARRIER();
        uint64_t before[2] = {(1ull << row) - 1, 0};
        Add(decay_[row * kTile], decay_[(row - 1) * kTile], local_[row * 8], before, kChunkTiles,
            BinaryRepeatParams(1, 1, 0, tile_blocks, tile_blocks, kTile));
        // Row `column` of the other form: lanes of a block are rows, blocks 2 apart are tiles.
        const int32_t column = kTile - 1 - row;
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t first = column + 1 - side * 8;   // of the lanes behind
            if (first >= 8) continue;
            const uint64_t behind = 0xffull & ~((1ull << (first < 0 ? 0 : first)) - 1);
            uint64_t lanes[2] = {behind * 0x01010101ull, 0};
            const FloatTile to = pair_columns_[column * columns + side * 8];
            Add(to, to[columns], local_[(column + 1) * 8], lanes, 1, BinaryRepeatParams(2, 2, kTile, 8, 8, 8));
        }
    }
    HA_VECTOR_BARRIER();
    Adds(behind_, decay_[(kTile - 1) * kTile], 0.0f, kTile, kChunkTiles, UnaryRepeatParams(1, 1, 2, tile_blocks));
}

// Sums over whole tiles and what follows from them. edges_: blocks 1..3 the gates before tile I, 4..7 those of tile I and
// later, 8 exp of all; across_: for tiles I > J the gates between a row of J and the start of I, a float each.
__aicore__ inline void GdnPrefill::TileEdges() {
    auto total = [&](int32_t tile) { return local_[(tile * kTile + kTile - 1) * 8]; };
    auto before = [&](int32_t tile) { return edges_[tile * 8]; };
    auto onwards = [&](int32_t tile) { return edges_[(4 + tile) * 8]; };
    auto across = [&](int32_t tile, int32_t earlier) { return across_[(tile * (tile - 1) / 2 + earlier) * kTile]; };
    Adds(before(1), total(0), 0.0f, 8);
    Adds(onwards(3), total(3), 0.0f, 8);
    HA_VECTOR_BARRIER();
    for (int32_t step = 1; step < kChunkTiles; ++step) {
        if (step + 1 < kChunkTiles) Add(before(step + 1), before(step), total(step), 8);
        Add(onwards(3 - step), onwards(4 - step), total(3 - step), 8);
        for (int32_t tile = step; tile < kChunkTiles; ++tile) {
            const int32_t earlier = tile - step;
            if (step == 1) {
                Adds(across(tile, earlier), behind_[earlier * kTile], 0.0f, kTile);
            } else {
                Add(across(tile, earlier), across(tile - 1, earlier), total(tile - 1), kTile, 1,
                    BinaryRepeatParams(1, 1, 0, 8, 8, 0));
            }
        }
        HA_VECTOR_BARRIER();
    }
    Spread(tail_, behind_, kChunk);
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        const int32_t at = tile * kTile * 8;
        if (tile == 0) {
            Adds(from_start_, local_, 0.0f, kTile * 8);
        } else {
            Add(from_start_[at], local_[at], before(tile), kFloatMask, 2, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
        }
        if (tile + 1 < kChunkTiles)
            Add(tail_[at], tail_[at], onwards(tile + 1), kFloatMask, 2, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    }
    Exp(edges_[8 * 8], onwards(0), 8);
    HA_VECTOR_BARRIER();
    Exp(from_start_, from_start_, kSpread);
    Exp(tail_, tail_, kSpread);
}

// 1 / sqrt(sum of squares + 1e-6) of each row; the unit's estimate is refined by two Newton steps.
__aicore__ inline void GdnPrefill::InverseNorm(const FloatTile& spread, const FloatTile& compact, const HalfTile& rows) {
    const int32_t key = shape_.key_dim;
    const FloatTile wide = y_, partial = swap_, sums = swap_[kChunk];
    HA_ORDER(MTE3_V);
    Cast(wide, rows, RoundMode::CAST_NONE, kChunk * key);
    HA_VECTOR_BARRIER();
    Mul(wide, wide, wide, kChunk * key);
    HA_VECTOR_BARRIER();
    WholeReduceSum(sums, wide, kFloatMask, kChunk, 1, 1, key / 8);
    if (key > kFloatMask) {
        WholeReduceSum(partial, wide[kFloatMask], kFloatMask, kChunk, 1, 1, key / 8);
        HA_VECTOR_BARRIER();
        Add(sums, sums, partial, kChunk);
    }
    HA_VECTOR_BARRIER();
    Adds(sums, sums, 1.0e-6f, kChunk);
    HA_VECTOR_BARRIER();
    Rsqrt(compact, sums, kChunk);
    Muls(sums, sums, -0.5f, kChunk);
    for (int32_t step = 0; step < 2; ++step) {
        HA_VECTOR_BARRIER();
        Mul(partial, compact, compact, kChunk);
        HA_VECTOR_BARRIER();
        Mul(partial, partial, sums, kChunk);
        HA_VECTOR_BARRIER();
        Adds(partial, partial, 1.5f, kChunk);
        HA_VECTOR_BARRIER();
        Mul(compact, compact, partial, kChunk);
    }
    HA_VECTOR_BARRIER();
    Spread(spread, compact, kChunk);
}

// decay_ij = exp(G_i - G_j) (times 1/|k_j|) for j <= i, tiles on and below the diagonal only.
__aicore__ inline void GdnPrefill::Decays() {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            for (int32_t tile = strip + 1; tile < kChunkTiles; ++tile)
                Add(decay_[At(strip, tile * kTile, kChunk) + side * 8], local_[tile * kTile * 8],
                    across_[(tile * (tile - 1) / 2 + strip) * kTile + side * 8], kFloatMask, 2,
                    BinaryRepeatParams(2, 1, 0, 16, 8, 0));
        }
    }
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Add(decay_[LowerAt(strip)], decay_[LowerAt(strip)], lower_mask_, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Exp(decay_[LowerAt(strip)], decay_[LowerAt(strip)], LowerCount(strip));
    if (Normalises()) {
        HA_VECTOR_BARRIER();
        for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
            for (int32_t side = 0; side < 2; ++side) {
                const int32_t at = LowerAt(strip) + side * 8;
                Mul(decay_[at], decay_[at], norm_columns_[strip * kTile + side * 8], kFloatMask, (kChunk - strip * kTile) / 8,
                    BinaryRepeatParams(2, 2, 0, 16, 16, 0));
            }
        }
    }
}

}  // namespace vllm_ext
