// How the vector unit walks its operands: masks, streams of blocks, the loops behind every instruction.
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

// Elements whose layout an instruction changes: all, if the source's places do not follow the destination's, in numbers of
// elements. Less than a fractal is a row or a column on its way, no tile.
template <typename T, typename U>
uint64_t RelaidElements(const UnaryRepeatParams& params, const Mask& mask, uint32_t last, uint32_t repeats) {
    const auto place = [](uint32_t unit, uint64_t block, uint64_t size) {
        const uint64_t units_of_block = 32 / size / kUnit;
        return unit / units_of_block * block * (32 / size) + unit % units_of_block * kUnit;
    };
    bool relaid = repeats > 1 && params.dstRepStride * (32 / sizeof(T)) != params.srcRepStride * (32 / sizeof(U));
    for (uint32_t unit = 0; unit <= last; ++unit)
        relaid |= place(unit, params.dstBlkStride, sizeof(T)) != place(unit, params.srcBlkStride, sizeof(U));
    if (!relaid) return 0;
    const uint64_t lanes = __builtin_popcountll(mask.words[0]) + __builtin_popcountll(mask.words[1]);
    return lanes * repeats < kFractalElements ? 0 : lanes * repeats;
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
    core.counters.relaid_elements += RelaidElements<T, U>(params, mask, last, count);
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

}  // namespace AscendC
