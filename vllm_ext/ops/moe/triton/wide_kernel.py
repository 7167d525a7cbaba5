"""The two grouped GEMMs with scales on the codes, as a stream of weights (Gluon, compute capability 9.0).

As in `stream_kernel.py` a producer fills a ring of K tiles. The consumer has two products under way: while the tensor
core multiplies one half of the rows (or of the columns, where it holds 128 rows), the other half's codes are expanded.
Scales multiply the codes ("operand" in `tile.py`); the zero points' term is taken off at the end, from sums that the
producer lays out.
"""

# Gluon's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.dequant import CENTER, expand, expand_pair, scale_codes, unpack_factors
from vllm_ext.ops.moe.triton.persistent import (
    down_slots,
    dtype_of,
    load_block,
    load_first_block,
    side_by_side,
    store_down,
    store_gate_up,
)
from vllm_ext.ops.moe.triton.wide_producer import SUM_CHUNK, produce, split_in_bf16

HALF = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
FEW = gl.constexpr(16)


@gluon.jit
def _operand(word, scale, STEP: gl.constexpr, operand: gl.constexpr, p: gl.constexpr):
    """scale (code - 8) of 128 rows and 64 columns, the tensor core's left operand: a tile's columns from 64 STEP on."""
    if p[3] == 32:
        w0, w1 = expand_pair(word, STEP == 1, dtype_of(p[8]))
        w0 = scale_codes(w0, scale, 1, p[10], p[13], True)
        w1 = scale_codes(w1, scale, p[14], p[10], p[13], True)
        joined = gl.join(w0, w1).permute(0, 2, 1).reshape(HALF, COLUMNS)
        w = gl.convert_layout(joined, operand, assert_trivial=True)
    else:
        w0, w1, w2, w3 = expand(word, dtype_of(p[8]), True)
        w0 = scale_codes(w0, scale, 1, p[10], p[13], True)
        w1 = scale_codes(w1, scale, p[14], p[10], p[13], True)
        w2 = scale_codes(w2, scale, 1, p[10], p[13], True)
        w3 = scale_codes(w3, scale, p[14], p[10], p[13], True)
        w = side_by_side(w0, w1, w2, w3, operand)
    return w


@gluon.jit
def _subtract_zero_term(acc, factors, row, sums_buffers, N: gl.constexpr, operand: gl.constexpr, p: gl.constexpr):
    """acc less the sum over groups of s (z - 8) (sum of x)."""
    SUMS: gl.constexpr = p[0] // p[4]
    CHUNKS: gl.constexpr = (SUMS + SUM_CHUNK - 1) // SUM_CHUNK
    for c in gl.static_range(CHUNKS):
        at = c * SUM_CHUNK + gl.arange(0, SUM_CHUNK, layout=gl.SliceLayout(0, operand))
        # Past the last sum the sums are zero, so any factors will do there; a mask would make registers of the left
        # operand constant, and Triton 3.6's ptxas sets such registers after the product that reads them.
        group = gl.minimum(at, SUMS - 1) * p[4] // p[2]
        word = gl.load(factors + (group * p[1])[None, :] + row[:, None])
        s, z = unpack_factors(word, dtype_of(p[9]))
        left_high, left_middle, _ = split_in_bf16(-s * (z - CENTER))
        high = sums_buffers.index(c * 2).slice(0, N).permute((1, 0))
        middle = sums_buffers.index(c * 2 + 1).slice(0, N).permute((1, 0))
        acc = warpgroup_mma(left_high, high, acc)
        acc = warpgroup_mma(left_high, middle, acc)
        acc = warpgroup_mma(left_middle, high, acc)
    return acc


@gluon.jit
def _activate(
    acc, out, out_sums, first, count, start, alpha, limit, N: gl.constexpr, ACTIVATION: gl.constexpr, e: gl.constexpr
):
    """Activate and store a half, few slots at a time: registers are short."""
    if N > FEW:
        left, right = gl.split(acc.reshape(HALF, 2, N // 2).permute(0, 2, 1))
        _activate(left, out, out_sums, first, count, start, alpha, limit, N // 2, ACTIVATION, e)
        _activate(right, out, out_sums, first + N // 2, count - N // 2, start, alpha, limit, N // 2, ACTIVATION, e)
    else:
        store_gate_up(acc, out, out_sums, first, count, start, alpha, limit, ACTIVATION, e)


@gluon.jit
def _piece(
    factors,
    sorted_slots,
    out,
    out_sums,
    alpha,
    limit,
    words_ring,
    factors_ring,
    x_ring,
    sums_buffers,
    full,
    empty,
    sums_full,
    sums_empty,
    expert,
    first,
    count,
    start,
    stage,
    phase,
    sums_phase,
    N: gl.constexpr,
    GATE_UP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    p: gl.constexpr,
    e: gl.constexpr,
):
    """One piece of work, for at most N slots; returns the ring's next stage and its phase."""
    K: gl.constexpr = p[0]
    ROWS: gl.constexpr = p[1]
    STAGES: gl.constexpr = p[7]
    TILES: gl.constexpr = K // (4 * p[3])
    STEPS: gl.constexpr = 4 * p[3] // COLUMNS
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, operand)
    HALVES: gl.constexpr = p[5] // HALF
    nothing = gl.full([HALF, N], 0, gl.float32, accumulator)
    acc0, acc1 = warpgroup_mma_init(nothing), warpgroup_mma_init(nothing)
    # A product's left operand lives until the product is over, an iteration later for the second of two.
    w1 = gl.full([HALF, COLUMNS], 0, dtype_of(p[8]), operand)
    for i in range(TILES):
        before = gl.where(stage == 0, STAGES, stage) - 1
        mbarrier.wait(full.index(stage), phase)
        words, scales = words_ring.index(stage).reshape([p[5], p[3]]), factors_ring.index(stage)
        x_tile = x_ring.index(stage).slice(0, N)
        word0 = words.slice(0, HALF).load(operand)
        scale0 = unpack_factors(scales.slice(0, HALF).load(by_row), dtype_of(p[9]))[0][:, None]
        if HALVES == 2:
            word1 = words.slice(HALF, HALF).load(operand)
            scale1 = unpack_factors(scales.slice(HALF, HALF).load(gl.SliceLayout(1, operand)), dtype_of(p[9]))[0][
                :, None
            ]
            for step in gl.static_range(STEPS):
                x_step = x_tile.slice(step * COLUMNS, COLUMNS, dim=1).permute((1, 0))
                w0 = _operand(word0, scale0, step, operand, p)
                acc0 = warpgroup_mma(w0, x_step, acc0, is_async=True)
                acc1, w1 = warpgroup_mma_wait(1, deps=[acc1, w1])
                # So at a tile's end its stage is free.
                if step == 0:
                    mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
                w1 = _operand(word1, scale1, step, operand, p)
                acc1 = warpgroup_mma(w1, x_step, warpgroup_mma_init(acc1), is_async=True)
                acc0, w0 = warpgroup_mma_wait(1, deps=[acc0, w0])
                acc0 = warpgroup_mma_init(acc0)
        else:
            # With one product a tile, its operand would be renamed while it is read: copied, and overwritten too early.
            gl.static_assert(STEPS == 2)
            w0 = _operand(word0, scale0, 0, operand, p)
            acc0 = warpgroup_mma(w0, x_tile.slice(0, COLUMNS, dim=1).permute((1, 0)), acc0, is_async=True)
            w1 = warpgroup_mma_wait(1, deps=[w1])
            mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
            w1 = _operand(word0, scale0, 1, operand, p)
            acc0 = warpgroup_mma(w1, x_tile.slice(COLUMNS, COLUMNS, dim=1).permute((1, 0)), acc0, is_async=True)
            w0 = warpgroup_mma_wait(1, deps=[w0])
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    low, high, w1 = warpgroup_mma_wait(0, deps=[acc0, acc1, w1])
    mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES, stage) - 1), count=1)
    own_factors = factors + expert.to(gl.int64) * (K // p[2] * ROWS)
    row = start + gl.arange(0, HALF, layout=gl.SliceLayout(1, operand))
    mbarrier.wait(sums_full, sums_phase)
    low = _subtract_zero_term(low, own_factors, row, sums_buffers, N, operand, p)
    # The last tile of rows may be half a tile.
    if HALVES == 2 and start + HALF < ROWS:
        high = _subtract_zero_term(high, own_factors, row + HALF, sums_buffers, N, operand, p)
    mbarrier.arrive(sums_empty, count=1)
    if GATE_UP:
        _activate(low, out, out_sums, first, count, start // 2, alpha, limit, N, ACTIVATION, e)
        if HALVES == 2 and start + HALF < ROWS:
            _activate(high, out, out_sums, first, count, (start + HALF) // 2, alpha, limit, N, ACTIVATION, e)
    else:
        slot = down_slots(sorted_slots, first, count, N, HALF)
        store_down(low, out, slot, count, start, ROWS)
        if HALVES == 2 and start + HALF < ROWS:
            store_down(high, out, slot, count, start + HALF, ROWS)
    return stage, phase


@gluon.jit
def _consume(
    factors,
    sorted_slots,
    blocks,
    out,
    out_sums,
    alpha,
    limit,
    words_ring,
    factors_ring,
    x_ring,
    sums_buffers,
    full,
    empty,
    sums_full,
    sums_empty,
    GATE_UP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    p: gl.constexpr,
    e: gl.constexpr,
):
    """Piece of work after piece of work. An expert's last block is often nearly empty: that is a shorter product."""
    BLOCK_ROWS: gl.constexpr = p[5]
    ROW_TILES: gl.constexpr = (p[1] + BLOCK_ROWS - 1) // BLOCK_ROWS
    SHORT: gl.constexpr = p[15]
    gdc_wait()
    gdc_launch_dependents()
    used = gl.load(blocks + 3)
    unit = gl.program_id(0)
    stage = 0
    phase = 0
    sums_phase = 0
    expert, first, count = load_first_block(blocks, unit // ROW_TILES, used, False)
    while unit < used * ROW_TILES:
        start = unit % ROW_TILES * BLOCK_ROWS
        unit += gl.num_programs(0)
        next_expert, next_first, next_count = load_block(blocks, unit // ROW_TILES, used)
        if p[6] > SHORT and count <= SHORT:
            stage, phase = _piece(
                factors, sorted_slots, out, out_sums, alpha, limit, words_ring, factors_ring, x_ring, sums_buffers,
                full, empty, sums_full, sums_empty, expert, first, count, start, stage, phase, sums_phase, SHORT,
                GATE_UP, ACTIVATION, p, e,
            )  # fmt: skip
        else:
            stage, phase = _piece(
                factors, sorted_slots, out, out_sums, alpha, limit, words_ring, factors_ring, x_ring, sums_buffers,
                full, empty, sums_full, sums_empty, expert, first, count, start, stage, phase, sums_phase, p[6],
                GATE_UP, ACTIVATION, p, e,
            )  # fmt: skip
        sums_phase ^= 1
        expert, first, count = next_expert, next_first, next_count


@gluon.jit
def wide_kernel(
    words,
    factors_tiles,
    factors,
    x,
    x_stride,
    group_sums,
    sorted_slots,
    blocks,
    out,
    out_sums,
    alpha,
    limit,
    GATE_UP: gl.constexpr,
    TOP_K: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SHAPE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """One of the two GEMMs; `stream_kernel` explains the arguments."""
    PLANE: gl.constexpr = SHAPE[3]
    BLOCK_ROWS: gl.constexpr = SHAPE[5]
    TOKENS: gl.constexpr = SHAPE[6]
    STAGES: gl.constexpr = SHAPE[7]
    LINE: gl.constexpr = SHAPE[17]
    CHUNKS: gl.constexpr = (SHAPE[0] // SHAPE[4] + SUM_CHUNK - 1) // SUM_CHUNK
    words_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_ROWS * PLANE // LINE, LINE], words.layout)
    factors_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_ROWS], factors_tiles.layout)
    x_ring = gl.allocate_shared_memory(
        dtype_of(SHAPE[8]), [STAGES, TOKENS, 4 * PLANE], gl.NVMMASharedLayout(128, 16, 2)
    )
    sums_buffers = gl.allocate_shared_memory(
        gl.bfloat16, [CHUNKS * 2, TOKENS, SUM_CHUNK], gl.NVMMASharedLayout(32, 16, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sums_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    sums_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER[0])
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(sums_full, count=1)
    mbarrier.init(sums_empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    factors, sorted_slots, blocks, out, out_sums, alpha, limit, words_ring, factors_ring, x_ring,
                    sums_buffers, full, empty, sums_full, sums_empty, GATE_UP, ACTIVATION, SHAPE, EPILOGUE,
                ),
            ),
            (
                produce,
                (
                    words, factors_tiles, x, x_stride, group_sums, sorted_slots, blocks, words_ring, factors_ring,
                    x_ring, sums_buffers, full, empty, sums_full, sums_empty, GATE_UP, TOP_K, SHAPE,
                ),
            ),
        ],
        [PRODUCER[0]],
        [PRODUCER[1]],
    )  # fmt: skip
