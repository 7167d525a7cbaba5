// Flags between pipes, barriers within one, and a block's place in the launch.
#pragma once
#include "core.h"

namespace AscendC {

template <HardEvent event>
inline void SetFlag(int32_t id, sim::Site at = sim::Site::Here()) {
    sim::current->Set(event, id, at);
}
template <HardEvent event>
inline void WaitFlag(int32_t id, sim::Site at = sim::Site::Here()) {
    sim::current->Wait(event, id, at);
}
template <pipe_t pipe>
inline void PipeBarrier(sim::Site at = sim::Site::Here()) {
    sim::current->Barrier(pipe, at);
}
// Every block waits here for all others; what one wrote to global memory before, another may read after. The chip's own
// takes a few blocks of global memory for it, which are not counted.
inline void SyncAll(sim::Site at = sim::Site::Here()) {
    sim::Core& core = *sim::current;
    core.Barrier(PIPE_ALL, at);
    if (core.meeting == nullptr)
        core.Refuse("cooperative", "SyncAll needs all blocks of the launch to run at once, no more than the chip has cores");
    if (!core.meeting->Arrive()) core.Refuse("deadlock", "another block of the launch ended without waiting here");
}
inline int64_t GetBlockIdx() { return sim::current->block; }
inline int64_t GetBlockNum() { return sim::current->blocks; }

}  // namespace AscendC
