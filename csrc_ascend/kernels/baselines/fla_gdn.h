// The dataflow of flash-linear-attention's gated delta rule, for comparison: six launches with everything between them in
// global memory, states ahead of every chunk included, every product bringing both of its operands.
//
//   cumsum  G          kkt  A = strictly lower (b_i exp(G_i - G_j) k_i.k_j)          solve  T = (I + A)^-1
//   wu      U = T b V,  W = T b exp(G) K
//   h       V' = U - W S,  S = exp(G_last) S + (exp(G_last - G) V')^T K              by head and half of its value columns
//   o       O = s (exp(G) Q S + lower(exp(G_i - G_j) q_i.k_j) V')                    by chunk and half of the columns
// Head size 128, states [V, K] in FP32, no normalisation: what the comparison needs.
#pragma once
#include "inverse.h"
#include "state.h"

namespace vllm_ext {

enum Stage : int32_t { kCumsum, kKkt, kSolve, kWu, kH, kO };

class FlaGdn {
  public:
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial, GM_ADDR out,
                                GM_ADDR final_state, GM_ADDR workspace, const PrefillShape& shape);
    __aicore__ inline void Process(const Task& task);

  private:
    static constexpr int32_t kDim = 128, kDimTiles = kDim / kTile, kWide = kChunk * kDim, kSquareTile = kChunk * kChunk;

    __aicore__ inline void Cumsum();
    __aicore__ inline void Kkt();
    __aicore__ inline void Solve();
    __aicore__ inline void WriteUpdate();
    __aicore__ inline void States();
    __aicore__ inline void Outputs();
    __aicore__ inline void LoadRows(const HalfTile& dst, const GlobalTensor<half>& src, int32_t heads, int32_t head);
    __aicore__ inline void LoadSums(bool with_beta);
    __aicore__ inline void Decays();
    __aicore__ inline void ProductToUb(const FloatTile& dst, const HalfTile& left, const HalfTile& right, int32_t n);

    // Per chunk of a head, in halves: sums of gates, A (float), T, U, W, V', the state.
    __aicore__ inline GlobalTensor<half> Stored(int32_t which) const {
        constexpr int32_t sizes[] = {2 * kChunk, 2 * kSquareTile, kSquareTile, kWide, kWide, kWide, kDim * kDim};
        int64_t at = 0;
        for (int32_t i = 0; i < which; ++i) at += units_ * sizes[i];
        return workspace_[at + unit_ * sizes[which]];
    }
    __aicore__ inline GlobalTensor<float> StoredFloat(int32_t which) const {
        GlobalTensor<float> view;
        view.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(const_cast<__gm__ half*>(Stored(which).GetPhyAddr())));
        return view;
    }
    HalfTile Half(const FloatTile& tile) const { return tile.ReinterpretCast<half>(); }

    PrefillShape shape_;
    Task task_;
    StateIo state_io_;
    int64_t units_ = 0, unit_ = 0;
    int32_t tokens_ = 0;
    GlobalTensor<half> q_, k_, v_, out_, workspace_;
    GlobalTensor<float> g_, beta_;
    TPipe pipe_;
    TBuf<TPosition::VECCALC> ub_;
    TBuf<TPosition::A1> l1_;
    TBuf<TPosition::A2> l0a_;
    TBuf<TPosition::B2> l0b_;
    TBuf<TPosition::CO1> l0c_;
    FloatTile state_, x_, y_, square_, sums_, beta_row_, spread_, other_, beta_spread_, identity_, mask_;
    HalfTile rows_, more_rows_;
    HalfTile first_, second_, third_, fourth_;   // L1, each a chunk of 128 columns; fourth_ a state
    HalfTile left_, right_;
    FloatTile product_;
};

}  // namespace vllm_ext

#include "fla_gdn_impl.h"
