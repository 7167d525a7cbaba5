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
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.dequant import expand, unpack_factors
from vllm_ext.ops.moe.triton.persistent import (
    barrier,
    copy_weights,
    copy_x,
    load_block,
    load_first_block,
    load_rows,
    places,
    side_by_side,
    store_down,
    store_gate_up,
)


@gluon.constexpr_function
def dtype_of(name):
    """The dtype that goes by Triton's `name`."""
    return gl.bfloat16 if name == "bf16" else gl.float16 if name == "fp16" else gl.float32


@gluon.jit
def _share(units, rank, TILES: gl.constexpr, SPLIT: gl.constexpr):
    """K tiles [first, last) of the program of this rank, all pieces of work in a row, and tiles to skip after a piece.

    SPLIT gives every program as many tiles, one more or less; else programs take whole pieces in turn.
    """
    programs = gl.num_programs(0)
    first = rank * TILES
    last = units * TILES
    skip = (programs - 1) * TILES
    if SPLIT:
        least = last // programs
        more = last % programs
        first = rank * least + gl.minimum(rank, more)
        last = first + least + gl.where(rank < more, 1, 0)
        skip = 0
    return first, last, skip


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
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    t = gl.arange(0, TOKENS, layout=line)
    if GATHER:
        gdc_wait()
        gdc_launch_dependents()
    limit = gl.load(blocks + 3, cache_modifier=".cg")
    tile, last, skip = _share(limit * ROW_TILES, gl.num_programs(0) - 1 - gl.program_id(0), TILES, SPLIT)
    expert, first, count = load_first_block(blocks, tile // TILES // ROW_TILES, limit, SPLIT)
    early = 0
    if not GATHER:
        # The block table was complete before the first GEMM began: weights need not wait for it, activations do.
        early = gl.minimum(gl.minimum(TILES - tile % TILES, last - tile), STAGES)
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
def _multiply(words_buffer, x_buffer, zero, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The product of a tile's codes with the activations, under way; and its left operand, to be kept until it ends."""
    word = words_buffer.load(operand)
    w0, w1, w2, w3 = expand(word, DTYPE, True)
    w = side_by_side(w0, w1, w2, w3, operand)
    return warpgroup_mma(w, x_buffer.permute((1, 0)), zero, use_acc=False, is_async=True), w


@gluon.jit
def _hand_over(acc, partials, flags, rank):
    """Leave the sum of a piece's later tiles to the program that began the piece, the next rank below."""
    gl.store(_partial(partials, rank, acc), acc)
    barrier()
    gl.inline_asm_elementwise(
        "st.release.gpu.global.s32 [$1], 1; mov.b32 $0, 0;",
        "=r,l",
        [flags + rank],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _take_over(acc, partials, flags, rank):
    """acc and what the program of this rank left. It runs already: programs start in falling order of ranks."""
    came = 0
    while came == 0:
        came = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [flags + rank], dtype=gl.int32, is_pure=False, pack=1
        )
    acc += gl.load(_partial(partials, rank, acc), cache_modifier=".cg")
    # Every thread has seen the flag; leave it as it was found.
    barrier()
    gl.store(flags + rank, 0)
    return acc


@gluon.jit
def _partial(partials, rank, acc):
    """Where a program leaves its sum."""
    layout: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    t = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    return partials + rank * (acc.shape[0] * acc.shape[1]) + (row * acc.shape[1])[:, None] + t[None, :]


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
    """Multiply tile after tile, and finish each piece of work."""
    ROWS: gl.constexpr = p[1]
    BLOCK_ROWS: gl.constexpr = p[5]
    TOKENS: gl.constexpr = p[6]
    STAGES: gl.constexpr = p[7]
    TILE: gl.constexpr = 4 * p[3]
    RUNS: gl.constexpr = TILE // p[4]
    ROW_TILES: gl.constexpr = ROWS // BLOCK_ROWS
    TILES: gl.constexpr = p[0] // TILE
    EXPONENT: gl.constexpr = p[11]
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator, 2)
    gdc_wait()
    gdc_launch_dependents()
    used = gl.load(blocks + 3)
    rank = gl.num_programs(0) - 1 - gl.program_id(0)
    tile, last, skip = _share(used * ROW_TILES, rank, TILES, SPLIT)
    nothing = gl.full([BLOCK_ROWS, TOKENS], 0, gl.float32, accumulator)
    stage = 0
    phase = 0
    _, first, count = load_first_block(blocks, tile // TILES // ROW_TILES, used, SPLIT)
    while tile < last:
        row_tile = tile // TILES % ROW_TILES
        own_first, own_count = first, count
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        _, first, count = load_block(blocks, tile // TILES // ROW_TILES, used)
        acc = nothing
        for _ in range(start, end):
            mbarrier.wait(full.index(stage), phase)
            word = factors_ring.index(stage).load(gl.SliceLayout(1, accumulator))
            total = sums_ring.index(stage * RUNS).load(gl.SliceLayout(0, accumulator))
            for r in gl.static_range(1, RUNS):
                total += sums_ring.index(stage * RUNS + r).load(gl.SliceLayout(0, accumulator))
            product, w = _multiply(words_ring.index(stage), x_ring.index(stage), nothing, operand, dtype_of(p[8]))
            scale, zero = unpack_factors(word, dtype_of(p[9]))
            # The product is still to be multiplied by 2^EXPONENT.
            zero = (zero + p[10]) * 2.0**-EXPONENT
            product, w = warpgroup_mma_wait(0, deps=[product, w])
            mbarrier.arrive(empty.index(stage), count=1)
            acc += (product - zero[:, None] * total[None, :]) * scale[:, None]
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if start > 0:
            _hand_over(acc, partials, flags, rank)
        else:
            if SPLIT:
                other = rank
                while end < TILES:
                    other += 1
                    acc = _take_over(acc, partials, flags, other)
                    other_first, other_last, _ = _share(used * ROW_TILES, other, TILES, SPLIT)
                    end += other_last - other_first
            acc *= 2.0**EXPONENT
            if GATE_UP:
                store_gate_up(
                    acc, out, out_sums, own_first, own_count, row_tile * (BLOCK_ROWS // 2), alpha, limit, ACTIVATION, e
                )  # fmt: skip
            else:
                store_down(acc, out, sorted_slots, own_first, own_count, row_tile * BLOCK_ROWS, ROWS)


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
    dtypes of operands and factors, codes' offset, exponent of the result, row stride of the sums); EPILOGUE, of gate
    and up, (row stride of out, columns of one sum of it, sums, exponent, its step, plane width); PRODUCER the
    producer's (warps, registers). SPLIT is explained at `_share`; it leaves sums in `partials` and needs `flags` at
    zero, one a program.
    """
    PLANE: gl.constexpr = SHAPE[3]
    BLOCK_ROWS: gl.constexpr = SHAPE[5]
    TOKENS: gl.constexpr = SHAPE[6]
    STAGES: gl.constexpr = SHAPE[7]
    DTYPE: gl.constexpr = dtype_of(SHAPE[8])
    TILE: gl.constexpr = 4 * PLANE
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_ROWS, PLANE], words.layout)
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
