"""A tile of weights against a tile of activations: codes expanded in registers, multiplied, scaled, zero points off.

With weight value s (q - z), and codes that reach the tensor core as q + offset,

    sum_k s (q - z) x  =  sum_groups s (sum_k (q + offset) x - (z + offset) (sum_k x)),

so a zero point of any kind costs one rank-one product a group, after the inner loop, from sums of x that are computed
once. SCALING says where s is applied:

    "sum"      to a group's sum; least work for few tokens
    "operand"  to the codes, rounding s (q - 8) to 16 bits; the offset is then -8. Less work for many tokens, and one
               product after another adds to the same accumulators
    "column"   as "operand", column by column, for group sizes that the planes straddle
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.moe.triton.dequant import CENTER, expand, scale_codes, settle, unpack_factors

_SUM_CHUNK = tl.constexpr(16)


@triton.jit
def _split(value):
    """An FP32 value as the sum of three BF16 values, exact to 24 bits."""
    high = value.to(tl.bfloat16)
    rest = value - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _load_zero_term(factors, row, sums, token_ok, START: tl.constexpr, p: tl.constexpr):
    """Factor words [rows, chunk] and sums of x [chunk, tokens] of _SUM_CHUNK sums from START on."""
    ROWS: tl.constexpr = p[1]
    SUMS: tl.constexpr = (p[0] + p[4] - 1) // p[4]
    place = START + tl.arange(0, _SUM_CHUNK)
    ok = place < SUMS
    at = (place * p[4] // p[2])[None, :] * ROWS + row[:, None]
    word = tl.load(factors + at, mask=ok[None, :] & (row < ROWS)[:, None], other=0)
    total = tl.load(sums[None, :] + place[:, None], mask=ok[:, None] & token_ok[None, :], other=0.0)
    return word, total


@triton.jit
def _subtract_zero_term(acc, word, total, FACTOR_DTYPE: tl.constexpr, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """acc - sum over a chunk of groups of s (z + offset) (sum of x), [rows, tokens]: a product over the groups.

    Its factors are split into BF16 parts. FP16's offset of 1024 makes the term so much larger than the result that it
    needs all 24 bits; for BF16's 128, 16 bits leave an error below that of the operands.
    """
    s, z = unpack_factors(word, FACTOR_DTYPE)
    left = -s * (z + OFFSET)
    if ASM:
        left_high, left_middle, left_low = _split(left)
        high, middle, low = _split(total)
        acc = tl.dot(left_high, high, acc)
        acc = tl.dot(left_high, middle, acc)
        acc = tl.dot(left_middle, high, acc)
        if OFFSET > 128:
            acc = tl.dot(left_middle, middle, acc)
            acc = tl.dot(left_high, low, acc)
            acc = tl.dot(left_low, high, acc)
    else:
        acc = tl.dot(left, total, acc, input_precision="ieee")
    return acc


@triton.jit
def _group_factors(factors, row, column, p: tl.constexpr, FACTOR_DTYPE: tl.constexpr):
    """Scale and zero point, each [rows], of the group that `column` lies in; past K, those of the last group."""
    group = tl.minimum(column // p[2], (p[0] + p[2] - 1) // p[2] - 1)
    return unpack_factors(tl.load(factors + group * p[1] + row, mask=row < p[1], other=0), FACTOR_DTYPE)


@triton.jit
def _column_scales(factors, row, k, p: tl.constexpr, FACTOR_DTYPE: tl.constexpr):
    """The scales [rows, columns] of the columns k."""
    ok = (row < p[1])[:, None] & (k < p[0])[None, :]
    word = tl.load(factors + (k // p[2])[None, :] * p[1] + row[:, None], mask=ok, other=0)
    return unpack_factors(word, FACTOR_DTYPE)[0]


@triton.jit
def _load_x(x, k, token_ok, K: tl.constexpr, EVEN: tl.constexpr):
    """x^T [columns k, tokens], zeros where there is no token or no column."""
    at = x[None, :] + k[:, None]
    if EVEN:
        value = tl.load(at, mask=token_ok[None, :], other=0.0)
    else:
        value = tl.load(at, mask=token_ok[None, :] & (k < K)[:, None], other=0.0)
    return value


@triton.jit
def _side_by_side(left, right):
    """[R, P] and [R, P] to [R, 2P]. Tensor-core operands hold columns in rising registers: nothing moves."""
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def _four_side_by_side(p0, p1, p2, p3):
    """Four times [R, P] to [R, 4P]."""
    pairs = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    return pairs.permute(0, 3, 2, 1).reshape(p0.shape[0], 4 * p0.shape[1])


@triton.jit
def add_tile(
    acc,
    words,
    factors,
    row,
    x,
    token_ok,
    tile,
    p: tl.constexpr,
    FORM: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EVEN_TILES: tl.constexpr,
):
    """acc [rows, tokens] + one K tile's product."""
    K: tl.constexpr = p[0]
    ROWS: tl.constexpr = p[1]
    GROUP: tl.constexpr = p[2]
    PLANE: tl.constexpr = p[3]
    TILE: tl.constexpr = 4 * PLANE
    EVEN: tl.constexpr = K % TILE == 0 and EVEN_TILES
    # Planes of a tile that share a group.
    SHARED: tl.constexpr = 4 if GROUP % TILE == 0 else (2 if GROUP % (2 * PLANE) == 0 else 1)
    # Without the 16-bit assembly (FP32, the interpreter) operands are FP32.
    dtype: tl.constexpr = x.dtype.element_ty if ASM else tl.float32
    precision: tl.constexpr = "tf32" if ASM else "ieee"
    # What nibbles on odd planes count.
    ODD: tl.constexpr = 2 ** FORM[4]

    at = words + tile * (ROWS * PLANE) + row[:, None] * PLANE + tl.arange(0, PLANE)[None, :]
    k = tile * TILE
    if ROWS % BLOCK_ROWS == 0 and EVEN_TILES:
        word = tl.load(at)
    else:
        ok = tl.where(row < ROWS, k, K) < K
        word = tl.load(at, mask=ok[:, None], other=0)
    w0, w1, w2, w3 = expand(word, dtype, ASM)
    if SCALING == "sum" and SHARED == 1:
        for i in tl.static_range(4):
            w = w0 if i == 0 else (w1 if i == 1 else (w2 if i == 2 else w3))
            xs = _load_x(x, k + i * PLANE + tl.arange(0, PLANE), token_ok, K, EVEN).to(dtype)
            s, _ = _group_factors(factors, row, k + i * PLANE, p, FACTOR_DTYPE)
            acc += tl.dot(w, xs, input_precision=precision) * s[:, None]
    elif SCALING == "sum" and SHARED == 2:
        for i in tl.static_range(2):
            w = _side_by_side(w0, w1) if i == 0 else _side_by_side(w2, w3)
            xs = _load_x(x, k + i * 2 * PLANE + tl.arange(0, 2 * PLANE), token_ok, K, EVEN).to(dtype)
            s, _ = _group_factors(factors, row, k + i * 2 * PLANE, p, FACTOR_DTYPE)
            acc += tl.dot(w, xs, input_precision=precision) * s[:, None]
    else:
        xs = _load_x(x, k + tl.arange(0, TILE), token_ok, K, EVEN).to(dtype)
        if SCALING == "sum":
            s, _ = _group_factors(factors, row, k, p, FACTOR_DTYPE)
            w = _four_side_by_side(w0, w1, w2, w3)
            acc += tl.dot(w, xs, input_precision=precision) * s[:, None]
        else:
            if SCALING == "column":
                column = k + tl.arange(0, PLANE)
                s0 = _column_scales(factors, row, column, p, FACTOR_DTYPE)
                s1 = _column_scales(factors, row, column + PLANE, p, FACTOR_DTYPE)
                s2 = _column_scales(factors, row, column + 2 * PLANE, p, FACTOR_DTYPE)
                s3 = _column_scales(factors, row, column + 3 * PLANE, p, FACTOR_DTYPE)
            else:
                s0 = _group_factors(factors, row, k, p, FACTOR_DTYPE)[0][:, None]
                s1, s2, s3 = s0, s0, s0
                if SHARED <= 2:
                    s2 = _group_factors(factors, row, k + 2 * PLANE, p, FACTOR_DTYPE)[0][:, None]
                    s3 = s2
                if SHARED == 1:
                    s1 = _group_factors(factors, row, k + PLANE, p, FACTOR_DTYPE)[0][:, None]
                    s3 = _group_factors(factors, row, k + 3 * PLANE, p, FACTOR_DTYPE)[0][:, None]
            w0 = scale_codes(w0, s0, 1, FORM[0], FORM[3], ASM)
            w1 = scale_codes(w1, s1, ODD, FORM[0], FORM[3], ASM)
            w2 = scale_codes(w2, s2, 1, FORM[0], FORM[3], ASM)
            w3 = scale_codes(w3, s3, ODD, FORM[0], FORM[3], ASM)
            acc = settle(tl.dot(_four_side_by_side(w0, w1, w2, w3), xs, acc, input_precision=precision), ASM)
    return acc


@triton.jit
def finish(
    acc,
    factors,
    row,
    sums,
    token_ok,
    p: tl.constexpr,
    FORM: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    ASM: tl.constexpr,
):
    """W x^T in FP32 [rows, tokens] from the accumulated product of the codes."""
    SUMS: tl.constexpr = (p[0] + p[4] - 1) // p[4]
    if SCALING == "sum" and FORM[1] != FORM[2]:
        acc *= 2.0 ** (FORM[1] - FORM[2])
    OFFSET: tl.constexpr = FORM[0] if SCALING == "sum" else -CENTER
    for start in tl.static_range(0, SUMS, _SUM_CHUNK):
        word, total = _load_zero_term(factors, row, sums, token_ok, start, p)
        acc = _subtract_zero_term(acc, word, total, FACTOR_DTYPE, OFFSET, ASM)
    return acc
