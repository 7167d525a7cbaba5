// What the simulator keeps beside the bytes of a memory, its counters, and how a refusal names a place.
#pragma once
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "types.h"

namespace AscendC {
namespace sim {

struct Site {
    const char* file;
    int line;
    static constexpr Site Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct Violation : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline const char* NameOf(Hardware hardware) {
    static constexpr const char* names[] = {"GM", "UB", "L1", "L0A", "L0B", "L0C"};
    return names[static_cast<int>(hardware)];
}

struct Counters {
    uint64_t gm_read_bytes = 0, gm_write_bytes = 0, gm_bursts = 0;
    uint64_t l1_to_l0a_fractals = 0, l1_to_l0b_fractals = 0;
    uint64_t mac_fractals = 0, mmad_instructions = 0;
    uint64_t vector_repeats = 0, vector_instructions = 0;
    uint64_t l0c_to_ub_bytes = 0, ub_to_l1_bytes = 0, gm_to_l1_bytes = 0;
    uint64_t flags = 0, barriers = 0, relaid_elements = 0, cast_overflows = 0, scalar_accesses = 0;
    uint64_t peak_ub = 0, peak_l1 = 0, peak_l0a = 0, peak_l0b = 0, peak_l0c = 0;

    void Merge(const Counters& other) {
        constexpr int sums = 17, peaks = 5;
        auto* mine = reinterpret_cast<uint64_t*>(this);
        const auto* theirs = reinterpret_cast<const uint64_t*>(&other);
        for (int i = 0; i < sums; ++i) mine[i] += theirs[i];
        for (int i = sums; i < sums + peaks; ++i) mine[i] = std::max(mine[i], theirs[i]);
        static_assert(sizeof(Counters) == (sums + peaks) * sizeof(uint64_t), "every counter is merged");
    }
};

constexpr uint32_t kFractalElements = 256;   // of a tile of 16x16

typedef uint32_t Lanes __attribute__((vector_size(32)));

struct Cell {
    Lanes read;         // last reading instruction of each pipe
    uint32_t written;   // one bit a byte
    uint32_t clock;     // last writing instruction
    uint32_t pipe;      // and its pipe
    uint32_t block;     // GM only: 1 + the last writing block
    uint32_t reader;    // GM only: 1 + the last reading block, kManyBlocks for several
    uint32_t launch;    // GM only: the bytes written since the launch or its last meeting began
};
constexpr uint32_t kManyBlocks = 0xffffffffu;

struct Memory {
    Hardware hardware = Hardware::UB;
    uint32_t capacity = 0, alignment = 32, allocated = 0;
    std::vector<uint8_t> bytes;
    std::vector<Cell> cells;
};

// One deliberate fault, for testing that the simulator notices: at one line of a kernel a flag or a barrier does nothing,
// a layout is swapped, or the n-th view of a buffer is a block too small.
struct Mutation {
    std::string kind, file;
    int place = 0;   // line, or n for a view
};

// A buffer handed out by TPipe::InitBuffer.
struct Allocation {
    Hardware hardware = Hardware::UB;
    uint32_t begin = 0, end = 0;
    Site site{"", 0};
};

enum class GmMode : uint8_t { kInput, kOutput, kWorkspace };

// A tensor in global memory that the host made known. Cells are shared by all blocks of a launch.
struct GmRegion {
    const char* name = "";
    uint8_t* begin = nullptr;
    uint64_t size = 0;
    GmMode mode = GmMode::kInput;
    std::vector<Cell> cells;
};

}  // namespace sim
}  // namespace AscendC
