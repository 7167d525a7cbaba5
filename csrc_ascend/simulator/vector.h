// The vector unit: instructions on UB in count form and in mask + repeat form, 256 bytes of the widest operand a repeat.
#pragma once
#include "tensor.h"

namespace AscendC {
namespace sim {

// Eight elements are handled at a time: one 32-byte block of float, half a block of half.
constexpr uint32_t kUnit = 8;

// Which elements of a repeat take part: the first `count`, or one bit an element.
struct Mask {
    uint64_t words[2];
    static Mask FirstOf(uint64_t count, uint32_t limit) {
        if (count < 1 || count > limit)
            current->Refuse("mask", "a repeat has " + std::to_string(limit) + " elements, the mask asks for " + std::to_string(count));
        return {{count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1,
                 count > 64 ? (count >= 128 ? ~uint64_t{0} : (uint64_t{1} << (count - 64)) - 1) : 0}};
    }
    static Mask OfBits(const uint64_t bits[], uint32_t limit) {
        const Mask mask{{bits[0], limit > 64 ? bits[1] : 0}};
        if ((mask.words[0] | mask.words[1]) == 0) current->Refuse("mask", "no element takes part");
        return mask;
    }
    uint32_t Unit(uint32_t unit) const { return static_cast<uint32_t>(words[unit >> 3] >> ((unit & 7) * 8)) & 0xffu; }
    uint32_t LastUnit(uint32_t units) const {
        uint32_t last = 0;
        for (uint32_t unit = 0; unit < units; ++unit)
            if (Unit(unit)) last = unit;
        return last;
    }
};

template <int bytes>
uint32_t BytesOf(uint32_t bits) {
    if (bits == 0xffu) return bytes == 4 ? ~0u : 0xffffu;
    uint32_t mask = 0;
    for (uint32_t i = 0; i < 8; ++i)
        if ((bits >> i) & 1u) mask |= ((1u << bytes) - 1) << (i * bytes);
    return mask;
}

inline float Load(float value) { return value; }
inline float Load(half value) { return static_cast<float>(value); }

// One operand of an instruction: where its units lie.
template <typename T>
struct Stream {
    uint32_t base, block, repeat;
    uint8_t* bytes;
    static constexpr bool kWide = sizeof(T) == 4;

    Stream(const LocalTensor<T>& tensor, uint32_t block_stride, uint32_t repeat_stride, uint32_t repeats, uint32_t last_unit)
        : base(tensor.Offset()), block(block_stride), repeat(repeat_stride), bytes(tensor.Bytes(0)) {
        tensor.CheckPlace(Hardware::UB, "a vector operand");
        tensor.CheckAlignment(current->At(Hardware::UB).alignment);
        const uint64_t last = (uint64_t{repeats - 1} * repeat + uint64_t{kWide ? last_unit : last_unit / 2} * block) * 32;
        tensor.CheckBounds(base + last, kWide ? 32 : 16 * (last_unit % 2 + 1));
    }
    uint32_t At(uint32_t rep, uint32_t unit) const {
        return kWide ? base + (rep * repeat + unit * block) * 32u
                     : base + (rep * repeat + (unit >> 1) * block) * 32u + (unit & 1u) * 16u;
    }
    static uint32_t CellMask(uint32_t unit, uint32_t bits) {
        return kWide ? BytesOf<4>(bits) : BytesOf<2>(bits) << (16 * (unit & 1u));
    }
    const T* Read(Core& core, uint32_t rep, uint32_t unit, uint32_t bits) const {
        const uint32_t at = At(rep, unit);
        if (kWide || (unit & 1u) == 0 || !core.WroteNow(Hardware::UB, at)) core.CheckRead(Hardware::UB, at, CellMask(unit, bits));
        core.MarkRead(Hardware::UB, at);
        return reinterpret_cast<const T*>(bytes + at);
    }
    T* Write(Core& core, uint32_t rep, uint32_t unit, uint32_t bits) const {
        const uint32_t at = At(rep, unit);
        // Both halves of a block of half belong to one repeat: the second does not conflict with the first.
        if (kWide || (unit & 1u) == 0 || !core.WroteNow(Hardware::UB, at)) core.CheckWrite(Hardware::UB, at);
        core.MarkWritten(Hardware::UB, at, CellMask(unit, bits));
        return reinterpret_cast<T*>(bytes + at);
    }
};

inline void CheckRepeat(int64_t repeats) {
    if (repeats < 1 || repeats > 255) current->Refuse("repeat", "must be 1 to 255, is " + std::to_string(repeats));
}

template <typename T>
void Store(T* out, const float* values, uint32_t bits, Core& core) {
    for (uint32_t i = 0; i < kUnit; ++i) {
        if (bits != 0xffu && !((bits >> i) & 1u)) continue;
        if constexpr (sizeof(T) == 4) {
            out[i] = values[i];
        } else {
            out[i] = half(values[i]);
            core.counters.cast_overflows += (out[i].bits & 0x7fffu) == 0x7c00u && std::isfinite(values[i]);
        }
    }
}

template <typename T, typename U>
constexpr uint32_t ElementsOf() {
    return 256 / (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));
}

// dst = f(src): f sees eight floats and may use dst's old value only when `accumulate`.
template <bool accumulate, typename T, typename U, typename F>
void RunUnary(const LocalTensor<T>& dst, const LocalTensor<U>& src, const Mask& mask, int64_t repeats,
              const UnaryRepeatParams& params, F f) {
    Core& core = *current;
    CheckRepeat(repeats);
    constexpr uint32_t units = ElementsOf<T, U>() / kUnit;
    const uint32_t last = mask.LastUnit(units), count = static_cast<uint32_t>(repeats);
    const Stream<T> out(dst, params.dstBlkStride, params.dstRepStride, count, last);
    const Stream<U> in(src, params.srcBlkStride, params.srcRepStride, count, last);
    for (uint32_t rep = 0; rep < count; ++rep) {
        for (uint32_t unit = 0; unit <= last; ++unit) {
            const uint32_t bits = mask.Unit(unit);
            if (bits == 0) continue;
            const U* a = in.Read(core, rep, unit, bits);
            float x[kUnit], y[kUnit];
            for (uint32_t i = 0; i < kUnit; ++i) x[i] = Load(a[i]);
            if (accumulate) {
                const T* old = out.Read(core, rep, unit, bits);
                for (uint32_t i = 0; i < kUnit; ++i) y[i] = Load(old[i]);
            }
            for (uint32_t i = 0; i < kUnit; ++i) y[i] = f(x[i], accumulate ? y[i] : 0.0f);
            Store(out.Write(core, rep, unit, bits), y, bits, core);
        }
    }
    core.counters.vector_repeats += count;
    ++core.counters.vector_instructions;
}

template <bool accumulate, typename T, typename U, typename V, typename F>
void RunBinary(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<V>& src1, const Mask& mask,
               int64_t repeats, const BinaryRepeatParams& params, F f) {
    static_assert(sizeof(U) == sizeof(V), "both sources have one type");
    Core& core = *current;
    CheckRepeat(repeats);
    constexpr uint32_t units = ElementsOf<T, U>() / kUnit;
    const uint32_t last = mask.LastUnit(units), count = static_cast<uint32_t>(repeats);
    const Stream<T> out(dst, params.dstBlkStride, params.dstRepStride, count, last);
    const Stream<U> in0(src0, params.src0BlkStride, params.src0RepStride, count, last);
    const Stream<V> in1(src1, params.src1BlkStride, params.src1RepStride, count, last);
    for (uint32_t rep = 0; rep < count; ++rep) {
        for (uint32_t unit = 0; unit <= last; ++unit) {
            const uint32_t bits = mask.Unit(unit);
            if (bits == 0) continue;
            const U* a = in0.Read(core, rep, unit, bits);
            const V* b = in1.Read(core, rep, unit, bits);
            float x[kUnit], z[kUnit], y[kUnit];
            for (uint32_t i = 0; i < kUnit; ++i) x[i] = Load(a[i]);
            for (uint32_t i = 0; i < kUnit; ++i) z[i] = Load(b[i]);
            if (accumulate) {
                const T* old = out.Read(core, rep, unit, bits);
                for (uint32_t i = 0; i < kUnit; ++i) y[i] = Load(old[i]);
            }
            for (uint32_t i = 0; i < kUnit; ++i) y[i] = f(x[i], z[i], accumulate ? y[i] : 0.0f);
            Store(out.Write(core, rep, unit, bits), y, bits, core);
        }
    }
    core.counters.vector_repeats += count;
    ++core.counters.vector_instructions;
}

// Count form: `issue(offset, mask, repeats)` for whole repeats, at most 255 at a time, then for the rest.
template <typename Issue>
void InChunks(int64_t count, uint32_t elements, Issue issue) {
    if (count < 1) current->Refuse("count", "must be positive, is " + std::to_string(count));
    int64_t done = 0;
    while (count - done >= elements) {
        const int64_t repeats = std::min<int64_t>(255, (count - done) / elements);
        issue(static_cast<uint32_t>(done), Mask::FirstOf(elements, elements), repeats);
        done += repeats * elements;
    }
    if (done < count) issue(static_cast<uint32_t>(done), Mask::FirstOf(static_cast<uint64_t>(count - done), elements), 1);
}

// Natural exponential, branch free so that eight lanes run together; below one unit in the last place of error.
inline float ExpOf(float x) {
    const float clamped = std::min(std::max(x, -150.0f), 100.0f);
    const float n = std::nearbyintf(clamped * 1.44269504089f);
    const float r = (clamped - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int whole = static_cast<int>(n), first = whole / 2, second = whole - first;
    const uint32_t low = static_cast<uint32_t>(first + 127) << 23, high = static_cast<uint32_t>(second + 127) << 23;
    float scale_low, scale_high;
    std::memcpy(&scale_low, &low, 4);
    std::memcpy(&scale_high, &high, 4);
    const float value = p * scale_low * scale_high;
    return x != x ? x : x > 88.7228394f ? std::numeric_limits<float>::infinity() : value;
}

// The chip's reciprocal root is an estimate. Ours is off by one part in a thousand, up or down, so that a kernel which
// does not refine it fails here too.
inline float RsqrtOf(float x) {
    uint32_t raw;
    std::memcpy(&raw, &x, 4);
    return 1.0f / std::sqrt(x) * ((raw & 0x100u) ? 1.0009765625f : 0.9990234375f);
}

inline float RoundToHalfOdd(float value) {
    half down(value);
    const float back = static_cast<float>(down);
    if (back == value || !std::isfinite(value)) return back;
    if (std::fabs(back) > std::fabs(value)) --down.bits;   // truncate towards zero
    down.bits |= 1u;
    return static_cast<float>(down);
}

}  // namespace sim

#define VLLM_EXT_BINARY(NAME, ACCUMULATE, EXPRESSION)                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,          \
              int64_t repeatTimes, const BinaryRepeatParams& params, Site at = Site::Here()) {                           \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        sim::RunBinary<ACCUMULATE>(dst, src0, src1, sim::Mask::FirstOf(mask, sim::ElementsOf<T, U>()), repeatTimes,      \
                                   params, [](float a, float b, float d) { (void)d; return EXPRESSION; });               \
    }                                                                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask[],  \
              int64_t repeatTimes, const BinaryRepeatParams& params, Site at = Site::Here()) {                           \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        sim::RunBinary<ACCUMULATE>(dst, src0, src1, sim::Mask::OfBits(mask, sim::ElementsOf<T, U>()), repeatTimes,       \
                                   params, [](float a, float b, float d) { (void)d; return EXPRESSION; });               \
    }                                                                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, int32_t count,          \
              Site at = Site::Here()) {                                                                                  \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        sim::InChunks(count, sim::ElementsOf<T, U>(), [&](uint32_t offset, const sim::Mask& mask, int64_t repeats) {     \
            sim::RunBinary<ACCUMULATE>(dst[offset], src0[offset], src1[offset], mask, repeats, BinaryRepeatParams(),     \
                                       [](float a, float b, float d) { (void)d; return EXPRESSION; });                   \
        });                                                                                                              \
    }

VLLM_EXT_BINARY(Add, false, a + b)
VLLM_EXT_BINARY(Sub, false, a - b)
VLLM_EXT_BINARY(Mul, false, a * b)
VLLM_EXT_BINARY(Max, false, std::max(a, b))
VLLM_EXT_BINARY(Min, false, std::min(a, b))
VLLM_EXT_BINARY(MulAddDst, true, a * b + d)
#undef VLLM_EXT_BINARY

#define VLLM_EXT_SCALAR(NAME, ACCUMULATE, EXPRESSION)                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, uint64_t mask,                 \
              int64_t repeatTimes, const UnaryRepeatParams& params, Site at = Site::Here()) {                            \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        const float s = sim::Load(scalarValue);                                                                          \
        sim::RunUnary<ACCUMULATE>(dst, src, sim::Mask::FirstOf(mask, sim::ElementsOf<T, U>()), repeatTimes, params,      \
                                  [s](float a, float d) { (void)d; return EXPRESSION; });                                \
    }                                                                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, uint64_t mask[],         \
              int64_t repeatTimes, const UnaryRepeatParams& params, Site at = Site::Here()) {                            \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        const float s = sim::Load(scalarValue);                                                                          \
        sim::RunUnary<ACCUMULATE>(dst, src, sim::Mask::OfBits(mask, sim::ElementsOf<T, U>()), repeatTimes, params,       \
                                  [s](float a, float d) { (void)d; return EXPRESSION; });                                \
    }                                                                                                                    \
    template <typename T, typename U>                                                                                    \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalarValue, int32_t count,                 \
              Site at = Site::Here()) {                                                                                  \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        const float s = sim::Load(scalarValue);                                                                          \
        sim::InChunks(count, sim::ElementsOf<T, U>(), [&](uint32_t offset, const sim::Mask& mask, int64_t repeats) {     \
            sim::RunUnary<ACCUMULATE>(dst[offset], src[offset], mask, repeats, UnaryRepeatParams(),                      \
                                      [s](float a, float d) { (void)d; return EXPRESSION; });                            \
        });                                                                                                              \
    }

VLLM_EXT_SCALAR(Adds, false, a + s)
VLLM_EXT_SCALAR(Muls, false, a * s)
VLLM_EXT_SCALAR(Maxs, false, std::max(a, s))
VLLM_EXT_SCALAR(Mins, false, std::min(a, s))
VLLM_EXT_SCALAR(Axpy, true, a * s + d)
#undef VLLM_EXT_SCALAR

#define VLLM_EXT_UNARY(NAME, EXPRESSION)                                                                                 \
    template <typename T>                                                                                                \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, int64_t repeatTimes,                  \
              const UnaryRepeatParams& params, Site at = Site::Here()) {                                                 \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        sim::RunUnary<false>(dst, src, sim::Mask::FirstOf(mask, sim::ElementsOf<T, T>()), repeatTimes, params,           \
                             [](float a, float) { return EXPRESSION; });                                                 \
    }                                                                                                                    \
    template <typename T>                                                                                                \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count, Site at = Site::Here()) {             \
        sim::current->Begin(PIPE_V, at, #NAME);                                                                          \
        sim::InChunks(count, sim::ElementsOf<T, T>(), [&](uint32_t offset, const sim::Mask& mask, int64_t repeats) {     \
            sim::RunUnary<false>(dst[offset], src[offset], mask, repeats, UnaryRepeatParams(),                           \
                                 [](float a, float) { return EXPRESSION; });                                             \
        });                                                                                                              \
    }

VLLM_EXT_UNARY(Exp, sim::ExpOf(a))
VLLM_EXT_UNARY(Rsqrt, sim::RsqrtOf(a))
#undef VLLM_EXT_UNARY

namespace sim {
template <typename T, typename U>
void CheckRound(RoundMode mode) {
    static_assert(sizeof(T) != sizeof(U), "Cast changes the type");
    const bool narrowing = sizeof(T) < sizeof(U);
    if (mode == RoundMode::CAST_NONE || (narrowing && mode == RoundMode::CAST_ODD)) return;
    if (narrowing && mode == RoundMode::CAST_RINT && current->chip.aicore != 200) return;
    current->Refuse("rounding mode", "this Cast takes CAST_NONE" + std::string(narrowing ? " or CAST_ODD" : "") + " on " +
                                         current->chip.name);
}
}  // namespace sim

// float to half (nearest even, or odd) and half to float.
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, RoundMode mode, uint64_t mask, int64_t repeatTimes,
          const UnaryRepeatParams& given, Site at = Site::Here()) {
    sim::current->Begin(PIPE_V, at, "Cast");
    sim::CheckRound<T, U>(mode);
    UnaryRepeatParams params = given;
    if (params.dstBlkStride != params.srcBlkStride && sim::current->Faulty("layout", at)) {
        std::swap(params.dstBlkStride, params.srcBlkStride);
        std::swap(params.dstRepStride, params.srcRepStride);
    }
    const sim::Mask lanes = sim::Mask::FirstOf(mask, sim::ElementsOf<T, U>());
    if (mode == RoundMode::CAST_ODD) {
        sim::RunUnary<false>(dst, src, lanes, repeatTimes, params, [](float a, float) { return sim::RoundToHalfOdd(a); });
    } else {
        sim::RunUnary<false>(dst, src, lanes, repeatTimes, params, [](float a, float) { return a; });
    }
}
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, RoundMode mode, int32_t count, Site at = Site::Here()) {
    sim::current->Begin(PIPE_V, at, "Cast");
    sim::CheckRound<T, U>(mode);
    if (mode == RoundMode::CAST_ODD) sim::current->Refuse("rounding mode", "CAST_ODD is modelled in mask + repeat form only");
    const UnaryRepeatParams params(1, 1, static_cast<int64_t>(2 * sizeof(T)), static_cast<int64_t>(2 * sizeof(U)));
    sim::InChunks(count, sim::ElementsOf<T, U>(), [&](uint32_t offset, const sim::Mask& lanes, int64_t repeats) {
        sim::RunUnary<false>(dst[offset], src[offset], lanes, repeats, params, [](float a, float) { return a; });
    });
}

// Fills with a scalar; a repeat stride and a block stride like the other instructions.
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, uint64_t mask, int64_t repeatTimes, int64_t dstBlockStride,
               int64_t dstRepeatStride, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "Duplicate");
    sim::CheckRepeat(repeatTimes);
    constexpr uint32_t elements = 256 / sizeof(T), units = elements / sim::kUnit;
    const sim::Mask lanes = sim::Mask::FirstOf(mask, elements);
    const uint32_t last = lanes.LastUnit(units), count = static_cast<uint32_t>(repeatTimes);
    const sim::Stream<T> out(dst, Fit<uint16_t>(dstBlockStride), Fit<uint8_t>(dstRepeatStride), count, last);
    float values[sim::kUnit];
    for (float& x : values) x = sim::Load(value);
    for (uint32_t rep = 0; rep < count; ++rep)
        for (uint32_t unit = 0; unit <= last; ++unit)
            if (const uint32_t bits = lanes.Unit(unit)) sim::Store(out.Write(core, rep, unit, bits), values, bits, core);
    core.counters.vector_repeats += count;
    ++core.counters.vector_instructions;
}
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, uint64_t mask[], int64_t repeatTimes, int64_t dstBlockStride,
               int64_t dstRepeatStride, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "Duplicate");
    sim::CheckRepeat(repeatTimes);
    constexpr uint32_t elements = 256 / sizeof(T), units = elements / sim::kUnit;
    const sim::Mask lanes = sim::Mask::OfBits(mask, elements);
    const uint32_t last = lanes.LastUnit(units), count = static_cast<uint32_t>(repeatTimes);
    const sim::Stream<T> out(dst, Fit<uint16_t>(dstBlockStride), Fit<uint8_t>(dstRepeatStride), count, last);
    float values[sim::kUnit];
    for (float& x : values) x = sim::Load(value);
    for (uint32_t rep = 0; rep < count; ++rep)
        for (uint32_t unit = 0; unit <= last; ++unit)
            if (const uint32_t bits = lanes.Unit(unit)) sim::Store(out.Write(core, rep, unit, bits), values, bits, core);
    core.counters.vector_repeats += count;
    ++core.counters.vector_instructions;
}
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, int32_t count, Site at = Site::Here()) {
    constexpr uint32_t elements = 256 / sizeof(T);
    sim::current->SetPlace(at, "Duplicate", PIPE_V);
    sim::InChunks(count, elements, [&](uint32_t offset, sim::Mask lanes, int64_t repeats) {
        Duplicate(dst[offset], value, lanes.words, repeats, 1, 8, at);
    });
}

// One sum a repeat, written `dstRepStride` elements apart, added pairwise.
template <typename T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int64_t repeatTimes,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "WholeReduceSum");
    sim::CheckRepeat(repeatTimes);
    constexpr uint32_t elements = 256 / sizeof(T), units = elements / sim::kUnit;
    const sim::Mask lanes = sim::Mask::FirstOf(static_cast<uint64_t>(std::max(0, mask)), elements);
    const uint32_t last = lanes.LastUnit(units), count = static_cast<uint32_t>(repeatTimes);
    const sim::Stream<T> in(src, Fit<uint16_t>(srcBlkStride), Fit<uint8_t>(srcRepStride), count, last);
    dst.CheckPlace(Hardware::UB, "the destination");
    dst.CheckAlignment(sizeof(T));
    const uint32_t step = Fit<uint16_t>(dstRepStride) * static_cast<uint32_t>(sizeof(T));
    dst.CheckBounds(dst.Offset() + uint64_t{count - 1} * step, sizeof(T));
    for (uint32_t rep = 0; rep < count; ++rep) {
        float values[128] = {};
        for (uint32_t unit = 0; unit <= last; ++unit) {
            const uint32_t bits = lanes.Unit(unit);
            const T* a = in.Read(core, rep, unit, bits);
            for (uint32_t i = 0; i < sim::kUnit; ++i)
                if ((bits >> i) & 1u) values[unit * sim::kUnit + i] = sim::Load(a[i]);
        }
        for (uint32_t width = elements / 2; width > 0; width /= 2)
            for (uint32_t i = 0; i < width; ++i) values[i] += values[i + width];
        const uint32_t to = dst.Offset() + rep * step;
        // Sums of one instruction share blocks; they conflict with other instructions only.
        if (!core.WroteNow(Hardware::UB, to)) core.CheckWrite(Hardware::UB, to);
        core.MarkWritten(Hardware::UB, to, static_cast<uint32_t>((uint64_t{1} << sizeof(T)) - 1) << (to & 31u));
        T result;
        if constexpr (sizeof(T) == 4) {
            result = values[0];
        } else {
            result = half(values[0]);
        }
        std::memcpy(dst.Bytes(to), &result, sizeof(T));
    }
    core.counters.vector_repeats += count;
    ++core.counters.vector_instructions;
}

// Eight elements a repeat, each spread over a block of 32 bytes.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeatTimes, const BrcbRepeatParams& params,
          Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "Brcb");
    core.RequireApi(core.chip.brcb, "Brcb");
    sim::CheckRepeat(repeatTimes);
    if (core.chip.aicore == 200 && params.dstBlkStride != 1)
        core.Refuse("Brcb stride", "blocks must follow each other (dstBlkStride 1): other strides run element by element on " +
                                       std::string(core.chip.name));
    dst.CheckPlace(Hardware::UB, "the destination");
    src.CheckPlace(Hardware::UB, "the source");
    dst.CheckAlignment(32);
    src.CheckAlignment(32);
    const uint32_t count = static_cast<uint32_t>(repeatTimes), taken = 8 * sizeof(T);
    src.CheckBounds(src.Offset(), count * taken);
    core.ReadRange(Hardware::UB, src.Offset(), count * taken);
    for (uint32_t rep = 0; rep < count; ++rep) {
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t to = dst.Offset() + (rep * params.dstRepStride + i * params.dstBlkStride) * 32u;
            dst.CheckBounds(to, 32);
            core.WriteRange(Hardware::UB, to, 32);
            T value;
            std::memcpy(&value, src.Bytes(src.Offset() + rep * taken + i * sizeof(T)), sizeof(T));
            for (uint32_t e = 0; e < 32 / sizeof(T); ++e) std::memcpy(dst.Bytes(to + e * sizeof(T)), &value, sizeof(T));
        }
    }
    core.counters.vector_repeats += core.chip.aicore == 200 ? 2 * count : count;
    ++core.counters.vector_instructions;
}

// One 16x16 block of 16-bit elements.
template <typename T>
void Transpose(const LocalTensor<T>& dst, const LocalTensor<T>& src, Site at = Site::Here()) {
    static_assert(sizeof(T) == 2, "Transpose moves 16-bit elements");
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "Transpose");
    dst.CheckPlace(Hardware::UB, "the destination");
    src.CheckPlace(Hardware::UB, "the source");
    dst.CheckAlignment(32);
    src.CheckAlignment(32);
    src.CheckBounds(src.Offset(), 512);
    dst.CheckBounds(dst.Offset(), 512);
    core.ReadRange(Hardware::UB, src.Offset(), 512);
    core.WriteRange(Hardware::UB, dst.Offset(), 512);
    uint16_t block[256];
    std::memcpy(block, src.Bytes(src.Offset()), 512);
    auto* out = reinterpret_cast<uint16_t*>(dst.Bytes(dst.Offset()));
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 16; ++column) out[column * 16 + row] = block[row * 16 + column];
    core.counters.vector_repeats += 2;
    ++core.counters.vector_instructions;
}

}  // namespace AscendC
