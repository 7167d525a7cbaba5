"""The inverse of a chunk's unit lower triangular matrix, in 4 x 4 blocks of 16 rows, one row of blocks to a warp.

Blocks are held as [4, 16, 16], one for every row of blocks b: `diagonal` (b, b), `beside` (b, b - 1) for odd b, `first`
and `second` (b, 0) and (b, 1) for b >= 2; where there is none, zero. Inverses are built from small blocks to large,
[[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']], which stays accurate where powers of the matrix would not: repeated
keys make the powers' entries binomials.

The tensor cores' right operand lies in registers as the transpose of what their results lie as. So products are given
the right factor's transpose, and carried along transposed as well where that is needed, instead of moving anything.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def load_once(pointer, mask):
    """FP32 numbers from memory, zero where masked. The compiler would load them again for every layout they are used
    in, a number at a time; what comes out of assembly it moves instead.
    """
    value = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if not _INTERPRETED:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], tl.float32, False, 1)
    return value


@triton.jit
def to_half(x):
    """FP32 as FP16, the largest number for what is past it."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _parts(x):
    """An FP32 number as two FP16 numbers, 22 bits of it."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _product(x, transposed, FINE: tl.constexpr):
    """x y for blocks [4, 16, 16], y given as its transpose. One
    FP16 product is finer than BF16 operands are; FINE, for operands in FP16, multiplies twice as many bits.
    """
    if FINE:
        x_high, x_low = _parts(x)
        high, low = _parts(transposed)
        high, low = tl.permute(high, (0, 2, 1)), tl.permute(low, (0, 2, 1))
        product = tl.dot(x_high, high, tl.dot(x_high, low, tl.dot(x_low, high)))
    else:
        product = tl.dot(x.to(tl.float16), tl.permute(transposed.to(tl.float16), (0, 2, 1)))
    return product


@triton.jit
def _column(matrix, wanted):
    """Of a [64, 64] matrix the blocks [4, 16, 16] where wanted [4, 4] is true, at most one in a row of blocks."""
    return tl.sum(tl.where(wanted[:, None, :, None], tl.reshape(matrix, (4, 16, 4, 16)), 0.0), axis=2)


@triton.jit
def diagonal_of(matrix):
    """The diagonal blocks of a [64, 64] matrix."""
    return _column(matrix, tl.arange(0, 4)[:, None] == tl.arange(0, 4)[None, :])


@triton.jit
def blocks_of(matrix):
    """diagonal, beside, first and second of a [64, 64] matrix."""
    row = tl.arange(0, 4)[:, None]
    column = tl.arange(0, 4)[None, :]
    return (
        _column(matrix, row == column),
        _column(matrix, (row == column + 1) & (row % 2 == 1)),
        _column(matrix, (column == 0) & (row >= 2)),
        _column(matrix, (column == 1) & (row >= 2)),
    )


@triton.jit
def assemble(diagonal, beside, first, second):
    """The [64, 64] matrix of these blocks."""
    row = tl.arange(0, 4)[:, None, None, None]
    column = tl.arange(0, 4)[None, None, :, None]
    matrix = tl.where(row == column, diagonal[:, :, None, :], 0.0)
    matrix = tl.where((row == column + 1) & (row % 2 == 1), beside[:, :, None, :], matrix)
    matrix = tl.where((row >= 2) & (column == 0), first[:, :, None, :], matrix)
    matrix = tl.where((row >= 2) & (column == 1), second[:, :, None, :], matrix)
    return tl.reshape(matrix, (64, 64))


@triton.jit
def level_mask(HALF: tl.constexpr):
    """[1, 16, 16]: rows in the lower, columns in the upper half of the same diagonal block of 2 HALF rows."""
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    return (row // (2 * HALF) == column // (2 * HALF)) & ((row // HALF) % 2 == 1) & ((column // HALF) % 2 == 0)


@triton.jit
def _block(x, place):
    """Block `place` of [4, 16, 16], for every row of blocks."""
    own = tl.arange(0, 4)[:, None, None] == place
    return tl.broadcast_to(tl.sum(tl.where(own, x, 0.0), axis=0)[None, :, :], (4, 16, 16))


@triton.jit
def _even_block(x):
    """Block 2 p of [4, 16, 16], for rows of blocks 2 p and 2 p + 1."""
    even = tl.arange(0, 2)[None, :, None, None] == 0
    pairs = tl.sum(tl.where(even, tl.reshape(x, (2, 2, 16, 16)), 0.0), axis=1)
    return tl.reshape(tl.broadcast_to(pairs[:, None, :, :], (2, 2, 16, 16)), (4, 16, 16))


@triton.jit
def invert(diagonal, diagonal_transposed, beside, first, second, FINE: tl.constexpr):
    """The blocks of (I + A)^-1 from those of the strictly lower triangular A, FP32; of diagonal_transposed only what
    level_mask(1) of `diagonal` is the transpose of is read.
    """
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    one = tl.where(row == column, 1.0, 0.0)
    inverse = one - tl.where(level_mask(1), diagonal, 0.0)
    transposed = one - tl.where((row + 1 == column) & (row % 2 == 0), diagonal_transposed, 0.0)
    for level in tl.static_range(1, 4):
        between = tl.where(level_mask(2**level), diagonal, 0.0)
        step = _product(transposed, between, FINE)  # of (between inverse)^T
        inverse, transposed = inverse - _product(inverse, step, FINE), transposed - _product(step, inverse, FINE)
    step = _product(_even_block(transposed), beside, FINE)
    beside, beside_transposed = -_product(inverse, step, FINE), -_product(step, inverse, FINE)
    step = _product(_block(transposed, 0), first, FINE) + _product(_block(beside_transposed, 1), second, FINE)
    below = tl.where(tl.arange(0, 4)[:, None, None] == 3, beside, 0.0)
    first = -(_product(inverse, step, FINE) + _product(below, _block(step, 2), FINE))
    step = _product(_block(transposed, 1), second, FINE)
    second = -(_product(inverse, step, FINE) + _product(below, _block(step, 2), FINE))
    return inverse, beside, first, second
