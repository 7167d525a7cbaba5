#include "launch_table.h"

#include <c10/util/Exception.h>

#include <iterator>

namespace vllm_ext {
namespace {

struct TaskView {
    int64_t token_begin, token_count, sequence, head, column_begin, column_count, gate_begin;
    explicit TaskView(const int32_t* f)
        : token_begin(f[0]), token_count(f[1]), sequence(f[2]), head(f[3]), column_begin(f[4]), column_count(f[5]),
          gate_begin(f[6]) {}
};

uint32_t ColumnBits(const TaskView& task) {
    return ((1u << (task.column_count / kTileColumns)) - 1u) << (task.column_begin / kTileColumns);
}

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

    // Before anything is sized by the number of sequences, which a caller may have wrong.
    if (sizes.sequences > count / sizes.value_heads)
        Refuse(std::to_string(count) + " tasks cannot cover " + std::to_string(sizes.value_heads) + " heads of " +
               std::to_string(sizes.sequences) + " sequences");

    std::vector<std::vector<const int32_t*>> tasks_of(kPhases);
    int64_t expected_start = 0;
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
        for (int32_t index = starts.front(); index < starts.back(); ++index)
            tasks_of[phase].push_back(rows + index * kTaskFields);
        phases_.push_back(phase);
        blocks_.push_back(blocks);
        starts_.push_back(std::move(starts));
        needs_workspace_ |= phase != kWhole;
    }
    if (expected_start != count) Refuse(std::to_string(count - expected_start) + " tasks belong to no launch");
    if (!InOrder(phases_)) Refuse("launches must be: whole heads; or map, reduce, output; or whole heads and then these");
    std::vector<const int32_t*> recurrent = tasks_of[kWhole];
    recurrent.insert(recurrent.end(), tasks_of[kReduce].begin(), tasks_of[kReduce].end());
    const std::vector<Range> ranges = CheckCoverage(recurrent);
    if (!needs_workspace_) return;
    const std::vector<uint32_t> reduced = UnitsOf(kReduce, tasks_of[kReduce], ranges);
    const std::vector<uint32_t> mapped = UnitsOf(kMap, tasks_of[kMap], ranges);
    const std::vector<uint32_t> written = UnitsOf(kOutput, tasks_of[kOutput], ranges);
    for (size_t unit = 0; unit < reduced.size(); ++unit) {
        const bool same = written[unit] == reduced[unit] && mapped[unit] == (reduced[unit] ? AllColumns() : 0);
        if (!same) Refuse("map, reduce and output must cover the same chunks and columns of each head");
    }
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

uint32_t LaunchTable::AllColumns() const { return (1u << (sizes_.value_dim / kTileColumns)) - 1u; }

// Every column of every head of every sequence once, over that sequence's tokens; every token and gate in one sequence.
std::vector<LaunchTable::Range> LaunchTable::CheckCoverage(const std::vector<const int32_t*>& tasks) const {
    std::vector<uint32_t> columns(sizes_.sequences * sizes_.value_heads, 0);
    std::vector<Range> ranges(sizes_.sequences, Range{-1, 0, 0});
    for (const int32_t* fields : tasks) {
        const TaskView task(fields);
        const Range range{task.token_begin, task.token_count, task.gate_begin};
        if (ranges[task.sequence].token_begin < 0) ranges[task.sequence] = range;
        if (!(ranges[task.sequence] == range))
            Refuse("sequence " + std::to_string(task.sequence) + " has two different token ranges");
        uint32_t& done = columns[task.sequence * sizes_.value_heads + task.head];
        const uint32_t bits = ColumnBits(task);
        if (done & bits)
            Refuse("head " + std::to_string(task.head) + " of sequence " + std::to_string(task.sequence) +
                   " has columns twice");
        done |= bits;
    }
    const uint32_t all = AllColumns();
    const int64_t missing = std::count_if(columns.begin(), columns.end(), [&](uint32_t done) { return done != all; });
    if (missing) Refuse(std::to_string(missing) + " of " + std::to_string(columns.size()) + " heads lack columns");

    std::vector<Range> filled;
    std::copy_if(ranges.begin(), ranges.end(), std::back_inserter(filled), [](const Range& r) { return r.token_count > 0; });
    std::sort(filled.begin(), filled.end(), [](const Range& a, const Range& b) { return a.token_begin < b.token_begin; });
    int64_t tokens = 0;
    for (const Range& range : filled) {
        if (range.token_begin != tokens)
            Refuse("sequences must follow each other without gap or overlap, one begins at token " +
                   std::to_string(range.token_begin) + " and not " + std::to_string(tokens));
        tokens += range.token_count;
    }
    if (tokens != sizes_.tokens)
        Refuse("sequences have " + std::to_string(tokens) + " tokens of " + std::to_string(sizes_.tokens));
    std::sort(filled.begin(), filled.end(), [](const Range& a, const Range& b) { return a.gate_begin < b.gate_begin; });
    int64_t free_gate = 0;
    for (const Range& range : filled) {
        if (range.gate_begin < free_gate)
            Refuse("two sequences share gates from " + std::to_string(range.gate_begin));
        free_gate = range.gate_begin + Padded(range.token_count);
    }
    return ranges;
}

// The columns that a phase of chunk-head-chunk covers of each chunk of each head, each once; a map covers all.
std::vector<uint32_t> LaunchTable::UnitsOf(int32_t phase, const std::vector<const int32_t*>& tasks,
                                           const std::vector<Range>& ranges) const {
    const int64_t chunks = sizes_.gate_stride / kChunkTokens;
    std::vector<uint32_t> units(sizes_.value_heads * chunks, 0);
    for (const int32_t* fields : tasks) {
        const TaskView task(fields);
        const Range& range = ranges[task.sequence];
        const int64_t offset = task.token_begin - range.token_begin, left = range.token_count - offset - task.token_count;
        const bool whole_chunks = offset % kChunkTokens == 0 && (left == 0 || task.token_count % kChunkTokens == 0);
        if (offset < 0 || left < 0 || !whole_chunks || task.gate_begin != range.gate_begin + offset)
            Refuse("phase " + std::to_string(phase) + ": tokens " + std::to_string(task.token_begin) + "+" +
                   std::to_string(task.token_count) + ", gates from " + std::to_string(task.gate_begin) +
                   ", are not whole chunks of sequence " + std::to_string(task.sequence));
        const uint32_t bits = phase == kMap ? AllColumns() : ColumnBits(task);
        const int64_t first = task.head * chunks + task.gate_begin / kChunkTokens;
        for (int64_t unit = first; unit < first + Padded(task.token_count) / kChunkTokens; ++unit) {
            if (units[unit] & bits)
                Refuse("phase " + std::to_string(phase) + " has a chunk of head " + std::to_string(task.head) + " twice");
            units[unit] |= bits;
        }
    }
    return units;
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
