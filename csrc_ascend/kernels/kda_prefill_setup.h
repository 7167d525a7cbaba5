// KdaPrefill: buffers, constants, and what moves between global memory, L1 and UB.
#pragma once

namespace vllm_ext {

constexpr int32_t kStripBlocks = kChunk * 2;   // 32-byte blocks of a float strip
constexpr int32_t kTileBlocks = kTile * 2;     // of one of its tiles
constexpr int32_t kEdgeRows = 6;               // rows of edges_
constexpr int32_t kEdgeBlocks = kEdgeRows * 2; // of one of its strips

__aicore__ inline void KdaPrefill::AllocateBuffers() {
    const int32_t key = shape_.key_dim, value = shape_.value_dim;
    const int32_t keys = kChunk * key, values = kChunk * value, square = kChunk * kChunk, column = kChunk * kTile;
    const int32_t broadcast = square * 2, half_state = key * value / 2;
    int32_t tile = keys > values ? keys : values;
    if (tile < half_state) tile = half_state;
    if (tile < square * 2) tile = square * 2;
    int32_t at = 0;
    const int32_t total = 4 * tile + (broadcast > tile ? broadcast : tile) + (2 * keys + values) / 2 + 4 * column + kChunk +
                          2 * kSpread + kChunk + key + 8 * key + 3 * kChunk + kSquare + kEdgeRows * key;
    pipe_.InitBuffer(ub_, total * 4);
    auto take = [&](int32_t floats) {
        at += floats;
        return ub_.GetWithOffset<float>(floats, (at - floats) * 4);
    };
    local_ = take(tile);
    key_ = take(2 * tile);   // with query_ it holds a whole state
    query_ = key_[tile];
    decay_ = take(tile);
    product_ = take(broadcast > tile ? broadcast : tile);
    key_rows_ = Half(take(keys / 2));
    query_rows_ = Half(take(keys / 2));
    value_rows_ = Half(take(values / 2));
    attention_ = take(2 * column);
    attention_rest_ = attention_[column];
    columns_ = take(2 * column);
    columns_rest_ = columns_[column];
    beta_compact_ = take(kChunk);
    beta_spread_ = take(kSpread);
    minus_beta_ = take(kSpread);
    minus_columns_ = take(kChunk);
    last_ = take(key);
    last_spread_ = take(8 * key);
    norms_ = take(3 * kChunk);
    identity_ = take(kSquare);
    edges_ = take(kEdgeRows * key);

    pipe_.InitBuffer(l1_, (5 * keys + 96 * key + key * value + 3 * square - kChunk * kTile + 3 * kSquare + 2 * values) * 2 + key * value * 4);
    at = 0;
    auto take_l1 = [&](int32_t halves) {
        at += halves;
        return l1_.GetWithOffset<half>(halves, (at - halves) * 2);
    };
    parked_ = take_l1(2 * key * value).ReinterpretCast<float>();
    read_keys_ = take_l1(keys);
    read_queries_ = take_l1(keys);
    later_keys_ = take_l1(keys);
    later_queries_ = take_l1(keys);
    tail_keys_ = take_l1(keys);
    earlier_keys_ = take_l1(96 * key);
    state_l1_ = take_l1(key * value);
    negative_a_ = take_l1(square - kChunk * kTile);   // its last strip is a diagonal tile
    inverse_ = take_l1(square);
    p_ = take_l1(square);
    sums_ = take_l1(3 * kSquare);
    right_side_ = take_l1(values);
    new_values_ = take_l1(values);

    // L0A: the left operands of the reading products, later of the update; then those of the pairs, later T and P.
    const int32_t pair_left = 3 * 2 * kTile * key, triangles = 2 * square;
    pipe_.InitBuffer(l0a_, (2 * keys + (pair_left > triangles ? pair_left : triangles) + 4 * kSquare) * 2);
    kq_left_ = l0a_.Get<half>();
    pair_left_ = kq_left_[2 * keys];
    t_left_ = pair_left_;
    p_left_ = pair_left_[square];
    small_left_ = pair_left_[pair_left > triangles ? pair_left : triangles];
    // L0B: the state, later the tail keys; then those of the pairs, later V' and the right-hand side.
    const int32_t small_right = 12 * kSquare, wide = values > small_right ? values : small_right;
    const int32_t later = values + wide, pair_right = 96 * key;
    pipe_.InitBuffer(l0b_, (key * value + (later > pair_right ? later : pair_right)) * 2);
    state_right_ = l0b_.Get<half>();
    pair_right_ = state_right_[key * value];
    value_right_ = pair_right_;
    wide_right_ = pair_right_[values];
    // L0C: a place for each product of a chunk.
    pipe_.InitBuffer(l0c_, (2 * values + 12 * kSquare + 8 * kSquare + 2 * values + key * value) * 4);
    read_ = l0c_.Get<float>();
    pairs_ = read_[2 * values];
    merged_ = pairs_[12 * kSquare];
    values_ = merged_[8 * kSquare];
    attended_ = values_[values];
    change_ = attended_[values];
}

__aicore__ inline void KdaPrefill::FillConstants() {
    Duplicate(identity_, 0.0f, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t row = 0; row < kTile; ++row) {
        uint64_t self[2] = {1ull << row, 0};
        Duplicate(identity_[row * kTile], 1.0f, self, 1, 1, 8);
    }
}

// The state from UB (key_ and query_) to L1, as it is and as an operand; and back.
__aicore__ inline void KdaPrefill::ParkState(int32_t floats) {
    Cast(Half(product_), key_, RoundMode::CAST_NONE, floats);
    HA_ORDER(V_MTE3);
    DataCopy(parked_, key_, floats);
    DataCopy(state_l1_, Half(product_), floats);
    const int32_t strips = state_.Columns(task_) / kTile;
    if (shape_.phase == kReduce && task_.token_count > 0)
        DataCopy(workspace_.State(task_, 0, 0), Half(product_), workspace_.StateBursts(task_, strips, true));
}
__aicore__ inline void KdaPrefill::FetchState(int32_t floats) {
    HA_ORDER(MTE3_MTE1);
    DataCopy(key_, parked_, floats);
    HA_ORDER(MTE1_V);
}

__aicore__ inline void KdaPrefill::LoadInputs(int32_t chunk) {
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
    DataCopy(decay_, g_[gate * key], kChunk * key);
    DataCopy(beta_compact_, beta_[gate], kChunk);
}

}  // namespace vllm_ext
