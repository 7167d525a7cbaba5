// KdaPrefill: gates, and the operands of the cube with their decays.
#pragma once

namespace vllm_ext {

// local_ = sums of the gates within tiles of 16 rows, NZ; exp of all of them, a float each and spread; -beta.
// Sums never leave a tile: what lies between two rows is added up, not the difference of two long sums, so a steep gate
// costs no accuracy but in its own tile.
__aicore__ inline void KdaPrefill::Gates() {
    const int32_t row_blocks = shape_.key_dim / 8;
    for (int32_t strip = 0; strip < key_tiles_; ++strip) {
        for (int32_t side = 0; side < 2; ++side)
            Maxs(local_[At(strip, 0, kChunk) + side * 8], decay_[strip * kTile + side * 8], kLowestGate, kFloatMask, kChunk / 8,
                 UnaryRepeatParams(2, row_blocks, 16, 8 * row_blocks));
    }
    if (UsesKeys()) {
        Spread(beta_spread_, beta_compact_, kChunk);
        Muls(minus_columns_, beta_compact_, -1.0f, kChunk);
    }
    // Eight runs of eight rows side by side, a repeat taking one row of each run for half a strip; then pairs of runs.
    for (int32_t row = 1; row < 8; ++row) {
        HA_VECTOR_BARRIER();
        for (int32_t side = 0; side < 2; ++side) {
            const FloatTile to = local_[row * kTile + side * 8];
            Add(to, to, local_[(row - 1) * kTile + side * 8], kFloatMask, key_tiles_,
                BinaryRepeatParams(16, 16, 16, kStripBlocks, kStripBlocks, kStripBlocks));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            const FloatTile to = local_[(tile * kTile + 8) * kTile + side * 8];
            Add(to, to, local_[(tile * kTile + 7) * kTile + side * 8], kFloatMask, key_tiles_,
                BinaryRepeatParams(2, 2, 0, kStripBlocks, kStripBlocks, kStripBlocks));
        }
    }
    HA_VECTOR_BARRIER();
    if (UsesKeys()) Muls(minus_beta_, beta_spread_, -1.0f, kSpread);
    TileEdges();
    Exp(last_, Between(0, 3).rows, kTile, key_tiles_, UnaryRepeatParams(1, 1, 2, Between(0, 3).strip_blocks));
    HA_VECTOR_BARRIER();
    Spread(last_spread_, last_, shape_.key_dim);
}

// The gates of tiles [first, last] as a row, a piece in each strip: a single tile's are its last row of local_.
__aicore__ inline KdaPrefill::EdgeRow KdaPrefill::Between(int32_t first, int32_t last) const {
    if (first == last) return {local_[(first * kTile + kTile - 1) * kTile], kStripBlocks};
    constexpr int32_t place[3][4] = {{0, 0, 1, 2}, {0, 0, 3, 4}, {0, 0, 0, 5}};
    return {edges_[place[first][last] * kTile], kEdgeBlocks};
}
__aicore__ inline void KdaPrefill::TileEdges() {
    for (int32_t count = 1; count < kChunkTiles; ++count) {
        for (int32_t first = 0; first + count < kChunkTiles; ++first) {
            const EdgeRow to = Between(first, first + count), less = Between(first, first + count - 1);
            Add(to.rows, less.rows, Between(first + count, first + count).rows, kTile, key_tiles_,
                BinaryRepeatParams(1, 1, 1, to.strip_blocks, less.strip_blocks, kStripBlocks));
        }
        HA_VECTOR_BARRIER();
    }
}
// dst rows [row, row + 8) = the row minus local_ rows [from, from + 8).
__aicore__ inline void KdaPrefill::EdgeMinusLocal(int32_t row, const EdgeRow& edge, int32_t from) {
    for (int32_t side = 0; side < 2; ++side)
        Sub(decay_[row * kTile + side * 8], edge.rows[side * 8], local_[from * kTile + side * 8], kFloatMask, key_tiles_,
            BinaryRepeatParams(2, 0, 2, kStripBlocks, edge.strip_blocks, kStripBlocks));
}

// K and s Q in NZ float, normalised if asked for; rows past the sequence become zero.
__aicore__ inline void KdaPrefill::Widen(int32_t tokens) {
    if (tokens < kChunk) {
        ClearPadding(tokens);
        HA_VECTOR_BARRIER();
    }
    HA_ORDER(MTE3_V);
    if (UsesKeys()) RowsToNz(key_, key_rows_, kChunk, key_tiles_);
    if (UsesQueries()) RowsToNz(query_, query_rows_, kChunk, key_tiles_);
    HA_VECTOR_BARRIER();
    if (Normalises()) {
        if (UsesKeys()) ScaleByNorm(key_, 1.0f);
        if (UsesQueries()) ScaleByNorm(query_, shape_.scale);
    } else if (UsesQueries()) {
        Muls(query_, query_, shape_.scale, kChunk * shape_.key_dim);
    }
}

// rows *= scale / sqrt(sum of squares + 1e-6); the unit's estimate is refined by two Newton steps.
__aicore__ inline void KdaPrefill::ScaleByNorm(const FloatTile& rows, float scale) {
    const FloatTile sums = norms_, partial = norms_[kChunk], inverse = norms_[2 * kChunk];
    Mul(decay_, rows, rows, kChunk * shape_.key_dim);
    HA_VECTOR_BARRIER();
    // A repeat reads one row of half a strip from every strip.
    WholeReduceSum(sums, decay_, 8 * key_tiles_, kChunk, 1, kStripBlocks, 2);
    WholeReduceSum(partial, decay_[8], 8 * key_tiles_, kChunk, 1, kStripBlocks, 2);
    HA_VECTOR_BARRIER();
    Add(sums, sums, partial, kChunk);
    HA_VECTOR_BARRIER();
    Adds(sums, sums, 1.0e-6f, kChunk);
    HA_VECTOR_BARRIER();
    Rsqrt(inverse, sums, kChunk);
    Muls(sums, sums, -0.5f, kChunk);
    for (int32_t step = 0; step < 2; ++step) {
        HA_VECTOR_BARRIER();
        Mul(partial, inverse, inverse, kChunk);
        HA_VECTOR_BARRIER();
        Mul(partial, partial, sums, kChunk);
        HA_VECTOR_BARRIER();
        Adds(partial, partial, 1.5f, kChunk);
        HA_VECTOR_BARRIER();
        Mul(inverse, inverse, partial, kChunk);
    }
    HA_VECTOR_BARRIER();
    Muls(inverse, inverse, scale, kChunk);
    HA_VECTOR_BARRIER();
    Spread(product_, inverse, kChunk);
    HA_VECTOR_BARRIER();
    ScaleRows(rows, rows, product_, kChunk, key_tiles_);
}

// K exp(G), s Q exp(G) and K exp(G_last - G), to L1.
__aicore__ inline void KdaPrefill::ReadOperands() {
    const int32_t keys = kChunk * shape_.key_dim;
    for (int32_t row = 0; row < kTile; row += 4)
        Adds(decay_[row * kTile], local_[row * kTile], 0.0f, kFloatMask, key_tiles_,
             UnaryRepeatParams(1, 1, kStripBlocks, kStripBlocks));
    for (int32_t row = kTile; row < kChunk; row += 8) {
        const EdgeRow before = Between(0, row / kTile - 1);
        for (int32_t side = 0; side < 2; ++side)
            Add(decay_[row * kTile + side * 8], local_[row * kTile + side * 8], before.rows[side * 8], kFloatMask, key_tiles_,
                BinaryRepeatParams(2, 2, 0, kStripBlocks, kStripBlocks, before.strip_blocks));
    }
    HA_VECTOR_BARRIER();
    Exp(decay_, decay_, keys);
    HA_VECTOR_BARRIER();
    if (UsesKeys()) {
        Mul(product_, key_, decay_, keys);
        HA_VECTOR_BARRIER();
        Cast(key_rows_, product_, RoundMode::CAST_NONE, keys);
    }
    if (UsesQueries()) {
        Mul(product_, query_, decay_, keys);
        HA_VECTOR_BARRIER();
        Cast(query_rows_, product_, RoundMode::CAST_NONE, keys);
    }
    HA_ORDER(V_MTE3);
    if (UsesKeys()) way_.Copy(read_keys_, key_rows_, keys);
    if (UsesQueries()) way_.Copy(read_queries_, query_rows_, keys);
    if (!UsesKeys()) return;
    for (int32_t row = 0; row < kChunk; row += 8) EdgeMinusLocal(row, Between(row / kTile, kChunkTiles - 1), row);
    HA_VECTOR_BARRIER();
    Exp(decay_, decay_, keys);
    HA_VECTOR_BARRIER();
    Mul(product_, key_, decay_, keys);
    HA_VECTOR_BARRIER();
    HA_ORDER(MTE3_V);
    Cast(key_rows_, product_, RoundMode::CAST_NONE, keys);
    HA_ORDER(V_MTE3);
    way_.Copy(tail_keys_, key_rows_, keys);
}

// Operands of the tiles below the diagonal tiles: rows 16.. relative to the last row before their block, and the rows
// before each block relative to that same row.
__aicore__ inline void KdaPrefill::PairOperands() {
    const int32_t key = shape_.key_dim;
    for (int32_t strip = 0; strip < key_tiles_; ++strip)
        Exp(decay_[At(strip, kTile, kChunk)], local_[At(strip, kTile, kChunk)], 3 * kSquare);
    HA_ORDER(MTE3_V);
    LaterRows(key_, key_rows_, later_keys_);
    LaterRows(query_, query_rows_, later_queries_);
    HA_ORDER(MTE3_V);
    EarlierRows(1, 0, key_rows_, earlier_keys_);
    EarlierRows(2, 1, key_rows_[kTile * key], earlier_keys_[kTile * key]);
    EarlierRows(3, 0, query_rows_, earlier_keys_[3 * kTile * key]);
}

// rows [16, 64) times decay_, to L1 as NZ [64, key_dim] without its first row block.
__aicore__ inline void KdaPrefill::LaterRows(const FloatTile& rows, const HalfTile& staging, const HalfTile& l1) {
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < key_tiles_; ++strip) {
        const int32_t at = At(strip, kTile, kChunk);
        Mul(product_[at], rows[at], decay_[at], 3 * kSquare);
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < key_tiles_; ++strip) {
        const int32_t at = At(strip, kTile, kChunk);
        Cast(staging[at], product_[at], RoundMode::CAST_NONE, 3 * kSquare);
    }
    HA_ORDER(V_MTE3);
    way_.Copy(l1[kSquare], staging[kSquare], DataCopyParams(key_tiles_, 3 * kTile, kTile, kTile));
}

// The rows before `block`, times exp(last of them - row), to L1 as NZ [16 block, key_dim]; scratch from row block `at` on.
__aicore__ inline void KdaPrefill::EarlierRows(int32_t block, int32_t at, const HalfTile& staging, const HalfTile& l1) {
    const int32_t rows = block * kTile, shift = at * kSquare;
    for (int32_t row = 0; row < rows; row += 8) EdgeMinusLocal(at * kTile + row, Between(row / kTile, block - 1), row);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < key_tiles_; ++strip)
        Exp(decay_[shift + At(strip, 0, kChunk)], decay_[shift + At(strip, 0, kChunk)], rows * kTile);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < key_tiles_; ++strip)
        Mul(product_[shift + At(strip, 0, kChunk)], key_[At(strip, 0, kChunk)], decay_[shift + At(strip, 0, kChunk)], rows * kTile);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < key_tiles_; ++strip)
        Cast(staging[At(strip, 0, rows)], product_[shift + At(strip, 0, kChunk)], RoundMode::CAST_NONE, rows * kTile);
    HA_ORDER(V_MTE3);
    way_.Copy(l1, staging, rows * shape_.key_dim);
}

}  // namespace vllm_ext
