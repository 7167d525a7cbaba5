// The vector unit: instructions on UB in count form and in mask + repeat form, 256 bytes of the widest operand a repeat.
#pragma once
#include "vector_engine.h"

namespace AscendC {

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
namespace sim {
template <typename T>
void RunReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const Mask& lanes, int64_t repeatTimes,
                  int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride) {
    sim::Core& core = *sim::current;
    sim::CheckRepeat(repeatTimes);
    constexpr uint32_t elements = 256 / sizeof(T), units = elements / sim::kUnit;
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
}  // namespace sim

template <typename T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t mask, int64_t repeatTimes,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride, Site at = Site::Here()) {
    sim::current->Begin(PIPE_V, at, "WholeReduceSum");
    const sim::Mask lanes = sim::Mask::FirstOf(static_cast<uint64_t>(std::max(0, mask)), 256 / sizeof(T));
    sim::RunReduceSum(dst, src, lanes, repeatTimes, dstRepStride, srcBlkStride, srcRepStride);
}
template <typename T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], int64_t repeatTimes,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride, Site at = Site::Here()) {
    sim::current->Begin(PIPE_V, at, "WholeReduceSum");
    const sim::Mask lanes = sim::Mask::OfBits(mask, 256 / sizeof(T));
    sim::RunReduceSum(dst, src, lanes, repeatTimes, dstRepStride, srcBlkStride, srcRepStride);
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
