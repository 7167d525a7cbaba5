// The state of one simulated AI core: memories, the shadow that knows who wrote and read each 32-byte cell, clocks, counters.
//
// Happens-before. Every instruction belongs to a pipe and gets the next number of that pipe. `known[p][q]` is the last
// instruction of pipe q that is certainly finished before the next instruction of pipe p starts: PipeBarrier raises
// known[p][p], WaitFlag merges the snapshot its SetFlag took. An access is refused unless the last conflicting access to
// the cell is known to be finished. Issue order alone orders a write after an earlier read of the same pipe, nothing else.
#pragma once
#include <array>
#include <set>

#include "chip.h"
#include "meeting.h"
#include "shadow.h"

namespace AscendC {
namespace sim {

class Core {
  public:
    explicit Core(const ChipSpec& chip) : chip(chip) {
        const Hardware kinds[] = {Hardware::UB, Hardware::L1, Hardware::L0A, Hardware::L0B, Hardware::L0C};
        for (Hardware kind : kinds) {
            Memory& memory = At(kind);
            memory.hardware = kind;
            memory.capacity = chip.capacity[static_cast<int>(kind)];
            memory.alignment = chip.alignment[static_cast<int>(kind)];
            memory.bytes.resize(memory.capacity);
            memory.cells.resize(memory.capacity / 32);
        }
    }

    // Everything a block may not inherit from the block that ran here before.
    void Reset(const char* kernel_name, uint32_t block_index, uint32_t block_count) {
        kernel = kernel_name;
        block = block_index;
        blocks = block_count;
        for (Memory& memory : memories) {
            memory.allocated = 0;
            std::memset(memory.bytes.data(), 0xff, memory.bytes.size());
            std::memset(static_cast<void*>(memory.cells.data()), 0, memory.cells.size() * sizeof(Cell));
        }
        for (auto& row : known) row = Lanes{};
        clocks.fill(0);
        small_mmad = 0;
        for (auto& flag : flags) flag.set = false;
        allocations.clear();
        counters = Counters{};
        event_ids.fill(0);
        open_tensors = 0;
        views = 0;
    }

    Memory& At(Hardware hardware) { return memories[static_cast<int>(hardware) - 1]; }

    // ---- instructions -------------------------------------------------------------------------------------------
    void Begin(pipe_t on, Site at, const char* name) {
        pipe = on;
        site = at;
        instruction = name;
        clock = ++clocks[on];
        after_write = known[on];
        after_read = known[on];
        after_read[on] = std::numeric_limits<uint32_t>::max();
    }

    void RequireApi(bool available, const char* rule) {
        if (!available) Refuse("missing API", std::string(rule) + " does not exist on " + chip.name);
    }

    void CheckRead(Hardware hardware, uint32_t offset, uint32_t mask) {
        const Cell& cell = At(hardware).cells[offset >> 5];
        if ((cell.written & mask) != mask) RefuseAt(hardware, offset, "unwritten", "reads bytes that nothing has written");
        if (cell.clock > after_write[cell.pipe]) RefuseOrder(hardware, offset, "read after write", cell.pipe, cell.clock);
    }
    void CheckWrite(Hardware hardware, uint32_t offset) {
        const Cell& cell = At(hardware).cells[offset >> 5];
        if (cell.clock > after_write[cell.pipe]) RefuseOrder(hardware, offset, "write after write", cell.pipe, cell.clock);
        const Lanes late = cell.read > after_read;
        if (__builtin_expect(AnyLane(late), 0)) {
            for (int p = 0; p < kPipeCount; ++p)
                if (late[p]) RefuseOrder(hardware, offset, "write after read", p, cell.read[p]);
        }
    }
    // Whether the running instruction has already written this cell.
    bool WroteNow(Hardware hardware, uint32_t offset) {
        const Cell& cell = At(hardware).cells[offset >> 5];
        return cell.clock == clock && cell.pipe == pipe;
    }
    void MarkRead(Hardware hardware, uint32_t offset) { At(hardware).cells[offset >> 5].read[pipe] = clock; }
    void MarkWritten(Hardware hardware, uint32_t offset, uint32_t mask) {
        Cell& cell = At(hardware).cells[offset >> 5];
        cell.written |= mask;
        cell.clock = clock;
        cell.pipe = pipe;
    }
    // Contiguous bytes, any alignment.
    void ReadRange(Hardware hardware, uint32_t offset, uint32_t bytes) {
        ForCells(offset, bytes, [&](uint32_t at, uint32_t mask) {
            CheckRead(hardware, at, mask);
            MarkRead(hardware, at);
        });
    }
    void WriteRange(Hardware hardware, uint32_t offset, uint32_t bytes) {
        ForCells(offset, bytes, [&](uint32_t at, uint32_t mask) {
            CheckWrite(hardware, at);
            MarkWritten(hardware, at, mask);
        });
    }
    template <typename Visit>
    static void ForCells(uint64_t offset, uint64_t bytes, Visit visit) {
        const uint64_t end = offset + bytes;
        for (uint64_t at = offset & ~uint64_t{31}; at < end; at += 32) {
            const uint64_t first = at < offset ? offset - at : 0, last = std::min<uint64_t>(32, end - at);
            const uint32_t upper = last == 32 ? ~0u : (1u << last) - 1;
            visit(static_cast<uint32_t>(at), upper & ~((1u << first) - 1));
        }
    }

    // ---- global memory ------------------------------------------------------------------------------------------
    GmRegion& RegionOf(const void* pointer, uint64_t bytes) {
        const auto* at = static_cast<const uint8_t*>(pointer);
        for (GmRegion* region : *regions) {
            if (at >= region->begin && at + bytes <= region->begin + region->size) return *region;
        }
        Refuse("GM bounds", "touches " + std::to_string(bytes) + " bytes that belong to no tensor the host passed");
    }
    void GmRead(const void* pointer, uint64_t bytes) {
        GmRegion& region = RegionOf(pointer, bytes);
        counters.gm_read_bytes += bytes;
        if (region.mode == GmMode::kInput) return;
        const uint64_t offset = static_cast<const uint8_t*>(pointer) - region.begin;
        ForGmCells(region, offset, bytes, [&](Cell& cell, uint64_t at, uint32_t mask) {
            if ((cell.written & mask) != mask) RefuseGm(region, at, "unwritten", "reads bytes that nothing has written");
            if (cell.block == block + 1) {
                if (cell.clock > after_write[cell.pipe])
                    RefuseGm(region, at, "read after write", OrderText(cell.pipe, cell.clock));
            } else if (cell.block != 0) {
                RefuseGm(region, at, "cross-block", "block " + std::to_string(cell.block - 1) + " wrote it in this launch");
            }
            cell.reader = cell.reader == 0 || cell.reader == block + 1 ? block + 1 : kManyBlocks;
            cell.read[pipe] = clock;
        });
    }
    void GmWrite(void* pointer, uint64_t bytes) {
        GmRegion& region = RegionOf(pointer, bytes);
        counters.gm_write_bytes += bytes;
        const uint64_t offset = static_cast<uint8_t*>(pointer) - region.begin;
        if (region.mode == GmMode::kInput) RefuseGm(region, offset, "read-only", "writes an input");
        ForGmCells(region, offset, bytes, [&](Cell& cell, uint64_t at, uint32_t mask) {
            if (cell.block == block + 1) {
                if (cell.clock > after_write[cell.pipe])
                    RefuseGm(region, at, "write after write", OrderText(cell.pipe, cell.clock));
                for (int p = 0; cell.reader == block + 1 && p < kPipeCount; ++p)
                    if (cell.read[p] > after_read[p]) RefuseGm(region, at, "write after read", OrderText(p, cell.read[p]));
            } else if ((cell.launch & mask) != 0 || (cell.reader != 0 && cell.reader != block + 1)) {
                RefuseGm(region, at, "cross-block", "another block of this launch touches it too");
            }
            cell.written |= mask;
            cell.launch |= mask;
            cell.block = block + 1;
            cell.clock = clock;
            cell.pipe = pipe;
        });
    }

    // ---- order --------------------------------------------------------------------------------------------------
    struct Flag {
        bool set = false;
        Site site{"", 0};
        Lanes snapshot{};
    };
    Flag& FlagOf(HardEvent event, int id) { return flags[static_cast<int>(event) * kEventIds + id]; }

    // Notes that a fault could be planted here, and says whether this one is.
    bool Faulty(const char* kind, Site at) { return Faulty(kind, at, at.line); }
    bool Faulty(const char* kind, Site at, int place) {
        if (places == nullptr && mutation == nullptr) return false;
        const char* slash = std::strrchr(at.file, '/');
        const std::string file = slash ? slash + 1 : at.file;
        if (places != nullptr) places->insert(std::string(kind) + " " + file + " " + std::to_string(place));
        return mutation != nullptr && mutation->place == place && mutation->kind == kind && mutation->file == file;
    }

    void Set(HardEvent event, int id, Site at) {
        if (Faulty("flag", at)) return;
        const EventPipes pipes = PipesOf(event);
        SetPlace(at, "SetFlag", pipes.source);
        CheckEventId(id);
        Flag& flag = FlagOf(event, id);
        if (flag.set) Refuse("flag set twice", FlagText(event, id) + " is set again before anything waited for it");
        flag.set = true;
        flag.site = at;
        flag.snapshot = known[pipes.source];
        flag.snapshot[pipes.source] = clocks[pipes.source];
        ++counters.flags;
    }
    void Wait(HardEvent event, int id, Site at) {
        if (Faulty("flag", at)) return;
        const EventPipes pipes = PipesOf(event);
        SetPlace(at, "WaitFlag", pipes.destination);
        CheckEventId(id);
        Flag& flag = FlagOf(event, id);
        if (!flag.set) Refuse("deadlock", FlagText(event, id) + " is waited for and never set");
        flag.set = false;
        Lanes& row = known[pipes.destination];
        row = Max(row, flag.snapshot);
    }
    void Barrier(pipe_t which, Site at) {
        if (Faulty("barrier", at)) return;
        SetPlace(at, "PipeBarrier", which);
        ++counters.barriers;
        if (which == PIPE_ALL) {
            for (int p = 0; p < kPipeCount; ++p)
                for (int q = 0; q < kPipeCount; ++q) known[p][q] = clocks[q];
        } else {
            known[which][which] = clocks[which];
        }
    }
    // What a kernel must have cleaned up when it returns.
    void Finish() {
        SetPlace(Site{kernel, 0}, "end of kernel", PIPE_ALL);
        for (int event = 0; event < static_cast<int>(HardEvent::COUNT); ++event) {
            for (int id = 0; id < kEventIds; ++id) {
                const Flag& flag = FlagOf(static_cast<HardEvent>(event), id);
                if (!flag.set) continue;
                site = flag.site;
                Refuse("flag left set", FlagText(static_cast<HardEvent>(event), id) + " was set here and never waited for");
            }
        }
        if (open_tensors != 0)
            Refuse("unbalanced queue", std::to_string(open_tensors) + " tensors were allocated from a queue and never freed");
    }

    // ---- refusals -----------------------------------------------------------------------------------------------
    void SetPlace(Site at, const char* name, pipe_t on) {
        site = at;
        instruction = name;
        pipe = on;
    }
    [[noreturn]] void Refuse(const char* rule, const std::string& text) const {
        const char* slash = std::strrchr(site.file, '/');
        throw Violation(std::string("kernel ") + kernel + ", block " + std::to_string(block) + ", " +
                        (slash ? slash + 1 : site.file) + ":" + std::to_string(site.line) + ", " + instruction + " on pipe " +
                        NameOfPipe(pipe) + ": rule [" + rule + "] " + text);
    }
    [[noreturn]] void RefuseAt(Hardware hardware, uint32_t offset, const char* rule, const std::string& text) const {
        std::string owner;
        for (const Allocation& allocation : allocations) {
            if (allocation.hardware == hardware && offset >= allocation.begin && offset < allocation.end)
                owner = " (byte " + std::to_string(offset - allocation.begin) + " of the buffer made at line " +
                        std::to_string(allocation.site.line) + ")";
        }
        Refuse(rule, std::string(NameOf(hardware)) + " offset " + std::to_string(offset) + owner + ": " + text);
    }

    const ChipSpec& chip;
    const char* kernel = "";
    uint32_t block = 0, blocks = 1;
    Counters counters;
    std::vector<Allocation> allocations;
    std::vector<GmRegion*>* regions = nullptr;
    Meeting* meeting = nullptr;
    std::array<uint8_t, static_cast<int>(HardEvent::COUNT)> event_ids{};   // bit set: handed out by AllocEventID
    int open_tensors = 0;
    int views = 0;
    const Mutation* mutation = nullptr;
    std::set<std::string>* places = nullptr;
    std::array<uint32_t, 8> clocks{};
    Lanes known[kPipeCount] = {};
    uint32_t small_mmad = 0;   // last Mmad too small to be ordered by the cube alone
    pipe_t pipe = PIPE_S;
    Lanes after_write{}, after_read{};
    uint32_t clock = 0;

  private:
    static const char* NameOfPipe(pipe_t pipe) { return AscendC::NameOf(pipe); }
    static bool AnyLane(Lanes lanes) {
        uint64_t words[4];
        std::memcpy(words, &lanes, 32);
        return (words[0] | words[1] | words[2] | words[3]) != 0;
    }
    static Lanes Max(Lanes a, Lanes b) {
        for (int i = 0; i < kPipeCount; ++i) a[i] = std::max(a[i], b[i]);
        return a;
    }
    void CheckEventId(int id) const {
        if (id < 0 || id >= kEventIds) Refuse("event id", "event ids run from 0 to 7, got " + std::to_string(id));
    }
    static std::string FlagText(HardEvent event, int id) { return std::string(PipesOf(event).name) + " id " + std::to_string(id); }
    std::string OrderText(uint32_t other, uint32_t when) const {
        return std::string("nothing orders it after instruction ") + std::to_string(when) + " of pipe " +
               NameOfPipe(static_cast<pipe_t>(other));
    }
    [[noreturn]] void RefuseOrder(Hardware hardware, uint32_t offset, const char* rule, uint32_t other, uint32_t when) const {
        RefuseAt(hardware, offset, rule, OrderText(other, when));
    }
    [[noreturn]] void RefuseGm(const GmRegion& region, uint64_t offset, const char* rule, const std::string& text) const {
        Refuse(rule, std::string("GM tensor ") + region.name + " offset " + std::to_string(offset) + ": " + text);
    }
    template <typename Visit>
    static void ForGmCells(GmRegion& region, uint64_t offset, uint64_t bytes, Visit visit) {
        const uint64_t end = offset + bytes;
        for (uint64_t at = offset & ~uint64_t{31}; at < end; at += 32) {
            const uint64_t first = at < offset ? offset - at : 0, last = std::min<uint64_t>(32, end - at);
            const uint32_t upper = last == 32 ? ~0u : (1u << last) - 1;
            visit(region.cells[at >> 5], at, upper & ~((1u << first) - 1));
        }
    }

    std::array<Memory, 5> memories;
    std::array<Flag, static_cast<int>(HardEvent::COUNT) * kEventIds> flags;
    Site site{"", 0};
    const char* instruction = "";
};

inline thread_local Core* current = nullptr;

}  // namespace sim

inline void RefuseField(int64_t value, int bits) {
    sim::current->Refuse("field width", std::to_string(value) + " does not fit a parameter of " + std::to_string(bits) +
                                            " bits (repeats and strides have limits)");
}

}  // namespace AscendC
