// The steps of GdnPrefill; see gdn_prefill.h for the order and the formulas.
#pragma once

namespace vllm_ext {

__aicore__ inline void GdnPrefill::AllocateBuffers() {
    const int32_t key = shape_.key_dim, value = shape_.value_dim;
    int32_t at = 0;
    // Floats of UB, one after another; `Float` hands out the next.
    const int32_t wide = kChunk * (key > value ? key : value), square = kChunk * kChunk;
    const int32_t broadcast = square * 2;   // multipliers of the diagonal tiles, spread
    const int32_t y_size = wide > broadcast ? wide : broadcast;
    const int32_t half_state = key * value / 2;
    const int32_t y_floats = y_size > half_state ? y_size : half_state;
    const int32_t total = key * value + kChunk * (2 * key + value) / 2 + kChunk * value + y_floats + 3 * square +
                          7 * kSpread + 6 * kChunk + 3 * kSquare + 6 * kTile + 72;
    pipe_.InitBuffer(ub_, total * 4);
    auto take = [&](int32_t floats) {
        at += floats;
        return ub_.GetWithOffset<float>(floats, (at - floats) * 4);
    };
    state_ub_ = take(key * value);
    key_rows_ = Half(take(kChunk * key / 2));
    query_rows_ = Half(take(kChunk * key / 2));
    value_rows_ = Half(take(kChunk * value / 2));
    x_ = take(kChunk * value);
    y_ = take(y_floats);
    decay_ = take(square);
    a_ = take(square);
    swap_ = take(square);
    p_half_ = Half(swap_)[square];   // the other half of swap_ is scratch
    local_ = take(kSpread);
    tail_ = take(kSpread);
    beta_spread_ = take(kSpread);
    key_norm_ = take(kSpread);
    query_scale_ = take(kSpread);
    from_start_ = take(kSpread);
    minus_beta_ = take(kSpread);
    gate_ = take(kChunk);
    beta_compact_ = take(kChunk);
    gate_columns_ = take(kChunk);
    norm_columns_ = take(kChunk);
    norm_scratch_ = take(kChunk);
    minus_columns_ = take(kChunk);
    lower_mask_ = take(kSquare);
    upper_mask_ = take(kSquare);
    identity_ = take(kSquare);
    across_ = take(6 * kTile);
    edges_ = take(72);

    const int32_t keys = kChunk * key, values = kChunk * value;
    pipe_.InitBuffer(l1_, (2 * keys + key * value + 3 * square - kChunk * kTile + 3 * kSquare + 3 * values) * 2);
    at = 0;
    auto take_l1 = [&](int32_t halves) {
        at += halves;
        return l1_.GetWithOffset<half>(halves, (at - halves) * 2);
    };
    keys_ = take_l1(keys);
    queries_ = take_l1(keys);
    state_l1_ = take_l1(key * value);
    negative_a_ = take_l1(square - kChunk * kTile);   // its last strip is a diagonal tile
    inverse_ = take_l1(square);
    p_ = take_l1(square);
    sums_ = take_l1(3 * kSquare);
    right_side_ = take_l1(values);
    new_values_ = take_l1(values);
    tail_values_ = take_l1(values);

    // L0A: [K; Q], later the transposed tail values or keys; then T, P and the inversion's four tiles.
    pipe_.InitBuffer(l0a_, (2 * keys + 2 * square + 4 * kSquare) * 2);
    kq_left_ = l0a_.Get<half>();
    t_left_ = kq_left_[2 * keys];
    p_left_ = t_left_[square];
    small_left_ = p_left_[square];
    // L0B: the state, later keys or tail values; K^T, later V'; the inversion's tiles, later the right-hand side.
    const int32_t third = values > 12 * kSquare ? values : 12 * kSquare;
    pipe_.InitBuffer(l0b_, (key * value + (keys > values ? keys : values) + third) * 2);
    state_right_ = l0b_.Get<half>();
    key_right_ = state_right_[key * value];
    wide_right_ = key_right_[keys > values ? keys : values];
    // L0C: a place for each product of a chunk.
    pipe_.InitBuffer(l0c_, (2 * values + 2 * square + 8 * kSquare + 2 * values + key * value) * 4);
    read_ = l0c_.Get<float>();
    scores_ = read_[2 * values];
    merged_ = scores_[2 * square];
    values_ = merged_[8 * kSquare];
    attended_ = values_[values];
    change_ = attended_[values];
}

// Masks of a diagonal tile, added to exponents, and the identity.
__aicore__ inline void GdnPrefill::FillConstants() {
    Duplicate(lower_mask_, 0.0f, kSquare);
    Duplicate(upper_mask_, 0.0f, kSquare);
    Duplicate(identity_, 0.0f, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t row = 0; row < kTile; ++row) {
        const uint64_t all = (1ull << kTile) - 1, below = (1ull << row) - 1, self = 1ull << row;
        uint64_t above_bits[2] = {all & ~below & ~self, 0}, not_above_bits[2] = {below | self, 0};
        uint64_t self_bits[2] = {self, 0};
        if (row + 1 < kTile) Duplicate(lower_mask_[row * kTile], kNever, above_bits, 1, 1, 8);
        Duplicate(upper_mask_[row * kTile], kNever, not_above_bits, 1, 1, 8);
        Duplicate(identity_[row * kTile], 1.0f, self_bits, 1, 1, 8);
    }
}

__aicore__ inline void GdnPrefill::LoadInputs(int32_t chunk) {
    const int32_t done = chunk * kChunk, rest = task_.token_count - done;
    const int32_t tokens = rest < kChunk ? rest : kChunk, key = shape_.key_dim, value = shape_.value_dim;
    const int64_t token = task_.token_begin + done;
    const int32_t key_gap = (shape_.key_heads - 1) * key / 16;
    const int32_t value_gap = (shape_.value_heads * value - task_.column_count) / 16;
    const int64_t row = (token * shape_.key_heads + key_head_) * key;
    if (UsesKeys()) DataCopy(key_rows_, k_[row], DataCopyParams(tokens, key / 16, key_gap, 0));
    if (UsesQueries()) DataCopy(query_rows_, q_[row], DataCopyParams(tokens, key / 16, key_gap, 0));
    if (Resident())
        DataCopy(value_rows_, v_[(token * shape_.value_heads + task_.head) * value + task_.column_begin],
                 DataCopyParams(tokens, task_.column_count / 16, value_gap, 0));
    const int64_t gate = static_cast<int64_t>(task_.head) * shape_.gate_stride + task_.gate_begin + done;
    DataCopy(gate_, g_[gate], kChunk);
    DataCopy(beta_compact_, beta_[gate], kChunk);
}

__aicore__ inline void GdnPrefill::Chunk(int32_t chunk, bool more) {
    const int32_t rest = task_.token_count - chunk * kChunk, tokens = rest < kChunk ? rest : kChunk;
    StageInputs(chunk, tokens);
    ReadProducts();
    Gates();
    if (Resident()) RowsToNz(x_, value_rows_, kChunk, value_tiles_);
    if (more) {
        HA_ORDER(MTE3_MTE2);
        HA_ORDER(V_MTE2);
        LoadInputs(chunk + 1);
    }
    if (Maps()) {
        Decays();
        KeyKey();
        DiagonalMultipliers();
        QueryKey();
        Solve();
    }
    if (shape_.phase == kMap) StoreMapped(chunk);
    if (!Maps()) HA_VECTOR_BARRIER();
    if (Resident()) NewValues(chunk);
    if (Outputs()) Output(chunk, tokens);
    if (Resident()) UpdateState();
}

// K, Q and the state to L1 as operands; rows past the sequence become zero.
__aicore__ inline void GdnPrefill::StageInputs(int32_t chunk, int32_t tokens) {
    HA_ORDER(MTE2_V);
    if (tokens < kChunk) {
        const int32_t key = shape_.key_dim, columns = task_.column_count;
        if (UsesKeys()) Duplicate(key_rows_[tokens * key], half(0.0f), (kChunk - tokens) * key);
        if (UsesQueries()) Duplicate(query_rows_[tokens * key], half(0.0f), (kChunk - tokens) * key);
        if (Resident()) Duplicate(value_rows_[tokens * columns], half(0.0f), (kChunk - tokens) * columns);
    }
    const int32_t rows = state_.Rows(task_), columns = state_.Columns(task_);
    if (Resident()) {
        HA_ORDER(MTE3_V);
        Cast(Half(y_), state_ub_, RoundMode::CAST_NONE, rows * columns);
    }
    HA_ORDER(V_MTE3);
    if (UsesKeys()) RowsToL1(keys_, key_rows_, kChunk, key_tiles_);
    if (UsesQueries()) RowsToL1(queries_, query_rows_, kChunk, key_tiles_);
    if (Resident()) DataCopy(state_l1_, Half(y_), rows * columns);
    if (shape_.phase == kReduce)
        DataCopy(workspace_.State(task_, chunk, 0), Half(y_), workspace_.StateBursts(task_, columns / kTile, true));
    LoadMapped(chunk);
}

// What earlier launches left for this chunk, to L1.
__aicore__ inline void GdnPrefill::LoadMapped(int32_t chunk) {
    if (shape_.phase != kReduce && shape_.phase != kOutput) return;
    HA_ORDER(MTE1_MTE2);
    if (shape_.phase == kReduce) {
        Unpack(inverse_, workspace_.Inverse(task_, chunk));
    } else {
        Unpack(p_, workspace_.Attention(task_, chunk));
        DataCopy(new_values_, workspace_.Values(task_, chunk), kChunk * task_.column_count);
        const int32_t strips = state_.Columns(task_) / kTile;
        DataCopy(state_l1_, workspace_.State(task_, chunk, 0), workspace_.StateBursts(task_, strips, false));
    }
    HA_ORDER(MTE2_MTE1);
}

// T and P of a chunk for the launches to come.
__aicore__ inline void GdnPrefill::StoreMapped(int32_t chunk) {
    Pack(workspace_.Attention(task_, chunk), p_half_);
    HA_ORDER(MTE3_MTE1);
    Pack(Half(y_), inverse_);
    HA_ORDER(MTE1_MTE3);
    DataCopy(workspace_.Inverse(task_, chunk), Half(y_), kLowerSize);
}

// [K; Q] S and [K; Q] K^T.
__aicore__ inline void GdnPrefill::ReadProducts() {
    HA_ORDER(MTE3_MTE1);
    const HalfTile query_left = kq_left_[QueryBlock() * kTile * shape_.key_dim];
    if (UsesKeys()) LoadLeft(kq_left_, keys_, kChunkTiles, key_tiles_, kChunkTiles);
    if (shape_.phase == kMap) {
        LoadLeft(kq_left_[kChunk * shape_.key_dim], queries_, kChunkTiles, key_tiles_, kChunkTiles);
    } else if (UsesQueries()) {
        LoadLeft(query_left, queries_, kChunkTiles, key_tiles_, kChunkTiles);
    }
    if (shape_.phase != kMap) {
        if (shape_.state_v_first) {
            LoadRightTransposed(state_right_, state_l1_, key_tiles_, value_tiles_);
        } else {
            LoadRight(state_right_, state_l1_, key_tiles_, value_tiles_);
        }
    }
    if (Maps()) LoadColumnsTransposed(key_right_, keys_, key_tiles_);
    HA_ORDER(MTE1_M);
    if (Maps()) {
        MultiplyLower(scores_, kq_left_, key_right_, key_tiles_);
        MultiplyLower(scores_[kChunk * kChunk], kq_left_[kChunk * shape_.key_dim], key_right_, key_tiles_);
    }
    if (shape_.phase != kMap) Multiply(read_, kq_left_, state_right_, ReadBlocks(), value_tiles_, key_tiles_);
}

// Spread vectors of the chunk's gates and steps: local_ the sums of gates within a tile of 16 rows, from_start exp(G),
// tail exp(G_last - G), minus_beta -beta/|k|, key_norm 1/|k|, query_scale s/|q|; gate_columns_ local_, a float each.
// Sums never leave a tile: what lies between two rows is added up, not the difference of two long sums, so a steep gate
// costs no accuracy but in its own tile.
__aicore__ inline void GdnPrefill::Gates() {
    Maxs(gate_, gate_, kLowestGate, kChunk);
    HA_VECTOR_BARRIER();
    Spread(local_, gate_, kChunk);
    Spread(beta_spread_, beta_compact_, kChunk);
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
    WholeReduceSum(gate_columns_, local_, 1, kChunk, 1, 1, 1);
    TileEdges();
    Muls(minus_beta_, beta_spread_, -1.0f, kSpread);
    Muls(minus_columns_, beta_compact_, -1.0f, kChunk);
    if (shape_.normalise) {
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
                Sub(across(tile, earlier), total(earlier), gate_columns_[earlier * kTile], kTile, 1,
                    BinaryRepeatParams(1, 0, 1, 8, 0, 8));
            } else {
                Add(across(tile, earlier), across(tile - 1, earlier), total(tile - 1), kTile, 1,
                    BinaryRepeatParams(1, 1, 0, 8, 8, 0));
            }
        }
        HA_VECTOR_BARRIER();
    }
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        const int32_t at = tile * kTile * 8;
        if (tile == 0) {
            Adds(from_start_, local_, 0.0f, kTile * 8);
        } else {
            Add(from_start_[at], local_[at], before(tile), kFloatMask, 2, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
        }
        Sub(tail_[at], onwards(tile), local_[at], kFloatMask, 2, BinaryRepeatParams(1, 0, 1, 8, 0, 8));
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
            Sub(decay_[LowerAt(strip) + side * 8], local_[strip * kTile * 8], gate_columns_[strip * kTile + side * 8], kFloatMask, 2,
                BinaryRepeatParams(2, 1, 0, 16, 8, 0));
            for (int32_t tile = strip + 1; tile < kChunkTiles; ++tile)
                Add(decay_[At(strip, tile * kTile, kChunk) + side * 8], local_[tile * kTile * 8],
                    across_[(tile * (tile - 1) / 2 + strip) * kTile + side * 8], kFloatMask, 2,
                    BinaryRepeatParams(2, 1, 0, 16, 8, 0));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Add(decay_[LowerAt(strip)], decay_[LowerAt(strip)], lower_mask_, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Exp(decay_[LowerAt(strip)], decay_[LowerAt(strip)], LowerCount(strip));
    if (shape_.normalise) {
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

// a_ = k_i.k_j as it left the cube, for the diagonal tiles; then -A below them, as an operand.
__aicore__ inline void GdnPrefill::KeyKey() {
    HA_ORDER(M_V);
    DrainLower(a_, scores_);
}

// -A_rj of the diagonal tiles by columns: the products of keys are symmetric, so the tile is read as its transpose.
__aicore__ inline void GdnPrefill::DiagonalMultipliers() {
    // [j, tile, r]: a row of the transposed tiles is a column of A.
    constexpr int32_t row_blocks = kChunkTiles * 2;
    const FloatTile columns = swap_;
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            Sub(columns[tile * kTile + side * 8], gate_columns_[tile * kTile + side * 8], local_[tile * kTile * 8], kFloatMask, 2,
                BinaryRepeatParams(row_blocks, 0, 1, 8 * row_blocks, 0, 8));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = tile * kTile + side * 8;
            Add(columns[at], columns[at], upper_mask_[side * 8], kFloatMask, 2,
                BinaryRepeatParams(row_blocks, row_blocks, 2, 8 * row_blocks, 8 * row_blocks, 16));
        }
    }
    HA_VECTOR_BARRIER();
    Exp(columns, columns, kChunk * kTile);
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = tile * kTile + side * 8;
            Mul(columns[at], columns[at], a_[LowerAt(tile) + side * 8], kFloatMask, 2,
                BinaryRepeatParams(row_blocks, row_blocks, 2, 8 * row_blocks, 8 * row_blocks, 16));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = tile * kTile + side * 8;
            Mul(columns[at], columns[at], minus_columns_[at], kFloatMask, 2,
                BinaryRepeatParams(row_blocks, row_blocks, 0, 8 * row_blocks, 8 * row_blocks, 0));
        }
    }
    if (shape_.normalise) {
        HA_VECTOR_BARRIER();
        for (int32_t tile = 0; tile < kChunkTiles; ++tile) {
            for (int32_t side = 0; side < 2; ++side) {
                const int32_t at = tile * kTile + side * 8;
                Mul(columns[at], columns[at], key_norm_[tile * kTile * 8], kFloatMask, 2,
                    BinaryRepeatParams(row_blocks, row_blocks, 1, 8 * row_blocks, 8 * row_blocks, 8));
            }
        }
    }
    HA_VECTOR_BARRIER();
    Spread(y_, columns, kChunk * kTile);
    // -A below the diagonal tiles.
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare;
        Mul(a_[at], a_[at], decay_[at], LowerCount(strip) - kSquare);
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = LowerAt(strip) + kSquare + side * 8;
            Mul(a_[at], a_[at], minus_beta_[(strip + 1) * kTile * 8], kFloatMask, (kChunk - (strip + 1) * kTile) / 8,
                BinaryRepeatParams(2, 2, 1, 16, 16, 8));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare;
        Cast(Half(swap_)[at], a_[at], RoundMode::CAST_NONE, LowerCount(strip) - kSquare);
    }
    HA_ORDER(V_MTE3);
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare;
        DataCopy(negative_a_[at], Half(swap_)[at], LowerCount(strip) - kSquare);
    }
}

// P = s lower(exp(G_i - G_j) q_i.k_j), rounded, to L1.
__aicore__ inline void GdnPrefill::QueryKey() {
    DrainLower(a_, scores_[kChunk * kChunk]);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Mul(decay_[LowerAt(strip)], decay_[LowerAt(strip)], a_[LowerAt(strip)], LowerCount(strip));
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = LowerAt(strip) + side * 8;
            Mul(decay_[at], decay_[at], query_scale_[strip * kTile * 8], kFloatMask, (kChunk - strip * kTile) / 8,
                BinaryRepeatParams(2, 2, 1, 16, 16, 8));
        }
    }
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Cast(p_half_[LowerAt(strip)], decay_[LowerAt(strip)], RoundMode::CAST_NONE, LowerCount(strip));
    HA_ORDER(V_MTE3);
    if (shape_.phase == kMap) return;
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DataCopy(p_[LowerAt(strip)], p_half_[LowerAt(strip)], LowerCount(strip));
}

__aicore__ inline void GdnPrefill::Solve() {
    InverseBuffers b;
    b.multipliers = y_;
    b.row_blocks = 1;
    b.column_blocks = kChunkTiles * kTile;
    b.diagonal = a_;
    b.staging = Half(a_[kChunk * kTile]);
    b.negative = negative_a_;
    b.inverse = inverse_;
    b.sums = sums_;
    b.left = small_left_;
    b.right = wide_right_;
    b.product = merged_;
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Adds(b.diagonal[tile * kSquare], identity_, 0.0f, kSquare);
    SubstituteDiagonal(b);
    PlaceDiagonal(b);
    for (int32_t row = 1; row < kChunkTiles; ++row) MergeRow(b, row);
}

// V' = T (beta V - beta exp(G) K S); then V' and exp(G_last - G) V' (over |k|) as operands.
__aicore__ inline void GdnPrefill::NewValues(int32_t chunk) {
    const int32_t columns = task_.column_count;
    if (shape_.phase == kReduce) HA_ORDER(M_V);
    Drain(y_, read_, 0, kChunkTiles, ReadBlocks(), value_tiles_);
    ScaleRows(x_, x_, beta_spread_, kChunk, value_tiles_);
    Mul(minus_beta_, minus_beta_, from_start_, kSpread);
    HA_VECTOR_BARRIER();
    ScaleRows(y_, y_, minus_beta_, kChunk, value_tiles_);
    HA_VECTOR_BARRIER();
    Add(x_, x_, y_, kChunk * columns);
    HA_VECTOR_BARRIER();
    Cast(Half(y_), x_, RoundMode::CAST_NONE, kChunk * columns);
    HA_ORDER(V_MTE3);
    DataCopy(right_side_, Half(y_), kChunk * columns);
    HA_ORDER(MTE3_MTE1);
    LoadLower(t_left_, inverse_);
    LoadRight(wide_right_, right_side_, kChunkTiles, value_tiles_);
    HA_ORDER(MTE1_M);
    LowerTimes(values_, t_left_, wide_right_, value_tiles_);
    if (shape_.normalise) Mul(tail_, tail_, key_norm_, kSpread);
    HA_ORDER(M_V);
    DrainRows(x_, values_, value_tiles_);
    HA_VECTOR_BARRIER();
    Cast(Half(y_), x_, RoundMode::CAST_NONE, kChunk * columns);
    ScaleRows(x_, x_, tail_, kChunk, value_tiles_);
    HA_VECTOR_BARRIER();
    Cast(Half(y_)[kChunk * columns], x_, RoundMode::CAST_NONE, kChunk * columns);
    HA_ORDER(V_MTE3);
    if (shape_.phase == kReduce) {
        DataCopy(workspace_.Values(task_, chunk), Half(y_), kChunk * columns);
    } else {
        DataCopy(new_values_, Half(y_), kChunk * columns);
    }
    DataCopy(tail_values_, Half(y_)[kChunk * columns], kChunk * columns);
}

// O = s exp(G) Q S + P V'.
__aicore__ inline void GdnPrefill::Output(int32_t chunk, int32_t tokens) {
    const int32_t columns = task_.column_count;
    HA_ORDER(MTE3_MTE1);
    LoadLower(p_left_, p_);
    LoadRight(key_right_, new_values_, kChunkTiles, value_tiles_);
    HA_ORDER(MTE1_M);
    LowerTimes(attended_, p_left_, key_right_, value_tiles_);
    Mul(from_start_, from_start_, query_scale_, kSpread);
    HA_ORDER(MTE3_V);
    if (shape_.phase == kOutput) HA_ORDER(M_V);
    Drain(y_, read_, QueryBlock(), kChunkTiles, ReadBlocks(), value_tiles_);
    HA_VECTOR_BARRIER();
    ScaleRows(y_, y_, from_start_, kChunk, value_tiles_);
    HA_ORDER(M_V);
    DrainRows(x_, attended_, value_tiles_);
    HA_VECTOR_BARRIER();
    Add(x_, x_, y_, kChunk * columns);
    HA_VECTOR_BARRIER();
    NzToRows(Half(y_), x_, kChunk, value_tiles_);
    HA_ORDER(V_MTE3);
    const int64_t token = task_.token_begin + chunk * kChunk;
    DataCopy(out_[(token * shape_.value_heads + task_.head) * shape_.value_dim + task_.column_begin], Half(y_),
             DataCopyParams(tokens, columns / 16, 0, (shape_.value_heads * shape_.value_dim - columns) / 16));
}

// S = exp(G_last) S + V''^T K, in place, half of the strips at a time.
__aicore__ inline void GdnPrefill::UpdateState() {
    const int32_t rows = state_.Rows(task_) / kTile, strips = state_.Columns(task_) / kTile, step = (strips + 1) / 2;
    if (!Outputs()) HA_ORDER(MTE3_MTE1);
    if (shape_.state_v_first) {
        LoadLeftTransposed(kq_left_, tail_values_, value_tiles_, kChunkTiles);
        LoadRight(state_right_, keys_, kChunkTiles, key_tiles_);
    } else {
        LoadLeftTransposed(kq_left_, keys_, key_tiles_, kChunkTiles);
        LoadRight(state_right_, tail_values_, kChunkTiles, value_tiles_);
    }
    HA_ORDER(MTE1_M);
    Multiply(change_, kq_left_, state_right_, rows, strips, kChunkTiles);
    for (int32_t first = 0; first < strips; first += step) {
        const int32_t count = strips - first < step ? strips - first : step;
        const int32_t from = first * rows * kSquare, strip_floats = rows * kSquare;
        const FloatTile state = state_ub_[from];
        for (int32_t strip = 0; strip < count; ++strip)
            Mul(state[strip * strip_floats], state[strip * strip_floats], edges_[8 * 8], kFloatMask, strip_floats / kFloatMask,
                BinaryRepeatParams(1, 1, 0, 8, 8, 0));
        if (first == 0) HA_ORDER(M_V);
        Drain(x_, change_[from], 0, count * rows, count * rows, 1);
        HA_VECTOR_BARRIER();
        Add(state, state, x_, count * strip_floats);
    }
    HA_VECTOR_BARRIER();
}

}  // namespace vllm_ext
