// Tiles as the prefill kernels keep them, and the few movements and vector loops all of them share.
//
// In UB a tile [rows, columns] of float is NZ: strips of 16 columns, each strip rows x 16, so that a row of a strip is two
// blocks of 32 bytes. That is how results leave L0C and how operands enter L1, so nothing between two products changes
// layout; inputs and outputs change it inside the Cast that converts their type. A number for each row is kept "spread":
// [rows, 8], one block a row, which a vector instruction reads with block stride 1 beside every second block of a strip.
#pragma once
#include "kernel_operator.h"

namespace vllm_ext {
using namespace AscendC;

constexpr int32_t kChunk = 64;                 // tokens
constexpr int32_t kTile = 16;                  // rows and columns of a cube fractal
constexpr int32_t kChunkTiles = kChunk / kTile;
constexpr int32_t kSpread = kChunk * 8;        // elements of one spread row vector
constexpr int32_t kSquare = kTile * kTile;     // elements of a fractal
constexpr int32_t kFloatMask = 64;             // elements of a float repeat
constexpr float kNever = -1.0e30f;             // exp of it is 0
// exp of less is 0 in float: clamping changes no decay and keeps sums of infinite gates finite.
constexpr float kLowestGate = -104.0f;

// An edge from one pipe to the next, at the place that needs it.
#define HA_ORDER(EVENT)                          \
    do {                                         \
        SetFlag<HardEvent::EVENT>(EVENT_ID0);    \
        WaitFlag<HardEvent::EVENT>(EVENT_ID0);   \
    } while (0)
#define HA_VECTOR_BARRIER() PipeBarrier<PIPE_V>()

using FloatTile = LocalTensor<float>;
using HalfTile = LocalTensor<half>;

// One sequence x value head x range of value columns, as the host lists them (int32, in this order).
struct Task {
    int32_t token_begin, token_count, sequence, head, column_begin, column_count, gate_begin, reserved;
};
constexpr int32_t kTaskFields = 8;

// Sizes and options of a launch (int32, in this order).
struct PrefillShape {
    int32_t key_heads, value_heads, key_dim, value_dim, gate_stride;
    int32_t has_initial, has_final, state_is_half, state_v_first, normalise;
    float scale;
    int32_t phase;
};

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
    shape.normalise = fields[9];
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

  private:
    __aicore__ inline int64_t Units() const { return static_cast<int64_t>(shape_.value_heads) * chunks_; }
    __aicore__ inline int64_t Unit(const Task& task, int32_t chunk) const {
        return static_cast<int64_t>(task.head) * chunks_ + task.gate_begin / kChunk + chunk;
    }
    GlobalTensor<half> memory_;
    PrefillShape shape_;
    int32_t chunks_ = 0;
};

// ---- vector loops on NZ tiles ---------------------------------------------------------------------------------------
// Elements of strip `strip`, from row `row` on, in a tile of `rows` rows.
__aicore__ inline int32_t At(int32_t strip, int32_t row, int32_t rows) { return (strip * rows + row) * kTile; }

// dst = src * row vector, for rows [first, rows) of the strips [strip, strip + strips).
__aicore__ inline void ScaleRows(const FloatTile& dst, const FloatTile& src, const FloatTile& spread, int32_t rows,
                                 int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = At(strip, 0, rows) + side * 8;
            Mul(dst[at], src[at], spread, kFloatMask, rows / 8, BinaryRepeatParams(2, 2, 1, 16, 16, 8));
        }
    }
}

// dst = src * column vector (one float a column), likewise.
__aicore__ inline void ScaleColumns(const FloatTile& dst, const FloatTile& src, const FloatTile& columns, int32_t rows,
                                    int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        for (int32_t side = 0; side < 2; ++side) {
            const int32_t at = At(strip, 0, rows) + side * 8;
            Mul(dst[at], src[at], columns[strip * kTile + side * 8], kFloatMask, rows / 8,
                BinaryRepeatParams(2, 2, 0, 16, 16, 0));
        }
    }
}

// One float a row [kChunk] to spread form.
__aicore__ inline void Spread(const FloatTile& dst, const FloatTile& compact, int32_t rows) {
    Brcb(dst, compact, rows / 8, BrcbRepeatParams(1, 8));
}

// ---- layouts at the ends of the vector chain --------------------------------------------------------------------------
// Rows of half [rows, strips * 16] to NZ float: a repeat takes 4 rows of one strip.
__aicore__ inline void RowsToNz(const FloatTile& dst, const HalfTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        Cast(dst[At(strip, 0, rows)], src[strip * kTile], RoundMode::CAST_NONE, kFloatMask, rows / 4,
             UnaryRepeatParams(1, strips, 8, 4 * strips));
    }
}
// And back.
__aicore__ inline void NzToRows(const HalfTile& dst, const FloatTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip) {
        Cast(dst[strip * kTile], src[At(strip, 0, rows)], RoundMode::CAST_NONE, kFloatMask, rows / 4,
             UnaryRepeatParams(strips, 1, 4 * strips, 8));
    }
}
// Rows of half in UB to NZ in L1, a strip at a time.
__aicore__ inline void RowsToL1(const HalfTile& dst, const HalfTile& src, int32_t rows, int32_t strips) {
    for (int32_t strip = 0; strip < strips; ++strip)
        DataCopy(dst[At(strip, 0, rows)], src[strip * kTile], DataCopyParams(rows, 1, strips - 1, 0));
}

// ---- operands of the cube ---------------------------------------------------------------------------------------------
// Left operand [m, k] tiles from NZ [m, k]: row blocks one after another. `stride` is the row blocks of the whole NZ tile.
__aicore__ inline void LoadLeft(const HalfTile& dst, const HalfTile& src, int32_t m, int32_t k, int32_t stride) {
    for (int32_t row = 0; row < m; ++row)
        LoadData(dst[row * k * kSquare], src, LoadData2DParams(row, k, stride, 0, 0, false, 0));
}
// Left operand [m, k] from its transpose, NZ [k, m]: strips are row blocks already, each fractal is turned.
__aicore__ inline void LoadLeftTransposed(const HalfTile& dst, const HalfTile& src, int32_t m, int32_t k) {
    LoadData(dst, src, LoadData2DParams(0, m * k, 1, 0, 0, true, 0));
}
// Right operand [k, n] from NZ [k, n].
__aicore__ inline void LoadRight(const HalfTile& dst, const HalfTile& src, int32_t k, int32_t n) {
    for (int32_t row = 0; row < k; ++row)
        LoadData(dst[row * n * kSquare], src, LoadData2DParams(row, n, k, 0, 0, true, 0));
}
// Right operand [k, n] from its transpose, NZ [n, k]: in order already.
__aicore__ inline void LoadRightTransposed(const HalfTile& dst, const HalfTile& src, int32_t k, int32_t n) {
    LoadData(dst, src, LoadData2DParams(0, k * n, 1, 0, 0, false, 0));
}
// C = A B, sizes in tiles.
__aicore__ inline void Multiply(const FloatTile& c, const HalfTile& a, const HalfTile& b, int32_t m, int32_t n, int32_t k) {
    Mmad(c, a, b, MmadParams(m * kTile, n * kTile, k * kTile, 0, false, true));
}
// ---- triangles --------------------------------------------------------------------------------------------------------
// Square tiles [kChunk, kChunk] are used on and below the diagonal only: strip c from row 16 c on, `LowerTiles` fractals.
__aicore__ inline int32_t LowerAt(int32_t strip) { return At(strip, strip * kTile, kChunk); }
__aicore__ inline int32_t LowerTiles(int32_t strip) { return kChunkTiles - strip; }

// Fractals of the strips before `strip`, where the strips of a lower triangle follow each other.
__aicore__ inline int32_t PackedAt(int32_t strip) { return (strip * kChunkTiles - strip * (strip - 1) / 2) * kSquare; }

// A lower triangle between global memory, where it is packed, and L1 or UB.
template <typename Destination, typename Source>
__aicore__ inline void Unpack(const Destination& dst, const Source& packed) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DataCopy(dst[LowerAt(strip)], packed[PackedAt(strip)], LowerTiles(strip) * kSquare);
}
template <typename Destination, typename Source>
__aicore__ inline void Pack(const Destination& packed, const Source& src) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DataCopy(packed[PackedAt(strip)], src[LowerAt(strip)], LowerTiles(strip) * kSquare);
}

// Right operand for `MultiplyLower`: the transpose of NZ [kChunk, k], one column of tiles after another.
__aicore__ inline void LoadColumnsTransposed(const HalfTile& dst, const HalfTile& src, int32_t k) {
    for (int32_t column = 0; column < kChunkTiles; ++column)
        LoadData(dst[column * k * kSquare], src, LoadData2DParams(column, k, kChunkTiles, 0, 0, false, 0));
}
// The lower triangle of A B, A [kChunk, k] by rows of tiles, B [k, kChunk] by columns of tiles.
__aicore__ inline void MultiplyLower(const FloatTile& c, const HalfTile& a, const HalfTile& b, int32_t k) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        Multiply(c[LowerAt(strip)], a[strip * k * kSquare], b[strip * k * kSquare], LowerTiles(strip), 1, k);
}
// Left operand for `LowerTimes`, from NZ: row block i has i + 1 tiles.
__aicore__ inline void LoadLower(const HalfTile& dst, const HalfTile& src) {
    for (int32_t row = 0; row < kChunkTiles; ++row)
        LoadData(dst[row * kChunkTiles * kSquare], src, LoadData2DParams(row, row + 1, kChunkTiles, 0, 0, false, 0));
}
// L B for a lower triangular L; row blocks of the result follow each other in C.
__aicore__ inline void LowerTimes(const FloatTile& c, const HalfTile& lower, const HalfTile& b, int32_t n) {
    for (int32_t row = 0; row < kChunkTiles; ++row)
        Multiply(c[row * n * kSquare], lower[row * kChunkTiles * kSquare], b, 1, n, row + 1);
}

// ---- out of L0C -------------------------------------------------------------------------------------------------------
template <typename T>
__aicore__ inline void DrainBursts(const LocalTensor<T>& dst, const FloatTile& src, const DataCopyParams& params) {
    DataCopyEnhancedParams matrix;
    matrix.blockMode = BlockMode::BLOCK_MODE_MATRIX;
    DataCopy(dst, src, params, matrix);
}
// Rows [first, first + rows) of every strip of a tile with `total` row blocks; all sizes in fractals.
__aicore__ inline void Drain(const FloatTile& dst, const FloatTile& src, int32_t first, int32_t rows, int32_t total,
                             int32_t strips) {
    DrainBursts(dst, src[first * kSquare], DataCopyParams(strips, rows, total - rows, 0));
}
// The result of `MultiplyLower`.
__aicore__ inline void DrainLower(const FloatTile& dst, const FloatTile& src) {
    for (int32_t strip = 0; strip < kChunkTiles; ++strip)
        DrainBursts(dst[LowerAt(strip)], src[LowerAt(strip)], DataCopyParams(1, LowerTiles(strip), 0, 0));
}
// The result of `LowerTimes`, to NZ.
__aicore__ inline void DrainRows(const FloatTile& dst, const FloatTile& src, int32_t n) {
    constexpr int32_t fractal_blocks = kSquare * 4 / 32;
    for (int32_t row = 0; row < kChunkTiles; ++row)
        DrainBursts(dst[row * kSquare], src[row * n * kSquare], DataCopyParams(n, 1, 0, (kChunkTiles - 1) * fractal_blocks));
}

}  // namespace vllm_ext
