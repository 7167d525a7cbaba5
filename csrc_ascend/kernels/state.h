// The recurrent state between global memory and UB, where it is NZ float: [V, K] or [K, V], whichever global memory holds.
#pragma once
#include "tile.h"

namespace vllm_ext {

class StateIo {
  public:
    __aicore__ inline void Init(GM_ADDR initial, GM_ADDR final_state, const PrefillShape& shape) {
        shape_ = shape;
        initial_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(initial));
        final_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(final_state));
        initial_half_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(initial));
        final_half_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(final_state));
    }

    // Rows and columns of the part of the state a task keeps.
    __aicore__ inline int32_t Rows(const Task& task) const { return shape_.state_v_first ? task.column_count : shape_.key_dim; }
    __aicore__ inline int32_t Columns(const Task& task) const {
        return shape_.state_v_first ? shape_.key_dim : task.column_count;
    }

    // `scratch` takes half of the state's size; vector unit and loads may use both tensors when this is called.
    __aicore__ inline void Load(const FloatTile& state, const FloatTile& scratch, const Task& task) const {
        const int32_t rows = Rows(task), columns = Columns(task);
        if (!shape_.has_initial) {
            Duplicate(state, 0.0f, rows * columns);
            HA_VECTOR_BARRIER();
            return;
        }
        const int64_t from = Offset(task);
        if (shape_.state_is_half) {
            const HalfTile narrow = scratch.ReinterpretCast<half>();
            for (int32_t strip = 0; strip < columns / kTile; ++strip)
                DataCopy(narrow[At(strip, 0, rows)], initial_half_[from + strip * kTile], DataCopyParams(rows, 1, RowGap(1), 0));
            HA_ORDER(MTE2_V);
            Cast(state, narrow, RoundMode::CAST_NONE, rows * columns);
            HA_VECTOR_BARRIER();
        } else {
            for (int32_t strip = 0; strip < columns / kTile; ++strip)
                DataCopy(state[At(strip, 0, rows)], initial_[from + strip * kTile], DataCopyParams(rows, 2, RowGap(2), 0));
            HA_ORDER(MTE2_V);
        }
    }

    __aicore__ inline void Store(const FloatTile& state, const FloatTile& scratch, const Task& task) const {
        if (!shape_.has_final) return;
        const int32_t rows = Rows(task), columns = Columns(task);
        const int64_t to = Offset(task);
        if (shape_.state_is_half) {
            const HalfTile narrow = scratch.ReinterpretCast<half>();
            HA_ORDER(MTE3_V);
            Cast(narrow, state, RoundMode::CAST_NONE, rows * columns);
            HA_ORDER(V_MTE3);
            for (int32_t strip = 0; strip < columns / kTile; ++strip)
                DataCopy(final_half_[to + strip * kTile], narrow[At(strip, 0, rows)], DataCopyParams(rows, 1, 0, RowGap(1)));
        } else {
            HA_ORDER(V_MTE3);
            for (int32_t strip = 0; strip < columns / kTile; ++strip)
                DataCopy(final_[to + strip * kTile], state[At(strip, 0, rows)], DataCopyParams(rows, 2, 0, RowGap(2)));
        }
    }

  private:
    // First element of the task's part: [N, HV, V, K] or [N, HV, K, V].
    __aicore__ inline int64_t Offset(const Task& task) const {
        const int64_t whole = static_cast<int64_t>(shape_.key_dim) * shape_.value_dim;
        const int64_t head = (static_cast<int64_t>(task.sequence) * shape_.value_heads + task.head) * whole;
        return head + static_cast<int64_t>(task.column_begin) * (shape_.state_v_first ? shape_.key_dim : 1);
    }
    // Blocks from the end of a strip's row to its start in the next row; a strip's row is `blocks` blocks.
    __aicore__ inline int32_t RowGap(int32_t blocks) const {
        return ((shape_.state_v_first ? shape_.key_dim : shape_.value_dim) / kTile - 1) * blocks;
    }

    PrefillShape shape_;
    GlobalTensor<float> initial_, final_;
    GlobalTensor<half> initial_half_, final_half_;
};

}  // namespace vllm_ext
