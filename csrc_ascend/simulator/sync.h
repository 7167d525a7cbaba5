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
inline int64_t GetBlockIdx() { return sim::current->block; }
inline int64_t GetBlockNum() { return sim::current->blocks; }

}  // namespace AscendC
