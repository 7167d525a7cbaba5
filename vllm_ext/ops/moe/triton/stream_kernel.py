"""The two grouped GEMMs for few tokens an expert, as a stream of weights (Gluon, compute capability 9.0).

The producer of a program keeps a ring of K tiles in shared memory full: weights and scales come by bulk copies, the
block's activations and their sums row by row. The consumer's warps take tiles from the ring, expand the codes in
registers, multiply, take the zero points' term off and scale. Programs stay for the whole call and go from one piece of
work to the next without letting the ring run dry.
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

from vllm_ext.ops.moe.triton.dequant import expand, expand_pair, unpack_factors
from vllm_ext.ops.moe.triton.persistent import (
    down_slots,
    dtype_of,
    load_block,
    load_first_block,
    side_by_side,
    store_down,
    store_gate_up,
)
from vllm_ext.ops.moe.triton.share import hand_over, share, take_over
from vllm_ext.ops.moe.triton.stream_producer import produce, produce_words


@gluon.jit
def _begin(words, x_tile, nothing, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The product of codes with the activations, under way; and its left operand, to be kept until it ends."""
    w0, w1, w2, w3 = expand(words, DTYPE, True)
    w = side_by_side(w0, w1, w2, w3, operand)
    return warpgroup_mma(w, x_tile.permute((1, 0)), nothing, use_acc=False, is_async=True), w


@gluon.jit
def _begin_pair(words, x_tile, product, HIGH: gl.constexpr, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The same for a tile's lower or upper two planes, of which the upper ones are added to `product`."""
    w0, w1 = expand_pair(words, HIGH, DTYPE)
    joined = gl.join(w0, w1).permute(0, 2, 1).reshape(words.shape[0], 2 * words.shape[1])
    w = gl.convert_layout(joined, operand, assert_trivial=True)
    COLUMNS: gl.constexpr = 2 * words.shape[1]
    x_pair = x_tile.slice(COLUMNS if HIGH else 0, COLUMNS, dim=1).permute((1, 0))
    return warpgroup_mma(w, x_pair, product, use_acc=HIGH, is_async=True), w


@gluon.jit
def _halves(word, word_1, x_tile, nothing, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The products of both halves of a tile's rows, the last two under way, and the operands they read.

    Codes are expanded while the tensor core multiplies others; no more than two operands' registers are held.
    """
    if word.shape[1] == 32:
        low, w = _begin_pair(word, x_tile, nothing, False, operand, DTYPE)
        high, w_1 = _begin_pair(word_1, x_tile, nothing, False, operand, DTYPE)
        low, w = warpgroup_mma_wait(1, deps=[low, w])
        low, w = _begin_pair(word, x_tile, warpgroup_mma_init(low), True, operand, DTYPE)
        high, w_1 = warpgroup_mma_wait(1, deps=[high, w_1])
        high, w_1 = _begin_pair(word_1, x_tile, warpgroup_mma_init(high), True, operand, DTYPE)
    else:
        low, w = _begin(word, x_tile, nothing, operand, DTYPE)
        high, w_1 = _begin(word_1, x_tile, nothing, operand, DTYPE)
    return low, w, high, w_1


@gluon.jit
def _scaled(product, factors, total, p: gl.constexpr):
    """A tile's product less the zero points' term, scaled; still to be multiplied by 2^exponent."""
    scale, zero = unpack_factors(factors, dtype_of(p[9]))
    zero = (zero + p[10]) * 2.0 ** -p[11]
    return (product - zero[:, None] * total[None, :]) * scale[:, None]


@gluon.jit
def _add_tiles(
    words_ring,
    factors_ring,
    x_ring,
    sums_ring,
    full,
    empty,
    words_empty,
    tiles,
    stage,
    phase,
    N: gl.constexpr,
    ROWS: gl.constexpr,
    p: gl.constexpr,
):
    """The sums of a piece's next `tiles` K tiles for its first N slots; then the ring's next stage and its phase.

    With ROWS half of the block's rows there are two sums: one half's codes are expanded while the tensor core
    multiplies the other's. Else the second is the first.
    """
    STAGES: gl.constexpr = p[7]
    RUNS: gl.constexpr = 4 * p[3] // p[4]
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator)
    nothing = gl.full([ROWS, N], 0, gl.float32, accumulator)
    acc, other = nothing, nothing
    for _ in range(tiles):
        mbarrier.wait(full.index(stage), phase)
        words = words_ring.index(stage).reshape([p[5], p[3]])
        factors, x_tile = factors_ring.index(stage), x_ring.index(stage).slice(0, N)
        codes = words.slice(0, ROWS).load(operand)
        if p[5] > ROWS:
            codes_1 = words.slice(ROWS, ROWS).load(operand)
            if p[19]:
                mbarrier.arrive(words_empty.index(stage), count=1)
            product, w, high, w_1 = _halves(codes, codes_1, x_tile, nothing, operand, dtype_of(p[8]))
        else:
            if p[19]:
                mbarrier.arrive(words_empty.index(stage), count=1)
            product, w = _begin(codes, x_tile, nothing, operand, dtype_of(p[8]))
        word = factors.slice(0, ROWS).load(by_row)
        total = sums_ring.index(stage * RUNS).slice(0, N).load(gl.SliceLayout(0, accumulator))
        for r in gl.static_range(1, RUNS):
            total += sums_ring.index(stage * RUNS + r).slice(0, N).load(gl.SliceLayout(0, accumulator))
        if p[5] > ROWS:
            word_1 = factors.slice(ROWS, ROWS).load(by_row)
            product, w = warpgroup_mma_wait(1, deps=[product, w])
            acc += _scaled(product, word, total, p)
            high, w_1 = warpgroup_mma_wait(0, deps=[high, w_1])
            mbarrier.arrive(empty.index(stage), count=1)
            other += _scaled(high, word_1, total, p)
        else:
            product, w = warpgroup_mma_wait(0, deps=[product, w])
            mbarrier.arrive(empty.index(stage), count=1)
            acc += _scaled(product, word, total, p)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return acc, other, stage, phase


@gluon.jit
def _finish(
    acc, other, slot, out, out_sums, alpha, limit, first, count, row, GATE_UP: gl.constexpr,
    ACTIVATION: gl.constexpr, p: gl.constexpr, e: gl.constexpr,
):  # fmt: skip
    """Store a piece's rows from `row` on: activated, or by slot."""
    ROWS: gl.constexpr = acc.shape[0]
    if GATE_UP:
        store_gate_up(acc * 2.0 ** p[11], out, out_sums, first, count, row // 2, alpha, limit, ACTIVATION, e)
        if p[5] > ROWS:
            row += ROWS
            store_gate_up(other * 2.0 ** p[11], out, out_sums, first, count, row // 2, alpha, limit, ACTIVATION, e)
    else:
        store_down(acc * 2.0 ** p[11], out, slot, count, row, p[1])
        if p[5] > ROWS:
            store_down(other * 2.0 ** p[11], out, slot, count, row + ROWS, p[1])


@gluon.jit
def _slots(sorted_slots, first, count, TOKENS: gl.constexpr, ROWS: gl.constexpr, GATE_UP: gl.constexpr):
    """A block's slots as they will be needed, asked for before the block is multiplied."""
    slot = 0
    if not GATE_UP:
        slot = down_slots(sorted_slots, first, count, TOKENS, ROWS)
    return slot


@gluon.jit
def _consume(
    sorted_slots,
    blocks,
    out,
    out_sums,
    partials,
    flags,
    alpha,
    limit,
    words_ring,
    factors_ring,
    x_ring,
    sums_ring,
    full,
    empty,
    words_empty,
    GATE_UP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SPLIT: gl.constexpr,
    p: gl.constexpr,
    e: gl.constexpr,
):
    """Multiply tile after tile, and finish each piece of work; one with few of a block's slots is a shorter product."""
    TOKENS: gl.constexpr = p[6]
    SHORT: gl.constexpr = p[15]
    HALF: gl.constexpr = p[16]
    ROW_TILES: gl.constexpr = p[1] // p[5]
    TILES: gl.constexpr = p[0] // (4 * p[3])
    SPARSE: gl.constexpr = p[18]
    gdc_wait()
    gdc_launch_dependents()
    used = gl.load(blocks + 3)
    rank = gl.num_programs(0) - 1 - gl.program_id(0)
    tile, last, skip = share(used * ROW_TILES, rank, TILES, SPLIT)
    stage = 0
    phase = 0
    asked = 0
    if SPARSE > 0:
        asked = gl.where(rank < SPARSE * ROW_TILES, gl.minimum(TILES, p[7]), 0)
    _, first, count = load_first_block(blocks, tile // TILES // ROW_TILES, used, SPLIT)
    while tile < last:
        row = tile // TILES % ROW_TILES * p[5]
        own_first, own_count = first, count
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        _, first, count = load_block(blocks, tile // TILES // ROW_TILES, used)
        if SPARSE != 0:
            end = gl.where(own_count > 0, end, start + asked)
            asked = 0
        if SHORT < TOKENS and own_count <= SHORT:
            few_slot = _slots(sorted_slots, own_first, own_count, SHORT, HALF, GATE_UP)
            few, few_1, stage, phase = _add_tiles(
                words_ring,
                factors_ring,
                x_ring,
                sums_ring,
                full,
                empty,
                words_empty,
                end - start,
                stage,
                phase,
                SHORT,
                HALF,
                p,
            )
            _finish(
                few, few_1, few_slot, out, out_sums, alpha, limit, own_first, own_count, row, GATE_UP, ACTIVATION, p, e
            )
        else:
            slot = _slots(sorted_slots, own_first, own_count, TOKENS, HALF, GATE_UP)
            acc, other, stage, phase = _add_tiles(
                words_ring,
                factors_ring,
                x_ring,
                sums_ring,
                full,
                empty,
                words_empty,
                end - start,
                stage,
                phase,
                TOKENS,
                HALF,
                p,
            )
            if SPLIT:
                if start > 0:
                    hand_over(acc, other, partials, flags, rank, p)
                else:
                    giver = rank
                    while end < TILES:
                        giver += 1
                        acc, other = take_over(acc, other, partials, flags, giver, p)
                        giver_first, giver_last, _ = share(used * ROW_TILES, giver, TILES, SPLIT)
                        end += giver_last - giver_first
                    _finish(
                        acc, other, slot, out, out_sums, alpha, limit, own_first, own_count, row, GATE_UP, ACTIVATION,
                        p, e,
                    )  # fmt: skip
            else:
                _finish(
                    acc, other, slot, out, out_sums, alpha, limit, own_first, own_count, row, GATE_UP, ACTIVATION, p, e
                )


@gluon.jit
def stream_kernel(
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
    partials,
    flags,
    alpha,
    limit,
    GATE_UP: gl.constexpr,
    TOP_K: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SPLIT: gl.constexpr,
    SHAPE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """One of the two GEMMs; programs take pieces of work (a block of slots, BLOCK_ROWS rows) in turn.

    SHAPE is (K, rows, group size, plane width, columns of one sum, BLOCK_ROWS, BLOCK_TOKENS, stages, the names of the
    dtypes of operands and factors, codes' offset, exponent of the result, row stride of the sums, exponent of the
    scales, what odd planes count, slots of the shorter product, rows of one product, words of a line of the bulk
    copies, experts that have a block each at the table's start or -1 if a block may be without slots, whether words
    are freed before the rest of a tile); EPILOGUE, of gate and up, (row stride of out, columns of one sum of it, sums,
    exponent, its step, plane width); PRODUCER the producer's (warps, registers). SPLIT is explained at `share`; it
    leaves sums in `partials` and needs `flags` at zero, one a program.
    """
    PLANE: gl.constexpr = SHAPE[3]
    BLOCK_ROWS: gl.constexpr = SHAPE[5]
    TOKENS: gl.constexpr = SHAPE[6]
    STAGES: gl.constexpr = SHAPE[7]
    DTYPE: gl.constexpr = dtype_of(SHAPE[8])
    LINE: gl.constexpr = SHAPE[17]
    APART: gl.constexpr = 1 if SHAPE[19] else 0
    TILE: gl.constexpr = 4 * PLANE
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_ROWS * PLANE // LINE, LINE], words.layout)
    factors_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_ROWS], factors_tiles.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, TILE], x_layout)
    sums_ring = gl.allocate_shared_memory(gl.float32, [STAGES * (TILE // SHAPE[4]), TOKENS], sums_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    words_empty = empty
    if APART:
        words_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + APART + 32 * PRODUCER[0])
        mbarrier.init(empty.index(i), count=1)
        if APART:
            mbarrier.init(words_empty.index(i), count=1)
    fence_async_shared()
    if APART:
        gl.warp_specialize(
            [
                (_consume, (
                    sorted_slots, blocks, out, out_sums, partials, flags, alpha, limit, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, words_empty, GATE_UP, ACTIVATION, SPLIT, SHAPE, EPILOGUE,
                )),
                (produce_words, (words, blocks, words_ring, full, words_empty, GATE_UP, SPLIT, SHAPE)),
                (produce, (
                    words, factors_tiles, x, x_stride, group_sums, sorted_slots, blocks, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, GATE_UP, TOP_K, SPLIT, SHAPE,
                )),
            ],
            [1, PRODUCER[0]],
            [PRODUCER[1], PRODUCER[1]],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    sorted_slots, blocks, out, out_sums, partials, flags, alpha, limit, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, words_empty, GATE_UP, ACTIVATION, SPLIT, SHAPE, EPILOGUE,
                )),
                (produce, (
                    words, factors_tiles, x, x_stride, group_sums, sorted_slots, blocks, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, GATE_UP, TOP_K, SPLIT, SHAPE,
                )),
            ],
            [PRODUCER[0]],
            [PRODUCER[1]],
        )  # fmt: skip
