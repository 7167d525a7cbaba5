"""The producer of `wide_kernel`: copies of weights and activations into its ring, and sums of x beside them (Gluon)."""

# Gluon's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.persistent import barrier, copy_weights, copy_x, load_block, load_first_block, places

SUM_CHUNK = gl.constexpr(16)


@gluon.jit
def split_in_bf16(value):
    """An FP32 value as the sum of three BF16 values."""
    high = value.to(gl.bfloat16)
    rest = value - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    return high, middle, (rest - middle.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _stage_sums(group_sums, row, token_ok, buffers, CHUNK: gl.constexpr, p: gl.constexpr, layout: gl.constexpr):
    """Sums of x of a chunk of runs, split into two BF16 parts, to shared memory [part, tokens, runs]."""
    SUMS: gl.constexpr = p[0] // p[4]
    place = CHUNK * SUM_CHUNK + gl.arange(0, SUM_CHUNK, layout=gl.SliceLayout(0, layout))
    mask = token_ok[:, None] & (place < SUMS)[None, :]
    total = gl.load((group_sums + row * p[12])[:, None] + place[None, :], mask=mask, other=0.0)
    high, middle, _ = split_in_bf16(total)
    buffers.index(CHUNK * 2).store(high)
    buffers.index(CHUNK * 2 + 1).store(middle)


@gluon.jit
def produce(
    words,
    factors,
    x,
    x_stride,
    group_sums,
    sorted_slots,
    blocks,
    words_ring,
    factors_ring,
    x_ring,
    sums_buffers,
    full,
    empty,
    sums_full,
    sums_empty,
    GATHER: gl.constexpr,
    TOP_K: gl.constexpr,
    p: gl.constexpr,
):
    """Fill the ring, tile after tile of one piece of work after another; then lay out the piece's sums."""
    K: gl.constexpr = p[0]
    ROWS: gl.constexpr = p[1]
    PLANE: gl.constexpr = p[3]
    BLOCK_ROWS: gl.constexpr = p[5]
    TOKENS: gl.constexpr = p[6]
    STAGES: gl.constexpr = p[7]
    TILE: gl.constexpr = 4 * PLANE
    TILES: gl.constexpr = K // TILE
    ROW_TILES: gl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    CHUNKS: gl.constexpr = (K // p[4] + SUM_CHUNK - 1) // SUM_CHUNK
    sums_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    unit = gl.program_id(0)
    if GATHER:
        gdc_wait()
        gdc_launch_dependents()
    limit = gl.load(blocks + 3, cache_modifier=".cg")
    expert, first, count = load_first_block(blocks, unit // ROW_TILES, limit, False)
    early = 0
    if not GATHER:
        # The block table was complete before the first GEMM began: weights need not wait for it, activations do.
        early = gl.where(unit < limit * ROW_TILES, gl.minimum(TILES, STAGES), 0)
        row = unit % ROW_TILES * BLOCK_ROWS
        for i in range(early):
            copy_weights(words, factors, full.index(i), words_ring.index(i), factors_ring.index(i), expert, row, i, p)
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    sums_phase = 1
    began = 0
    while unit < limit * ROW_TILES:
        place = places(sorted_slots, first, count, x_stride, GATHER, TOP_K, p)
        row = unit % ROW_TILES * BLOCK_ROWS
        unit += gl.num_programs(0)
        next_expert, next_first, next_count = load_block(blocks, unit // ROW_TILES, limit)
        for i in range(TILES):
            bar = full.index(stage)
            if began >= early:
                mbarrier.wait(empty.index(stage), phase)
                copy_weights(words, factors, bar, words_ring.index(stage), factors_ring.index(stage), expert, row, i, p)
            copy_x(x_ring.index(stage), bar, x, place, count, i, TOKENS, TILE)
            began += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, sums_layout))
        source = first + t
        if GATHER:
            source = gl.load(sorted_slots + source, mask=t < count, other=0) // TOP_K
        mbarrier.wait(sums_empty, sums_phase)
        for c in gl.static_range(CHUNKS):
            _stage_sums(group_sums, source.to(gl.int64), t < count, sums_buffers, c, p, sums_layout)
        fence_async_shared()
        barrier()
        mbarrier.arrive(sums_full, count=1)
        sums_phase ^= 1
        expert, first, count = next_expert, next_first, next_count
