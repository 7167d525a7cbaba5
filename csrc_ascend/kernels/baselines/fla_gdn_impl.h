// The stages of FlaGdn; see fla_gdn.h.
#pragma once

namespace vllm_ext {

__aicore__ inline void FlaGdn::Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial, GM_ADDR out,
                                    GM_ADDR final_state, GM_ADDR workspace, const PrefillShape& shape) {
    shape_ = shape;
    q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(q));
    k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(k));
    v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v));
    g_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(g));
    beta_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(beta));
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(out));
    workspace_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(workspace));
    state_io_.Init(initial, final_state, shape);
    units_ = static_cast<int64_t>(shape.value_heads) * (shape.gate_stride / kChunk);
    const int32_t floats = kDim * kDim / 2 + 2 * kWide + 2 * kSquareTile + kWide + 2 * kChunk + 3 * kSpread + 2 * kSquare;
    pipe_.InitBuffer(ub_, floats * 4);
    int32_t at = 0;
    auto take = [&](int32_t count) {
        at += count;
        return ub_.GetWithOffset<float>(count, (at - count) * 4);
    };
    state_ = take(kDim * kDim / 2);
    x_ = take(kWide);
    y_ = take(kWide);
    square_ = take(2 * kSquareTile);
    rows_ = Half(take(kWide / 2));
    more_rows_ = Half(take(kWide / 2));
    sums_ = take(kChunk);
    beta_row_ = take(kChunk);
    spread_ = take(kSpread);
    other_ = take(kSpread);
    beta_spread_ = take(kSpread);
    identity_ = take(kSquare);
    mask_ = take(kSquare);
    pipe_.InitBuffer(l1_, (3 * kWide + kDim * kDim) * 2);
    first_ = l1_.GetWithOffset<half>(kWide, 0);
    second_ = l1_.GetWithOffset<half>(kWide, 2 * kWide);
    third_ = l1_.GetWithOffset<half>(kWide, 4 * kWide);
    fourth_ = l1_.GetWithOffset<half>(kDim * kDim, 6 * kWide);
    pipe_.InitBuffer(l0a_, kWide * 2);
    pipe_.InitBuffer(l0b_, kWide * 2);
    pipe_.InitBuffer(l0c_, kDim * kDim * 4);
    left_ = l0a_.Get<half>();
    right_ = l0b_.Get<half>();
    product_ = l0c_.Get<float>();
    Duplicate(identity_, 0.0f, kSquare);
    Duplicate(mask_, 0.0f, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t row = 0; row < kTile; ++row) {
        uint64_t self[2] = {1ull << row, 0}, above[2] = {((1ull << kTile) - 1) & ~((2ull << row) - 1), 0};
        Duplicate(identity_[row * kTile], 1.0f, self, 1, 1, 8);
        if (row + 1 < kTile) Duplicate(mask_[row * kTile], kNever, above, 1, 1, 8);
    }
    HA_VECTOR_BARRIER();
}

__aicore__ inline void FlaGdn::Process(const Task& task) {
    task_ = task;
    unit_ = static_cast<int64_t>(task.head) * (shape_.gate_stride / kChunk) + task.gate_begin / kChunk;
    tokens_ = task.token_count < kChunk ? task.token_count : kChunk;
    PipeBarrier<PIPE_ALL>();
    switch (shape_.phase) {
        case kCumsum: Cumsum(); break;
        case kKkt: Kkt(); break;
        case kSolve: Solve(); break;
        case kWu: WriteUpdate(); break;
        case kH: States(); break;
        default: Outputs();
    }
}

// Rows of a head's chunk, zero past the sequence.
__aicore__ inline void FlaGdn::LoadRows(const HalfTile& dst, const GlobalTensor<half>& src, int32_t heads, int32_t head) {
    DataCopy(dst, src[(static_cast<int64_t>(task_.token_begin) * heads + head) * kDim],
             DataCopyParams(tokens_, kDim / 16, (heads - 1) * kDim / 16, 0));
    HA_ORDER(MTE2_V);
    if (tokens_ < kChunk) Duplicate(dst[tokens_ * kDim], half(0.0f), (kChunk - tokens_) * kDim);
}

// G as a float a row and spread, beta spread.
__aicore__ inline void FlaGdn::LoadSums(bool with_beta) {
    DataCopy(sums_, StoredFloat(0), kChunk);
    if (with_beta) DataCopy(beta_row_, beta_[static_cast<int64_t>(task_.head) * shape_.gate_stride + task_.gate_begin], kChunk);
    HA_ORDER(MTE2_V);
    Spread(spread_, sums_, kChunk);
    if (with_beta) Spread(beta_spread_, beta_row_, kChunk);
    HA_VECTOR_BARRIER();
}

__aicore__ inline void FlaGdn::Cumsum() {
    DataCopy(sums_, g_[static_cast<int64_t>(task_.head) * shape_.gate_stride + task_.gate_begin], kChunk);
    HA_ORDER(MTE2_V);
    Maxs(sums_, sums_, kLowestGate, kChunk);
    HA_VECTOR_BARRIER();
    Spread(spread_, sums_, kChunk);
    FloatTile from = spread_, to = other_;
    for (int32_t step = 1; step < kChunk; step *= 2) {
        HA_VECTOR_BARRIER();
        Adds(to, from, 0.0f, step * 8);
        Add(to[step * 8], from[step * 8], from, (kChunk - step) * 8);
        const FloatTile last = from;
        from = to;
        to = last;
    }
    HA_VECTOR_BARRIER();
    WholeReduceSum(sums_, spread_, 1, kChunk, 1, 1, 1);
    HA_ORDER(V_MTE3);
    DataCopy(StoredFloat(0), sums_, kChunk);
}

// exp(G_i - G_j) on and below the diagonal into the second half of square_; zero above.
__aicore__ inline void FlaGdn::Decays() {
    const FloatTile decay = square_[kSquareTile];
    Duplicate(decay, 0.0f, kSquareTile);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        for (int32_t side = 0; side < 2; ++side)
            Sub(decay[LowerAt(strip) + side * 8], spread_[strip * kTile * 8], sums_[strip * kTile + side * 8], kFloatMask,
                LowerTiles(strip) * 2, BinaryRepeatParams(2, 1, 0, 16, 8, 0));
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip) Add(decay[LowerAt(strip)], decay[LowerAt(strip)], mask_, kSquare);
    HA_VECTOR_BARRIER();
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Exp(decay[LowerAt(strip)], decay[LowerAt(strip)], LowerTiles(strip) * kSquare);
    HA_VECTOR_BARRIER();
}

// dst = left [64, 128] right [n, 128]^T from L1, n in tiles, to UB.
__aicore__ inline void FlaGdn::ProductToUb(const FloatTile& dst, const HalfTile& left, const HalfTile& right, int32_t n) {
    HA_ORDER(MTE3_MTE1);
    HA_ORDER(M_MTE1);
    LoadLeft(left_, left, kChunkTiles, kDimTiles, kChunkTiles);
    LoadRightTransposed(right_, right, kDimTiles, n);
    HA_ORDER(MTE1_M);
    HA_ORDER(V_M);
    Multiply(product_, left_, right_, kChunkTiles, n, kDimTiles);
    HA_ORDER(M_V);
    Drain(dst, product_, 0, kChunkTiles, kChunkTiles, n);
    HA_VECTOR_BARRIER();
}

__aicore__ inline void FlaGdn::Kkt() {
    LoadRows(rows_, k_, shape_.key_heads, task_.head / (shape_.value_heads / shape_.key_heads));
    HA_ORDER(V_MTE3);
    RowsToL1(WayToL1(), first_, rows_, kChunk, kDimTiles);
    LoadSums(true);
    Decays();
    ProductToUb(square_, first_, first_, kChunkTiles);
    Mul(square_, square_, square_[kSquareTile], kSquareTile);
    HA_VECTOR_BARRIER();
    ScaleRows(square_, square_, beta_spread_, kChunk, kChunkTiles);
    HA_ORDER(V_MTE3);
    DataCopy(StoredFloat(1), square_, kSquareTile);
}

// The diagonal of A as stored is not used: it holds beta, not zero.
__aicore__ inline void FlaGdn::Solve() {
    DataCopy(square_, StoredFloat(1), kSquareTile);
    HA_ORDER(MTE2_V);
    Muls(square_, square_, -1.0f, kSquareTile);
    Duplicate(Half(x_), half(0.0f), kSquareTile);
    HA_VECTOR_BARRIER();
    // Rows of the diagonal tiles interleaved, [row, tile, column].
    for (int32_t tile = 0; tile < kChunkTiles; ++tile)
        for (int32_t side = 0; side < 2; ++side)
            Adds(y_[tile * kTile + side * 8], square_[LowerAt(tile) + side * 8], 0.0f, kFloatMask, 2,
                 UnaryRepeatParams(kChunkTiles * 2, 2, kChunkTiles * 16, 16));
    Cast(Half(square_[kSquareTile]), square_, RoundMode::CAST_NONE, kSquareTile);
    HA_ORDER(V_MTE3);
    DataCopy(first_, Half(square_[kSquareTile]), kSquareTile);
    DataCopy(second_, Half(x_), kSquareTile);
    HA_ORDER(MTE3_V);
    Spread(x_, y_, kChunk * kTile);
    InverseBuffers b;
    b.multipliers = x_;
    b.row_blocks = kChunkTiles * kTile;
    b.column_blocks = 1;
    b.diagonal = square_;
    b.staging = Half(square_[kSquareTile]);
    b.negative = first_;
    b.inverse = second_;
    b.sums = third_;
    b.left = left_;
    b.right = right_;
    b.product = product_;
    HA_VECTOR_BARRIER();
    for (int32_t tile = 0; tile < kChunkTiles; ++tile) Adds(b.diagonal[tile * kSquare], identity_, 0.0f, kSquare);
    SubstituteDiagonal(b);
    PlaceDiagonal(b);
    for (int32_t row = 1; row < kChunkTiles; ++row) MergeRow(b, row);
    HA_ORDER(MTE3_MTE1);
    DataCopy(Half(y_), second_, kSquareTile);
    HA_ORDER(MTE1_MTE3);
    DataCopy(Stored(2), Half(y_), kSquareTile);
}

__aicore__ inline void FlaGdn::WriteUpdate() {
    DataCopy(first_, Stored(2), kSquareTile);
    LoadRows(rows_, k_, shape_.key_heads, task_.head / (shape_.value_heads / shape_.key_heads));
    LoadRows(more_rows_, v_, shape_.value_heads, task_.head);
    LoadSums(true);
    RowsToNz(x_, more_rows_, kChunk, kDimTiles);
    RowsToNz(y_, rows_, kChunk, kDimTiles);
    Exp(spread_, spread_, kSpread);
    HA_VECTOR_BARRIER();
    Mul(spread_, spread_, beta_spread_, kSpread);
    ScaleRows(x_, x_, beta_spread_, kChunk, kDimTiles);
    HA_VECTOR_BARRIER();
    ScaleRows(y_, y_, spread_, kChunk, kDimTiles);
    HA_VECTOR_BARRIER();
    Cast(more_rows_, x_, RoundMode::CAST_NONE, kWide);
    Cast(rows_, y_, RoundMode::CAST_NONE, kWide);
    HA_ORDER(V_MTE3);
    DataCopy(second_, more_rows_, kWide);
    DataCopy(third_, rows_, kWide);
    HA_ORDER(MTE3_MTE1);
    HA_ORDER(MTE2_MTE1);
    for (int32_t part = 0; part < 2; ++part) {
        HA_ORDER(M_MTE1);
        LoadLeft(left_, first_, kChunkTiles, kChunkTiles, kChunkTiles);
        LoadRight(right_, part == 0 ? second_ : third_, kChunkTiles, kDimTiles);
        HA_ORDER(MTE1_M);
        HA_ORDER(V_M);
        Multiply(product_, left_, right_, kChunkTiles, kDimTiles, kChunkTiles);
        HA_ORDER(M_V);
        HA_ORDER(MTE3_V);
        DrainBursts(rows_, product_, DataCopyParams(1, kChunkTiles * kDimTiles, 0, 0));
        HA_ORDER(V_MTE3);
        DataCopy(Stored(3 + part), rows_, kWide);
    }
}

// A half of the value columns: rows of the state, and strips of U and V'.
__aicore__ inline void FlaGdn::States() {
    const int32_t columns = task_.column_count, tiles = columns / kTile, part = task_.column_begin * kChunk;
    state_io_.Load(state_, x_, task_);
    const int32_t chunks = (task_.token_count + kChunk - 1) / kChunk, whole = task_.token_count, begin = task_.token_begin;
    for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        PipeBarrier<PIPE_ALL>();
        tokens_ = whole - chunk * kChunk < kChunk ? whole - chunk * kChunk : kChunk;
        task_.token_begin = begin + chunk * kChunk;
        LoadRows(rows_, k_, shape_.key_heads, task_.head / (shape_.value_heads / shape_.key_heads));
        LoadSums(false);
        DataCopy(first_, Stored(4), kWide);
        DataCopy(more_rows_, Stored(3)[part], columns * kChunk);
        HA_ORDER(MTE2_V);
        HA_ORDER(MTE2_MTE1);
        Cast(Half(y_), state_, RoundMode::CAST_NONE, columns * kDim);
        HA_ORDER(V_MTE3);
        RowsToL1(WayToL1(), second_, rows_, kChunk, kDimTiles);
        DataCopy(fourth_, Half(y_), columns * kDim);
        DataCopy(Stored(6)[task_.column_begin * kDim], Half(y_), columns * kDim);
        ProductToUb(x_, first_, fourth_, tiles);
        HA_ORDER(MTE3_V);
        Cast(y_, more_rows_, RoundMode::CAST_NONE, columns * kChunk);
        Sub(other_, spread_[(kChunk - 1) * 8], spread_, kFloatMask, kChunk / 8, BinaryRepeatParams(1, 0, 1, 8, 0, 8));
        HA_VECTOR_BARRIER();
        Sub(x_, y_, x_, columns * kChunk);
        Exp(other_, other_, kSpread);
        Exp(spread_[(kChunk - 1) * 8], spread_[(kChunk - 1) * 8], 8);
        HA_VECTOR_BARRIER();
        Cast(Half(y_), x_, RoundMode::CAST_NONE, columns * kChunk);
        ScaleRows(x_, x_, other_, kChunk, tiles);
        HA_VECTOR_BARRIER();
        Cast(Half(y_)[columns * kChunk], x_, RoundMode::CAST_NONE, columns * kChunk);
        HA_ORDER(V_MTE3);
        DataCopy(Stored(5)[part], Half(y_), columns * kChunk);
        DataCopy(third_, Half(y_)[columns * kChunk], columns * kChunk);
        HA_ORDER(MTE3_MTE1);
        HA_ORDER(M_MTE1);
        LoadLeftTransposed(left_, third_, tiles, kChunkTiles);
        LoadRight(right_, second_, kChunkTiles, kDimTiles);
        HA_ORDER(MTE1_M);
        HA_ORDER(V_M);
        Multiply(product_, left_, right_, tiles, kDimTiles, kChunkTiles);
        HA_ORDER(M_V);
        for (int32_t strip = 0; strip < kDimTiles; ++strip)
            Mul(state_[strip * columns * kTile], state_[strip * columns * kTile], spread_[(kChunk - 1) * 8], kFloatMask,
                columns * kTile / kFloatMask, BinaryRepeatParams(1, 1, 0, 8, 8, 0));
        Drain(x_, product_, 0, tiles, tiles, kDimTiles);
        HA_VECTOR_BARRIER();
        Add(state_, state_, x_, columns * kDim);
        HA_VECTOR_BARRIER();
        ++unit_;
        task_.gate_begin += kChunk;
    }
    task_.token_begin = begin;
    state_io_.Store(state_, x_, task_);
}

__aicore__ inline void FlaGdn::Outputs() {
    const int32_t columns = task_.column_count, tiles = columns / kTile;
    const int32_t key_head = task_.head / (shape_.value_heads / shape_.key_heads);
    LoadRows(rows_, q_, shape_.key_heads, key_head);
    LoadRows(more_rows_, k_, shape_.key_heads, key_head);
    LoadSums(false);
    DataCopy(third_, Stored(5)[task_.column_begin * kChunk], columns * kChunk);
    DataCopy(fourth_, Stored(6)[task_.column_begin * kDim], columns * kDim);
    HA_ORDER(MTE2_MTE1);
    HA_ORDER(V_MTE3);
    RowsToL1(WayToL1(), first_, rows_, kChunk, kDimTiles);
    RowsToL1(WayToL1(), second_, more_rows_, kChunk, kDimTiles);
    Decays();
    ProductToUb(square_, first_, second_, kChunkTiles);
    ProductToUb(x_, first_, fourth_, tiles);
    Mul(square_, square_, square_[kSquareTile], kSquareTile);
    Exp(spread_, spread_, kSpread);
    HA_VECTOR_BARRIER();
    ScaleRows(x_, x_, spread_, kChunk, tiles);
    HA_ORDER(MTE3_V);
    Cast(rows_, square_, RoundMode::CAST_NONE, kSquareTile);
    HA_ORDER(V_MTE3);
    HA_ORDER(MTE1_MTE3);
    DataCopy(second_, rows_, kSquareTile);
    HA_ORDER(MTE3_MTE1);
    HA_ORDER(M_MTE1);
    LoadLeft(left_, second_, kChunkTiles, kChunkTiles, kChunkTiles);
    LoadRight(right_, third_, kChunkTiles, tiles);
    HA_ORDER(MTE1_M);
    HA_ORDER(V_M);
    Multiply(product_, left_, right_, kChunkTiles, tiles, kChunkTiles);
    HA_ORDER(M_V);
    Drain(y_, product_, 0, kChunkTiles, kChunkTiles, tiles);
    HA_VECTOR_BARRIER();
    Add(x_, x_, y_, columns * kChunk);
    HA_VECTOR_BARRIER();
    Muls(x_, x_, shape_.scale, columns * kChunk);
    HA_VECTOR_BARRIER();
    HA_ORDER(MTE3_V);
    NzToRows(more_rows_, x_, kChunk, tiles);
    HA_ORDER(V_MTE3);
    DataCopy(out_[(static_cast<int64_t>(task_.token_begin) * shape_.value_heads + task_.head) * kDim + task_.column_begin],
             more_rows_, DataCopyParams(tokens_, columns / 16, 0, (shape_.value_heads * kDim - columns) / 16));
}

}  // namespace vllm_ext
