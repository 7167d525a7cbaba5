"""What runs beside the groups of warps that carry a state (`recurrence_hopper`): one warp fetches their tiles and takes
their outputs away, and four may multiply queries by keys.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_ext.ops.linear_attention.triton.hopper import await_launches, exp2


@gluon.jit
def room_for_state(tiles, states, group: gl.constexpr, K: gl.constexpr):
    """A tile [64, K] of FP32 over the second and third stages of keys, or for the second group of queries."""
    stages = tiles[group]
    return stages.index(1)._reinterpret(gl.float32, [64, K], states.layout)


@gluon.jit
def produce(tiles, descriptors, barriers, place, p: gl.constexpr):
    """Ask the copy engine for the tiles of every chunk, STAGES ahead of who reads them, and to take outputs away.

    A group of warps that let its outputs go itself would have to wait for its products before it.
    """
    k_tiles, q_tiles, v_tiles, solve_tiles, weight_tiles, tail_tiles, factor_tiles, o_tiles = tiles
    k, q, v, tails, inverse, scores, factors, o, states = descriptors
    ready, free, _ = barriers
    start, stop, begin, _, chunk_slot, head, value_heads, key_column, first_column, with_values, segment, row = place
    K: gl.constexpr = p[0]
    V: gl.constexpr = p[1]
    GROUPS: gl.constexpr = p[2]
    KDA: gl.constexpr = p[3]
    TRANSITION: gl.constexpr = p[4]
    STAGES: gl.constexpr = p[6]
    SEGMENTED: gl.constexpr = p[8]
    SCORED: gl.constexpr = p[9]
    KEYS: gl.constexpr = 1 if TRANSITION else 2  # tiles [64, K]
    SQUARES: gl.constexpr = 1 if TRANSITION or SCORED else 2  # tiles [64, 64]
    BYTES: gl.constexpr = KEYS * 128 * K + SQUARES * 8192 + (132 * K if KDA else 1024)
    VALUE_BYTES: gl.constexpr = 8192 * GROUPS
    if states is not None:
        # An initial state is older than the launches before this one, and comes where later chunks will.
        arrived = ready.index(STAGES)
        mbarrier.expect(arrived, GROUPS * 256 * K)
        for group in gl.static_range(GROUPS):
            room = room_for_state(tiles, states, group, K)
            tma.async_copy_global_to_shared(states, [row + 64 * group, 0], arrived, room)
    # Chunks are older than the transitions, which a first segment need not await.
    if not SEGMENTED or segment > 0:
        await_launches()
    count = stop - start
    for step in range(count if TRANSITION else count + STAGES - 1):
        stage = step % STAGES
        # Stages but the first are free once the state is there: it comes before chunks that it has to meet first.
        freed = step // STAGES if stage > 0 else step // STAGES + 1
        if (step < count) | (step >= STAGES):
            mbarrier.wait(free.index(stage), freed & 1)
        if not TRANSITION and step >= STAGES:
            # Who frees a stage has put its chunk's output where it leaves from.
            fence_async_shared()
            for group in gl.static_range(GROUPS):
                at = head * V + first_column + 64 * group
                row_o = begin + (start + step - STAGES) * 64
                tma.async_copy_shared_to_global(o, [row_o, at], o_tiles.index(group))
        if step < count:
            barrier = ready.index(stage)
            if with_values:
                mbarrier.expect(barrier, BYTES + VALUE_BYTES)
            else:
                mbarrier.expect(barrier, BYTES)
            token = begin + (start + step) * 64
            out = (chunk_slot + start + step) * value_heads + head
            if KDA:
                tma.async_copy_global_to_shared(k, [out * 64, 0], barrier, k_tiles.index(stage))
                if not TRANSITION:
                    tma.async_copy_global_to_shared(q, [out * 64, 0], barrier, q_tiles.index(stage))
                tma.async_copy_global_to_shared(tails, [out * 64, 0], barrier, tail_tiles.index(stage))
            else:
                tma.async_copy_global_to_shared(k, [token, key_column], barrier, k_tiles.index(stage))
                if not TRANSITION:
                    tma.async_copy_global_to_shared(q, [token, key_column], barrier, q_tiles.index(stage))
            if with_values:
                for group in gl.static_range(GROUPS):
                    at = head * V + first_column + 64 * group
                    tma.async_copy_global_to_shared(v, [token, at], barrier, v_tiles.index(stage * GROUPS + group))
            tma.async_copy_global_to_shared(inverse, [out * 64, 0], barrier, solve_tiles.index(stage))
            if not TRANSITION and not SCORED:
                tma.async_copy_global_to_shared(scores, [out * 64, 0], barrier, weight_tiles.index(stage))
            tma.async_copy_global_to_shared(factors, [out, 0], barrier, factor_tiles.index(stage))
        if not TRANSITION and step >= STAGES:
            tma.store_wait(0)
            mbarrier.expect(ready.index(STAGES + 1), 0)


@gluon.jit
def score(tiles, barriers, place, scale, p: gl.constexpr):
    """Multiply queries by keys, on four warps: what a chunk's outputs take of the chunk's own values."""
    k_tiles, q_tiles, _, _, weight_tiles, _, factor_tiles, _ = tiles
    ready, free, scored = barriers
    start, stop, _, length, _, _, _, _, _, _, _, _ = place
    STAGES: gl.constexpr = p[6]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row = gl.arange(0, 64, by_row)[:, None]
    column = gl.arange(0, 64, by_column)[None, :]
    zero = gl.zeros([64, 64], gl.float32, layout)
    for step in range(stop - start):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if length - (start + step) * 64 < 64:
            # Keys past the sequence's end are zeroed first.
            mbarrier.wait(free.index(STAGES), 0)
        queries = q_tiles.index(stage)
        asked = warpgroup_mma(queries, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        vector = factor_tiles.index(stage)._reinterpret(gl.float32, [256], plain)
        totals = vector.slice(192, 64)
        asked = warpgroup_mma_wait(0, [asked])
        between = exp2(totals.load(by_row)[:, None] - totals.load(by_column)[None, :])
        between = gl.where(row >= column, between, 0.0)
        weights = asked * scale * between
        weight_tiles.index(stage).store(weights.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.expect(scored.index(stage), 0)
