// Gated delta rule, prefill: a head stays on a core, all six operators of a chunk run there, the state never leaves UB.
//
// Order within a chunk (HA-NPU paper, sections 5 and 6), G the running sum of the gates, b beta, s the scale:
//   [K; Q] S and [K; Q] K^T while K, Q and S lie in L0        GEMM first: nothing here waits for the inversion
//   A = strictly lower (b_i exp(G_i - G_j) k_i.k_j),  P = s lower (exp(G_i - G_j) q_i.k_j)
//   T = (I + A)^-1,  V' = T b (V - exp(G) K S)
//   O = s exp(G) Q S + P V'                                   reads the old state
//   S = exp(G_last) S + (exp(G_last - G) V')^T K              then overwrites it in place
// With normalisation K and Q stay as they came: 1/|k| and 1/|q| multiply rows and columns of the products instead, so the
// operands of the cube are exact. Where the host asks for it every other operand is kept in two halves (split.h). The state is kept [V, K] or [K, V], as it lies in global memory.
#pragma once
#include "prefill_base.h"
#include "split.h"
#include "gdn_prefill_plan.h"

namespace vllm_ext {

class GdnPrefill : public Prefill<GdnPrefill> {
    friend class Prefill<GdnPrefill>;

    __aicore__ inline void AllocateBuffers();
    __aicore__ inline void FillConstants();
    __aicore__ inline void TakeState() { state_.Load(state_ub_, y_, task_); }
    __aicore__ inline void GiveState() { state_.Store(state_ub_, y_, task_); }
    __aicore__ inline void LoadInputs(int32_t chunk);
    __aicore__ inline void Chunk(int32_t chunk, bool more);
    __aicore__ inline void StageInputs(int32_t chunk, int32_t tokens);
    __aicore__ inline void Gates();
    __aicore__ inline void PairSums();
    __aicore__ inline void TileEdges();
    __aicore__ inline void InverseNorm(const FloatTile& spread, const FloatTile& compact, const HalfTile& rows);
    __aicore__ inline void ReadProducts();
    __aicore__ inline void Decays();
    __aicore__ inline void KeyKey();
    __aicore__ inline void DiagonalMultipliers();
    __aicore__ inline void BelowDiagonal();
    __aicore__ inline void QueryKey();
    __aicore__ inline void NewValues(int32_t chunk);
    __aicore__ inline void Output(int32_t chunk, int32_t tokens);
    __aicore__ inline void UpdateState();

    // The same steps with every rounded operand in two halves; heads whole or cut by columns.
    __aicore__ inline bool Splits() const { return (shape_.options & kSplit) != 0; }
    __aicore__ inline void SplitState(int32_t count);
    __aicore__ inline void SplitLower(const SplitTile& l1, const FloatTile& x, int32_t below, const HalfTile& staging,
                                      const FloatTile& rest);
    __aicore__ inline void SplitValues(const SplitTile& l1);
    __aicore__ inline void LowerTimesSplit(const FloatTile& product, const SplitTile& lower, const SplitTile& right);
    __aicore__ inline void SolveSplit();
    __aicore__ inline void AddLowRead();
    __aicore__ inline void AddLowChange(int32_t rows, int32_t strips);

    __aicore__ inline int32_t LowerCount(int32_t strip) const { return LowerTiles(strip) * kSquare; }

    // UB
    FloatTile state_ub_, x_, y_, decay_, a_, swap_;
    HalfTile p_half_;
    FloatTile gate_, norm_columns_, norm_scratch_, behind_, pair_columns_;
    FloatTile local_, tail_, key_norm_, query_scale_, from_start_;
    FloatTile lower_mask_, upper_mask_, across_;
    // L1
    HalfTile keys_, queries_, tail_values_;
    HalfTile state_low_, negative_low_, inverse_low_, p_low_, sums_low_, right_low_, new_low_, tail_low_;
    // L0
    HalfTile t_left_, p_left_, key_right_, wide_right_;
    FloatTile scores_;
};

}  // namespace vllm_ext

#include "gdn_prefill_setup.h"
#include "gdn_prefill_gates.h"
#include "gdn_prefill_impl.h"
#include "gdn_prefill_split.h"
