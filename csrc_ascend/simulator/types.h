// Types, enumerations and parameter structures of the Ascend C subset, with the names and meanings of Ascend C.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

// The compiler of a chip defines this; a build for the simulator of another chip family passes it.
#ifndef __CCE_AICORE__
#define __CCE_AICORE__ 200
#endif
#define __aicore__
#define __global__
#define __gm__
#define __inline__ inline
using GM_ADDR = uint8_t*;

namespace AscendC {

// IEEE binary16 storage. Arithmetic happens in float; conversion rounds to nearest, ties to even.
struct half {
    uint16_t bits = 0;
    half() = default;
    explicit half(float value) : bits(FromFloat(value)) {}
    explicit half(double value) : half(static_cast<float>(value)) {}
    explicit half(int value) : half(static_cast<float>(value)) {}
    explicit operator float() const { return ToFloat(bits); }

#if defined(__FLT16_MANT_DIG__)
    static uint16_t FromFloat(float value) {
        const _Float16 narrow = static_cast<_Float16>(value);
        uint16_t raw;
        std::memcpy(&raw, &narrow, 2);
        return raw;
    }
    static float ToFloat(uint16_t raw) {
        _Float16 narrow;
        std::memcpy(&narrow, &raw, 2);
        return static_cast<float>(narrow);
    }
#else
    static uint16_t FromFloat(float value) {
        uint32_t x;
        std::memcpy(&x, &value, 4);
        const uint32_t sign = (x >> 16) & 0x8000u;
        x &= 0x7fffffffu;
        if (x > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
        if (x >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
        if (x < 0x33000001u) return static_cast<uint16_t>(sign);
        const int exponent = static_cast<int>(x >> 23) - 112;
        uint32_t mantissa = (x & 0x7fffffu) | 0x800000u;
        const int shift = exponent > 0 ? 13 : 14 - exponent;
        const uint32_t rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
        mantissa >>= shift;
        if (rest > middle || (rest == middle && (mantissa & 1u))) ++mantissa;
        const uint32_t magnitude = exponent > 0 ? ((static_cast<uint32_t>(exponent - 1) << 10) + mantissa) : mantissa;
        return static_cast<uint16_t>(sign | magnitude);
    }
    static float ToFloat(uint16_t raw) {
        const uint32_t sign = static_cast<uint32_t>(raw & 0x8000u) << 16, exponent = (raw >> 10) & 31u;
        const uint32_t mantissa = raw & 0x3ffu;
        if (exponent == 0) {
            const float value = std::ldexp(static_cast<float>(mantissa), -24);
            return sign ? -value : value;
        }
        const uint32_t x = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
        float value;
        std::memcpy(&value, &x, 4);
        return value;
    }
#endif
};
static_assert(sizeof(half) == 2, "half is two bytes of storage");

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, CO1, CO2, VECIN, VECOUT, VECCALC };
enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C };

constexpr Hardware GetPhyType(TPosition position) {
    switch (position) {
        case TPosition::A1:
        case TPosition::B1: return Hardware::L1;
        case TPosition::A2: return Hardware::L0A;
        case TPosition::B2: return Hardware::L0B;
        case TPosition::CO1: return Hardware::L0C;
        case TPosition::GM: return Hardware::GM;
        default: return Hardware::UB;
    }
}

}  // namespace AscendC

// Pipes are global names in Ascend C.
enum pipe_t : uint8_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
constexpr int kPipeCount = 7;
enum event_t : uint8_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {

using TEventID = int8_t;
constexpr int kEventIds = 8;

enum class HardEvent : uint8_t {
    MTE2_MTE1, MTE1_MTE2, MTE2_V, V_MTE2, MTE3_V, V_MTE3, M_V, V_M, MTE1_M, M_MTE1, MTE3_MTE2, MTE2_MTE3, MTE3_MTE1,
    MTE1_MTE3, V_MTE1, MTE1_V, M_FIX, FIX_M, FIX_MTE3, FIX_MTE2, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S,
    COUNT
};

struct EventPipes {
    pipe_t source, destination;
    const char* name;
};

inline EventPipes PipesOf(HardEvent event) {
    static constexpr EventPipes table[] = {
        {PIPE_MTE2, PIPE_MTE1, "MTE2_MTE1"}, {PIPE_MTE1, PIPE_MTE2, "MTE1_MTE2"}, {PIPE_MTE2, PIPE_V, "MTE2_V"},
        {PIPE_V, PIPE_MTE2, "V_MTE2"},       {PIPE_MTE3, PIPE_V, "MTE3_V"},       {PIPE_V, PIPE_MTE3, "V_MTE3"},
        {PIPE_M, PIPE_V, "M_V"},             {PIPE_V, PIPE_M, "V_M"},             {PIPE_MTE1, PIPE_M, "MTE1_M"},
        {PIPE_M, PIPE_MTE1, "M_MTE1"},       {PIPE_MTE3, PIPE_MTE2, "MTE3_MTE2"}, {PIPE_MTE2, PIPE_MTE3, "MTE2_MTE3"},
        {PIPE_MTE3, PIPE_MTE1, "MTE3_MTE1"}, {PIPE_MTE1, PIPE_MTE3, "MTE1_MTE3"}, {PIPE_V, PIPE_MTE1, "V_MTE1"},
        {PIPE_MTE1, PIPE_V, "MTE1_V"},       {PIPE_M, PIPE_FIX, "M_FIX"},         {PIPE_FIX, PIPE_M, "FIX_M"},
        {PIPE_FIX, PIPE_MTE3, "FIX_MTE3"},
        {PIPE_FIX, PIPE_MTE2, "FIX_MTE2"},   {PIPE_S, PIPE_V, "S_V"},             {PIPE_V, PIPE_S, "V_S"},
        {PIPE_S, PIPE_MTE2, "S_MTE2"},       {PIPE_MTE2, PIPE_S, "MTE2_S"},       {PIPE_S, PIPE_MTE3, "S_MTE3"},
        {PIPE_MTE3, PIPE_S, "MTE3_S"}};
    return table[static_cast<int>(event)];
}

inline const char* NameOf(pipe_t pipe) {
    static constexpr const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};
    return names[pipe];
}

// A parameter field is 8 or 16 bits wide; the chip would silently cut a larger value, the simulator refuses it.
[[noreturn]] void RefuseField(int64_t value, int bits);
template <typename Field>
Field Fit(int64_t value) {
    if (value < 0 || value > static_cast<int64_t>(std::numeric_limits<Field>::max())) RefuseField(value, 8 * sizeof(Field));
    return static_cast<Field>(value);
}

enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class BlockMode : uint8_t { BLOCK_MODE_NORMAL, BLOCK_MODE_MATRIX, BLOCK_MODE_VECTOR };
enum class DeqScale : uint8_t { DEQ_NONE };

// Strides between blocks and repeats of 32 bytes, from start to start.
struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(int64_t dstBlk, int64_t srcBlk, int64_t dstRep, int64_t srcRep)
        : dstBlkStride(Fit<uint16_t>(dstBlk)), srcBlkStride(Fit<uint16_t>(srcBlk)), dstRepStride(Fit<uint8_t>(dstRep)),
          srcRepStride(Fit<uint8_t>(srcRep)) {}
    uint16_t dstBlkStride = 1, srcBlkStride = 1;
    uint8_t dstRepStride = 8, srcRepStride = 8;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(int64_t dstBlk, int64_t src0Blk, int64_t src1Blk, int64_t dstRep, int64_t src0Rep, int64_t src1Rep)
        : dstBlkStride(Fit<uint8_t>(dstBlk)), src0BlkStride(Fit<uint8_t>(src0Blk)), src1BlkStride(Fit<uint8_t>(src1Blk)),
          dstRepStride(Fit<uint8_t>(dstRep)), src0RepStride(Fit<uint8_t>(src0Rep)), src1RepStride(Fit<uint8_t>(src1Rep)) {}
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(int64_t blkStride, int64_t repStride)
        : dstBlkStride(Fit<uint16_t>(blkStride)), dstRepStride(Fit<uint16_t>(repStride)) {}
    uint16_t dstBlkStride = 1, dstRepStride = 8;
};

// Lengths and gaps (end of a block to the start of the next) in units of 32 bytes.
struct DataCopyParams {
    DataCopyParams() = default;
    DataCopyParams(int64_t count, int64_t length, int64_t sourceGap, int64_t destinationGap)
        : blockCount(Fit<uint16_t>(count)), blockLen(Fit<uint16_t>(length)), srcStride(Fit<uint16_t>(sourceGap)),
          dstStride(Fit<uint16_t>(destinationGap)) {}
    uint16_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;
};

struct DataCopyEnhancedParams {
    BlockMode blockMode = BlockMode::BLOCK_MODE_NORMAL;
    DeqScale deqScale = DeqScale::DEQ_NONE;
    uint64_t deqValue = 0;
    uint8_t sidStoreMode = 0;
    bool isRelu = false;
};

struct DataCopyExtParams {
    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t bytes, uint32_t sourceGap, uint32_t destinationGap, uint32_t reserved)
        : blockCount(count), blockLen(bytes), srcStride(sourceGap), dstStride(destinationGap), rsv(reserved) {}
    uint16_t blockCount = 1;
    uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue{};
};

struct Nd2NzParams {
    Nd2NzParams() = default;
    Nd2NzParams(uint16_t nds, uint16_t n, uint16_t d, uint16_t ndStride, uint16_t sourceD, uint16_t c0Stride, uint16_t nStride,
                uint16_t nzStride)
        : ndNum(nds), nValue(n), dValue(d), srcNdMatrixStride(ndStride), srcDValue(sourceD), dstNzC0Stride(c0Stride),
          dstNzNStride(nStride), dstNzMatrixStride(nzStride) {}
    uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0;
    uint16_t dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;
};

// Fractals of 512 bytes: source stride from start to start, destination gap from end to start.
struct LoadData2DParams {
    LoadData2DParams() = default;
    LoadData2DParams(int64_t start, int64_t repeat, int64_t stride, uint8_t sidIn, int64_t gap, bool transpose, uint8_t mode)
        : startIndex(Fit<uint16_t>(start)), dstGap(Fit<uint16_t>(gap)), srcStride(Fit<uint16_t>(stride)),
          ifTranspose(transpose), repeatTimes(Fit<uint8_t>(repeat)), sid(sidIn), addrMode(mode) {}
    uint16_t startIndex = 0, dstGap = 0, srcStride = 0;
    bool ifTranspose = false;
    uint8_t repeatTimes = 0, sid = 0, addrMode = 0;
};
using LoadData2dParams = LoadData2DParams;

struct LoadData2dTransposeParams {
    uint16_t startIndex = 0;
    uint8_t repeatTimes = 0;
    uint16_t srcStride = 0, dstGap = 0, dstFracGap = 0;
    uint8_t addrMode = 0;
};

struct MmadParams {
    MmadParams() = default;
    MmadParams(int64_t rows, int64_t columns, int64_t depth, uint8_t unit, bool source, bool init)
        : m(Fit<uint16_t>(rows)), n(Fit<uint16_t>(columns)), k(Fit<uint16_t>(depth)), unitFlag(unit), cmatrixSource(source),
          cmatrixInitVal(init) {}
    uint16_t m = 0, n = 0, k = 0;
    bool isBias = false;
    uint8_t unitFlag = 0;
    bool cmatrixSource = false;   // true: C starts from the bias table
    bool cmatrixInitVal = true;   // true: C starts from zero; false: from what L0C holds
};

enum class CO2Layout : uint8_t { NZ = 0, ROW_MAJOR };
struct FixpipeConfig {
    CO2Layout format;
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};
enum class QuantMode_t : uint8_t { NoQuant, F322F16 };
struct FixpipeParamsV220 {
    uint16_t nSize = 0, mSize = 0, srcStride = 0;   // srcStride: rows between column strips of L0C
    uint32_t dstStride = 0;                         // ROW_MAJOR: elements a row; NZ: 32-byte units a strip
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    bool reluEn = false;
    uint8_t unitFlag = 0;
};
using FixpipeParamsM300 = FixpipeParamsV220;

}  // namespace AscendC
using AscendC::half;
