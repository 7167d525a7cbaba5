// The steps of KdaPrefill; see kda_prefill.h for the order and the formulas.
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

__aicore__ inline void KdaPrefill::Chunk(int32_t chunk, bool more) {
    const int32_t rest = task_.token_count - chunk * kChunk, tokens = rest < kChunk ? rest : kChunk;
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
        Solve();
    }
    if (shape_.phase == kMap) StoreMapped(chunk);
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

// What earlier launches left for this chunk, to L1.
__aicore__ inline void KdaPrefill::LoadMapped(int32_t chunk) {
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

// T and P of a chunk for the launches to come; P waits in query_.
__aicore__ inline void KdaPrefill::StoreMapped(int32_t chunk) {
    Pack(workspace_.Attention(task_, chunk), Half(query_)[kChunk * kChunk]);
    HA_ORDER(MTE3_MTE1);
    Pack(Half(product_), inverse_);
    HA_ORDER(MTE1_MTE3);
    DataCopy(workspace_.Inverse(task_, chunk), Half(product_), kLowerSize);
}

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
    Spread(beta_spread_, beta_compact_, kChunk);
    Muls(minus_columns_, beta_compact_, -1.0f, kChunk);
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
    Muls(minus_beta_, beta_spread_, -1.0f, kSpread);
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
        const int32_t key = shape_.key_dim, columns = task_.column_count;
        if (UsesKeys()) Duplicate(key_rows_[tokens * key], half(0.0f), (kChunk - tokens) * key);
        if (UsesQueries()) Duplicate(query_rows_[tokens * key], half(0.0f), (kChunk - tokens) * key);
        if (Resident()) Duplicate(value_rows_[tokens * columns], half(0.0f), (kChunk - tokens) * columns);
        HA_VECTOR_BARRIER();
    }
    HA_ORDER(MTE3_V);
    if (UsesKeys()) RowsToNz(key_, key_rows_, kChunk, key_tiles_);
    if (UsesQueries()) RowsToNz(query_, query_rows_, kChunk, key_tiles_);
    HA_VECTOR_BARRIER();
    if (shape_.normalise) {
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
    if (UsesKeys()) DataCopy(read_keys_, key_rows_, keys);
    if (UsesQueries()) DataCopy(read_queries_, query_rows_, keys);
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
    DataCopy(tail_keys_, key_rows_, keys);
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
    DataCopy(l1[kSquare], staging[kSquare], DataCopyParams(key_tiles_, 3 * kTile, kTile, kTile));
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
    DataCopy(l1, staging, rows * shape_.key_dim);
}

// [K exp(G); s Q exp(G)] S, and for each row block its keys and queries against the keys before it.
__aicore__ inline void KdaPrefill::CubeProducts() {
    const int32_t key = shape_.key_dim, pair = 2 * kTile * key;
    HA_ORDER(MTE3_MTE1);
    if (shape_.phase != kMap) {
        if (UsesKeys()) LoadLeft(kq_left_, read_keys_, kChunkTiles, key_tiles_, kChunkTiles);
        if (UsesQueries())
            LoadLeft(kq_left_[QueryBlock() * kTile * key], read_queries_, kChunkTiles, key_tiles_, kChunkTiles);
        if (shape_.state_v_first) {
            LoadRightTransposed(state_right_, state_l1_, key_tiles_, value_tiles_);
        } else {
            LoadRight(state_right_, state_l1_, key_tiles_, value_tiles_);
        }
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
        if (shape_.phase == kWhole) DataCopy(p_[at], p_half[at], LowerTiles(strip) * kSquare);
        if (strip + 1 < kChunkTiles) DataCopy(negative_a_[at + kSquare], a_half[at + kSquare], (LowerTiles(strip) - 1) * kSquare);
    }
}

__aicore__ inline void KdaPrefill::Solve() {
    InverseBuffers b;
    b.multipliers = product_;
    b.row_blocks = 1;
    b.column_blocks = kChunkTiles * kTile;
    b.diagonal = attention_rest_;
    b.staging = Half(columns_rest_);
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
    DataCopy(right_side_, Half(product_), floats);
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
    DataCopy(new_values_, Half(product_), floats);
    if (shape_.phase == kReduce) DataCopy(workspace_.Values(task_, chunk), Half(product_), floats);
}

// O = s Q exp(G) S + P V'.
__aicore__ inline void KdaPrefill::Output(int32_t chunk, int32_t tokens) {
    const int32_t columns = task_.column_count, floats = kChunk * columns;
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
    HA_ORDER(V_MTE3);
    const int64_t token = task_.token_begin + chunk * kChunk;
    DataCopy(out_[(token * shape_.value_heads + task_.head) * shape_.value_dim + task_.column_begin], Half(product_),
             DataCopyParams(tokens, columns / 16, 0, (shape_.value_heads * shape_.value_dim - columns) / 16));
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
        DataCopy(parked_[from], key_, floats);
        DataCopy(state_l1_[from], Half(product_), floats);
        if (shape_.phase == kReduce && more)
            DataCopy(workspace_.State(task_, chunk + 1, first), Half(product_), workspace_.StateBursts(task_, count, true));
        HA_ORDER(MTE3_MTE1);
    }
}

}  // namespace vllm_ext
