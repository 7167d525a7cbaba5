// Short names for the small kernels that the simulator is tested with.
#pragma once
#include "c_api.h"

using namespace AscendC;

namespace {

using V = TBuf<TPosition::VECCALC>;
using L1Buf = TBuf<TPosition::A1>;
using L0ABuf = TBuf<TPosition::A2>;
using L0BBuf = TBuf<TPosition::B2>;
using L0CBuf = TBuf<TPosition::CO1>;

template <typename T>
GlobalTensor<T> Gm(GM_ADDR pointer) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<T*>(pointer));
    return tensor;
}

template <HardEvent event>
void Order() {
    SetFlag<event>(0);
    WaitFlag<event>(0);
}

}  // namespace
