"""The producer's warps of the streaming kernels: they keep a program's ring of K tiles full (Gluon)."""

# Gluon's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.persistent import (
    copy_factors,
    copy_weights,
    copy_words,
    copy_x,
    load_block,
    load_first_block,
    load_rows,
    places,
)
from vllm_ext.ops.moe.triton.share import share


@gluon.jit
def produce_words(words, blocks, words_ring, full, empty, GATHER: gl.constexpr, SPLIT: gl.constexpr, p: gl.constexpr):
    """The words' part of `produce`, by a warp of its own: their place is free before the others' of a tile."""
    ROW_TILES: gl.constexpr = p[1] // p[5]
    TILES: gl.constexpr = p[0] // (4 * p[3])
    STAGES: gl.constexpr = p[7]
    SPARSE: gl.constexpr = p[18]
    rank = gl.num_programs(0) - 1 - gl.program_id(0)
    early = 0
    if GATHER:
        if SPARSE > 0:
            early = gl.where(rank < SPARSE * ROW_TILES, gl.minimum(TILES, STAGES), 0)
            own = rank % ROW_TILES * p[5]
            for i in range(early):
                copy_words(words, full.index(i), words_ring.index(i), rank // ROW_TILES, own, i, p)
        gdc_wait()
        gdc_launch_dependents()
    limit = gl.load(blocks + 3, cache_modifier=".cg")
    tile, last, skip = share(limit * ROW_TILES, rank, TILES, SPLIT)
    expert, _, count = load_first_block(blocks, tile // TILES // ROW_TILES, limit, SPLIT)
    stage = 0
    phase = 1
    began = 0
    while tile < last:
        row = tile // TILES % ROW_TILES * p[5]
        start = tile % TILES
        end = gl.minimum(TILES, start + last - tile)
        tile += end - start + skip
        next_expert, _, next_count = load_block(blocks, tile // TILES // ROW_TILES, limit)
        if SPARSE != 0:
            asked = gl.where(began == 0, early, 0)
            end = gl.where(count > 0, end, start + asked)
        for i in range(start, end):
            if began >= early:
                mbarrier.wait(empty.index(stage), phase)
                copy_words(words, full.index(stage), words_ring.index(stage), expert, row, i, p)
            began += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        expert, count = next_expert, next_count


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
    APART: gl.constexpr = p[19]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    t = gl.arange(0, TOKENS, layout=line)
    rank = gl.num_programs(0) - 1 - gl.program_id(0)
    early = 0
    if GATHER:
        if SPARSE > 0:
            # The first blocks are those of the experts one after another: their weights need not wait for the table.
            early = gl.where(rank < SPARSE * ROW_TILES, gl.minimum(TILES, STAGES), 0)
            if not APART:
                own = rank % ROW_TILES * BLOCK_ROWS
                for i in range(early):
                    w, f = words_ring.index(i), factors_ring.index(i)
                    copy_weights(words, factors, full.index(i), w, f, rank // ROW_TILES, own, i, p)
        gdc_wait()
        gdc_launch_dependents()
    limit = gl.load(blocks + 3, cache_modifier=".cg")
    tile, last, skip = share(limit * ROW_TILES, rank, TILES, SPLIT)
    expert, first, count = load_first_block(blocks, tile // TILES // ROW_TILES, limit, SPLIT)
    if not GATHER and APART:
        gdc_wait()
        gdc_launch_dependents()
    elif not GATHER:
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
            if APART:
                mbarrier.wait(empty.index(stage), phase)
                copy_factors(factors, bar, factors_ring.index(stage), expert, row, i, p)
            elif began >= early:
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
