// Kernels that must be refused for the order of their pipes: races, flags that do not pair.
#pragma once
#include "rule_support.h"

namespace {

void race_read_after_write(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}
VLLM_EXT_REGISTER(race_read_after_write, race_read_after_write);

void race_write_after_read(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer, other;
    pipe.InitBuffer(buffer, 256);
    pipe.InitBuffer(other, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_V>();
    Muls(other.Get<float>(), buffer.Get<float>(), 2.0f, 64);
    PipeBarrier<PIPE_MTE2>();
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
}
VLLM_EXT_REGISTER(race_write_after_read, race_write_after_read);

void race_write_after_write(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
}
VLLM_EXT_REGISTER(race_write_after_write, race_write_after_write);

void race_within_vector(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    Duplicate(buffer.Get<float>(), 1.0f, 64);
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}
VLLM_EXT_REGISTER(race_within_vector, race_within_vector);

// Each repeat reads what the repeat before it wrote: legal to issue, wrong on a pipeline.
void race_within_instruction(const GM_ADDR*) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 1024);
    Duplicate(buffer.Get<float>(), 1.0f, 256);
    PipeBarrier<PIPE_V>();
    Add(buffer.Get<float>()[64], buffer.Get<float>(), buffer.Get<float>()[64], 64, 3, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
}
VLLM_EXT_REGISTER(race_within_instruction, race_within_instruction);

// The flag is there, but of another pair of pipes.
void race_wrong_event(const GM_ADDR* gm) {
    TPipe pipe;
    V buffer;
    pipe.InitBuffer(buffer, 256);
    DataCopy(buffer.Get<float>(), Gm<float>(gm[0]), 64);
    Order<HardEvent::MTE2_MTE3>();
    Muls(buffer.Get<float>(), buffer.Get<float>(), 2.0f, 64);
}
VLLM_EXT_REGISTER(race_wrong_event, race_wrong_event);

void race_small_mmad(const GM_ADDR* gm) {
    TPipe pipe;
    L1Buf l1;
    L0ABuf l0a;
    L0BBuf l0b;
    L0CBuf l0c;
    pipe.InitBuffer(l1, 512);
    pipe.InitBuffer(l0a, 512);
    pipe.InitBuffer(l0b, 512);
    pipe.InitBuffer(l0c, 1024);
    DataCopy(l1.Get<half>(), Gm<half>(gm[0]), 256);
    Order<HardEvent::MTE2_MTE1>();
    LoadData(l0a.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    LoadData(l0b.Get<half>(), l1.Get<half>(), LoadData2DParams(0, 1, 1, 0, 0, false, 0));
    Order<HardEvent::MTE1_M>();
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 16, 0, false, true));
    Mmad(l0c.Get<float>(), l0a.Get<half>(), l0b.Get<half>(), MmadParams(16, 16, 16, 0, false, false));
}
VLLM_EXT_REGISTER(race_small_mmad, race_small_mmad);

void flag_deadlock(const GM_ADDR*) { WaitFlag<HardEvent::MTE2_V>(0); }
VLLM_EXT_REGISTER(flag_deadlock, flag_deadlock);

void flag_left_set(const GM_ADDR*) { SetFlag<HardEvent::MTE2_V>(3); }
VLLM_EXT_REGISTER(flag_left_set, flag_left_set);

void flag_set_twice(const GM_ADDR*) {
    SetFlag<HardEvent::MTE2_V>(1);
    SetFlag<HardEvent::MTE2_V>(1);
}
VLLM_EXT_REGISTER(flag_set_twice, flag_set_twice);

void event_ids(const GM_ADDR*) {
    TPipe pipe;
    for (int i = 0; i < 9; ++i) pipe.AllocEventID<HardEvent::MTE2_V>();
}
VLLM_EXT_REGISTER(event_ids, event_ids);

void event_id_beyond(const GM_ADDR*) { SetFlag<HardEvent::MTE2_V>(8); }
VLLM_EXT_REGISTER(event_id_beyond, event_id_beyond);

void event_id_not_taken(const GM_ADDR*) {
    TPipe pipe;
    pipe.ReleaseEventID<HardEvent::MTE2_V>(0);
}
VLLM_EXT_REGISTER(event_id_not_taken, event_id_not_taken);

// The first of two blocks ends without having met the other, which would wait for ever.
void meeting_missed(const GM_ADDR*) {
    if (GetBlockIdx() == 1) SyncAll();
}
VLLM_EXT_REGISTER(meeting_missed, meeting_missed);

}  // namespace
