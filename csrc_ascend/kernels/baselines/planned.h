// Runs a plan of the planner step by step, whichever strategy it is of: the dataflows the prefill kernels are compared with.
//
// The host turns the kernels of a plan into a table (`ascend_sim/planned.py`): copies, products and vector steps in the
// plan's order, tiles at the plan's offsets in UB, L1, L0 and L0C. A launch runs one kernel of the plan, or all of them with
// a barrier of all cores between (the MegaKernel). Steps are not overlapped: nothing here has a clock.
//
// Tiles in UB are NZ float, columns of numbers compact; what a kernel leaves for a later one is NZ in global memory, a
// tile for each chunk of a head. States are [V, K] float; sequences are whole chunks.
#pragma once
#include "../inverse.h"
#include "../state.h"

namespace vllm_ext {

enum StepCode : int32_t {
    kLoadVector, kLoadTile, kLoadOperand, kFetch, kStage, kProduct, kDrain, kStoreVector, kStoreTile, kStoreOutput,
    kCumsum, kExp, kExpTail, kExpLast, kExpFromMiddle, kExpToMiddle, kDecay, kMul, kScale, kRowScale, kAdd, kSub, kLower,
    kStrictLower, kStateUpdate, kSolve, kSolvePowers, kSolveRows
};

// A row of the table. Offsets of buffers are in bytes, those of global memory in blocks of 32 bytes.
struct StepRow {
    int32_t code, destination, rows, columns, source, second, third, sizes, scale_bits;
    int32_t memory;             // 0 to 3: q, k, v, o; 4 gates, 5 beta, 6 workspace
    int32_t base, head_stride, chunk_stride;
    int32_t axis;               // of the value columns: 0, 1, or -1 for a tile that has none
    int32_t is_half;            // what global memory holds
    int32_t m, n, k, flags, left, right;
};
constexpr int32_t kStepFields = 21;
constexpr int32_t kTransposeLeft = 1, kTransposeRight = 2, kLoadLeftOperand = 4, kLoadRightOperand = 8;

// What is said of a kernel before its steps.
struct PhaseRow {
    int32_t first, count, recurrent, state, keeps_states, states_base, states_head_stride, states_chunk_stride;
};
constexpr int32_t kPhaseFields = 8, kHeaderFields = 8;

class Planned {
  public:
    __aicore__ inline void Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial, GM_ADDR out,
                                GM_ADDR final_state, GM_ADDR workspace, GM_ADDR tasks, GM_ADDR block_tasks,
                                const PrefillShape& shape, GM_ADDR program);
    __aicore__ inline void Run();

  private:
    __aicore__ inline void RunChunk(const PhaseRow& phase);
    __aicore__ inline void RunStep(const StepRow& s);
    __aicore__ inline void Move(const StepRow& s);
    __aicore__ inline void LoadTile(const StepRow& s);
    __aicore__ inline void LoadOperand(const StepRow& s);
    __aicore__ inline void StoreTile(const StepRow& s);
    __aicore__ inline void StoreOutput(const StepRow& s);
    __aicore__ inline void StoreState(const PhaseRow& phase, const StepRow& s);
    __aicore__ inline void Product(const StepRow& s);
    __aicore__ inline void Vector(const StepRow& s);
    __aicore__ inline void Gate(const StepRow& s);
    __aicore__ inline void CumsumVector(const StepRow& s);
    __aicore__ inline void CumsumTile(const StepRow& s);
    __aicore__ inline void Relative(const StepRow& s, int32_t row, bool row_first);
    __aicore__ inline void Decay(const StepRow& s);
    __aicore__ inline void Lower(const StepRow& s);
    __aicore__ inline void UpdateState(const StepRow& s);
    __aicore__ inline void Solve(const StepRow& s);
    __aicore__ inline void SubstituteTiles(InverseBuffers& b, const FloatTile& a);
    __aicore__ inline void Identity(const FloatTile& tile);
    __aicore__ inline void TileProduct(const InverseBuffers& b, const FloatTile& to, int32_t left, const HalfTile* from_left,
                                       int32_t right, const HalfTile* from_right, int32_t place);
    __aicore__ inline void PowersOfTile(const InverseBuffers& b, const FloatTile& negative, int32_t tile);
    __aicore__ inline void SolveRows(const StepRow& s);

    __aicore__ inline bool IsVector(const StepRow& s) const { return s.rows == 1 || s.columns == 1; }
    __aicore__ inline FloatTile Ub(int32_t bytes) { return ub_.Get<float>()[bytes / 4]; }
    __aicore__ inline HalfTile L1(int32_t bytes) { return l1_.Get<half>()[bytes / 2]; }
    __aicore__ inline FloatTile L0c(int32_t bytes) { return l0c_.Get<float>()[bytes / 4]; }
    // The queue of FP16 tiles: free between two steps, so it serves every step as scratch.
    __aicore__ inline FloatTile Scratch() { return ub_.Get<float>(); }
    __aicore__ inline HalfTile HalfScratch() { return ub_.Get<half>(); }
    __aicore__ inline void Settle() const { PipeBarrier<PIPE_ALL>(); }
    // Where a step's tile lies in global memory: elements of its type from the workspace's or the tensor's begin.
    template <typename T>
    __aicore__ inline GlobalTensor<T> Memory(const StepRow& s) const;
    // The bursts that take the task's columns out of a tile in the workspace.
    __aicore__ inline DataCopyParams Bursts(const StepRow& s, bool to_memory) const;
    __aicore__ inline int32_t Blocks(const StepRow& s) const { return s.is_half ? 1 : 2; }   // of a row of a strip

    PrefillShape shape_;
    Task task_;
    StateIo state_io_;
    GM_ADDR inputs_[7];
    const __gm__ int32_t* program_ = nullptr;
    const __gm__ int32_t* block_tasks_ = nullptr;
    GM_ADDR tasks_ = nullptr;
    TPipe pipe_;
    TBuf<TPosition::VECCALC> ub_;
    TBuf<TPosition::A1> l1_;
    TBuf<TPosition::A2> l0a_;
    TBuf<TPosition::B2> l0b_;
    TBuf<TPosition::CO1> l0c_;
};

}  // namespace vllm_ext

#include "planned_moves.h"
#include "planned_vector.h"
#include "planned_inverse.h"
