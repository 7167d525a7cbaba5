// Gated delta rule, prefill: a head stays on a core, all six operators of a chunk run there, the state never leaves UB.
//
// Order within a chunk (HA-NPU paper, sections 5 and 6), G the running sum of the gates, b beta, s the scale:
//   [K; Q] S and [K; Q] K^T while K, Q and S lie in L0        GEMM first: nothing here waits for the inversion
//   A = strictly lower (b_i exp(G_i - G_j) k_i.k_j),  P = s lower (exp(G_i - G_j) q_i.k_j)
//   T = (I + A)^-1,  V' = T b (V - exp(G) K S)
//   O = s exp(G) Q S + P V'                                   reads the old state
//   S = exp(G_last) S + (exp(G_last - G) V')^T K              then overwrites it in place
// With normalisation K and Q stay as they came: 1/|k| and 1/|q| multiply rows and columns of the products instead, so the
// operands of the cube are exact. The state is kept [V, K] or [K, V], as it lies in global memory.
#pragma once
#include "inverse.h"
#include "state.h"

namespace vllm_ext {

class GdnPrefill {
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
        // The task before may still be storing.
        HA_ORDER(MTE3_V);
        HA_ORDER(V_MTE2);
        if (Resident()) state_.Load(state_ub_, y_, task);
        const int32_t chunks = (task.token_count + kChunk - 1) / kChunk;
        if (chunks > 0) LoadInputs(0);
        for (int32_t chunk = 0; chunk < chunks; ++chunk) Chunk(chunk, chunk + 1 < chunks);
        if (Resident()) state_.Store(state_ub_, y_, task);
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
    __aicore__ inline void LoadInputs(int32_t chunk);
    __aicore__ inline void Chunk(int32_t chunk, bool more);
    __aicore__ inline void StageInputs(int32_t chunk, int32_t tokens);
    __aicore__ inline void Gates();
    __aicore__ inline void TileEdges();
    __aicore__ inline void InverseNorm(const FloatTile& spread, const FloatTile& compact, const HalfTile& rows);
    __aicore__ inline void ReadProducts();
    __aicore__ inline void Decays();
    __aicore__ inline void KeyKey();
    __aicore__ inline void DiagonalMultipliers();
    __aicore__ inline void QueryKey();
    __aicore__ inline void Solve();
    __aicore__ inline void StoreMapped(int32_t chunk);
    __aicore__ inline void LoadMapped(int32_t chunk);
    __aicore__ inline void NewValues(int32_t chunk);
    __aicore__ inline void Output(int32_t chunk, int32_t tokens);
    __aicore__ inline void UpdateState();

    __aicore__ inline int32_t LowerCount(int32_t strip) const { return LowerTiles(strip) * kSquare; }

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

    // UB
    FloatTile state_ub_, x_, y_, decay_, a_, swap_;
    HalfTile key_rows_, query_rows_, value_rows_, p_half_;
    FloatTile gate_, beta_compact_, gate_columns_, norm_columns_, norm_scratch_, minus_columns_;
    FloatTile local_, tail_, beta_spread_, key_norm_, query_scale_, from_start_, minus_beta_;
    FloatTile lower_mask_, upper_mask_, identity_, across_, edges_;
    HalfTile Half(const FloatTile& tile) const { return tile.ReinterpretCast<half>(); }
    // L1
    HalfTile keys_, queries_, state_l1_, negative_a_, inverse_, sums_, right_side_, p_, new_values_, tail_values_;
    // L0
    HalfTile kq_left_, t_left_, p_left_, small_left_, state_right_, key_right_, wide_right_;
    FloatTile read_, scores_, merged_, values_, attended_, change_;
};

}  // namespace vllm_ext

#include "gdn_prefill_setup.h"
#include "gdn_prefill_gates.h"
#include "gdn_prefill_impl.h"
