// GdnPrefill: buffers, constants, and what moves between global memory and L1.
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

}  // namespace vllm_ext
