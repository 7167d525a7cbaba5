// LocalTensor, GlobalTensor and the buffers that hand them out: TPipe, TBuf, TQue.
#pragma once
#include "core.h"

namespace AscendC {
using sim::Site;

template <typename T>
class GlobalTensor {
  public:
    using PrimType = T;
    void SetGlobalBuffer(T* pointer, uint64_t count = 0) {
        address_ = pointer;
        size_ = count;
    }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor moved;
        moved.SetGlobalBuffer(address_ + offset, size_ > offset ? size_ - offset : 0);
        return moved;
    }
    const T* GetPhyAddr() const { return address_; }
    uint64_t GetSize() const { return size_; }
    T GetValue(uint64_t offset, Site at = Site::Here()) const {
        sim::Core& core = *sim::current;
        core.Begin(PIPE_S, at, "GetValue");
        ++core.counters.scalar_accesses;
        core.GmRead(address_ + offset, sizeof(T));
        T value;
        std::memcpy(&value, address_ + offset, sizeof(T));
        return value;
    }
    T* Raw() const { return address_; }

  private:
    T* address_ = nullptr;
    uint64_t size_ = 0;
};

template <typename T>
class LocalTensor {
  public:
    using PrimType = T;
    LocalTensor() = default;
    LocalTensor(Hardware hardware, uint32_t offset, uint32_t begin, uint32_t end)
        : hardware_(hardware), offset_(offset), begin_(begin), end_(end) {}

    LocalTensor operator[](uint32_t elements) const {
        LocalTensor moved = *this;
        moved.offset_ += elements * static_cast<uint32_t>(sizeof(T));
        return moved;
    }
    template <typename U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(hardware_, offset_, begin_, end_);
    }
    uint32_t GetSize() const { return offset_ < end_ ? (end_ - offset_) / static_cast<uint32_t>(sizeof(T)) : 0; }

    T GetValue(uint32_t element, Site at = Site::Here()) const {
        sim::Core& core = *sim::current;
        core.Begin(PIPE_S, at, "GetValue");
        ++core.counters.scalar_accesses;
        const uint32_t offset = offset_ + element * static_cast<uint32_t>(sizeof(T));
        CheckBounds(offset, sizeof(T));
        core.ReadRange(hardware_, offset, sizeof(T));
        T value;
        std::memcpy(&value, core.At(hardware_).bytes.data() + offset, sizeof(T));
        return value;
    }
    void SetValue(uint32_t element, T value, Site at = Site::Here()) const {
        sim::Core& core = *sim::current;
        core.Begin(PIPE_S, at, "SetValue");
        ++core.counters.scalar_accesses;
        const uint32_t offset = offset_ + element * static_cast<uint32_t>(sizeof(T));
        CheckBounds(offset, sizeof(T));
        core.WriteRange(hardware_, offset, sizeof(T));
        std::memcpy(core.At(hardware_).bytes.data() + offset, &value, sizeof(T));
    }

    // For the simulator's own instructions.
    Hardware Where() const { return hardware_; }
    uint32_t Offset() const { return offset_; }
    uint32_t Begin() const { return begin_; }
    uint8_t* Bytes(uint32_t offset) const { return sim::current->At(hardware_).bytes.data() + offset; }
    void CheckBounds(uint64_t offset, uint64_t bytes) const {
        if (offset < begin_ || offset + bytes > end_)
            sim::current->RefuseAt(hardware_, static_cast<uint32_t>(std::min<uint64_t>(begin_, offset)), "buffer bounds",
                                   "touches bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                                       " of a buffer that lies at " + std::to_string(begin_) + " to " + std::to_string(end_));
    }
    void CheckAlignment(uint32_t alignment) const {
        if (offset_ % alignment != 0)
            sim::current->RefuseAt(hardware_, offset_, "alignment",
                                   "must be a multiple of " + std::to_string(alignment) + " bytes");
    }
    void CheckPlace(Hardware wanted, const char* role) const {
        if (hardware_ != wanted)
            sim::current->Refuse("wrong memory", std::string(role) + " must be in " + sim::NameOf(wanted) + ", is in " +
                                                     sim::NameOf(hardware_));
    }
    uint32_t allocation = 0;   // of a queue: which of its buffers, from 1

  private:
    Hardware hardware_ = Hardware::UB;
    uint32_t offset_ = 0, begin_ = 0, end_ = 0;
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
  public:
    template <typename T>
    LocalTensor<T> Get() {
        return LocalTensor<T>(GetPhyType(position), begin_, begin_, end_);
    }
    template <typename T>
    LocalTensor<T> GetWithOffset(uint32_t count, uint32_t byte_offset, Site site = Site::Here()) {
        const uint32_t shrunk = sim::current->Faulty("view", site, ++sim::current->views) ? 32 : 0;
        const uint32_t at = begin_ + byte_offset, end = at + count * static_cast<uint32_t>(sizeof(T)) - shrunk;
        if (end > end_)
            sim::current->RefuseAt(GetPhyType(position), begin_, "buffer bounds",
                                   "a view of " + std::to_string(byte_offset) + " + " +
                                       std::to_string(count * sizeof(T)) + " bytes leaves a buffer of " +
                                       std::to_string(end_ - begin_));
        return LocalTensor<T>(GetPhyType(position), at, at, end);
    }

  private:
    friend class TPipe;
    uint32_t begin_ = 0, end_ = 0;
};

// The events a queue of this position raises when a tensor is filled and when it is freed again.
struct QueueEvents {
    HardEvent filled, freed;
};
constexpr QueueEvents EventsOf(TPosition position) {
    switch (position) {
        case TPosition::VECIN: return {HardEvent::MTE2_V, HardEvent::V_MTE2};
        case TPosition::VECOUT: return {HardEvent::V_MTE3, HardEvent::MTE3_V};
        case TPosition::A1:
        case TPosition::B1: return {HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2};
        case TPosition::A2:
        case TPosition::B2: return {HardEvent::MTE1_M, HardEvent::M_MTE1};
        default: return {HardEvent::M_V, HardEvent::V_M};
    }
}

template <TPosition position, int32_t depth>
class TQue {
  public:
    template <typename T>
    LocalTensor<T> AllocTensor(Site at = Site::Here()) {
        sim::Core& core = *sim::current;
        core.SetPlace(at, "AllocTensor", PIPE_S);
        for (int i = 0; i < count_; ++i) {
            Slot& slot = slots_[i];
            if (slot.state != kFree) continue;
            if (slot.recycled) core.Wait(EventsOf(position).freed, slot.freed_id, at);
            slot.recycled = false;
            slot.state = kAllocated;
            ++core.open_tensors;
            LocalTensor<T> tensor(GetPhyType(position), slot.begin, slot.begin, slot.begin + length_);
            tensor.allocation = static_cast<uint32_t>(i) + 1;
            return tensor;
        }
        core.Refuse("unbalanced queue", "all " + std::to_string(count_) + " buffers are in use: a FreeTensor is missing");
    }
    template <typename T>
    bool EnQue(const LocalTensor<T>& tensor, Site at = Site::Here()) {
        Slot& slot = SlotOf(tensor, "EnQue", kAllocated, at);
        slot.state = kQueued;
        sim::current->Set(EventsOf(position).filled, slot.filled_id, at);
        order_[(head_ + queued_++) % kMaxSlots] = static_cast<int>(tensor.allocation) - 1;
        return true;
    }
    template <typename T>
    LocalTensor<T> DeQue(Site at = Site::Here()) {
        sim::Core& core = *sim::current;
        core.SetPlace(at, "DeQue", PIPE_S);
        if (queued_ == 0) core.Refuse("unbalanced queue", "DeQue from an empty queue");
        const int index = order_[head_];
        head_ = (head_ + 1) % kMaxSlots;
        --queued_;
        Slot& slot = slots_[index];
        slot.state = kTaken;
        core.Wait(EventsOf(position).filled, slot.filled_id, at);
        LocalTensor<T> tensor(GetPhyType(position), slot.begin, slot.begin, slot.begin + length_);
        tensor.allocation = static_cast<uint32_t>(index) + 1;
        return tensor;
    }
    template <typename T>
    void FreeTensor(LocalTensor<T>& tensor, Site at = Site::Here()) {
        Slot& slot = SlotOf(tensor, "FreeTensor", kTaken, at);
        slot.state = kFree;
        slot.recycled = true;
        sim::current->Set(EventsOf(position).freed, slot.freed_id, at);
        --sim::current->open_tensors;
        tensor.allocation = 0;
    }
    // TPipe::Destroy waits for what FreeTensor raised.
    void Drain(Site at) {
        for (int i = 0; i < count_; ++i)
            if (slots_[i].recycled) sim::current->Wait(EventsOf(position).freed, slots_[i].freed_id, at);
    }
    ~TQue() noexcept(false) {
        if (sim::current != nullptr && std::uncaught_exceptions() == 0) Drain(Site{"TQue", 0});
    }

  private:
    friend class TPipe;
    static constexpr int kMaxSlots = 8;
    enum State : uint8_t { kFree, kAllocated, kQueued, kTaken };
    struct Slot {
        uint32_t begin = 0;
        State state = kFree;
        bool recycled = false;
        TEventID filled_id = 0, freed_id = 0;
    };
    template <typename T>
    Slot& SlotOf(const LocalTensor<T>& tensor, const char* name, State wanted, Site at) {
        sim::current->SetPlace(at, name, PIPE_S);
        if (tensor.allocation == 0 || static_cast<int>(tensor.allocation) > count_ ||
            slots_[tensor.allocation - 1].state != wanted)
            sim::current->Refuse("unbalanced queue", std::string(name) + " of a tensor that this queue did not hand out for it");
        return slots_[tensor.allocation - 1];
    }
    Slot slots_[kMaxSlots];
    int order_[kMaxSlots] = {};
    int head_ = 0, queued_ = 0, count_ = 0;
    uint32_t length_ = 0;
};

class TPipe {
  public:
    TPipe() { sim::current->SetPlace(Site{"TPipe", 0}, "TPipe", PIPE_S); }

    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t bytes, Site at = Site::Here()) {
        buffer.begin_ = Take(GetPhyType(position), bytes, at);
        buffer.end_ = buffer.begin_ + bytes;
        return true;
    }
    template <TPosition position, int32_t depth>
    bool InitBuffer(TQue<position, depth>& queue, uint8_t count, uint32_t bytes, Site at = Site::Here()) {
        sim::current->SetPlace(at, "InitBuffer", PIPE_S);
        if (count == 0 || count > TQue<position, depth>::kMaxSlots)
            sim::current->Refuse("queue depth", "a queue holds 1 to 8 buffers, asked for " + std::to_string(count));
        queue.count_ = count;
        queue.length_ = bytes;
        for (int i = 0; i < count; ++i) {
            queue.slots_[i].begin = Take(GetPhyType(position), bytes, at);
            queue.slots_[i].filled_id = TakeEvent(EventsOf(position).filled);
            queue.slots_[i].freed_id = TakeEvent(EventsOf(position).freed);
        }
        return true;
    }
    template <HardEvent event>
    TEventID AllocEventID(Site at = Site::Here()) {
        sim::current->SetPlace(at, "AllocEventID", PIPE_S);
        return TakeEvent(event);
    }
    template <HardEvent event>
    void ReleaseEventID(TEventID id, Site at = Site::Here()) {
        sim::current->SetPlace(at, "ReleaseEventID", PIPE_S);
        uint8_t& used = sim::current->event_ids[static_cast<int>(event)];
        if (!((used >> id) & 1u)) sim::current->Refuse("event id", "releases an id that was not allocated");
        used = static_cast<uint8_t>(used & ~(1u << id));
    }

  private:
    static uint32_t Take(Hardware hardware, uint32_t bytes, Site at) {
        sim::Core& core = *sim::current;
        core.SetPlace(at, "InitBuffer", PIPE_S);
        sim::Memory& memory = core.At(hardware);
        const uint32_t begin = (memory.allocated + memory.alignment - 1) / memory.alignment * memory.alignment;
        if (bytes == 0 || begin + uint64_t{bytes} > memory.capacity)
            core.Refuse("capacity", std::string(sim::NameOf(hardware)) + " of " + core.chip.name + " offers " +
                                        std::to_string(memory.capacity) + " bytes, " + std::to_string(begin) +
                                        " are taken and " + std::to_string(bytes) + " more are asked for");
        memory.allocated = begin + bytes;
        core.allocations.push_back({hardware, begin, begin + bytes, at});
        uint64_t* peaks[] = {nullptr, &core.counters.peak_ub, &core.counters.peak_l1, &core.counters.peak_l0a,
                             &core.counters.peak_l0b, &core.counters.peak_l0c};
        uint64_t& peak = *peaks[static_cast<int>(hardware)];
        peak = std::max<uint64_t>(peak, memory.allocated);
        return begin;
    }
    static TEventID TakeEvent(HardEvent event) {
        uint8_t& used = sim::current->event_ids[static_cast<int>(event)];
        for (int id = 0; id < kEventIds; ++id) {
            if ((used >> id) & 1u) continue;
            used = static_cast<uint8_t>(used | (1u << id));
            return static_cast<TEventID>(id);
        }
        sim::current->Refuse("event id", std::string("all 8 ids of ") + PipesOf(event).name + " are taken");
    }
};

}  // namespace AscendC
