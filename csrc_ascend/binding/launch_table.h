// The launch table of a call: which tasks each block of each launch works through.
#pragma once
#include <algorithm>

#include "prefill.h"

namespace vllm_ext {

struct Sizes {
    int64_t tokens, key_heads, value_heads, key_dim, value_dim, gate_stride, sequences;
};

// Everything the kernels read as scalars, int32: the tasks, then of each launch its block starts and its shape.
struct PackedTable {
    std::vector<int32_t> fields;
    std::vector<int64_t> starts_at, shape_at;   // of each launch
};

class LaunchTable {
  public:
    // Raises ValueError for a table that would read or write out of bounds, twice, or not everywhere.
    LaunchTable(const std::string& where, const PrefillCall& call, const Sizes& sizes);

    bool needs_workspace() const { return needs_workspace_; }
    int64_t launches() const { return static_cast<int64_t>(phases_.size()); }
    int32_t blocks(int64_t launch) const { return blocks_[launch]; }
    int32_t most_blocks() const { return *std::max_element(blocks_.begin(), blocks_.end()); }

    // `shape` are the kernels' sizes and options; the last of them is the launch's phase and is set here.
    PackedTable Pack(const std::vector<int32_t>& shape) const;

  private:
    // Of a sequence: its tokens, and where its gates begin.
    struct Range {
        int64_t token_begin, token_count, gate_begin;
        bool operator==(const Range& other) const {
            return token_begin == other.token_begin && token_count == other.token_count && gate_begin == other.gate_begin;
        }
    };

    void CheckTask(const int32_t* task, int64_t index) const;
    std::vector<Range> CheckCoverage(const std::vector<const int32_t*>& tasks) const;
    std::vector<uint32_t> UnitsOf(int32_t phase, const std::vector<const int32_t*>& tasks,
                                  const std::vector<Range>& ranges) const;
    uint32_t AllColumns() const;
    void Refuse(const std::string& reason) const;

    std::string where_;
    Sizes sizes_;
    std::vector<int32_t> tasks_, phases_, blocks_;
    std::vector<std::vector<int32_t>> starts_;
    bool needs_workspace_ = false;
};

}  // namespace vllm_ext
