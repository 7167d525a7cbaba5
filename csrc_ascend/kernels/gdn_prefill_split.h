// GdnPrefill with operands in two halves: the low halves, and the products they add.
#pragma once

namespace vllm_ext {

// What rounding took from the state; its rounded form lies in y_ and is on its way to L1.
__aicore__ inline void GdnPrefill::SplitState(int32_t count) {
    const int32_t piece = kChunk * task_.column_count;
    HA_ORDER(MTE3_V);
    for (int32_t at = 0; at < count; at += piece) TakeRest(Half(y_)[at], state_ub_[at], Half(y_)[at], x_, piece);
    HA_ORDER(V_MTE3);
    way_.Copy(state_low_, Half(y_), count);
}

// A lower triangle, strip by strip from `below` tiles below the diagonal on.
__aicore__ inline void GdnPrefill::SplitLower(const SplitTile& l1, const FloatTile& x, int32_t below, const HalfTile& staging,
                                              const FloatTile& rest) {
    for (int32_t strip = 0; strip + below < kChunkTiles; ++strip) {
        const int32_t at = LowerAt(strip) + below * kSquare, count = LowerCount(strip) - below * kSquare;
        SplitToL1(way_, l1[at], x[at], count, staging, rest, DataCopyParams(1, count / 16, 0, 0));
    }
}

// x_, a piece at a time; a_ is free by now.
__aicore__ inline void GdnPrefill::SplitValues(const SplitTile& l1) {
    const int32_t count = kChunk * task_.column_count, piece = count < kChunk * kChunk ? count : kChunk * kChunk;
    for (int32_t at = 0; at < count; at += piece)
        SplitToL1(way_, l1[at], x_[at], piece, Half(y_), a_, DataCopyParams(1, piece / 16, 0, 0));
}

// L B for a lower triangular L, both from L1.
__aicore__ inline void GdnPrefill::LowerTimesSplit(const FloatTile& product, const SplitTile& lower, const SplitTile& right) {
    HA_ORDER(MTE3_MTE1);
    LoadLower(t_left_, lower.high);
    LoadLower(p_left_, lower.low);
    LoadRight(wide_right_, right.high, kChunkTiles, value_tiles_);
    LoadRight(key_right_, right.low, kChunkTiles, value_tiles_);
    HA_ORDER(MTE1_M);
    LowerTimes(product, t_left_, wide_right_, value_tiles_);
    PipeBarrier<PIPE_M>();
    LowerTimes(product, t_left_, key_right_, value_tiles_, false);
    PipeBarrier<PIPE_M>();
    LowerTimes(product, p_left_, wide_right_, value_tiles_, false);
}

__aicore__ inline void GdnPrefill::SolveSplit() {
    SplitInverseBuffers s;
    s.plain = InverseOf(y_, a_, Half(a_[kChunk * kTile]), wide_right_);
    s.negative = {negative_a_, negative_low_};
    s.inverse = {inverse_, inverse_low_};
    s.sums = {sums_, sums_low_};
    s.rest = swap_;
    InvertSplit(s, identity_);
}

// [K; Q] is exact, the state is not.
__aicore__ inline void GdnPrefill::AddLowRead() {
    HA_ORDER(M_MTE1);
    LoadState(state_low_);
    HA_ORDER(MTE1_M);
    Multiply(read_, kq_left_, state_right_, ReadBlocks(), value_tiles_, key_tiles_, false);
}

// K is exact, the tail values are not.
__aicore__ inline void GdnPrefill::AddLowChange(int32_t rows, int32_t strips) {
    HA_ORDER(M_MTE1);
    if (shape_.state_v_first) {
        LoadLeftTransposed(kq_left_, tail_low_, value_tiles_, kChunkTiles);
    } else {
        LoadRight(state_right_, tail_low_, kChunkTiles, value_tiles_);
    }
    HA_ORDER(MTE1_M);
    Multiply(change_, kq_left_, state_right_, rows, strips, kChunkTiles, false);
}

}  // namespace vllm_ext
