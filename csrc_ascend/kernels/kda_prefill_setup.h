// KdaPrefill: its tiles and inputs, and the state between L1 and UB.
#pragma once

namespace vllm_ext {

constexpr int32_t kStripBlocks = kChunk * 2;   // 32-byte blocks of a float strip
constexpr int32_t kTileBlocks = kTile * 2;     // of one of its tiles
constexpr int32_t kEdgeRows = 6;               // rows of edges_
constexpr int32_t kEdgeBlocks = kEdgeRows * 2; // of one of its strips

__aicore__ inline void KdaPrefill::AllocateBuffers() {
    const auto plan = vllm_ext_plan_kda::BuffersFor(shape_.key_dim, shape_.value_dim);
    AllocateShared(plan);
    local_ = TileAt<float>(ub_, plan.local);
    key_ = TileAt<float>(ub_, plan.key_query);   // with query_ it holds a whole state
    query_ = key_[plan.key_query.bytes / 8];
    decay_ = TileAt<float>(ub_, plan.decay);
    product_ = TileAt<float>(ub_, plan.product);
    attention_ = TileAt<float>(ub_, plan.attention);
    attention_rest_ = attention_[kChunk * kTile];
    columns_ = TileAt<float>(ub_, plan.columns);
    columns_rest_ = columns_[kChunk * kTile];
    last_ = TileAt<float>(ub_, plan.last);
    last_spread_ = TileAt<float>(ub_, plan.last_spread);
    norms_ = TileAt<float>(ub_, plan.norms);
    parked_ = TileAt<float>(l1_, plan.parked);
    read_keys_ = TileAt<half>(l1_, plan.read_keys);
    read_queries_ = TileAt<half>(l1_, plan.read_queries);
    later_keys_ = TileAt<half>(l1_, plan.later_keys);
    later_queries_ = TileAt<half>(l1_, plan.later_queries);
    tail_keys_ = TileAt<half>(l1_, plan.tail_keys);
    earlier_keys_ = TileAt<half>(l1_, plan.earlier_keys);
    // The left operands of the pairs, later T and P; the right ones, later V' and the right-hand side.
    pair_left_ = TileAt<half>(l0a_, plan.pair_left);
    t_left_ = pair_left_;
    p_left_ = pair_left_[kChunk * kChunk];
    pair_right_ = TileAt<half>(l0b_, plan.pair_right);
    value_right_ = pair_right_;
    wide_right_ = pair_right_[kChunk * shape_.value_dim];
    pairs_ = TileAt<float>(l0c_, plan.pairs);
}

// The state from global memory, through UB (key_ and query_), to L1, as it is and as an operand; and back.
__aicore__ inline void KdaPrefill::TakeState() {
    const int32_t floats = shape_.key_dim * task_.column_count, strips = state_.Columns(task_) / kTile;
    state_.Load(key_, product_, task_);
    Cast(Half(product_), key_, RoundMode::CAST_NONE, floats);
    HA_ORDER(V_MTE3);
    way_.Copy(parked_, key_, floats);
    way_.Copy(state_l1_, Half(product_), floats);
    if (shape_.phase == kReduce && task_.token_count > 0)
        DataCopy(workspace_.State(task_, 0, 0), Half(product_), workspace_.StateBursts(task_, strips, true));
}
__aicore__ inline void KdaPrefill::GiveState() {
    if (!shape_.has_final) return;
    HA_ORDER(MTE3_MTE1);
    DataCopy(key_, parked_, shape_.key_dim * task_.column_count);
    HA_ORDER(MTE1_V);
    state_.Store(key_, product_, task_);
}

__aicore__ inline void KdaPrefill::LoadInputs(int32_t chunk) {
    LoadRows(chunk);
    DataCopy(decay_, g_[GateOf(chunk) * shape_.key_dim], kChunk * shape_.key_dim);
}

}  // namespace vllm_ext
