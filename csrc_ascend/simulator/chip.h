// What a chip offers. The values come from the planner's chip files; the table is generated when the simulator is built.
#pragma once
#include <cstdint>

namespace AscendC {
namespace sim {

struct ChipSpec {
    const char* name;
    int aicore;               // __CCE_AICORE__ of its compiler: 200, 220, 300
    uint32_t cores;
    uint32_t capacity[6];     // usable bytes, indexed by Hardware: GM (unused), UB, L1, L0A, L0B, L0C
    uint32_t alignment[6];
    bool fixpipe_to_ub, fixpipe_to_gm, datacopy_l0c_to_ub, datacopy_ub_to_l1, datacopy_pad, load_data_with_transpose, brcb;
};

}  // namespace sim
}  // namespace AscendC
