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
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.activation import gated
from vllm_ext.ops.moe.triton.dequant import expand, scale_activations

# Triton renamed both after 3.6.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)  # fmt: skip
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _load_block(blocks, block, limit):
    """(expert, first place, slots) of a block; block 0 in the place of one past the end."""
    entry = blocks + gl.where(block < limit, block, 0) * 4
    expert = gl.load(entry, cache_modifier=".cg")
    first = gl.load(entry + 1, cache_modifier=".cg")
    return expert, first, gl.load(entry + 2, cache_modifier=".cg")


@gluon.jit
def _load_first_block(blocks, block, limit, SPLIT: gl.constexpr):
    """A program's first block. Unless SPLIT it is in the table whatever the limit is, and the read need not wait."""
    if not SPLIT:
        limit = block + 1
    return _load_block(blocks, block, limit)


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
def _copy_weights(words, factors, bar, words_buffer, factors_buffer, expert, row, tile, p: gl.constexpr):
    """Ask for the words and factors of one K tile of BLOCK_ROWS rows; `bar` hears when they came."""
    TILE: gl.constexpr = 4 * p[3]
    mbarrier.expect(bar, p[5] * p[3] * 2 + p[5] * 4)
    load_tile(words, [(expert * (p[0] // TILE) + tile) * p[1] + row, 0], bar, words_buffer)
    group = expert * (p[0] // p[2]) + tile * TILE // p[2]
    load_tile(factors, [group * p[1] + row], bar, factors_buffer)


@gluon.jit
def _copy_x(x_buffer, bar, x, place, count, tile, TOKENS: gl.constexpr, TILE: gl.constexpr):
    """Ask for a block's activations of one K tile, zeros for tokens that are not there; `bar` hears when they came."""
    LANES: gl.constexpr = TILE // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    at = (x + place)[:, None] + (tile * TILE + k)[None, :]
    load_rows(x_buffer, at, mask=(t < count)[:, None])
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _places(sorted_slots, first, count, x_stride, GATHER: gl.constexpr, TOP_K: gl.constexpr, p: gl.constexpr):
    """Where each token's activations begin, in elements: those of the slot's token, or at its place in sorted order."""
    TOKENS: gl.constexpr = p[6]
    LANES: gl.constexpr = p[3] * 4 // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    if GATHER:
        row = gl.load(sorted_slots + first + t, mask=t < count, other=0) // TOP_K
    else:
        row = gl.where(t < count, first + t, 0)
    return row.to(gl.int64) * x_stride


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
    expert, first, count = _load_first_block(blocks, tile // TILES // ROW_TILES, limit, SPLIT)
    early = 0
    if not GATHER:
        # The block table was complete before the first GEMM began: weights need not wait for it, activations do.
        early = gl.minimum(gl.minimum(TILES - tile % TILES, last - tile), STAGES)
        row = tile // TILES % ROW_TILES * BLOCK_ROWS
        for i in range(early):
            k = tile % TILES + i
            _copy_weights(words, factors, full.index(i), words_ring.index(i), factors_ring.index(i), expert, row, k, p)
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 1
    began = 0
    while tile < last:
        place = _places(sorted_slots, first, count, x_stride, GATHER, TOP_K, p)
        source = first + t
        if GATHER:
            source = gl.load(sorted_slots + source, mask=t < count, other=0) // TOP_K
        sums = group_sums + source.to(gl.int64) * p[12]
        row = tile // TILES % ROW_TILES * BLOCK_ROWS
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        next_expert, next_first, next_count = _load_block(blocks, tile // TILES // ROW_TILES, limit)
        for i in range(start, end):
            bar = full.index(stage)
            if began >= early:
                mbarrier.wait(empty.index(stage), phase)
                _copy_weights(
                    words, factors, bar, words_ring.index(stage), factors_ring.index(stage), expert, row, i, p
                )
            for r in gl.static_range(RUNS):
                run = sums_ring.index(stage * RUNS + r)
                load_rows(run, sums + i * RUNS + r, mask=t < count)
            _copy_x(x_ring.index(stage), bar, x, place, count, i, TOKENS, TILE)
            began += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        expert, first, count = next_expert, next_first, next_count


@gluon.jit
def _unpack(word, dtype: gl.constexpr):
    """(scale, zero point) in FP32 of a word that holds both in 16 bits."""
    if dtype == gl.bfloat16:
        scale = (word << 16).to(gl.float32, bitcast=True)
        zero = (word & -65536).to(gl.float32, bitcast=True)
    else:
        scale = (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        zero = (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return scale, zero


@gluon.jit
def _side_by_side(p0, p1, p2, p3, layout: gl.constexpr):
    """Four times [R, P] to [R, 4P] in the tensor core's order of columns: nothing moves."""
    pairs = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    joined = pairs.permute(0, 3, 2, 1).reshape(p0.shape[0], 4 * p0.shape[1])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def _multiply(words_buffer, x_buffer, zero, operand: gl.constexpr, DTYPE: gl.constexpr):
    """The product of a tile's codes with the activations, under way; and its left operand, to be kept until it ends."""
    word = words_buffer.load(operand)
    w0, w1, w2, w3 = expand(word, DTYPE, True)
    w = _side_by_side(w0, w1, w2, w3, operand)
    return warpgroup_mma(w, x_buffer.permute((1, 0)), zero, use_acc=False, is_async=True), w


@gluon.jit
def _store_gate_up(
    acc,
    out,
    out_sums,
    first,
    count,
    start,
    alpha,
    limit,
    ACTIVATION: gl.constexpr,
    e: gl.constexpr,
):
    """Activate rows and store them from column `start` on at the tokens' places, with the sums over runs of columns."""
    BLOCK_ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    COLUMNS: gl.constexpr = BLOCK_ROWS // 2
    OUT_STRIDE: gl.constexpr = e[0]
    OUT_SUM_WIDTH: gl.constexpr = e[1]
    OUT_SUMS: gl.constexpr = e[2]
    gate, up = gl.split(acc.reshape(BLOCK_ROWS // 16, 2, 8, TOKENS).permute(0, 2, 3, 1))
    value = gated(gate, up, alpha, limit, ACTIVATION).reshape(COLUMNS, TOKENS)
    value = value.to(out.dtype.element_ty).to(gl.float32)
    layout: gl.constexpr = value.type.layout
    column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))
    scaled = scale_activations(value, column[:, None], e[3], e[4], e[5])
    RUNS: gl.constexpr = COLUMNS // OUT_SUM_WIDTH
    sums = gl.sum(value.reshape(RUNS, OUT_SUM_WIDTH, TOKENS), 1)
    sums_layout: gl.constexpr = sums.type.layout
    run = start // OUT_SUM_WIDTH + gl.arange(0, RUNS, layout=gl.SliceLayout(1, sums_layout))
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, sums_layout))
    at = (out_sums + (first + t).to(gl.int64) * OUT_SUMS)[None, :] + run[:, None]
    gl.store(at, sums, mask=(t < count)[None, :] & (run < OUT_SUMS)[:, None])
    ROW_LANES: gl.constexpr = COLUMNS // 4 if COLUMNS < 128 else 32
    wide: gl.constexpr = gl.BlockedLayout([4, 1], [ROW_LANES, 32 // ROW_LANES], [1, gl.num_warps()], [0, 1])
    scaled = gl.convert_layout(scaled.to(out.dtype.element_ty), wide)
    column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, wide))
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, wide))
    at = (out + (first + t).to(gl.int64) * OUT_STRIDE)[None, :] + column[:, None]
    gl.store(at, scaled, mask=(t < count)[None, :])


@gluon.jit
def _store_down(acc, out, sorted_slots, first, count, start, ROWS: gl.constexpr):
    """Store rows from row `start` on by slot."""
    BLOCK_ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    LANES: gl.constexpr = BLOCK_ROWS // 8
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, wide))
    slot = gl.load(sorted_slots + first + t, mask=t < count, other=0).to(gl.int64)
    value = gl.convert_layout(acc.to(out.dtype.element_ty), wide)
    row = start + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, wide))
    gl.store((out + slot * ROWS)[None, :] + row[:, None], value, mask=(t < count)[None, :])


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
    _, first, count = _load_first_block(blocks, tile // TILES // ROW_TILES, used, SPLIT)
    while tile < last:
        row_tile = tile // TILES % ROW_TILES
        own_first, own_count = first, count
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        _, first, count = _load_block(blocks, tile // TILES // ROW_TILES, used)
        acc = nothing
        for _ in range(start, end):
            mbarrier.wait(full.index(stage), phase)
            word = factors_ring.index(stage).load(gl.SliceLayout(1, accumulator))
            total = sums_ring.index(stage * RUNS).load(gl.SliceLayout(0, accumulator))
            for r in gl.static_range(1, RUNS):
                total += sums_ring.index(stage * RUNS + r).load(gl.SliceLayout(0, accumulator))
            product, w = _multiply(words_ring.index(stage), x_ring.index(stage), nothing, operand, p[8])
            scale, zero = _unpack(word, p[9])
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
                _store_gate_up(
                    acc, out, out_sums, own_first, own_count, row_tile * (BLOCK_ROWS // 2), alpha, limit, ACTIVATION, e
                )  # fmt: skip
            else:
                _store_down(acc, out, sorted_slots, own_first, own_count, row_tile * BLOCK_ROWS, ROWS)


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

    SHAPE is (K, rows, group size, plane width, columns of one sum, BLOCK_ROWS, BLOCK_TOKENS, stages, dtype of the
    operands, of the factors, codes' offset, exponent of the result, row stride of the sums, exponent of the scales,
    what odd planes count); EPILOGUE, of gate and up, (row stride of out, columns of one sum of it, sums, exponent, its
    step, plane width); PRODUCER the producer's (warps, registers). SPLIT is explained at `_share`; it leaves sums in
    `partials` and needs `flags` at zero, one a program.
    """
    PLANE: gl.constexpr = SHAPE[3]
    BLOCK_ROWS: gl.constexpr = SHAPE[5]
    TOKENS: gl.constexpr = SHAPE[6]
    STAGES: gl.constexpr = SHAPE[7]
    DTYPE: gl.constexpr = SHAPE[8]
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
