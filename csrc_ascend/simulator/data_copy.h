// DataCopy in all its forms, DataCopyPad and Fixpipe: everything that moves data without computing.
#pragma once
#include "tensor.h"

namespace AscendC {
namespace sim {

inline void CheckCopy(const DataCopyParams& params) {
    if (params.blockCount < 1 || params.blockCount > 4095)
        current->Refuse("block count", "must be 1 to 4095, is " + std::to_string(params.blockCount));
    if (params.blockLen < 1) current->Refuse("block length", "must be at least one unit");
}

template <typename T>
void CheckLocal(const LocalTensor<T>& tensor) {
    tensor.CheckAlignment(current->At(tensor.Where()).alignment);
}

// The planted fault "layout": what was gathered is scattered.
inline DataCopyParams MaybeSwapped(DataCopyParams params, Site at) {
    if (params.srcStride != params.dstStride && current->Faulty("layout", at)) std::swap(params.srcStride, params.dstStride);
    return params;
}

// What leaves L0C, rounded if asked for.
template <typename T>
void Narrow(T* out, const float* values, uint32_t count) {
    if constexpr (std::is_same<T, float>::value) {
        std::memcpy(out, values, count * sizeof(float));
    } else {
        for (uint32_t i = 0; i < count; ++i) {
            out[i] = half(values[i]);
            current->counters.cast_overflows += std::isfinite(values[i]) && (out[i].bits & 0x7fffu) == 0x7c00u;
        }
    }
}

inline DataCopyParams WholeCopy(uint64_t bytes) {
    if (bytes == 0 || bytes % 32 != 0 || bytes / 32 > 65535)
        current->Refuse("copy size", "must be a positive multiple of 32 bytes up to 2 MiB, is " + std::to_string(bytes));
    return {1, static_cast<uint16_t>(bytes / 32), 0, 0};
}

}  // namespace sim

// GM to UB or L1.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& given, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    const DataCopyParams params = sim::MaybeSwapped(given, at);
    core.Begin(PIPE_MTE2, at, "DataCopy GM to local");
    sim::CheckCopy(params);
    sim::CheckLocal(dst);
    if (dst.Where() != Hardware::UB && dst.Where() != Hardware::L1)
        core.Refuse("wrong memory", std::string("GM copies to UB or L1, not to ") + sim::NameOf(dst.Where()));
    const uint32_t length = params.blockLen * 32u;
    const auto* from = reinterpret_cast<const uint8_t*>(src.Raw());
    uint32_t to = dst.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        dst.CheckBounds(to, length);
        core.GmRead(from, length);
        core.WriteRange(dst.Where(), to, length);
        std::memcpy(dst.Bytes(to), from, length);
        from += length + params.srcStride * 32u;
        to += length + params.dstStride * 32u;
    }
    core.counters.gm_bursts += params.blockCount;
    if (dst.Where() == Hardware::L1) core.counters.gm_to_l1_bytes += uint64_t{length} * params.blockCount;
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, Site at = Site::Here()) {
    sim::current->SetPlace(at, "DataCopy GM to local", PIPE_MTE2);
    DataCopy(dst, src, sim::WholeCopy(uint64_t{count} * sizeof(T)), at);
}

// GM to L1, rows to NZ.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& params, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_MTE2, at, "DataCopy GM to L1 ND2NZ");
    dst.CheckPlace(Hardware::L1, "the destination");
    sim::CheckLocal(dst);
    constexpr uint32_t c0 = 32 / sizeof(T);
    if (params.dValue % c0 != 0 || params.dstNzNStride == 0)
        core.Refuse("ND2NZ", "rows must be whole blocks of 32 bytes and dstNzNStride at least 1");
    for (uint32_t nd = 0; nd < params.ndNum; ++nd) {
        for (uint32_t row = 0; row < params.nValue; ++row) {
            const T* from = src.Raw() + uint64_t{nd} * params.srcNdMatrixStride + uint64_t{row} * params.srcDValue;
            core.GmRead(from, params.dValue * sizeof(T));
            for (uint32_t strip = 0; strip < params.dValue / c0; ++strip) {
                const uint32_t to = dst.Offset() + nd * params.dstNzMatrixStride * static_cast<uint32_t>(sizeof(T)) +
                                    (strip * params.dstNzC0Stride + row * params.dstNzNStride) * 32u;
                dst.CheckBounds(to, 32);
                core.WriteRange(Hardware::L1, to, 32);
                std::memcpy(dst.Bytes(to), from + strip * c0, 32);
            }
        }
    }
    core.counters.gm_bursts += uint64_t{params.ndNum} * params.nValue;
    core.counters.gm_to_l1_bytes += uint64_t{params.ndNum} * params.nValue * params.dValue * sizeof(T);
}

// UB to GM.
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& given, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    const DataCopyParams params = sim::MaybeSwapped(given, at);
    core.Begin(PIPE_MTE3, at, "DataCopy local to GM");
    sim::CheckCopy(params);
    sim::CheckLocal(src);
    if (src.Where() != Hardware::UB)
        core.Refuse("missing API", std::string("DataCopy from ") + sim::NameOf(src.Where()) + " to GM does not exist on " +
                                       core.chip.name);
    const uint32_t length = params.blockLen * 32u;
    auto* to = reinterpret_cast<uint8_t*>(dst.Raw());
    uint32_t from = src.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        src.CheckBounds(from, length);
        core.ReadRange(Hardware::UB, from, length);
        core.GmWrite(to, length);
        std::memcpy(to, src.Bytes(from), length);
        from += length + params.srcStride * 32u;
        to += length + params.dstStride * 32u;
    }
    core.counters.gm_bursts += params.blockCount;
}
template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, Site at = Site::Here()) {
    sim::current->SetPlace(at, "DataCopy local to GM", PIPE_MTE3);
    DataCopy(dst, src, sim::WholeCopy(uint64_t{count} * sizeof(T)), at);
}

// UB to L1, L1 to UB, UB to UB.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& given, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    const DataCopyParams params = sim::MaybeSwapped(given, at);
    const Hardware from = src.Where(), to = dst.Where();
    const bool to_l1 = from == Hardware::UB && to == Hardware::L1, to_ub = from == Hardware::L1 && to == Hardware::UB;
    core.Begin(to_l1 ? PIPE_MTE3 : to_ub ? PIPE_MTE1 : PIPE_V, at, "DataCopy local to local");
    if (to_l1) {
        core.RequireApi(core.chip.datacopy_ub_to_l1, "DataCopy from UB to L1");
    } else if (!to_ub && !(from == Hardware::UB && to == Hardware::UB)) {
        core.Refuse("missing API", std::string("DataCopy from ") + sim::NameOf(from) + " to " + sim::NameOf(to) +
                                       " does not exist on " + core.chip.name);
    }
    sim::CheckCopy(params);
    sim::CheckLocal(dst);
    sim::CheckLocal(src);
    const uint32_t length = params.blockLen * 32u;
    uint32_t read = src.Offset(), write = dst.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        src.CheckBounds(read, length);
        dst.CheckBounds(write, length);
        core.ReadRange(from, read, length);
        core.WriteRange(to, write, length);
        std::memmove(dst.Bytes(write), src.Bytes(read), length);
        read += length + params.srcStride * 32u;
        write += length + params.dstStride * 32u;
    }
    if (to_l1) core.counters.ub_to_l1_bytes += uint64_t{length} * params.blockCount;
    // Bursts that break fractals: rows gathered into strips, or scattered out of them.
    const uint64_t elements = length / sizeof(T);
    if (params.blockCount > 1 && params.srcStride != params.dstStride && elements < sim::kFractalElements)
        core.counters.relaid_elements += elements * params.blockCount;
}
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, Site at = Site::Here()) {
    sim::current->SetPlace(at, "DataCopy local to local", PIPE_V);
    DataCopy(dst, src, sim::WholeCopy(uint64_t{count} * sizeof(T)), at);
}

// L0C to UB, whole 16x16 fractals; float may be rounded to half on the way. Gaps: source in fractals, destination in 32 bytes.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<float>& src, const DataCopyParams& given,
              const DataCopyEnhancedParams& enhanced, Site at = Site::Here()) {
    const DataCopyParams params = sim::MaybeSwapped(given, at);
    static_assert(std::is_same<T, float>::value || std::is_same<T, half>::value, "L0C holds float; it leaves as float or half");
    sim::Core& core = *sim::current;
    core.Begin(PIPE_V, at, "DataCopy L0C to UB");
    core.RequireApi(core.chip.datacopy_l0c_to_ub, "DataCopy from L0C to UB");
    src.CheckPlace(Hardware::L0C, "the source");
    dst.CheckPlace(Hardware::UB, "the destination");
    sim::CheckCopy(params);
    sim::CheckLocal(dst);
    sim::CheckLocal(src);
    if (enhanced.blockMode != BlockMode::BLOCK_MODE_MATRIX)
        core.Refuse("block mode", "L0C leaves in BLOCK_MODE_MATRIX, fractals of 16x16");
    constexpr uint32_t fractal = 256;
    uint32_t read = src.Offset(), write = dst.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        const uint32_t elements = params.blockLen * fractal;
        src.CheckBounds(read, elements * 4);
        dst.CheckBounds(write, elements * sizeof(T));
        core.ReadRange(Hardware::L0C, read, elements * 4);
        core.WriteRange(Hardware::UB, write, elements * static_cast<uint32_t>(sizeof(T)));
        sim::Narrow(reinterpret_cast<T*>(dst.Bytes(write)), reinterpret_cast<const float*>(src.Bytes(read)), elements);
        read += (elements + params.srcStride * fractal) * 4;
        write += elements * static_cast<uint32_t>(sizeof(T)) + params.dstStride * 32u;
    }
    core.counters.l0c_to_ub_bytes += uint64_t{params.blockLen} * params.blockCount * fractal * 4;
}

// GM to UB and back with lengths in bytes; the rest of the last block is padding.
template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_MTE2, at, "DataCopyPad GM to UB");
    core.RequireApi(core.chip.datacopy_pad, "DataCopyPad");
    dst.CheckPlace(Hardware::UB, "the destination");
    sim::CheckLocal(dst);
    const auto* from = reinterpret_cast<const uint8_t*>(src.Raw());
    uint32_t to = dst.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        const uint32_t padded = (params.blockLen + 31) / 32 * 32;
        dst.CheckBounds(to, padded);
        core.GmRead(from, params.blockLen);
        core.WriteRange(Hardware::UB, to, pad.isPad ? padded : params.blockLen);
        std::memcpy(dst.Bytes(to), from, params.blockLen);
        for (uint32_t byte = params.blockLen; pad.isPad && byte < padded; byte += sizeof(T))
            std::memcpy(dst.Bytes(to + byte), &pad.paddingValue, sizeof(T));
        from += params.blockLen + params.srcStride;
        to += padded + params.dstStride * 32u;
    }
}
template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                 Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_MTE3, at, "DataCopyPad UB to GM");
    core.RequireApi(core.chip.datacopy_pad, "DataCopyPad");
    src.CheckPlace(Hardware::UB, "the source");
    sim::CheckLocal(src);
    auto* to = reinterpret_cast<uint8_t*>(dst.Raw());
    uint32_t from = src.Offset();
    for (uint32_t i = 0; i < params.blockCount; ++i) {
        src.CheckBounds(from, params.blockLen);
        core.ReadRange(Hardware::UB, from, params.blockLen);
        core.GmWrite(to, params.blockLen);
        std::memcpy(to, src.Bytes(from), params.blockLen);
        from += (params.blockLen + 31) / 32 * 32 + params.srcStride * 32u;
        to += params.blockLen + params.dstStride;
    }
}

// L0C to UB (m300) or GM (m300, c220), row major or NZ, float or rounded to half.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& params, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    static_assert(std::is_same<U, float>::value, "L0C holds float");
    core.Begin(PIPE_FIX, at, "Fixpipe L0C to UB");
    core.RequireApi(core.chip.fixpipe_to_ub, "Fixpipe to UB");
    src.CheckPlace(Hardware::L0C, "the source");
    dst.CheckPlace(Hardware::UB, "the destination");
    for (uint32_t row = 0; row < params.mSize; ++row) {
        for (uint32_t column = 0; column < params.nSize; column += 16) {
            const uint32_t from = src.Offset() + (column / 16 * params.srcStride + row) * 64u;
            const uint32_t element = static_cast<uint32_t>(sizeof(T));
            const uint32_t to = dst.Offset() + (config.format == CO2Layout::NZ
                                                    ? column / 16 * params.dstStride * 32u + row * 16u * element
                                                    : (row * params.dstStride + column) * element);
            src.CheckBounds(from, 64);
            dst.CheckBounds(to, 16 * element);
            core.ReadRange(Hardware::L0C, from, 64);
            core.WriteRange(Hardware::UB, to, 16 * element);
            sim::Narrow(reinterpret_cast<T*>(dst.Bytes(to)), reinterpret_cast<const float*>(src.Bytes(from)), 16);
        }
    }
    core.counters.l0c_to_ub_bytes += uint64_t{params.mSize} * params.nSize * 4;
}
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& params, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_FIX, at, "Fixpipe L0C to GM");
    core.RequireApi(core.chip.fixpipe_to_gm, "Fixpipe to GM");
    src.CheckPlace(Hardware::L0C, "the source");
    if (config.format != CO2Layout::ROW_MAJOR) core.Refuse("fixpipe layout", "the simulator writes rows to GM only");
    for (uint32_t row = 0; row < params.mSize; ++row) {
        for (uint32_t column = 0; column < params.nSize; column += 16) {
            const uint32_t from = src.Offset() + (column / 16 * params.srcStride + row) * 64u;
            T* to = dst.Raw() + uint64_t{row} * params.dstStride + column;
            src.CheckBounds(from, 64);
            core.ReadRange(Hardware::L0C, from, 64);
            core.GmWrite(to, 16 * sizeof(T));
            sim::Narrow(to, reinterpret_cast<const float*>(src.Bytes(from)), 16);
        }
    }
}

}  // namespace AscendC
