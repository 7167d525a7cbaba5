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
#include "prefill_base.h"
#include "kda_prefill_plan.h"

namespace vllm_ext {

class KdaPrefill : public Prefill<KdaPrefill> {
    friend class Prefill<KdaPrefill>;

    __aicore__ inline void AllocateBuffers();
    __aicore__ inline void FillConstants() { FillIdentity(); }
    __aicore__ inline void TakeState();
    __aicore__ inline void GiveState();
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
    __aicore__ inline void NewValues(int32_t chunk);
    __aicore__ inline void Output(int32_t chunk, int32_t tokens);
    __aicore__ inline void UpdateState(int32_t chunk, bool more);

    // UB. After DiagonalPairs the tiles of K, Q and the products serve the later steps, and the next gates arrive in decay_.
    FloatTile local_, key_, query_, decay_, product_;
    FloatTile attention_, attention_rest_, columns_, columns_rest_;   // diagonal tiles [64, 16]; two partial sums each
    FloatTile last_, last_spread_, norms_;
    // L1
    FloatTile parked_;
    HalfTile read_keys_, read_queries_, later_keys_, later_queries_, earlier_keys_, tail_keys_;
    // L0
    HalfTile pair_left_, t_left_, p_left_, pair_right_, value_right_, wide_right_;
    FloatTile pairs_;
};

}  // namespace vllm_ext

#include "kda_prefill_setup.h"
#include "kda_prefill_operands.h"
#include "kda_prefill_impl.h"
