// Sizes, short names and the one way in which the kernels order their pipes.
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

}  // namespace vllm_ext
