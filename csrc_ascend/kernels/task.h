// What the host hands a launch: tasks, sizes and options, and the memory that launches leave for each other.
#pragma once
#include "common.h"

namespace vllm_ext {

// One sequence x value head x range of value columns, as the host lists them (int32, in this order).
struct Task {
    int32_t token_begin, token_count, sequence, head, column_begin, column_count, gate_begin, reserved;
};
constexpr int32_t kTaskFields = 8;

// Sizes and options of a launch (int32, in this order).
struct PrefillShape {
    int32_t key_heads, value_heads, key_dim, value_dim, gate_stride;
    int32_t has_initial, has_final, state_is_half, state_v_first, options;
    float scale;
    int32_t phase;
};

// Bits of `options`: divide keys and queries by their length; keep what rounding takes from an operand as a second operand.
constexpr int32_t kNormalise = 1, kSplit = 2;

// What a launch does with its chunks. Heads are computed whole (or cut by columns) in one launch; the last heads of an
// extreme tail take three: T and P of every chunk, then the recurrence, then the outputs.
enum Phase : int32_t { kWhole, kMap, kReduce, kOutput };

__aicore__ inline PrefillShape ReadShape(GM_ADDR address) {
    const __gm__ int32_t* fields = reinterpret_cast<__gm__ int32_t*>(address);
    PrefillShape shape;
    shape.key_heads = fields[0];
    shape.value_heads = fields[1];
    shape.key_dim = fields[2];
    shape.value_dim = fields[3];
    shape.gate_stride = fields[4];
    shape.has_initial = fields[5];
    shape.has_final = fields[6];
    shape.state_is_half = fields[7];
    shape.state_v_first = fields[8];
    shape.options = fields[9];
    shape.scale = *reinterpret_cast<const __gm__ float*>(fields + 10);
    shape.phase = fields[11];
    return shape;
}

__aicore__ inline Task ReadTask(GM_ADDR address, int32_t index) {
    const __gm__ int32_t* fields = reinterpret_cast<__gm__ int32_t*>(address) + index * kTaskFields;
    Task task;
    task.token_begin = fields[0];
    task.token_count = fields[1];
    task.sequence = fields[2];
    task.head = fields[3];
    task.column_begin = fields[4];
    task.column_count = fields[5];
    task.gate_begin = fields[6];
    task.reserved = 0;
    return task;
}

// What the three launches of chunk-head-chunk leave for each other in global memory, for each chunk of a value head:
// T and P (ten fractals each, by strips), V' and the state before the chunk (both NZ, of the whole head, so that whoever
// reads need not be cut as whoever wrote).
constexpr int32_t kLowerSize = 10 * kSquare;
class Workspace {
  public:
    __aicore__ inline void Init(GM_ADDR address, const PrefillShape& shape) {
        memory_.SetGlobalBuffer(reinterpret_cast<__gm__ half*>(address));
        shape_ = shape;
        chunks_ = shape.gate_stride / kChunk;
    }
    __aicore__ inline GlobalTensor<half> Inverse(const Task& task, int32_t chunk) const {
        return memory_[Unit(task, chunk) * kLowerSize];
    }
    __aicore__ inline GlobalTensor<half> Attention(const Task& task, int32_t chunk) const {
        return memory_[Units() * kLowerSize + Unit(task, chunk) * kLowerSize];
    }
    __aicore__ inline GlobalTensor<half> Values(const Task& task, int32_t chunk) const {
        return memory_[Units() * 2 * kLowerSize + (Unit(task, chunk) * shape_.value_dim + task.column_begin) * kChunk];
    }
    // Strips [first, ...) of a task's part of the state: its columns are rows of [V, K] and strips of [K, V].
    __aicore__ inline GlobalTensor<half> State(const Task& task, int32_t chunk, int32_t first) const {
        const int32_t rows = shape_.state_v_first ? shape_.value_dim : shape_.key_dim;
        const int32_t part = task.column_begin * (shape_.state_v_first ? kTile : shape_.key_dim);
        return memory_[Units() * (2 * kLowerSize + shape_.value_dim * kChunk) +
                       Unit(task, chunk) * shape_.value_dim * shape_.key_dim + part + first * rows * kTile];
    }
    // `strips` of them as bursts, with the gap between them in global memory.
    __aicore__ inline DataCopyParams StateBursts(const Task& task, int32_t strips, bool to_memory) const {
        const int32_t rows = shape_.state_v_first ? task.column_count : shape_.key_dim;
        const int32_t gap = shape_.state_v_first ? shape_.value_dim - task.column_count : 0;
        return DataCopyParams(strips, rows, to_memory ? 0 : gap, to_memory ? gap : 0);
    }

    // Behind all of it, `bytes` for each block: how operands reach L1 on a chip without the direct way.
    __aicore__ inline GM_ADDR Scratch(int64_t bytes) const {
        const int64_t unit = 2 * kLowerSize + static_cast<int64_t>(shape_.value_dim) * (kChunk + shape_.key_dim);
        return reinterpret_cast<GM_ADDR>(const_cast<__gm__ half*>(memory_.GetPhyAddr())) + Units() * unit * 2 + GetBlockIdx() * bytes;
    }

  private:
    __aicore__ inline int64_t Units() const { return static_cast<int64_t>(shape_.value_heads) * chunks_; }
    __aicore__ inline int64_t Unit(const Task& task, int32_t chunk) const {
        return static_cast<int64_t>(task.head) * chunks_ + task.gate_begin / kChunk + chunk;
    }
    GlobalTensor<half> memory_;
    PrefillShape shape_;
    int32_t chunks_ = 0;
};

}  // namespace vllm_ext
