// The host side: a session owns the GM tensors, launches kernels block by block, and reports counters and violations.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "chip_table.h"
#include "kernel_operator.h"

namespace AscendC {
namespace sim {

using KernelBody = void (*)(const GM_ADDR* arguments);

inline std::map<std::string, KernelBody>& Kernels() {
    static std::map<std::string, KernelBody> table;
    return table;
}
struct Registration {
    Registration(const char* name, KernelBody body) { Kernels()[name] = body; }
};

class Session {
  public:
    Session(const ChipSpec& chip, int threads) : chip_(chip), threads_(std::max(1, threads)) {}

    // Known to every later launch; `written` says that an output or workspace already holds data.
    void AddRegion(const char* name, void* begin, uint64_t size, int mode, bool written) {
        auto region = std::make_unique<GmRegion>();
        names_.push_back(std::make_unique<std::string>(name));
        region->name = names_.back()->c_str();
        region->begin = static_cast<uint8_t*>(begin);
        region->size = size;
        region->mode = static_cast<GmMode>(mode);
        if (region->mode != GmMode::kInput) {
            region->cells.resize((size + 31) / 32);
            std::memset(static_cast<void*>(region->cells.data()), 0, region->cells.size() * sizeof(Cell));
            for (Cell& cell : region->cells) cell.written = written ? ~0u : 0u;
        }
        pointers_.push_back(region.get());
        regions_.push_back(std::move(region));
    }

    void Launch(const char* kernel, KernelBody body, uint32_t blocks, const GM_ADDR* arguments) {
        NewBeginning();
        // Blocks that fit the chip's cores run at once if the host lets them, so that they can wait for each other.
        const bool together = blocks <= chip_.cores;
        Meeting meeting(blocks, [this] { NewBeginning(); });
        std::atomic<uint32_t> next{0};
        std::mutex lock;
        std::string failure;
        auto work = [&] {
            auto core = std::make_unique<Core>(chip_);
            core->regions = &pointers_;
            core->meeting = together && cooperative_ ? &meeting : nullptr;
            core->mutation = mutation_.kind.empty() ? nullptr : &mutation_;
            core->places = watch_places_ ? &places_ : nullptr;
            current = core.get();
            for (uint32_t block = next++; block < blocks; block = next++) {
                core->Reset(kernel, block, blocks);
                try {
                    body(arguments);
                    core->Finish();
                } catch (const Violation& violation) {
                    std::lock_guard<std::mutex> guard(lock);
                    if (failure.empty()) failure = violation.what();
                    next = blocks;
                }
                if (cooperative_) meeting.Leave();
                std::lock_guard<std::mutex> guard(lock);
                counters_.Merge(core->counters);
            }
            current = nullptr;
        };
        std::vector<std::thread> pool;
        const int threads = cooperative_ ? static_cast<int>(blocks) : threads_;
        for (int i = 1; i < std::min<int>(threads, static_cast<int>(blocks)); ++i) pool.emplace_back(work);
        work();
        for (auto& thread : pool) thread.join();
        ++launches_;
        if (!failure.empty()) throw Violation(failure);
    }
    // Run the blocks of the launches to come at once, each on a thread of its own, so that they may wait for each other.
    void Cooperate() { cooperative_ = true; }

    // Plant a fault in the launches to come.
    void Mutate(const char* kind, const char* file, int place) { mutation_ = {kind, file, place}; }
    // Note where faults could be planted; for one thread.
    void WatchPlaces() {
        watch_places_ = true;
        threads_ = 1;
    }
    std::string Places() const {
        std::string text;
        for (const std::string& place : places_) text += place + "\n";
        return text;
    }

    // Every byte of every output must have been written by now.
    void CheckOutputs() const {
        for (const auto& region : regions_) {
            if (region->mode != GmMode::kOutput) continue;
            for (uint64_t i = 0; i < region->cells.size(); ++i) {
                const uint64_t rest = region->size - i * 32;
                const uint32_t wanted = rest >= 32 ? ~0u : (1u << rest) - 1;
                if ((region->cells[i].written & wanted) != wanted)
                    throw Violation(std::string("rule [output] GM tensor ") + region->name + " offset " +
                                    std::to_string(i * 32) + ": never written by any launch");
            }
        }
    }
    const Counters& counters() const { return counters_; }

  private:
    // A launch, or a barrier of all its blocks, waits for everything before it.
    void NewBeginning() {
        for (auto& region : regions_) {
            for (Cell& cell : region->cells) {
                cell.read = Lanes{};
                cell.clock = cell.pipe = cell.block = cell.reader = cell.launch = 0;
            }
        }
    }

    const ChipSpec& chip_;
    int threads_;
    int launches_ = 0;
    std::vector<std::unique_ptr<GmRegion>> regions_;
    std::vector<std::unique_ptr<std::string>> names_;
    std::vector<GmRegion*> pointers_;
    Counters counters_;
    Mutation mutation_;
    bool watch_places_ = false, cooperative_ = false;
    std::set<std::string> places_;
};

}  // namespace sim
}  // namespace AscendC

#define VLLM_EXT_REGISTER(NAME, BODY) static ::AscendC::sim::Registration registration_##NAME(#NAME, BODY)
