"""The parts of a persistent kernel: read the block table, ask for tiles and rows, finish a piece of work (Gluon)."""

# Gluon's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vllm_ext.ops.moe.triton.activation import gated
from vllm_ext.ops.moe.triton.dequant import scale_activations

# Triton renamed these after 3.6.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)  # fmt: skip
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def dtype_of(name):
    """The dtype that goes by Triton's `name`."""
    return gl.bfloat16 if name == "bf16" else gl.float16 if name == "fp16" else gl.float32


@gluon.jit
def load_block(blocks, block, limit):
    """(expert, first place, slots) of a block; block 0 in the place of one past the end."""
    entry = blocks + gl.where(block < limit, block, 0) * 4
    expert = gl.load(entry, cache_modifier=".cg")
    first = gl.load(entry + 1, cache_modifier=".cg")
    return expert, first, gl.load(entry + 2, cache_modifier=".cg")


@gluon.jit
def load_first_block(blocks, block, limit, SPLIT: gl.constexpr):
    """A program's first block. Unless SPLIT it is in the table whatever the limit is, and the read need not wait."""
    if not SPLIT:
        limit = block + 1
    return load_block(blocks, block, limit)


@gluon.jit
def _load_words(words, bar, words_buffer, expert, row, tile, p: gl.constexpr):
    """A tile of words is one piece of memory, copied in lines of p[17] words whatever the width of its planes is."""
    ROWS_A_LINE: gl.constexpr = p[17] // p[3]
    line = (expert * (p[0] // (4 * p[3])) + tile) * (p[1] // ROWS_A_LINE) + row // ROWS_A_LINE
    load_tile(words, [line, 0], bar, words_buffer)


@gluon.jit
def _load_factors(factors, bar, factors_buffer, expert, row, tile, p: gl.constexpr):
    group = expert * (p[0] // p[2]) + tile * (4 * p[3]) // p[2]
    load_tile(factors, [group * p[1] + row], bar, factors_buffer)


@gluon.jit
def copy_weights(words, factors, bar, words_buffer, factors_buffer, expert, row, tile, p: gl.constexpr):
    """Ask for the words and factors of one K tile of BLOCK_ROWS rows; `bar` hears when they came."""
    mbarrier.expect(bar, p[5] * p[3] * 2 + p[5] * 4)
    _load_words(words, bar, words_buffer, expert, row, tile, p)
    _load_factors(factors, bar, factors_buffer, expert, row, tile, p)


@gluon.jit
def copy_words(words, bar, words_buffer, expert, row, tile, p: gl.constexpr):
    """`copy_weights` of the words alone."""
    mbarrier.expect(bar, p[5] * p[3] * 2)
    _load_words(words, bar, words_buffer, expert, row, tile, p)


@gluon.jit
def copy_factors(factors, bar, factors_buffer, expert, row, tile, p: gl.constexpr):
    """`copy_weights` of the factors alone."""
    mbarrier.expect(bar, p[5] * 4)
    _load_factors(factors, bar, factors_buffer, expert, row, tile, p)


@gluon.jit
def copy_x(x_buffer, bar, x, place, count, tile, TOKENS: gl.constexpr, TILE: gl.constexpr):
    """Ask for a block's activations of one K tile, zeros for tokens that are not there; `bar` hears when they came."""
    LANES: gl.constexpr = TILE // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    at = (x + place)[:, None] + (tile * TILE + k)[None, :]
    load_rows(x_buffer, at, mask=(t < count)[:, None])
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def places(sorted_slots, first, count, x_stride, GATHER: gl.constexpr, TOP_K: gl.constexpr, p: gl.constexpr):
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
def side_by_side(p0, p1, p2, p3, layout: gl.constexpr):
    """Four times [R, P] to [R, 4P] in the tensor core's order of columns: nothing moves."""
    pairs = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    joined = pairs.permute(0, 3, 2, 1).reshape(p0.shape[0], 4 * p0.shape[1])
    return gl.convert_layout(joined, layout, assert_trivial=True)


@gluon.jit
def store_gate_up(
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
def down_slots(sorted_slots, first, count, TOKENS: gl.constexpr, BLOCK_ROWS: gl.constexpr):
    """Slots of a block, laid out as `store_down` stores BLOCK_ROWS rows."""
    LANES: gl.constexpr = BLOCK_ROWS // 8
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, gl.num_warps()], [0, 1])
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, wide))
    return gl.load(sorted_slots + first + t, mask=t < count, other=0)


@gluon.jit
def store_down(acc, out, slot, count, start, ROWS: gl.constexpr):
    """Store rows from row `start` on by slot (`down_slots`)."""
    BLOCK_ROWS: gl.constexpr = acc.shape[0]
    wide: gl.constexpr = slot.type.layout.parent
    t = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, wide))
    slot = slot.to(gl.int64)
    value = gl.convert_layout(acc.to(out.dtype.element_ty), wide)
    row = start + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, wide))
    gl.store((out + slot * ROWS)[None, :] + row[:, None], value, mask=(t < count)[None, :])
