// The steps of GdnPrefill; see gdn_prefill.h for the order and the formulas.
#pragma once

namespace vllm_ext {

__aicore__ inline void GdnPrefill::Chunk(int32_t chunk, bool more) {
    const int32_t tokens = TokensOf(chunk);
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
        BelowDiagonal();
        QueryKey();
        if (Splits()) {
            SolveSplit();
        } else {
            Invert(InverseOf(y_, a_, Half(a_[kChunk * kTile]), wide_right_), identity_);
        }
    }
    if (shape_.phase == kMap) StoreMapped(chunk, p_half_, Half(y_));
    if (!Maps()) HA_VECTOR_BARRIER();
    if (Resident()) NewValues(chunk);
    if (Outputs()) Output(chunk, tokens);
    if (Resident()) UpdateState();
}

// K, Q and the state to L1 as operands; rows past the sequence become zero.
__aicore__ inline void GdnPrefill::StageInputs(int32_t chunk, int32_t tokens) {
    HA_ORDER(MTE2_V);
    if (tokens < kChunk) ClearPadding(tokens);
    const int32_t rows = state_.Rows(task_), columns = state_.Columns(task_);
    if (Resident()) {
        HA_ORDER(MTE3_V);
        Cast(Half(y_), state_ub_, RoundMode::CAST_NONE, rows * columns);
    }
    HA_ORDER(V_MTE3);
    if (UsesKeys()) RowsToL1(way_, keys_, key_rows_, kChunk, key_tiles_);
    if (UsesQueries()) RowsToL1(way_, queries_, query_rows_, kChunk, key_tiles_);
    if (Resident()) way_.Copy(state_l1_, Half(y_), rows * columns);
    if (Splits()) SplitState(rows * columns);
    if (shape_.phase == kReduce)
        DataCopy(workspace_.State(task_, chunk, 0), Half(y_), workspace_.StateBursts(task_, columns / kTile, true));
    LoadMapped(chunk);
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
    if (shape_.phase != kMap) LoadState(state_l1_);
    if (Maps()) LoadColumnsTransposed(key_right_, keys_, key_tiles_);
    HA_ORDER(MTE1_M);
    if (Maps()) {
        MultiplyLower(scores_, kq_left_, key_right_, key_tiles_);
        MultiplyLower(scores_[kChunk * kChunk], kq_left_[kChunk * shape_.key_dim], key_right_, key_tiles_);
    }
    if (shape_.phase != kMap) Multiply(read_, kq_left_, state_right_, ReadBlocks(), value_tiles_, key_tiles_);
    if (Splits()) AddLowRead();
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
    const FloatTile columns = pair_columns_;
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
    if (Normalises()) {
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
}

// -A below the diagonal tiles, rounded, to L1.
__aicore__ inline void GdnPrefill::BelowDiagonal() {
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
    if (Splits()) {
        SplitLower({negative_a_, negative_low_}, a_, 1, Half(swap_), swap_[kChunk * kChunk / 2]);
        return;
    }
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare;
        Cast(Half(swap_)[at], a_[at], RoundMode::CAST_NONE, LowerCount(strip) - kSquare);
    }
    HA_ORDER(V_MTE3);
    for (int32_t strip = 0; strip + 1 < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + kSquare;
        way_.Copy(negative_a_[at], Half(swap_)[at], LowerCount(strip) - kSquare);
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
    if (Splits()) {
        SplitLower({p_, p_low_}, decay_, 0, p_half_, a_);
        return;
    }
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Cast(p_half_[LowerAt(strip)], decay_[LowerAt(strip)], RoundMode::CAST_NONE, LowerCount(strip));
    HA_ORDER(V_MTE3);
    if (shape_.phase == kMap) return;
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        way_.Copy(p_[LowerAt(strip)], p_half_[LowerAt(strip)], LowerCount(strip));
}

// V' = T (beta V - beta exp(G) K S); then V' and exp(G_last - G) V' (over |k|) as operands.
__aicore__ inline void GdnPrefill::NewValues(int32_t chunk) {
    const int32_t columns = task_.column_count, count = kChunk * columns;
    if (shape_.phase == kReduce) HA_ORDER(M_V);
    Drain(y_, read_, 0, kChunkTiles, ReadBlocks(), value_tiles_);
    ScaleRows(x_, x_, beta_spread_, kChunk, value_tiles_);
    Mul(minus_beta_, minus_beta_, from_start_, kSpread);
    HA_VECTOR_BARRIER();
    ScaleRows(y_, y_, minus_beta_, kChunk, value_tiles_);
    HA_VECTOR_BARRIER();
    Add(x_, x_, y_, count);
    HA_VECTOR_BARRIER();
    if (Splits()) {
        SplitValues({right_side_, right_low_});
        LowerTimesSplit(values_, {inverse_, inverse_low_}, {right_side_, right_low_});
    } else {
        Cast(Half(y_), x_, RoundMode::CAST_NONE, count);
        HA_ORDER(V_MTE3);
        way_.Copy(right_side_, Half(y_), count);
        HA_ORDER(MTE3_MTE1);
        LoadLower(t_left_, inverse_);
        LoadRight(wide_right_, right_side_, kChunkTiles, value_tiles_);
        HA_ORDER(MTE1_M);
        LowerTimes(values_, t_left_, wide_right_, value_tiles_);
    }
    if (Normalises()) Mul(tail_, tail_, key_norm_, kSpread);
    HA_ORDER(M_V);
    DrainRows(x_, values_, value_tiles_);
    HA_VECTOR_BARRIER();
    if (Splits()) {
        SplitValues({new_values_, new_low_});
        ScaleRows(x_, x_, tail_, kChunk, value_tiles_);
        HA_VECTOR_BARRIER();
        SplitValues({tail_values_, tail_low_});
        return;
    }
    Cast(Half(y_), x_, RoundMode::CAST_NONE, count);
    ScaleRows(x_, x_, tail_, kChunk, value_tiles_);
    HA_VECTOR_BARRIER();
    Cast(Half(y_)[count], x_, RoundMode::CAST_NONE, count);
    HA_ORDER(V_MTE3);
    if (shape_.phase == kReduce) {
        DataCopy(workspace_.Values(task_, chunk), Half(y_), count);
    } else {
        way_.Copy(new_values_, Half(y_), count);
    }
    way_.Copy(tail_values_, Half(y_)[count], count);
}

// O = s exp(G) Q S + P V'.
__aicore__ inline void GdnPrefill::Output(int32_t chunk, int32_t tokens) {
    const int32_t columns = task_.column_count;
    if (Splits()) {
        LowerTimesSplit(attended_, {p_, p_low_}, {new_values_, new_low_});
    } else {
        HA_ORDER(MTE3_MTE1);
        LoadLower(p_left_, p_);
        LoadRight(key_right_, new_values_, kChunkTiles, value_tiles_);
        HA_ORDER(MTE1_M);
        LowerTimes(attended_, p_left_, key_right_, value_tiles_);
    }
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
    StoreRows(Half(y_), chunk, tokens);
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
    if (Splits()) AddLowChange(rows, strips);
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
