// LoadData (L1 to L0A and L0B) and Mmad. L0A is ZZ, L0B is ZN, L0C is NZ; a fractal is 16x16 half, 512 bytes.
#pragma once
#include "tensor.h"

namespace AscendC {

template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& params, Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_MTE1, at, "LoadData");
    static_assert(sizeof(T) == 2, "the simulator loads fractals of half");
    src.CheckPlace(Hardware::L1, "the source");
    const bool left = dst.Where() == Hardware::L0A;
    if (!left && dst.Where() != Hardware::L0B)
        core.Refuse("wrong memory", std::string("LoadData fills L0A or L0B, not ") + sim::NameOf(dst.Where()));
    dst.CheckAlignment(core.At(dst.Where()).alignment);
    src.CheckAlignment(32);
    if (params.repeatTimes < 1) core.Refuse("repeat", "must be 1 to 255, is 0");
    if (params.addrMode != 0) core.Refuse("address mode", "the simulator walks addresses upwards only");
    const bool transpose = params.ifTranspose != core.Faulty("layout", at);
    for (uint32_t i = 0; i < params.repeatTimes; ++i) {
        const uint32_t from = src.Offset() + (params.startIndex + i * params.srcStride) * 512u;
        const uint32_t to = dst.Offset() + i * (params.dstGap + 1u) * 512u;
        src.CheckBounds(from, 512);
        dst.CheckBounds(to, 512);
        core.ReadRange(Hardware::L1, from, 512);
        core.WriteRange(dst.Where(), to, 512);
        const auto* in = reinterpret_cast<const uint16_t*>(src.Bytes(from));
        auto* out = reinterpret_cast<uint16_t*>(dst.Bytes(to));
        if (transpose) {
            for (int row = 0; row < 16; ++row)
                for (int column = 0; column < 16; ++column) out[column * 16 + row] = in[row * 16 + column];
        } else {
            std::memcpy(out, in, 512);
        }
    }
    (left ? core.counters.l1_to_l0a_fractals : core.counters.l1_to_l0b_fractals) += params.repeatTimes;
}

template <typename T>
void LoadDataWithTranspose(const LocalTensor<T>&, const LocalTensor<T>&, const LoadData2dTransposeParams&,
                           Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_MTE1, at, "LoadDataWithTranspose");
    core.RequireApi(core.chip.load_data_with_transpose, "LoadDataWithTranspose");
    core.Refuse("not modelled", "no kernel here uses LoadDataWithTranspose; the simulator only knows which chips lack it");
}

namespace sim {
typedef float Row __attribute__((vector_size(64)));

inline void WidenFractal(float* out, const uint8_t* in) {
    const auto* raw = reinterpret_cast<const uint16_t*>(in);
    for (int i = 0; i < 256; ++i) out[i] = half::ToFloat(raw[i]);
}
}  // namespace sim

// C[m, n] (+)= A[m, k] B[k, n]; half operands, float sums. Sizes that are no multiples of 16 read and write whole fractals.
inline void Mmad(const LocalTensor<float>& c, const LocalTensor<half>& a, const LocalTensor<half>& b, const MmadParams& params,
                 Site at = Site::Here()) {
    sim::Core& core = *sim::current;
    core.Begin(PIPE_M, at, "Mmad");
    c.CheckPlace(Hardware::L0C, "the result");
    a.CheckPlace(Hardware::L0A, "the left operand");
    b.CheckPlace(Hardware::L0B, "the right operand");
    c.CheckAlignment(core.At(Hardware::L0C).alignment);
    a.CheckAlignment(core.At(Hardware::L0A).alignment);
    b.CheckAlignment(core.At(Hardware::L0B).alignment);
    if (params.m == 0 || params.n == 0 || params.k == 0) core.Refuse("Mmad size", "m, n and k must be positive");
    if (params.cmatrixSource || params.isBias) core.Refuse("Mmad bias", "the bias table is not modelled");
    const uint32_t rows = (params.m + 15u) / 16, columns = (params.n + 15u) / 16, depth = (params.k + 15u) / 16;
    // The cube orders successive products into one C by itself only when a product keeps it busy long enough.
    if (rows * columns >= 10 && core.small_mmad <= core.known[PIPE_M][PIPE_M])
        core.after_write[PIPE_M] = std::numeric_limits<uint32_t>::max();
    if (rows * columns < 10) core.small_mmad = core.clock;

    a.CheckBounds(a.Offset(), rows * depth * 512u);
    b.CheckBounds(b.Offset(), depth * columns * 512u);
    c.CheckBounds(c.Offset(), rows * columns * 1024u);
    core.ReadRange(Hardware::L0A, a.Offset(), rows * depth * 512u);
    core.ReadRange(Hardware::L0B, b.Offset(), depth * columns * 512u);
    if (!params.cmatrixInitVal) core.ReadRange(Hardware::L0C, c.Offset(), rows * columns * 1024u);
    core.WriteRange(Hardware::L0C, c.Offset(), rows * columns * 1024u);

    static thread_local std::vector<float> left;
    left.resize(rows * depth * 256);
    for (uint32_t i = 0; i < rows * depth; ++i) sim::WidenFractal(left.data() + i * 256, a.Bytes(a.Offset() + i * 512u));
    std::vector<sim::Row> sums(rows * 16);
    alignas(64) float right[256];
    for (uint32_t j = 0; j < columns; ++j) {
        uint8_t* out = c.Bytes(c.Offset() + j * rows * 1024u);
        if (params.cmatrixInitVal) {
            std::fill(sums.begin(), sums.end(), sim::Row{});
        } else {
            std::memcpy(static_cast<void*>(sums.data()), out, rows * 1024u);
        }
        for (uint32_t l = 0; l < depth; ++l) {
            const auto* raw = reinterpret_cast<const uint16_t*>(b.Bytes(b.Offset() + (l * columns + j) * 512u));
            for (int n = 0; n < 16; ++n)
                for (int k = 0; k < 16; ++k) right[k * 16 + n] = half::ToFloat(raw[n * 16 + k]);
            sim::Row lines[16];
            std::memcpy(lines, right, sizeof(lines));
            for (uint32_t i = 0; i < rows; ++i) {
                const float* scalars = left.data() + (i * depth + l) * 256;
                for (int m = 0; m < 16; ++m) {
                    sim::Row sum = sums[i * 16 + m];
                    for (int k = 0; k < 16; ++k) sum += scalars[m * 16 + k] * lines[k];
                    sums[i * 16 + m] = sum;
                }
            }
        }
        std::memcpy(out, sums.data(), rows * 1024u);
    }
    core.counters.mac_fractals += uint64_t{rows} * columns * depth;
    ++core.counters.mmad_instructions;
}

}  // namespace AscendC
