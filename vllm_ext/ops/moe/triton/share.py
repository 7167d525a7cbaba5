"""Programs of a streaming kernel that share K tiles: who computes which, and how sums are handed over (Gluon)."""

# Gluon's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm_ext.ops.moe.triton.persistent import barrier


@gluon.jit
def share(units, rank, TILES: gl.constexpr, SPLIT: gl.constexpr):
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
def _partial(partials, rank, half, acc, p: gl.constexpr):
    """Where a program leaves the sum of a half of its rows, or of all of them."""
    layout: gl.constexpr = acc.type.layout
    row = half * acc.shape[0] + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    t = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    return partials + rank * (p[5] * p[6]) + (row * p[6])[:, None] + t[None, :]


@gluon.jit
def hand_over(acc, other, partials, flags, rank, p: gl.constexpr):
    """Leave the sum of a piece's later tiles to the program that began the piece, the next rank below."""
    gl.store(_partial(partials, rank, 0, acc, p), acc)
    if acc.shape[0] < p[5]:
        gl.store(_partial(partials, rank, 1, other, p), other)
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
def take_over(acc, other, partials, flags, rank, p: gl.constexpr):
    """The sums and what the program of this rank left. It runs already: programs start in falling order of ranks."""
    came = 0
    while came == 0:
        came = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [flags + rank], dtype=gl.int32, is_pure=False, pack=1
        )
    acc += gl.load(_partial(partials, rank, 0, acc, p), cache_modifier=".cg")
    if acc.shape[0] < p[5]:
        other += gl.load(_partial(partials, rank, 1, other, p), cache_modifier=".cg")
    # Every thread has seen the flag; leave it as it was found.
    barrier()
    gl.store(flags + rank, 0)
    return acc, other
