// The steps of KdaPrefill; see kda_prefill.h for the order and the formulas.
#pragma once

namespace vllm_ext {

__aicore__ inline void KdaPrefill::Chunk(int32_t chunk, bool more) {
    const int32_t tokens = TokensOf(chunk);
    HA_ORDER(MTE2_V);
    Gates();
    Widen(tokens);
    if (shape_.phase != kMap) ReadOperands();
    if (Maps()) PairOperands();
    LoadMapped(chunk);
    CubeProducts();
    if (Maps()) {
        DiagonalPairs();
        Multipliers();
        LowerOperands();
        Invert(InverseOf(product_, attention_rest_, Half(columns_rest_), wide_right_), identity_);
    }
    if (shape_.phase == kMap) StoreMapped(chunk, Half(query_)[kChunk * kChunk], Half(product_));
    if (Resident()) RowsToNz(key_, value_rows_, kChunk, value_tiles_);
    if (more) {
        if (shape_.phase != kWhole) HA_ORDER(MTE3_MTE2);
        HA_ORDER(V_MTE2);
        LoadInputs(chunk + 1);
    }
    if (Resident()) NewValues(chunk);
    if (Outputs()) Output(chunk, tokens);
    if (Resident()) UpdateState(chunk, more);
}

// [K exp(G); s Q exp(G)] S, and for each row block its keys and queries against the keys before it.
__aicore__ inline void KdaPrefill::CubeProducts() {
    const int32_t key = shape_.key_dim, pair = 2 * kTile * key;
    HA_ORDER(MTE3_MTE1);
    if (shape_.phase != kMap) {
        if (UsesKeys()) LoadLeft(kq_left_, read_keys_, kChunkTiles, key_tiles_, kChunkTiles);
        if (UsesQueries())
            LoadLeft(kq_left_[QueryBlock() * kTile * key], read_queries_, kChunkTiles, key_tiles_, kChunkTiles);
        LoadState(state_l1_);
    }
    for (int32_t block = 1, at = 0; Maps() && block < kChunkTiles; at += block * kTile * key, ++block) {
        const HalfTile left = pair_left_[(block - 1) * pair];
        LoadData(left, later_keys_, LoadData2DParams(block, key_tiles_, kChunkTiles, 0, 0, false, 0));
        LoadData(left[kTile * key], later_queries_, LoadData2DParams(block, key_tiles_, kChunkTiles, 0, 0, false, 0));
        LoadRightTransposed(pair_right_[at], earlier_keys_[at], key_tiles_, block);
    }
    HA_ORDER(MTE1_M);
    if (shape_.phase != kMap) Multiply(read_, kq_left_, state_right_, ReadBlocks(), value_tiles_, key_tiles_);
    for (int32_t block = 1, at = 0, to = 0; Maps() && block < kChunkTiles; ++block) {
        Multiply(pairs_[to], pair_left_[(block - 1) * pair], pair_right_[at], 2, block, key_tiles_);
        at += block * kTile * key;
        to += 2 * block * kSquare;
    }
}

// Diagonal tiles: for each distance i - j, exp(G_i - G_j) k_j times k_i and s q_i, summed over the channels. The sums land
// on their diagonals: attention_ [64, 16] as P, columns_ [16, 4, 16] (column, tile, row) as the inversion wants A.
__aicore__ inline void KdaPrefill::DiagonalPairs() {
    Duplicate(attention_, 0.0f, 2 * kChunk * kTile);
    Duplicate(columns_, 0.0f, 2 * kChunk * kTile);
    const int32_t tiles = kChunkTiles * key_tiles_;
    Mul(product_, query_, key_, kChunk * shape_.key_dim);
    HA_VECTOR_BARRIER();
    ReducePairs(product_, attention_, 0, kTile, 1, kSquare);
    for (int32_t distance = 1; distance < kTile; ++distance) {
        // Four rows of a tile a repeat, for the rows that are `distance` below another one of their tile.
        for (int32_t row = distance; row < kTile; row += 4) {
            const int32_t lanes = (kTile - row < 4 ? kTile - row : 4) * kTile;
            Sub(decay_[row * kTile], local_[row * kTile], local_[(row - distance) * kTile], lanes, tiles,
                BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, kTileBlocks));
        }
        HA_VECTOR_BARRIER();
        for (int32_t row = distance; row < kTile; row += 4) {
            const int32_t lanes = (kTile - row < 4 ? kTile - row : 4) * kTile;
            Exp(decay_[row * kTile], decay_[row * kTile], lanes, tiles, UnaryRepeatParams(1, 1, kTileBlocks, kTileBlocks));
        }
        HA_VECTOR_BARRIER();
        for (int32_t row = distance; row < kTile; row += 4) {
            const int32_t lanes = (kTile - row < 4 ? kTile - row : 4) * kTile;
            Mul(decay_[row * kTile], decay_[row * kTile], key_[(row - distance) * kTile], lanes, tiles,
                BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, kTileBlocks));
        }
        HA_VECTOR_BARRIER();
        for (int32_t row = distance; row < kTile; row += 4) {
            const int32_t lanes = (kTile - row < 4 ? kTile - row : 4) * kTile;
            Mul(product_[row * kTile], decay_[row * kTile], key_[row * kTile], lanes, tiles,
                BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, kTileBlocks));
        }
        HA_VECTOR_BARRIER();
        ReducePairs(product_, columns_, distance, 1, kChunk, kTile);
        for (int32_t row = distance; row < kTile; row += 4) {
            const int32_t lanes = (kTile - row < 4 ? kTile - row : 4) * kTile;
            Mul(decay_[row * kTile], decay_[row * kTile], query_[row * kTile], lanes, tiles,
                BinaryRepeatParams(1, 1, 1, kTileBlocks, kTileBlocks, kTileBlocks));
        }
        HA_VECTOR_BARRIER();
        ReducePairs(decay_, attention_, distance, kTile, 1, kSquare);
    }
    HA_VECTOR_BARRIER();
    Add(attention_, attention_, attention_rest_, kChunk * kTile);
    Add(columns_, columns_, columns_rest_, kChunk * kTile);
}

// Sums over channels of rows `distance`.. of each tile: even and odd halves of the strips apart, the second into the tile
// behind `sums`. Element (row, row - distance) lies at row * row_step + column * column_step of its tile's place.
__aicore__ inline void KdaPrefill::ReducePairs(const FloatTile& pairs, const FloatTile& sums, int32_t distance,
                                               int32_t row_step, int32_t column_step, int32_t tile_step) {
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        const int32_t to = tile * tile_step + distance * row_step, from = (tile * kTile + distance) * kTile;
        for (int32_t side = 0; side < 2; ++side)
            WholeReduceSum(sums[side * kChunk * kTile + to], pairs[from + side * 8], 8 * key_tiles_, kTile - distance,
                           row_step + column_step, kStripBlocks, 2);
    }
}

// -A of the diagonal tiles by columns, spread.
__aicore__ inline void KdaPrefill::Multipliers() {
    constexpr int32_t row_blocks = kChunkTiles * 2;
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = tile * kTile + side * 8;
            Mul(columns_[at], columns_[at], minus_columns_[at], kFloatMask, 2,
                BinaryRepeatParams(row_blocks, row_blocks, 0, 8 * row_blocks, 8 * row_blocks, 0));
        }
    }
    HA_VECTOR_BARRIER();
    Spread(product_, columns_, kChunk * kTile);
}

// -A below the diagonal tiles and P, rounded, to L1. From here on key_ and query_ are scratch.
__aicore__ inline void KdaPrefill::LowerOperands() {
    constexpr int32_t fractal_blocks = kSquare * 4 / 32;
    const FloatTile a = key_, p = key_[kChunk * kChunk];
    const HalfTile a_half = Half(query_), p_half = Half(query_)[kChunk * kChunk];
    HA_ORDER(M_V);
    int32_t result = 0;
    for (int32_t block = 1; block < kChunkTiles; ++block) {
        const DataCopyParams bursts(block, 1, 1, (kChunkTiles - 1) * fractal_blocks);
        DrainBursts(a[block * kSquare], pairs_[result], bursts);
        DrainBursts(p[block * kSquare], pairs_[result + kSquare], bursts);
        result += 2 * block * kSquare;
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = LowerAt(strip) + kSquare + side * 8;
            Mul(a[at], a[at], minus_beta_[(strip + 1) * kTile * 8], kFloatMask, (kChunk - (strip + 1) * kTile) / 8,
                BinaryRepeatParams(2, 2, 1, 16, 16, 8));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare, count = (LowerTiles(strip) - 1) * kSquare;
        Cast(p_half[LowerAt(strip)], attention_[strip * kSquare], RoundMode::CAST_NONE, kSquare);
        if (count == 0) continue;
        Cast(p_half[at], p[at], RoundMode::CAST_NONE, count);
        Cast(a_half[at], a[at], RoundMode::CAST_NONE, count);
    }
    HA_ORDER(V_MTE3);
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip);
        if (shape_.phase == kWhole) way_.Copy(p_[at], p_half[at], LowerTiles(strip) * kSquare);
        if (strip + 1 < kChunkTiles)
            way_.Copy(negative_a_[at + kSquare], a_half[at + kSquare], (LowerTiles(strip) - 1) * kSquare);
    }
}

// V' = T b (V - K exp(G) S), as an operand. V in NZ float is in key_.
__aicore__ inline void KdaPrefill::NewValues(int32_t chunk) {
    const int32_t floats = kChunk * task_.column_count;
    if (shape_.phase == kReduce) HA_ORDER(M_V);
    Drain(query_, read_, 0, kChunkTiles, ReadBlocks(), value_tiles_);
    HA_VECTOR_BARRIER();
    Sub(key_, key_, query_, floats);
    HA_VECTOR_BARRIER();
    ScaleRows(key_, key_, beta_spread_, kChunk, value_tiles_);
    HA_VECTOR_BARRIER();
    Cast(Half(product_), key_, RoundMode::CAST_NONE, floats);
    HA_ORDER(V_MTE3);
    way_.Copy(right_side_, Half(product_), floats);
    HA_ORDER(MTE3_MTE1);
    LoadLower(t_left_, inverse_);
    LoadRight(wide_right_, right_side_, kChunkTiles, value_tiles_);
    HA_ORDER(MTE1_M);
    LowerTimes(values_, t_left_, wide_right_, value_tiles_);
    HA_ORDER(M_V);
    DrainRows(key_, values_, value_tiles_);
    HA_VECTOR_BARRIER();
    Cast(Half(product_), key_, RoundMode::CAST_NONE, floats);
    HA_ORDER(V_MTE3);
    way_.Copy(new_values_, Half(product_), floats);
    if (shape_.phase == kReduce) DataCopy(workspace_.Values(task_, chunk), Half(product_), floats);
}

// O = s Q exp(G) S + P V'.
__aicore__ inline void KdaPrefill::Output(int32_t chunk, int32_t tokens) {
    const int32_t floats = kChunk * task_.column_count;
    HA_ORDER(MTE3_MTE1);
    LoadLower(p_left_, p_);
    LoadRight(value_right_, new_values_, kChunkTiles, value_tiles_);
    HA_ORDER(MTE1_M);
    LowerTimes(attended_, p_left_, value_right_, value_tiles_);
    if (shape_.phase == kOutput) HA_ORDER(M_V);
    Drain(query_, read_, QueryBlock(), kChunkTiles, ReadBlocks(), value_tiles_);
    HA_ORDER(M_V);
    DrainRows(key_, attended_, value_tiles_);
    HA_VECTOR_BARRIER();
    Add(key_, key_, query_, floats);
    HA_VECTOR_BARRIER();
    NzToRows(Half(product_), key_, kChunk, value_tiles_);
    StoreRows(Half(product_), chunk, tokens);
}

// S = exp(G_last) S + V'^T K exp(G_last - G), half of the strips at a time between L1 and UB.
__aicore__ inline void KdaPrefill::UpdateState(int32_t chunk, bool more) {
    const int32_t rows = state_.Rows(task_), strips = state_.Columns(task_) / kTile, step = (strips + 1) / 2;
    if (!Outputs()) HA_ORDER(MTE3_MTE1);
    if (shape_.state_v_first) {
        LoadLeftTransposed(kq_left_, new_values_, value_tiles_, kChunkTiles);
        LoadRight(state_right_, tail_keys_, kChunkTiles, key_tiles_);
    } else {
        LoadLeftTransposed(kq_left_, tail_keys_, key_tiles_, kChunkTiles);
        if (!Outputs()) LoadRight(value_right_, new_values_, kChunkTiles, value_tiles_);
    }
    HA_ORDER(MTE1_M);
    // [K, V]: V' is the right operand here too, and after Output it still lies in L0B.
    Multiply(change_, kq_left_, shape_.state_v_first ? state_right_ : value_right_, rows / kTile, strips, kChunkTiles);
    HA_ORDER(M_V);
    for (int32_t first = 0; first < strips; first += step) {
        const int32_t count = strips - first < step ? strips - first : step;
        const int32_t floats = count * rows * kTile, from = first * rows * kTile;
        HA_ORDER(V_MTE1);
        DataCopy(key_, parked_[from], floats);
        Drain(query_, change_[from], 0, floats / kSquare, floats / kSquare, 1);
        HA_ORDER(MTE1_V);
        if (shape_.state_v_first) {
            ScaleColumns(key_, key_, last_[first * kTile], rows, count);
        } else {
            ScaleRows(key_, key_, last_spread_, rows, count);
        }
        HA_VECTOR_BARRIER();
        Add(key_, key_, query_, floats);
        HA_VECTOR_BARRIER();
        HA_ORDER(MTE3_V);
        Cast(Half(product_), key_, RoundMode::CAST_NONE, floats);
        HA_ORDER(V_MTE3);
        way_.Copy(parked_[from], key_, floats);
        way_.Copy(state_l1_[from], Half(product_), floats);
        if (shape_.phase == kReduce && more)
            DataCopy(workspace_.State(task_, chunk + 1, first), Half(product_), workspace_.StateBursts(task_, count, true));
        HA_ORDER(MTE3_MTE1);
    }
}

}  // namespace vllm_ext
