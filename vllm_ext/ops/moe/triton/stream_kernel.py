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
    copy_weights,
    copy_x,
    dtype_of,
    load_block,
    load_first_block,
    load_rows,
    places,
    side_by_side,
    store_down,
    store_gate_up,
)
from vllm_ext.ops.moe.triton.share import hand_over, share, take_over


@gluon.jit
def _produce(
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
    sums_ring,
    full,
    empty,
    GATHER: gl.constexpr,
    TOP_K: gl.constexpr,
    SPLIT: gl.constexpr,
    p: gl.constexpr,
):
    """Fill the ring, tile after tile of one piece of work after another."""
    K: gl.constexpr = p[0]
    ROWS: gl.constexpr = p[1]
    PLANE: gl.constexpr = p[3]
    BLOCK_ROWS: gl.constexpr = p[5]
    TOKENS: gl.constexpr = p[6]
    STAGES: gl.constexpr = p[7]
    TILE: gl.constexpr = 4 * PLANE
    TILES: gl.constexpr = K // TILE
    ROW_TILES: gl.constexpr = ROWS // BLOCK_ROWS
    RUNS: gl.constexpr = TILE // p[4]
    SPARSE: gl.constexpr = p[18]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    t = gl.arange(0, TOKENS, layout=line)
    rank = gl.num_programs(0) - 1 - gl.program_id(0)
    early = 0
    if GATHER:
        if SPARSE > 0:
            # The first blocks are those of the experts one after another: their weights need not wait for the table.
            early = gl.where(rank < SPARSE * ROW_TILES, gl.minimum(TILES, STAGES), 0)
            own = rank % ROW_TILES * BLOCK_ROWS
            for i in range(early):
                w, f = words_ring.index(i), factors_ring.index(i)
                copy_weights(words, factors, full.index(i), w, f, rank // ROW_TILES, own, i, p)
        gdc_wait()
        gdc_launch_dependents()
    limit = gl.load(blocks + 3, cache_modifier=".cg")
    tile, last, skip = share(limit * ROW_TILES, rank, TILES, SPLIT)
    expert, first, count = load_first_block(blocks, tile // TILES // ROW_TILES, limit, SPLIT)
    if not GATHER:
        # The block table was complete before the first GEMM began: weights need not wait for it, activations do.
        early = gl.minimum(gl.minimum(TILES - tile % TILES, last - tile), STAGES)
        if SPARSE != 0:
            early = gl.where(count > 0, early, 0)
        row = tile // TILES % ROW_TILES * BLOCK_ROWS
        for i in range(early):
            k = tile % TILES + i
            copy_weights(words, factors, full.index(i), words_ring.index(i), factors_ring.index(i), expert, row, k, p)
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    began = 0
    while tile < last:
        place = places(sorted_slots, first, count, x_stride, GATHER, TOP_K, p)
        source = first + t
        if GATHER:
            source = gl.load(sorted_slots + source, mask=t < count, other=0) // TOP_K
        sums = group_sums + source.to(gl.int64) * p[12]
        row = tile // TILES % ROW_TILES * BLOCK_ROWS
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        next_expert, next_first, next_count = load_block(blocks, tile // TILES // ROW_TILES, limit)
        if SPARSE != 0:
            # Of a block without slots no more is copied than was asked for before that was known.
            asked = gl.where(began == 0, early, 0)
            end = gl.where(count > 0, end, start + asked)
        for i in range(start, end):
            bar = full.index(stage)
            if began >= early:
                mbarrier.wait(empty.index(stage), phase)
                copy_weights(words, factors, bar, words_ring.index(stage), factors_ring.index(stage), expert, row, i, p)
            for r in gl.static_range(RUNS):
                run = sums_ring.index(stage * RUNS + r)
                load_rows(run, sums + i * RUNS + r, mask=t < count)
            copy_x(x_ring.index(stage), bar, x, place, count, i, TOKENS, TILE)
            began += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        expert, first, count = next_expert, next_first, next_count


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
def _halves(words, x_tile, nothing, ROWS: gl.constexpr, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The products of both halves of a tile's rows, the last two under way, and the operands they read.

    Codes are expanded while the tensor core multiplies others; no more than two operands' registers are held.
    """
    word, word_1 = words.slice(0, ROWS).load(operand), words.slice(ROWS, ROWS).load(operand)
    if words.shape[1] == 32:
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
        if p[5] > ROWS:
            product, w, high, w_1 = _halves(words, x_tile, nothing, ROWS, operand, dtype_of(p[8]))
        else:
            product, w = _begin(words.load(operand), x_tile, nothing, operand, dtype_of(p[8]))
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
    acc, other, sorted_slots, out, out_sums, alpha, limit, first, count, row, GATE_UP: gl.constexpr,
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
        store_down(acc * 2.0 ** p[11], out, sorted_slots, first, count, row, p[1])
        if p[5] > ROWS:
            store_down(other * 2.0 ** p[11], out, sorted_slots, first, count, row + ROWS, p[1])


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
            few, few_1, stage, phase = _add_tiles(
                words_ring, factors_ring, x_ring, sums_ring, full, empty, end - start, stage, phase, SHORT, HALF, p
            )
            _finish(
                few, few_1, sorted_slots, out, out_sums, alpha, limit, own_first, own_count, row, GATE_UP, ACTIVATION,
                p, e,
            )  # fmt: skip
        else:
            acc, other, stage, phase = _add_tiles(
                words_ring, factors_ring, x_ring, sums_ring, full, empty, end - start, stage, phase, TOKENS, HALF, p
            )
            if start > 0:
                hand_over(acc, other, partials, flags, rank, p)
            else:
                if SPLIT:
                    giver = rank
                    while end < TILES:
                        giver += 1
                        acc, other = take_over(acc, other, partials, flags, giver, p)
                        giver_first, giver_last, _ = share(used * ROW_TILES, giver, TILES, SPLIT)
                        end += giver_last - giver_first
                _finish(
                    acc, other, sorted_slots, out, out_sums, alpha, limit, own_first, own_count, row, GATE_UP,
                    ACTIVATION, p, e,
                )  # fmt: skip


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
    copies, experts that have a block each at the table's start or -1 if a block may be without slots); EPILOGUE, of
    gate and up, (row stride of out, columns of one sum of it, sums, exponent, its step, plane width); PRODUCER the
    producer's (warps, registers). SPLIT is explained at `share`; it leaves sums in `partials` and needs `flags` at
    zero, one a program.
    """
    PLANE: gl.constexpr = SHAPE[3]
    BLOCK_ROWS: gl.constexpr = SHAPE[5]
    TOKENS: gl.constexpr = SHAPE[6]
    STAGES: gl.constexpr = SHAPE[7]
    DTYPE: gl.constexpr = dtype_of(SHAPE[8])
    LINE: gl.constexpr = SHAPE[17]
    TILE: gl.constexpr = 4 * PLANE
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_ROWS * PLANE // LINE, LINE], words.layout)
    factors_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_ROWS], factors_tiles.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, TILE], x_layout)
    sums_ring = gl.allocate_shared_memory(gl.float32, [STAGES * (TILE // SHAPE[4]), TOKENS], sums_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER[0])
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    sorted_slots, blocks, out, out_sums, partials, flags, alpha, limit, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, GATE_UP, ACTIVATION, SPLIT, SHAPE, EPILOGUE,
                ),
            ),
            (
                _produce,
                (
                    words, factors_tiles, x, x_stride, group_sums, sorted_slots, blocks, words_ring, factors_ring,
                    x_ring, sums_ring, full, empty, GATE_UP, TOP_K, SPLIT, SHAPE,
                ),
            ),
        ],
        [PRODUCER[0]],
        [PRODUCER[1]],
    )  # fmt: skip
