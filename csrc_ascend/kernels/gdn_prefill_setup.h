// GdnPrefill: its tiles, constants and inputs.
#pragma once

namespace vllm_ext {

__aicore__ inline void GdnPrefill::AllocateBuffers() {
    const auto plan = vllm_ext_plan_gdn::BuffersFor(shape_.key_dim, shape_.value_dim);
    AllocateShared(plan);
    state_ub_ = TileAt<float>(ub_, plan.state);
    x_ = TileAt<float>(ub_, plan.x);
    y_ = TileAt<float>(ub_, plan.y);
    decay_ = TileAt<float>(ub_, plan.decay);
    a_ = TileAt<float>(ub_, plan.a);
    swap_ = TileAt<float>(ub_, plan.swap);
    p_half_ = Half(swap_)[kChunk * kChunk];   // the other half of swap_ is scratch
    local_ = TileAt<float>(ub_, plan.local);
    tail_ = TileAt<float>(ub_, plan.tail);
    key_norm_ = TileAt<float>(ub_, plan.key_norm);
    query_scale_ = TileAt<float>(ub_, plan.query_scale);
    from_start_ = TileAt<float>(ub_, plan.from_start);
    gate_ = TileAt<float>(ub_, plan.gate);
    behind_ = TileAt<float>(ub_, plan.behind);
    pair_columns_ = swap_[kChunk * kTile];
    norm_columns_ = TileAt<float>(ub_, plan.norm_columns);
    norm_scratch_ = TileAt<float>(ub_, plan.norm_scratch);
    lower_mask_ = TileAt<float>(ub_, plan.lower_mask);
    upper_mask_ = TileAt<float>(ub_, plan.upper_mask);
    across_ = TileAt<float>(ub_, plan.across);
    keys_ = TileAt<half>(l1_, plan.keys);
    queries_ = TileAt<half>(l1_, plan.queries);
    tail_values_ = TileAt<half>(l1_, plan.tail_values);
    state_low_ = TileAt<half>(l1_, plan.state_low);
    negative_low_ = TileAt<half>(l1_, plan.negative_low);
    inverse_low_ = TileAt<half>(l1_, plan.inverse_low);
    p_low_ = TileAt<half>(l1_, plan.p_low);
    sums_low_ = TileAt<half>(l1_, plan.sums_low);
    right_low_ = TileAt<half>(l1_, plan.right_low);
    new_low_ = TileAt<half>(l1_, plan.new_low);
    tail_low_ = TileAt<half>(l1_, plan.tail_low);
    t_left_ = TileAt<half>(l0a_, plan.t_left);
    p_left_ = TileAt<half>(l0a_, plan.p_left);
    key_right_ = TileAt<half>(l0b_, plan.key_right);
    wide_right_ = TileAt<half>(l0b_, plan.wide_right);
    scores_ = TileAt<float>(l0c_, plan.scores);
}

// Masks of a diagonal tile, added to exponents, and the identity.
__aicore__ inline void GdnPrefill::FillConstants() {
    Duplicate(lower_mask_, 0.0f, kSquare);
    Duplicate(upper_mask_, 0.0f, kSquare);
    FillIdentity();
    for (int32_t row = 0; row < kTile; ++row) {
        const uint64_t all = (1ull << kTile) - 1, below = (1ull << row) - 1, self = 1ull << row;
        uint64_t above_bits[2] = {all & ~below & ~self, 0}, not_above_bits[2] = {below | self, 0};
        if (row + 1 < kTile) Duplicate(lower_mask_[row * kTile], kNever, above_bits, 1, 1, 8);
        Duplicate(upper_mask_[row * kTile], kNever, not_above_bits, 1, 1, 8);
    }
}

__aicore__ inline void GdnPrefill::LoadInputs(int32_t chunk) {
    LoadRows(chunk);
    DataCopy(gate_, g_[GateOf(chunk)], kChunk);
}

}  // namespace vllm_ext
