// Where the blocks of a launch wait for each other.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace AscendC {
namespace sim {

// The last block to arrive makes a new beginning for global memory.
class Meeting {
  public:
    Meeting(uint32_t blocks, std::function<void()> begin) : blocks_(blocks), begin_(std::move(begin)) {}
    // False when some block will never arrive.
    bool Arrive() {
        std::unique_lock<std::mutex> lock(mutex_);
        const uint32_t round = round_;
        broken_ |= left_ > 0;
        if (++arrived_ == blocks_) {
            begin_();
            arrived_ = 0;
            ++round_;
        }
        changed_.notify_all();
        changed_.wait(lock, [&] { return round_ != round || broken_; });
        return round_ != round;
    }
    // A block that fails, or ends, arrives no more.
    void Leave() {
        std::lock_guard<std::mutex> lock(mutex_);
        ++left_;
        broken_ |= arrived_ > 0;
        changed_.notify_all();
    }

  private:
    const uint32_t blocks_;
    const std::function<void()> begin_;
    std::mutex mutex_;
    std::condition_variable changed_;
    uint32_t arrived_ = 0, left_ = 0, round_ = 0;
    bool broken_ = false;
};

}  // namespace sim
}  // namespace AscendC
