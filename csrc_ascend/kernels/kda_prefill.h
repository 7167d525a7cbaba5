// Kimi Delta Attention, prefill: the gated delta rule with a decay for each channel, which then sits inside every product.
//
// With G the running sum of the gates, b beta, s the scale, all exponents are sums of gates and so at most 0:
//   [K exp(G); s Q exp(G)] S
//   k_i.k_j and q_i.k_j with decay exp(G_i - G_j): a tile below the diagonal tiles goes through the cube, split at the last
//   row R of the tiles left of its row block, exp(G_i - R) on one side and exp(R - G_j) on the other; within a diagonal
//   tile no split keeps both factors small, so the vector unit sums it directly, one distance i - j at a time
//   T = (I + A)^-1,  V' = T b (V - K exp(G) S),  O = s Q exp(G) S + P V'
//   S = exp(G_last) S + V'^T (K exp(G_last - G))
// Between updates the float state waits in L1: its place in UB is what the diagonal tiles need.
#pragma once
#include "inverse.h"
#include "state.h"

namespace vllm_ext {

class KdaPrefill {
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
        key_tiles_ = shape.key_dim / kTile;
        AllocateBuffers();
        FillConstants();
    }

    __aicore__ inline void Process(const Task& task) {
        task_ = task;
        value_tiles_ = task.column_count / kTile;
        key_head_ = task.head / (shape_.value_heads / shape_.key_heads);
        const int32_t floats = shape_.key_dim * task.column_count;
        // The task before may still be storing.
        HA_ORDER(MTE3_V);
        HA_ORDER(V_MTE2);
        if (Resident()) {
            state_.Load(key_, product_, task);
            ParkState(floats);
        }
        const int32_t chunks = (task.token_count + kChunk - 1) / kChunk;
        if (chunks > 0) LoadInputs(0);
        for (int32_t chunk = 0; chunk < chunks; ++chunk) Chunk(chunk, chunk + 1 < chunks);
        if (Resident() && shape_.has_final) {
            FetchState(floats);
            state_.Store(key_, product_, task);
        }
    }

  private:
    __aicore__ inline bool UsesKeys() const { return shape_.phase != kOutput; }
    __aicore__ inline bool UsesQueries() const { return shape_.phase != kReduce; }
    __aicore__ inline bool Resident() const { return shape_.phase == kWhole || shape_.phase == kReduce; }
    __aicore__ inline bool Maps() const { return shape_.phase == kWhole || shape_.phase == kMap; }
    __aicore__ inline bool Outputs() const { return shape_.phase == kWhole || shape_.phase == kOutput; }
    // Row blocks of the product with the state, and where those of the queries begin.
    __aicore__ inline int32_t ReadBlocks() const { return shape_.phase == kWhole ? 2 * kChunkTiles : kChunkTiles; }
    __aicore__ inline int32_t QueryBlock() const { return shape_.phase == kWhole ? kChunkTiles : 0; }
    __aicore__ inline void AllocateBuffers();
    __aicore__ inline void FillConstants();
    __aicore__ inline void ParkState(int32_t floats);
    __aicore__ inline void FetchState(int32_t floats);
    __aicore__ inline void LoadInputs(int32_t chunk);
    __aicore__ inline void Chunk(int32_t chunk, bool more);
    // A row of float, a piece in each strip, with the blocks from one piece to the next.
    struct EdgeRow {
        FloatTile rows;
        int32_t strip_blocks;
    };
    __aicore__ inline void Gates();
    __aicore__ inline void TileEdges();
    __aicore__ inline EdgeRow Between(int32_t first, int32_t last) const;
    __aicore__ inline void EdgeMinusLocal(int32_t row, const EdgeRow& edge, int32_t from);
    __aicore__ inline void Widen(int32_t tokens);
    __aicore__ inline void ScaleByNorm(const FloatTile& rows, float scale);
    __aicore__ inline void ReadOperands();
    __aicore__ inline void PairOperands();
    __aicore__ inline void LaterRows(const FloatTile& rows, const HalfTile& staging, const HalfTile& l1);
    __aicore__ inline void EarlierRows(int32_t block, int32_t at, const HalfTile& staging, const HalfTile& l1);
    __aicore__ inline void CubeProducts();
    __aicore__ inline void DiagonalPairs();
    __aicore__ inline void ReducePairs(const FloatTile& pairs, const FloatTile& sums, int32_t distance, int32_t row_step,
                                       int32_t column_step, int32_t tile_step);
    __aicore__ inline void Multipliers();
    __aicore__ inline void LowerOperands();
    __aicore__ inline void Solve();
    __aicore__ inline void StoreMapped(int32_t chunk);
    __aicore__ inline void LoadMapped(int32_t chunk);
    __aicore__ inline void NewValues(int32_t chunk);
    __aicore__ inline void Output(int32_t chunk, int32_t tokens);
    __aicore__ inline void UpdateState(int32_t chunk, bool more);

    PrefillShape shape_;
    Task task_;
    StateIo state_;
    Workspace workspace_;
    int32_t key_tiles_ = 0, value_tiles_ = 0, key_head_ = 0;
    GlobalTensor<half> q_, k_, v_, out_;
    GlobalTensor<float> g_, beta_;

    TPipe pipe_;
    TBuf<TPosition::VECCALC> ub_;
    TBuf<TPosition::A1> l1_;
    TBuf<TPosition::A2> l0a_;
    TBuf<TPosition::B2> l0b_;
    TBuf<TPosition::CO1> l0c_;

    // UB. After DiagonalPairs the tiles of K, Q and the products serve the later steps, and the next gates arrive in decay_.
    FloatTile local_, key_, query_, decay_, product_;
    HalfTile key_rows_, query_rows_, value_rows_;
    FloatTile attention_, attention_rest_, columns_, columns_rest_;   // diagonal tiles [64, 16]; two partial sums each
    FloatTile beta_compact_, beta_spread_, minus_beta_, minus_columns_, last_, last_spread_, norms_, identity_, edges_;
    HalfTile Half(const FloatTile& tile) const { return tile.ReinterpretCast<half>(); }
    // L1
    FloatTile parked_;
    HalfTile read_keys_, read_queries_, later_keys_, later_queries_, earlier_keys_, tail_keys_, state_l1_;
    HalfTile negative_a_, inverse_, sums_, right_side_, p_, new_values_;
    // L0
    HalfTile kq_left_, pair_left_, t_left_, p_left_, small_left_, state_right_, pair_right_, value_right_, wide_right_;
    FloatTile read_, pairs_, merged_, values_, attended_, change_;
};

}  // namespace vllm_ext

#include "kda_prefill_setup.h"
#include "kda_prefill_operands.h"
#include "kda_prefill_impl.h"
