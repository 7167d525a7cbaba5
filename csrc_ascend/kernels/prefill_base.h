// What the prefill kernels share: arguments, tasks, phases, rows from and to global memory, the memory between launches,
// and the inversion. `Kernel` brings the rest: AllocateBuffers, FillConstants, TakeState, GiveState, LoadInputs, Chunk.
#pragma once
#include "inverse.h"
#include "state.h"

namespace vllm_ext {

// A tile at the place the plan gives it (`vllm-ext plan --strategy ha-npu-kernel --emit-header`).
template <typename T, TPosition position, typename Place>
__aicore__ inline LocalTensor<T> TileAt(TBuf<position>& buffer, const Place& place) {
    return buffer.template GetWithOffset<T>(place.bytes / sizeof(T), place.offset);
}

template <class Kernel>
class Prefill {
  public:
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial, GM_ADDR out,
                                GM_ADDR final_state, GM_ADDR workspace, const PrefillShape& shape) {
        shape_ = shape;
        q_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(q));
        k_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(k));
        v_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(v));
        g_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(g));
        beta_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(beta));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(out));
        state_.Init(initial, final_state, shape);
        workspace_.Init(workspace, shape);
        // The largest thing to pass is a state in float.
        way_.Init(workspace_, static_cast<int64_t>(shape.key_dim) * shape.value_dim * 4);
        key_tiles_ = shape.key_dim / kTile;
        Self().AllocateBuffers();
        Self().FillConstants();
    }

    __aicore__ inline void Process(const Task& task) {
        task_ = task;
        value_tiles_ = task.column_count / kTile;
        key_head_ = task.head / (shape_.value_heads / shape_.key_heads);
        // The task before may still be storing.
        HA_ORDER(MTE3_V);
        HA_ORDER(V_MTE2);
        if (Resident()) Self().TakeState();
        const int32_t chunks = (task.token_count + kChunk - 1) / kChunk;
        if (chunks > 0) Self().LoadInputs(0);
        for (int32_t chunk = 0; chunk < chunks; ++chunk) Self().Chunk(chunk, chunk + 1 < chunks);
        if (Resident()) Self().GiveState();
    }

  protected:
    __aicore__ inline bool UsesKeys() const { return shape_.phase != kOutput; }
    __aicore__ inline bool UsesQueries() const { return shape_.phase != kReduce; }
    __aicore__ inline bool Resident() const { return shape_.phase == kWhole || shape_.phase == kReduce; }
    __aicore__ inline bool Maps() const { return shape_.phase == kWhole || shape_.phase == kMap; }
    __aicore__ inline bool Outputs() const { return shape_.phase == kWhole || shape_.phase == kOutput; }
    __aicore__ inline bool Normalises() const { return (shape_.options & kNormalise) != 0; }
    // Row blocks of the product with the state, and where those of the queries begin.
    __aicore__ inline int32_t ReadBlocks() const { return shape_.phase == kWhole ? 2 * kChunkTiles : kChunkTiles; }
    __aicore__ inline int32_t QueryBlock() const { return shape_.phase == kWhole ? kChunkTiles : 0; }
    __aicore__ inline HalfTile Half(const FloatTile& tile) const { return tile.ReinterpretCast<half>(); }

    // The buffers of the core, and the tiles of the plan that go by the same name in every kernel.
    template <typename Buffers>
    __aicore__ inline void AllocateShared(const Buffers& plan) {
        pipe_.InitBuffer(ub_, plan.ub_bytes);
        pipe_.InitBuffer(l1_, plan.l1_bytes);
        pipe_.InitBuffer(l0a_, plan.l0a_bytes);
        pipe_.InitBuffer(l0b_, plan.l0b_bytes);
        pipe_.InitBuffer(l0c_, plan.l0c_bytes);
        key_rows_ = TileAt<half>(ub_, plan.key_rows);
        query_rows_ = TileAt<half>(ub_, plan.query_rows);
        value_rows_ = TileAt<half>(ub_, plan.value_rows);
        beta_compact_ = TileAt<float>(ub_, plan.beta_compact);
        beta_spread_ = TileAt<float>(ub_, plan.beta_spread);
        minus_beta_ = TileAt<float>(ub_, plan.minus_beta);
        minus_columns_ = TileAt<float>(ub_, plan.minus_columns);
        identity_ = TileAt<float>(ub_, plan.identity);
        edges_ = TileAt<float>(ub_, plan.edges);
        state_l1_ = TileAt<half>(l1_, plan.state_l1);
        negative_a_ = TileAt<half>(l1_, plan.negative_a);
        inverse_ = TileAt<half>(l1_, plan.inverse);
        p_ = TileAt<half>(l1_, plan.p);
        sums_ = TileAt<half>(l1_, plan.sums);
        right_side_ = TileAt<half>(l1_, plan.right_side);
        new_values_ = TileAt<half>(l1_, plan.new_values);
        kq_left_ = TileAt<half>(l0a_, plan.kq_left);
        small_left_ = TileAt<half>(l0a_, plan.small_left);
        state_right_ = TileAt<half>(l0b_, plan.state_right);
        read_ = TileAt<float>(l0c_, plan.read);
        merged_ = TileAt<float>(l0c_, plan.merged);
        values_ = TileAt<float>(l0c_, plan.values);
        attended_ = TileAt<float>(l0c_, plan.attended);
        change_ = TileAt<float>(l0c_, plan.change);
    }
    // The identity of a tile; callers order what they did to it before.
    __aicore__ inline void FillIdentity() {
        Duplicate(identity_, 0.0f, kSquare);
        HA_VECTOR_BARRIER();
        for (int32_t row = 0; row < kTile; ++row) {
            uint64_t self[2] = {1ull << row, 0};
            Duplicate(identity_[row * kTile], 1.0f, self, 1, 1, 8);
        }
    }

    // Tokens of a chunk.
    __aicore__ inline int32_t TokensOf(int32_t chunk) const {
        const int32_t rest = task_.token_count - chunk * kChunk;
        return rest < kChunk ? rest : kChunk;
    }
    // First gate of a chunk, of all heads' padded tokens.
    __aicore__ inline int64_t GateOf(int32_t chunk) const {
        return static_cast<int64_t>(task_.head) * shape_.gate_stride + task_.gate_begin + chunk * kChunk;
    }
    // Rows of K, Q and V that the phase reads, and beta with the keys.
    __aicore__ inline void LoadRows(int32_t chunk) {
        const int32_t tokens = TokensOf(chunk), key = shape_.key_dim, value = shape_.value_dim;
        const int64_t token = task_.token_begin + chunk * kChunk;
        const int32_t key_gap = (shape_.key_heads - 1) * key / 16;
        const int32_t value_gap = (shape_.value_heads * value - task_.column_count) / 16;
        const int64_t row = (token * shape_.key_heads + key_head_) * key;
        if (UsesKeys()) {
            DataCopy(key_rows_, k_[row], DataCopyParams(tokens, key / 16, key_gap, 0));
            DataCopy(beta_compact_, beta_[GateOf(chunk)], kChunk);
        }
        if (UsesQueries()) DataCopy(query_rows_, q_[row], DataCopyParams(tokens, key / 16, key_gap, 0));
        if (Resident())
            DataCopy(value_rows_, v_[(token * shape_.value_heads + task_.head) * value + task_.column_begin],
                     DataCopyParams(tokens, task_.column_count / 16, value_gap, 0));
    }
    // Rows past the sequence become zero.
    __aicore__ inline void ClearPadding(int32_t tokens) {
        const int32_t key = shape_.key_dim, columns = task_.column_count, rest = kChunk - tokens;
        if (UsesKeys()) Duplicate(key_rows_[tokens * key], half(0.0f), rest * key);
        if (UsesQueries()) Duplicate(query_rows_[tokens * key], half(0.0f), rest * key);
        if (Resident()) Duplicate(value_rows_[tokens * columns], half(0.0f), rest * columns);
    }
    // Rows of the output, of which the sequence has `tokens`.
    __aicore__ inline void StoreRows(const HalfTile& rows, int32_t chunk, int32_t tokens) {
        const int32_t columns = task_.column_count;
        const int64_t token = task_.token_begin + chunk * kChunk;
        HA_ORDER(V_MTE3);
        DataCopy(out_[(token * shape_.value_heads + task_.head) * shape_.value_dim + task_.column_begin], rows,
                 DataCopyParams(tokens, columns / 16, 0, (shape_.value_heads * shape_.value_dim - columns) / 16));
    }

    // What earlier launches left for this chunk, to L1.
    __aicore__ inline void LoadMapped(int32_t chunk) {
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
    // P, and T by way of `scratch`, of a chunk for the launches to come.
    __aicore__ inline void StoreMapped(int32_t chunk, const HalfTile& p, const HalfTile& scratch) {
        Pack(workspace_.Attention(task_, chunk), p);
        HA_ORDER(MTE3_MTE1);
        Pack(scratch, inverse_);
        HA_ORDER(MTE1_MTE3);
        DataCopy(workspace_.Inverse(task_, chunk), scratch, kLowerSize);
    }

    // What the inversion works with, the multipliers of the diagonal tiles given; -A below them lies in L1.
    __aicore__ inline InverseBuffers InverseOf(const FloatTile& multipliers, const FloatTile& diagonal, const HalfTile& staging,
                                               const HalfTile& right) const {
        InverseBuffers b;
        b.multipliers = multipliers;
        b.row_blocks = 1;
        b.column_blocks = kChunkTiles * kTile;
        b.diagonal = diagonal;
        b.staging = staging;
        b.negative = negative_a_;
        b.inverse = inverse_;
        b.sums = sums_;
        b.left = small_left_;
        b.right = right;
        b.product = merged_;
        b.way = way_;
        return b;
    }
    // The state as the right operand of the reading products.
    __aicore__ inline void LoadState(const HalfTile& state) {
        if (shape_.state_v_first) {
            LoadRightTransposed(state_right_, state, key_tiles_, value_tiles_);
        } else {
            LoadRight(state_right_, state, key_tiles_, value_tiles_);
        }
    }

    PrefillShape shape_;
    Task task_;
    StateIo state_;
    Workspace workspace_;
    WayToL1 way_;
    int32_t key_tiles_ = 0, value_tiles_ = 0, key_head_ = 0;
    GlobalTensor<half> q_, k_, v_, out_;
    GlobalTensor<float> g_, beta_;

    TPipe pipe_;
    TBuf<TPosition::VECCALC> ub_;
    TBuf<TPosition::A1> l1_;
    TBuf<TPosition::A2> l0a_;
    TBuf<TPosition::B2> l0b_;
    TBuf<TPosition::CO1> l0c_;
    // UB
    HalfTile key_rows_, query_rows_, value_rows_;
    FloatTile beta_compact_, beta_spread_, minus_beta_, minus_columns_, identity_, edges_;
    // L1
    HalfTile state_l1_, negative_a_, inverse_, p_, sums_, right_side_, new_values_;
    // L0
    HalfTile kq_left_, small_left_, state_right_;
    FloatTile read_, merged_, values_, attended_, change_;

  private:
    __aicore__ inline Kernel& Self() { return static_cast<Kernel&>(*this); }
};

// A kernel's entry: a block works through its tasks.
template <class Kernel>
__aicore__ inline void RunTasks(Kernel& kernel, GM_ADDR tasks, GM_ADDR block_tasks) {
    const __gm__ int32_t* bounds = reinterpret_cast<__gm__ int32_t*>(block_tasks) + GetBlockIdx();
    for (int32_t task = bounds[0]; task < bounds[1]; ++task) kernel.Process(ReadTask(tasks, task));
}

}  // namespace vllm_ext
