"""`recurrence_kernel` for compute capability 9.0 in Gluon: the same arithmetic, with products left in flight.

Tiles come by the copy engine (TMA), STAGES chunks ahead. The order of products keeps the tensor cores busy while the
other units work on what the last one gave: a chunk's K S and Q S are started as soon as the state before it is known,
before the output of the chunk before is taken out of its registers.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_ext.ops.linear_attention.triton.hopper import (
    await_launches,
    exp2,
    let_dependents_launch,
    narrowed,
    sequence_of_slot,
    times,
    to_half,
    zero_past,
)
from vllm_ext.ops.linear_attention.triton.recurrence_feed_hopper import produce, room_for_state, score

# One compiled kernel serves every count.
_UNSPECIALIZED = [
    "num_sequences",
    "num_tokens",
    "value_heads",
    "heads_a_key",
    "segment_chunks",
    "first_slot",
    "end_slot",
]


@gluon.jit
def _consume(tiles, descriptors, barriers, pointers, place, group: gl.constexpr, p: gl.constexpr):
    """Carry 64 columns of a head's state through its chunks, on four warps."""
    k_tiles, q_tiles, v_tiles, solve_tiles, weight_tiles, tail_tiles, factor_tiles, o_tiles = tiles
    states = descriptors[8]
    ready, free, scored = barriers
    initial_state, carries, final_state, o_pointer, own, carry = pointers
    start, stop, begin, length, _, head, value_heads, _, first_column, with_values, segment, _ = place
    K: gl.constexpr = p[0]
    V: gl.constexpr = p[1]
    GROUPS: gl.constexpr = p[2]
    KDA: gl.constexpr = p[3]
    TRANSITION: gl.constexpr = p[4]
    V_FIRST: gl.constexpr = p[5]
    STAGES: gl.constexpr = p[6]
    PART: gl.constexpr = p[7]
    SCORED: gl.constexpr = p[9]
    FACTORS: gl.constexpr = K if KDA else 256
    dtype: gl.constexpr = k_tiles.dtype
    rows_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    state_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows_layout, 2)
    left_state: gl.constexpr = gl.DotOperandLayout(0, state_layout, 2)
    per_row: gl.constexpr = gl.SliceLayout(0, rows_layout)
    per_key: gl.constexpr = gl.SliceLayout(0, state_layout)
    per_column: gl.constexpr = gl.SliceLayout(1, state_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    column = first_column + 64 * group + gl.arange(0, 64, per_column)
    key = gl.arange(0, K, per_key)
    at_state = column[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + column[:, None]
    at_carry = carry + column[:, None] * K + key[None, :]
    state = gl.zeros([64, K], gl.float32, state_layout)
    if states is not None:
        mbarrier.wait(ready.index(STAGES), 0)
        state = room_for_state(tiles, states, group, K).load(state_layout)
        gl.thread_barrier()
    elif carries is None:
        # An initial state is older than the launches before this one.
        if initial_state is not None:
            state = gl.load(initial_state + own + at_state).to(gl.float32)
        if PART:
            await_launches()
            if start > 0:
                state = gl.load(final_state + own + at_state)
    elif segment == 0:
        if initial_state is not None:
            state = gl.load(initial_state + own + at_state).to(gl.float32)
    elif TRANSITION:
        state = gl.where(column[:, None] == key[None, :] + V, 1.0, 0.0)
    else:
        await_launches()
        state = gl.load(carries + at_carry)
    zero_rows = gl.zeros([64, 64], gl.float32, rows_layout)
    answer = gl.zeros([64, 64], dtype, rows_layout)
    narrow = gl.convert_layout(narrowed(state, dtype), left)
    for later in gl.static_range(1, STAGES):
        mbarrier.expect(free.index(later), 0)
    o_tile = o_tiles.index(group)
    value_column = head * V + first_column + 64 * group
    gl.thread_barrier()
    for step in range(stop - start):
        stage = step % STAGES
        keys = k_tiles.index(stage)
        values = v_tiles.index(stage * GROUPS + group)
        left_over = length - (start + step) * 64
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if left_over < 64:
            # What stands past the sequence's end is the next one's; 0 times its NaN would be NaN.
            if not KDA and group == 0:
                zero_past(keys, left_over, 64, K)
            if with_values:
                zero_past(values, left_over, 64, 64)
            fence_async_shared()
            gl.thread_barrier()
            if not KDA and GROUPS > 1:
                if group == 0:
                    mbarrier.expect(free.index(STAGES), 0)
                else:
                    mbarrier.wait(free.index(STAGES), 0)
        read = warpgroup_mma(narrow, keys.permute((1, 0)), zero_rows, use_acc=False, is_async=True)
        if not TRANSITION and step > 0:
            # That the output before the last one has left.
            mbarrier.wait(ready.index(STAGES + 1), step & 1)
        vector = factor_tiles.index(stage)._reinterpret(gl.float32, [FACTORS], plain)
        if KDA:
            decay = vector.load(per_key)[None, :]
        else:
            of_k = vector.slice(0, 64).load(per_row)[None, :]
            if SCORED:
                decay = exp2(vector.slice(255, 1).load(per_column))[:, None]
            else:
                decay = vector.slice(192, 64).load(per_column)[:, None]
        if SCORED:
            # Here: later the assembler has no registers for it, and lets no product stay in flight.
            mbarrier.wait(scored.index(stage), (step // STAGES) & 1)
        rest = zero_rows
        if with_values:
            rest = values.permute((1, 0)).load(rows_layout).to(gl.float32)
        if not TRANSITION:
            o_tile.permute((1, 0)).store(answer)
        gl.thread_barrier()
        if not TRANSITION and step > 0:
            mbarrier.expect(free.index((step - 1) % STAGES), 0)
        read, narrow = warpgroup_mma_wait(0, [read, narrow])
        rest = rest - read if KDA else rest - read * of_k
        rest = gl.convert_layout(to_half(rest), left)
        solve = solve_tiles.index(stage).permute((1, 0))
        delta = warpgroup_mma(rest, solve, zero_rows, use_acc=False, is_async=True)
        if not TRANSITION:
            queries = q_tiles.index(stage).permute((1, 0))
            asked = warpgroup_mma(narrow, queries, zero_rows, use_acc=False, is_async=True)
        if not KDA:
            tail = vector.slice(128, 64).load(per_row)[None, :]
        state = times(state, decay)
        delta, rest = warpgroup_mma_wait(0 if TRANSITION else 1, [delta, rest])
        if KDA:
            added = gl.convert_layout(narrowed(delta, dtype), left_state)
            grown = warpgroup_mma(added, tail_tiles.index(stage), state, is_async=True)
        else:
            added = gl.convert_layout(narrowed(delta * tail, dtype), left_state)
            grown = warpgroup_mma(added, keys, state, is_async=True)
        if TRANSITION:
            state, added = warpgroup_mma_wait(0, [grown, added])
            narrow = gl.convert_layout(narrowed(state, dtype), left)
            gl.thread_barrier()
            mbarrier.expect(free.index(stage), 0)
        else:
            weighted = gl.convert_layout(narrowed(delta, dtype), left)
            weights = weight_tiles.index(stage).permute((1, 0))
            if not KDA:
                of_q = vector.slice(64, 64).load(per_row)[None, :]
                asked, narrow = warpgroup_mma_wait(1, [asked, narrow])
                asked = times(asked, of_q)
            within = warpgroup_mma(weighted, weights, asked, is_async=True)
            if KDA:
                state, added, narrow = warpgroup_mma_wait(1, [grown, added, narrow])
            else:
                state, added = warpgroup_mma_wait(1, [grown, added])
            narrow = gl.convert_layout(narrowed(state, dtype), left)
            within, weighted = warpgroup_mma_wait(0, [within, weighted])
            answer = narrowed(within, dtype)
    if TRANSITION:
        gl.store(carries + at_carry, state)
    else:
        if stop > start:
            if stop > start + 1:
                mbarrier.wait(ready.index(STAGES + 1), (stop - start) & 1)
            o_tile.permute((1, 0)).store(answer)
            gl.thread_barrier()
            row = (stop - 1) * 64 + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
            at = gl.arange(0, 64, gl.SliceLayout(0, out_layout)) + value_column
            at_o = (begin + row)[:, None].to(gl.int64) * (value_heads * V) + at[None, :]
            gl.store(o_pointer + at_o, o_tile.load(out_layout), mask=(row < length)[:, None])
        if final_state is not None and (PART or stop >= (length + 63) // 64):
            gl.store(final_state + own + at_state, state)


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def recurrence_hopper_kernel(
    k,
    q,
    v,
    tails,
    inverse,
    scores,
    factors,
    o,
    states,
    initial_state,
    carries,
    final_state,
    o_pointer,
    cu_seqlens,
    num_sequences,
    num_tokens,
    value_heads,
    heads_a_key,
    segment_chunks,
    first_slot,
    end_slot,
    scale,
    K: gl.constexpr,
    V: gl.constexpr,
    GROUPS: gl.constexpr,
    KDA: gl.constexpr,
    TRANSITION: gl.constexpr,
    V_FIRST: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
):
    """Arguments as `recurrence_kernel`, for blocks of 64 GROUPS columns, tiles by descriptors: k, q [tokens, heads K]
    (KDA: k, q, tails [slots heads 64, K]), v and o [tokens, heads V], inverse and scores [slots heads 64, 64], factors
    [slots heads, 256] (KDA: [.., K]); states, if the copy engine is to bring the initial ones, [sequences heads V, K]
    in FP32, for which it takes three STAGES. Without scores (of GDN, 128 columns) they are made here, and the fourth
    row of factors has the sums of gates. A PART of a call has the chunks of slots first_slot to end_slot, and the
    states of sequences that began before stand in final_state.
    """
    if TRANSITION:
        # Whoever depends on this launch may then take the chunks for complete.
        await_launches()
    let_dependents_launch()
    dtype: gl.constexpr = v.dtype
    FACTORS: gl.constexpr = K if KDA else 256
    SCORED: gl.constexpr = scores is None
    # The last ones are no stage's: that initial states have arrived, that outputs have left, and that keys past a
    # sequence's end, which one group zeroes for all, are zeroed. A barrier in memory of its own that no group asked for
    # would lie within a tile.
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    if states is not None:
        mbarrier.init(ready.index(STAGES), count=1)
    if GROUPS > 1:
        mbarrier.init(free.index(STAGES), count=1)
    if not TRANSITION:
        mbarrier.init(ready.index(STAGES + 1), count=1)
    scored = free
    if SCORED:
        scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(scored.index(stage), count=1)
    fence_async_shared()
    COLUMN_BLOCKS: gl.constexpr = (V + K if TRANSITION else V) // (64 * GROUPS)
    program = gl.program_id(0)
    first_column = program % COLUMN_BLOCKS * (64 * GROUPS)
    head = program // COLUMN_BLOCKS % value_heads
    segment_slot = program // (COLUMN_BLOCKS * value_heads)
    n, begin, length, segment, chunk_slot = sequence_of_slot(
        cu_seqlens, segment_slot, num_sequences, num_tokens, segment_chunks * 64, PACKED
    )
    chunks = (length + 63) // 64
    start = segment * segment_chunks
    if (segment > 0) & (start >= chunks):
        return
    stop = gl.minimum(start + segment_chunks, chunks)
    # The last segment's end is the sequence's, and what the first does to its initial state is known at once.
    if TRANSITION and (stop == chunks) | ((segment == 0) & (first_column >= V)):
        return
    if PART:
        start = gl.maximum(start, first_slot - chunk_slot)
        stop = gl.minimum(stop, end_slot - chunk_slot)
        if (start > stop) | ((start == stop) & (chunks > 0)):
            return
        chunk_slot = chunk_slot - first_slot
    own = (n.to(gl.int64) * value_heads + head) * (V * K)
    carried = segment_slot if TRANSITION else segment_slot - 1
    carry = (carried.to(gl.int64) * value_heads + head) * ((V + K) * K)
    with_values = first_column < V if TRANSITION else first_column >= 0

    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k.layout) if not TRANSITION else k_tiles
    tail_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, K], k.layout) if KDA else k_tiles
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, 64, 64], v.layout)
    solve_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], inverse.layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, 64, 64], v.layout) if not TRANSITION else solve_tiles
    factor_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, FACTORS], factors.layout)
    o_tiles = gl.allocate_shared_memory(dtype, [GROUPS, 64, 64], o.layout)

    SEGMENTED: gl.constexpr = carries is not None and not TRANSITION
    p: gl.constexpr = (K, V, GROUPS, KDA, TRANSITION, V_FIRST, STAGES, PART, SEGMENTED, SCORED)
    tiles = (k_tiles, q_tiles, v_tiles, solve_tiles, weight_tiles, tail_tiles, factor_tiles, o_tiles)
    descriptors = (k, q, v, tails, inverse, scores, factors, o, states)
    pointers = (initial_state, carries, final_state, o_pointer, own, carry)
    key_column = head // heads_a_key * K
    place = (
        start, stop, begin, length, chunk_slot, head, value_heads, key_column, first_column, with_values,
        segment, (n * value_heads + head) * V + first_column,
    )  # fmt: skip
    barriers = (ready, free, scored)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (tiles, descriptors, barriers, pointers, place, 0, p)),
                (produce, (tiles, descriptors, barriers, place, p)),
            ],
            [1],
            [40],
        )
    elif SCORED:
        gl.warp_specialize(
            [
                (_consume, (tiles, descriptors, barriers, pointers, place, 0, p)),
                (_consume, (tiles, descriptors, barriers, pointers, place, 1, p)),
                (score, (tiles, barriers, place, scale, p)),
                (produce, (tiles, descriptors, barriers, place, p)),
            ],
            [4, 4, 1],
            [208, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tiles, descriptors, barriers, pointers, place, 0, p)),
                (_consume, (tiles, descriptors, barriers, pointers, place, 1, p)),
                (produce, (tiles, descriptors, barriers, place, p)),
            ],
            [4, 1],
            [240, 24],
        )
