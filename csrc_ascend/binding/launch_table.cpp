#include "launch_table.h"

#include <c10/util/Exception.h>

namespace vllm_ext {
namespace {

struct TaskView {
    int64_t token_begin, token_count, sequence, head, column_begin, column_count, gate_begin;
    explicit TaskView(const int32_t* f)
        : token_begin(f[0]), token_count(f[1]), sequence(f[2]), head(f[3]), column_begin(f[4]), column_count(f[5]),
          gate_begin(f[6]) {}
};

int64_t Padded(int64_t tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens * kChunkTokens; }

// The order in which launches may follow each other: whole heads, then the three parts of chunk-head-chunk.
bool InOrder(const std::vector<int32_t>& phases) {
    static const std::vector<std::vector<int32_t>> allowed = {
        {kWhole}, {kMap, kReduce, kOutput}, {kWhole, kMap, kReduce, kOutput}};
    return std::find(allowed.begin(), allowed.end(), phases) != allowed.end();
}

}  // namespace

LaunchTable::LaunchTable(const std::string& where, const PrefillCall& call, const Sizes& sizes)
    : where_(where), sizes_(sizes) {
    const at::Tensor &tasks = call.tasks, &launches = call.launches;
    for (const at::Tensor* table : {&tasks, &launches}) {
        if (!table->device().is_cpu() || table->scalar_type() != at::kInt || table->dim() != 2 || !table->is_contiguous())
            Refuse("tasks and launches must be contiguous int32 matrices on the CPU");
    }
    if (tasks.size(1) != kTaskFields || launches.size(1) < 4 || launches.size(0) < 1)
        Refuse("tasks must have " + std::to_string(kTaskFields) + " columns, launches at least one row and 4 columns");
    const int32_t* rows = tasks.const_data_ptr<int32_t>();
    const int64_t count = tasks.size(0), width = launches.size(1);
    tasks_.assign(rows, rows + tasks.numel());
    for (int64_t index = 0; index < count; ++index) CheckTask(rows + index * kTaskFields, index);

    std::vector<const int32_t*> recurrent;
    std::vector<int64_t> mapped(2, 0);
    int64_t reduced = 0, expected_start = 0;
    for (int64_t launch = 0; launch < launches.size(0); ++launch) {
        const int32_t* row = launches.const_data_ptr<int32_t>() + launch * width;
        const int32_t phase = row[0], blocks = row[1];
        if (phase < 0 || phase >= kPhases || blocks < 1 || blocks > width - 3)
            Refuse("launch " + std::to_string(launch) + " has phase " + std::to_string(phase) + " and " +
                   std::to_string(blocks) + " blocks; phases are 0 to 3, and a row holds " + std::to_string(width - 3) +
                   " blocks");
        std::vector<int32_t> starts(row + 2, row + 2 + blocks + 1);
        if (starts.front() != expected_start || starts.back() > count || !std::is_sorted(starts.begin(), starts.end()))
            Refuse("launch " + std::to_string(launch) + ": block starts must rise through the " + std::to_string(count) +
                   " tasks without a gap");
        expected_start = starts.back();
        for (int32_t index = starts.front(); index < starts.back(); ++index) {
            const int32_t* fields = rows + index * kTaskFields;
            const TaskView task(fields);
            if (phase == kWhole || phase == kReduce) recurrent.push_back(fields);
            if (phase == kReduce) reduced += task.token_count * task.column_count;
            if (phase == kMap) mapped[0] += task.token_count * sizes.value_dim;
            if (phase == kOutput) mapped[1] += task.token_count * task.column_count;
        }
        phases_.push_back(phase);
        blocks_.push_back(blocks);
        starts_.push_back(std::move(starts));
        needs_workspace_ |= phase != kWhole;
    }
    if (expected_start != count) Refuse(std::to_string(count - expected_start) + " tasks belong to no launch");
    if (!InOrder(phases_)) Refuse("launches must be: whole heads; or map, reduce, output; or whole heads and then these");
    if (mapped[0] != reduced || mapped[1] != reduced)
        Refuse("map, reduce and output must cover the same tokens and columns, got " + std::to_string(mapped[0]) + ", " +
               std::to_string(reduced) + ", " + std::to_string(mapped[1]));
    CheckCoverage(recurrent);
}

void LaunchTable::Refuse(const std::string& reason) const { TORCH_CHECK_VALUE(false, where_, ": launch table: ", reason); }

void LaunchTable::CheckTask(const int32_t* fields, int64_t index) const {
    const TaskView task(fields);
    const bool tokens = task.token_begin >= 0 && task.token_count >= 0 && task.token_begin + task.token_count <= sizes_.tokens;
    const bool place = task.sequence >= 0 && task.sequence < sizes_.sequences && task.head >= 0 && task.head < sizes_.value_heads;
    const bool columns = task.column_begin >= 0 && task.column_count > 0 && task.column_begin % kTileColumns == 0 &&
                         task.column_count % kTileColumns == 0 && task.column_begin + task.column_count <= sizes_.value_dim;
    const bool gates = task.gate_begin >= 0 && task.gate_begin % kChunkTokens == 0 &&
                       task.gate_begin + Padded(task.token_count) <= sizes_.gate_stride;
    if (tokens && place && columns && gates) return;
    Refuse("task " + std::to_string(index) + " (tokens " + std::to_string(task.token_begin) + "+" +
           std::to_string(task.token_count) + ", sequence " + std::to_string(task.sequence) + ", head " +
           std::to_string(task.head) + ", columns " + std::to_string(task.column_begin) + "+" +
           std::to_string(task.column_count) + ", gates from " + std::to_string(task.gate_begin) + ") lies outside " +
           std::to_string(sizes_.tokens) + " tokens, " + std::to_string(sizes_.sequences) + " sequences, " +
           std::to_string(sizes_.value_heads) + " heads, " + std::to_string(sizes_.value_dim) + " columns or " +
           std::to_string(sizes_.gate_stride) + " gates");
}

// Every column of every head of every sequence once, over that sequence's tokens; all tokens in some sequence.
void LaunchTable::CheckCoverage(const std::vector<const int32_t*>& tasks) const {
    std::vector<uint32_t> columns(sizes_.sequences * sizes_.value_heads, 0);
    std::vector<int64_t> begin(sizes_.sequences, -1), length(sizes_.sequences, 0);
    for (const int32_t* fields : tasks) {
        const TaskView task(fields);
        if (begin[task.sequence] < 0) {
            begin[task.sequence] = task.token_begin;
            length[task.sequence] = task.token_count;
        }
        if (begin[task.sequence] != task.token_begin || length[task.sequence] != task.token_count)
            Refuse("sequence " + std::to_string(task.sequence) + " has two different token ranges");
        const int64_t first = task.column_begin / kTileColumns, tiles = task.column_count / kTileColumns;
        const uint32_t bits = ((1u << tiles) - 1u) << first;
        uint32_t& done = columns[task.sequence * sizes_.value_heads + task.head];
        if (done & bits)
            Refuse("head " + std::to_string(task.head) + " of sequence " + std::to_string(task.sequence) +
                   " has columns twice");
        done |= bits;
    }
    const uint32_t all = (1u << (sizes_.value_dim / kTileColumns)) - 1u;
    const int64_t missing = std::count_if(columns.begin(), columns.end(), [&](uint32_t done) { return done != all; });
    if (missing) Refuse(std::to_string(missing) + " of " + std::to_string(columns.size()) + " heads lack columns");
    int64_t tokens = 0;
    for (int64_t sequence = 0; sequence < sizes_.sequences; ++sequence) tokens += length[sequence];
    if (tokens != sizes_.tokens)
        Refuse("sequences have " + std::to_string(tokens) + " tokens of " + std::to_string(sizes_.tokens));
}

PackedTable LaunchTable::Pack(const std::vector<int32_t>& shape) const {
    PackedTable packed;
    packed.fields = tasks_;
    for (int64_t launch = 0; launch < launches(); ++launch) {
        packed.starts_at.push_back(static_cast<int64_t>(packed.fields.size()));
        packed.fields.insert(packed.fields.end(), starts_[launch].begin(), starts_[launch].end());
        packed.shape_at.push_back(static_cast<int64_t>(packed.fields.size()));
        packed.fields.insert(packed.fields.end(), shape.begin(), shape.end());
        packed.fields.back() = phases_[launch];
    }
    return packed;
}

}  // namespace vllm_ext
