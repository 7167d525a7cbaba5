// Planned: buffers, tasks, copies and products.
#pragma once

namespace vllm_ext {

template <typename Row, int32_t fields>
__aicore__ inline Row ReadRow(const __gm__ int32_t* from) {
    static_assert(sizeof(Row) == fields * sizeof(int32_t), "the host writes this many fields");
    Row row;
    int32_t* to = &reinterpret_cast<int32_t&>(row);
    for (int32_t i = 0; i < fields; ++i) to[i] = from[i];
    return row;
}

__aicore__ inline void Planned::Init(GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR initial, GM_ADDR out,
                                     GM_ADDR final_state, GM_ADDR workspace, GM_ADDR tasks, GM_ADDR block_tasks,
                                     const PrefillShape& shape, GM_ADDR program) {
    shape_ = shape;
    GM_ADDR inputs[7] = {q, k, v, out, g, beta, workspace};
    for (int32_t i = 0; i < 7; ++i) inputs_[i] = inputs[i];
    state_io_.Init(initial, final_state, shape);
    tasks_ = tasks;
    block_tasks_ = reinterpret_cast<__gm__ int32_t*>(block_tasks);
    program_ = reinterpret_cast<__gm__ int32_t*>(program);
    pipe_.InitBuffer(ub_, program_[1]);
    if (program_[2] == 0) return;
    pipe_.InitBuffer(l1_, program_[2]);
    if (program_[3] == 0) return;
    pipe_.InitBuffer(l0a_, program_[3]);
    pipe_.InitBuffer(l0b_, program_[4]);
    pipe_.InitBuffer(l0c_, program_[5]);
}

__aicore__ inline void Planned::Run() {
    const int32_t phases = program_[0], blocks = GetBlockNum();
    for (int32_t index = 0; index < phases; ++index) {
        const PhaseRow phase = ReadRow<PhaseRow, kPhaseFields>(program_ + kHeaderFields + index * kPhaseFields);
        const __gm__ int32_t* bounds = block_tasks_ + index * (blocks + 1) + GetBlockIdx();
        for (int32_t task = bounds[0]; task < bounds[1]; ++task) {
            task_ = ReadTask(tasks_, task);
            const int32_t chunks = phase.recurrent ? task_.token_count / kChunk : 1;
            Settle();
            if (phase.recurrent) state_io_.Load(Ub(phase.state), Scratch(), task_);
            for (int32_t chunk = 0; chunk < chunks; ++chunk) {
                RunChunk(phase);
                task_.token_begin += kChunk;
                task_.gate_begin += kChunk;
            }
            Settle();
            if (phase.recurrent) state_io_.Store(Ub(phase.state), Scratch(), task_);
        }
        if (index + 1 < phases) SyncAll();
    }
}

__aicore__ inline void Planned::RunChunk(const PhaseRow& phase) {
    for (int32_t i = 0; i < phase.count; ++i) {
        const StepRow s = ReadRow<StepRow, kStepFields>(program_ + phase.first + i * kStepFields);
        Settle();
        RunStep(s);
        if (phase.keeps_states && s.code == kStage && s.source == phase.state) StoreState(phase, s);
    }
}

__aicore__ inline void Planned::RunStep(const StepRow& s) {
    if (s.code == kProduct) {
        Product(s);
    } else if (s.code < kCumsum) {
        Move(s);
    } else {
        Vector(s);
    }
}

template <typename T>
__aicore__ inline GlobalTensor<T> Planned::Memory(const StepRow& s) const {
    const int64_t chunk = task_.gate_begin / kChunk;
    int64_t at = 0;
    if (s.memory < 4) {
        const bool keys = s.memory < 2;
        const int64_t heads = keys ? shape_.key_heads : shape_.value_heads, dim = keys ? shape_.key_dim : shape_.value_dim;
        const int64_t head = keys ? task_.head / (shape_.value_heads / shape_.key_heads) : task_.head;
        at = (task_.token_begin * heads + head) * dim + (keys ? 0 : task_.column_begin);
    } else if (s.memory < 6) {
        at = (static_cast<int64_t>(task_.head) * shape_.gate_stride + task_.gate_begin) * s.columns;
    } else {
        at = (s.base + static_cast<int64_t>(task_.head) * s.head_stride + chunk * s.chunk_stride) * (32 / sizeof(T));
        // The tile of the whole head: its rows follow each other within a strip.
        if (s.axis == 1) at += static_cast<int64_t>(task_.column_begin) * s.rows;
        if (s.axis == 0) at += static_cast<int64_t>(task_.column_begin) * kTile;
    }
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(inputs_[s.memory]) + at);
    return tensor;
}

__aicore__ inline DataCopyParams Planned::Bursts(const StepRow& s, bool to_memory) const {
    if (s.axis != 0) return DataCopyParams(1, s.columns / kTile * s.rows * Blocks(s), 0, 0);
    const int32_t gap = (shape_.value_dim - s.rows) * Blocks(s);
    return DataCopyParams(s.columns / kTile, s.rows * Blocks(s), to_memory ? 0 : gap, to_memory ? gap : 0);
}

__aicore__ inline void Planned::Move(const StepRow& s) {
    const int32_t elements = s.rows * s.columns;
    switch (s.code) {
        case kLoadVector:
            DataCopy(Ub(s.destination), Memory<float>(s), elements < 8 ? 8 : elements);
            break;
        case kLoadTile: LoadTile(s); break;
        case kLoadOperand: LoadOperand(s); break;
        case kFetch:
            DataCopy(HalfScratch(), L1(s.source), elements);
            Settle();
            Cast(Ub(s.destination), HalfScratch(), RoundMode::CAST_NONE, elements);
            break;
        case kStage:
            Cast(HalfScratch(), Ub(s.source), RoundMode::CAST_NONE, elements);
            Settle();
            DataCopy(L1(s.destination), HalfScratch(), elements);
            break;
        case kDrain: Drain(Ub(s.destination), L0c(s.source), 0, s.rows / kTile, s.rows / kTile, s.columns / kTile); break;
        case kStoreVector: DataCopy(Memory<float>(s), Ub(s.source), elements < 8 ? 8 : elements); break;
        case kStoreTile: StoreTile(s); break;
        default: StoreOutput(s);
    }
}

// To NZ float: rows of the caller's tensors become strips in the copy.
__aicore__ inline void Planned::LoadTile(const StepRow& s) {
    const int32_t strips = s.columns / kTile;
    if (s.memory == 4) {
        for (int32_t strip = 0; strip < strips; ++strip)
            DataCopy(Ub(s.destination)[At(strip, 0, s.rows)], Memory<float>(s)[strip * kTile],
                     DataCopyParams(s.rows, 2, (strips - 1) * 2, 0));
        return;
    }
    if (!s.is_half) {
        DataCopy(Ub(s.destination), Memory<float>(s), Bursts(s, false));
        return;
    }
    if (s.memory < 4) {
        const int32_t width = s.memory < 2 ? shape_.key_heads * shape_.key_dim : shape_.value_heads * shape_.value_dim;
        for (int32_t strip = 0; strip < strips; ++strip)
            DataCopy(HalfScratch()[At(strip, 0, s.rows)], Memory<half>(s)[strip * kTile],
                     DataCopyParams(s.rows, 1, width / kTile - 1, 0));
    } else {
        DataCopy(HalfScratch(), Memory<half>(s), Bursts(s, false));
    }
    Settle();
    Cast(Ub(s.destination), HalfScratch(), RoundMode::CAST_NONE, s.rows * s.columns);
}

// To L1: halves directly, floats by way of UB, 16 KiB at a time.
__aicore__ inline void Planned::LoadOperand(const StepRow& s) {
    if (s.memory < 4) {
        const int32_t width = s.memory < 2 ? shape_.key_heads * shape_.key_dim : shape_.value_heads * shape_.value_dim;
        DataCopy(L1(s.destination), Memory<half>(s), Nd2NzParams(1, s.rows, s.columns, 0, width, s.rows, 1, 0));
        return;
    }
    if (s.is_half) {
        DataCopy(L1(s.destination), Memory<half>(s), Bursts(s, false));
        return;
    }
    constexpr int32_t piece = 4096;
    for (int32_t done = 0; done < s.rows * s.columns; done += piece) {
        const HalfTile rounded = HalfScratch()[piece * 2];
        Settle();
        DataCopy(Scratch(), Memory<float>(s)[done], piece);
        Settle();
        Cast(rounded, Scratch(), RoundMode::CAST_NONE, piece);
        Settle();
        DataCopy(L1(s.destination)[done], rounded, piece);
    }
}

__aicore__ inline void Planned::StoreTile(const StepRow& s) {
    if (!s.is_half) {
        DataCopy(Memory<float>(s), Ub(s.source), Bursts(s, true));
        return;
    }
    Cast(HalfScratch(), Ub(s.source), RoundMode::CAST_NONE, s.rows * s.columns);
    Settle();
    DataCopy(Memory<half>(s), HalfScratch(), Bursts(s, true));
}

__aicore__ inline void Planned::StoreOutput(const StepRow& s) {
    NzToRows(HalfScratch(), Ub(s.source), s.rows, s.columns / kTile);
    Settle();
    DataCopy(Memory<half>(s), HalfScratch(),
             DataCopyParams(s.rows, s.columns / kTile, 0, (shape_.value_heads * shape_.value_dim - s.columns) / kTile));
}

// The state ahead of a chunk, rounded for its products a moment ago, for a later kernel.
__aicore__ inline void Planned::StoreState(const PhaseRow& phase, const StepRow& s) {
    StepRow to = s;
    to.memory = 6;
    to.base = phase.states_base;
    to.head_stride = phase.states_head_stride;
    to.chunk_stride = phase.states_chunk_stride;
    to.axis = 0;
    to.is_half = 1;
    DataCopy(Memory<half>(to), HalfScratch(), Bursts(to, true));
}

__aicore__ inline void Planned::Product(const StepRow& s) {
    const HalfTile left = l0a_.Get<half>()[s.left / 2], right = l0b_.Get<half>()[s.right / 2];
    if (s.flags & kLoadLeftOperand) {
        if (s.flags & kTransposeLeft) {
            LoadLeftTransposed(left, L1(s.source), s.m, s.k);
        } else {
            LoadLeft(left, L1(s.source), s.m, s.k, s.m);
        }
    }
    if (s.flags & kLoadRightOperand) {
        if (s.flags & kTransposeRight) {
            LoadRightTransposed(right, L1(s.second), s.k, s.n);
        } else {
            LoadRight(right, L1(s.second), s.k, s.n);
        }
    }
    Settle();
    Multiply(L0c(s.destination), left, right, s.m, s.n, s.k);
}

}  // namespace vllm_ext
