"""The two grouped GEMMs. Weights are the left operand, out^T = W x^T, and stay in registers after the expansion.

A program computes BLOCK_ROWS rows of one expert's weight for one block of at most BLOCK_TOKENS slots. With weight
value s (q - z), and codes that reach the tensor core as q + offset,

    sum_k s (q - z) x  =  sum_groups s (sum_k (q + offset) x)  -  sum_groups s (z + offset) (sum_k x),

so a zero point of any kind costs one rank-one product a group, outside the inner loop, from sums of x that are
computed once. SCALING says where s is applied:

    "sum"      to a group's sum; least work for few tokens
    "operand"  to the codes, rounding s q to 16 bits; less work for many tokens, and the GEMM runs on uninterrupted
    "column"   as "operand", column by column, for group sizes that the planes straddle
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.moe.triton.activation import gated, pointwise
from vllm_ext.ops.moe.triton.dequant import expand, scale_codes

_SUM_CHUNK = tl.constexpr(32)


@triton.jit
def _zero_term(
    scale,
    zero,
    row,
    sums,
    token_ok,
    p: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """sum over groups of s (z + offset) (sum of x): FP32 [rows, tokens], the factors split into TF32 triples."""
    K: tl.constexpr = p[0]
    ROWS: tl.constexpr = p[1]
    GROUP: tl.constexpr = p[2]
    SUM_WIDTH: tl.constexpr = p[4]
    SUMS: tl.constexpr = (K + SUM_WIDTH - 1) // SUM_WIDTH
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    term = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for start in tl.static_range(0, SUMS, _SUM_CHUNK):
        place = start + tl.arange(0, _SUM_CHUNK)
        group = tl.minimum(place * SUM_WIDTH // GROUP, GROUPS - 1)
        at = group[None, :] * ROWS + row[:, None]
        ok = (place < SUMS)[None, :] & (row < ROWS)[:, None]
        s = tl.load(scale + at, mask=ok, other=0.0).to(tl.float32)
        z = 8.0
        if zero is not None:
            z = tl.load(zero + at, mask=ok, other=0).to(tl.float32)
        total = tl.load(sums[None, :] + place[:, None], mask=(place < SUMS)[:, None] & token_ok[None, :], other=0.0)
        term = tl.dot(s * (z + OFFSET), total, term, input_precision="tf32x3")
    return term


@triton.jit
def _scales(scale, row, tile, p: tl.constexpr, dtype: tl.constexpr):
    """The scales [rows] of a K tile's four nibble planes."""
    K: tl.constexpr = p[0]
    ROWS: tl.constexpr = p[1]
    GROUP: tl.constexpr = p[2]
    PLANE: tl.constexpr = p[3]
    LAST: tl.constexpr = (K + GROUP - 1) // GROUP - 1
    ok = row < ROWS
    at = tile * 4 * PLANE
    s0 = tl.load(scale + tl.minimum(at // GROUP, LAST) * ROWS + row, mask=ok, other=0.0).to(dtype)
    s1, s2, s3 = s0, s0, s0
    if GROUP % (4 * PLANE) != 0:
        s2 = tl.load(scale + tl.minimum((at + 2 * PLANE) // GROUP, LAST) * ROWS + row, mask=ok, other=0.0).to(dtype)
        s3 = s2
        if GROUP % (2 * PLANE) != 0:
            s1 = tl.load(scale + tl.minimum((at + PLANE) // GROUP, LAST) * ROWS + row, mask=ok, other=0.0).to(dtype)
            s3 = tl.load(scale + tl.minimum((at + 3 * PLANE) // GROUP, LAST) * ROWS + row, mask=ok, other=0.0).to(dtype)
    return s0, s1, s2, s3


@triton.jit
def _column_scales(scale, row, k, p: tl.constexpr, dtype: tl.constexpr):
    """The scales [rows, columns] of the columns k."""
    ok = (row < p[1])[:, None] & (k < p[0])[None, :]
    return tl.load(scale + (k // p[2])[None, :] * p[1] + row[:, None], mask=ok, other=0.0).to(dtype)


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
def _weight_times_x(
    acc,
    words,
    scale,
    row,
    x,
    token_ok,
    p: tl.constexpr,
    SCALING: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """acc [rows, tokens] + the product of the codes, scaled, and x^T. `x` points at the tokens' first columns."""
    K: tl.constexpr = p[0]
    ROWS: tl.constexpr = p[1]
    GROUP: tl.constexpr = p[2]
    PLANE: tl.constexpr = p[3]
    TILES: tl.constexpr = (K + 4 * PLANE - 1) // (4 * PLANE)
    EVEN: tl.constexpr = K % (4 * PLANE) == 0
    # Without the 16-bit assembly (FP32, the interpreter) operands are FP32.
    dtype: tl.constexpr = x.dtype.element_ty if ASM else tl.float32
    scale_dtype: tl.constexpr = tl.float32 if SCALING == "sum" else dtype
    precision: tl.constexpr = "tf32" if ASM else "ieee"

    at = words + row[:, None] * PLANE + tl.arange(0, PLANE)[None, :]
    s0, s1, s2, s3 = _scales(scale, row, 0, p, scale_dtype)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        if ROWS % BLOCK_ROWS == 0:
            word = tl.load(at + tile * (ROWS * PLANE))
        else:
            word = tl.load(at + tile * (ROWS * PLANE), mask=(row < ROWS)[:, None], other=0)
        k = tile * (4 * PLANE) + tl.arange(0, PLANE)
        x0 = _load_x(x, k, token_ok, K, EVEN).to(dtype)
        x1 = _load_x(x, k + PLANE, token_ok, K, EVEN).to(dtype)
        x2 = _load_x(x, k + 2 * PLANE, token_ok, K, EVEN).to(dtype)
        x3 = _load_x(x, k + 3 * PLANE, token_ok, K, EVEN).to(dtype)
        w0, w1, w2, w3 = expand(word, dtype, ASM)
        if SCALING == "sum":
            # The next tile's scales, so that their latency hides behind this tile's products.
            n0, n1, n2, n3 = _scales(scale, row, tile + 1, p, scale_dtype)
            part = tl.dot(w0, x0, input_precision=precision)
            if GROUP % (4 * PLANE) == 0:
                part = tl.dot(w1, x1, part, input_precision=precision)
                part = tl.dot(w2, x2, part, input_precision=precision)
                part = tl.dot(w3, x3, part, input_precision=precision)
                acc += part * s0[:, None]
            elif GROUP % (2 * PLANE) == 0:
                part = tl.dot(w1, x1, part, input_precision=precision)
                acc += part * s0[:, None]
                part = tl.dot(w2, x2, input_precision=precision)
                part = tl.dot(w3, x3, part, input_precision=precision)
                acc += part * s2[:, None]
            else:
                acc += part * s0[:, None]
                acc += tl.dot(w1, x1, input_precision=precision) * s1[:, None]
                acc += tl.dot(w2, x2, input_precision=precision) * s2[:, None]
                acc += tl.dot(w3, x3, input_precision=precision) * s3[:, None]
            s0, s1, s2, s3 = n0, n1, n2, n3
        elif SCALING == "operand":
            n0, n1, n2, n3 = _scales(scale, row, tile + 1, p, scale_dtype)
            acc = tl.dot(scale_codes(w0, s0[:, None], OFFSET, ASM), x0, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w1, s1[:, None], OFFSET, ASM), x1, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w2, s2[:, None], OFFSET, ASM), x2, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w3, s3[:, None], OFFSET, ASM), x3, acc, input_precision=precision)
            s0, s1, s2, s3 = n0, n1, n2, n3
        else:
            c0 = _column_scales(scale, row, k, p, dtype)
            c1 = _column_scales(scale, row, k + PLANE, p, dtype)
            c2 = _column_scales(scale, row, k + 2 * PLANE, p, dtype)
            c3 = _column_scales(scale, row, k + 3 * PLANE, p, dtype)
            acc = tl.dot(scale_codes(w0, c0, OFFSET, ASM), x0, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w1, c1, OFFSET, ASM), x1, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w2, c2, OFFSET, ASM), x2, acc, input_precision=precision)
            acc = tl.dot(scale_codes(w3, c3, OFFSET, ASM), x3, acc, input_precision=precision)
    return acc


@triton.jit
def gate_up_kernel(
    x,
    words,
    scale,
    zero,
    bias,
    group_sums,
    topk_weights,
    sorted_slots,
    blocks,
    num_blocks,
    out,
    out_sums,
    x_stride,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    SHAPE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_SUM_WIDTH: tl.constexpr,
    OUT_SUMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    SCALING: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """activation(w13 x + bias) of every slot, in sorted order: out [S, OUT_STRIDE], and its sums over runs of columns.

    SHAPE is (K, rows, group size, plane width, columns of one sum).
    """
    K: tl.constexpr = SHAPE[0]
    ROWS: tl.constexpr = SHAPE[1]
    GROUP: tl.constexpr = SHAPE[2]
    PLANE: tl.constexpr = SHAPE[3]
    SUM_WIDTH: tl.constexpr = SHAPE[4]
    ROW_TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    K_PADDED: tl.constexpr = (K + 4 * PLANE - 1) // (4 * PLANE) * (4 * PLANE)
    pid = tl.program_id(0)
    block = pid // ROW_TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(blocks + block * 4).to(tl.int64)
    first = tl.load(blocks + block * 4 + 1).to(tl.int64)
    count = tl.load(blocks + block * 4 + 2)
    t = tl.arange(0, BLOCK_TOKENS)
    token_ok = t < count
    slot = tl.load(sorted_slots + first + t, mask=token_ok, other=0).to(tl.int64)
    token = slot // TOP_K
    row_tile = pid % ROW_TILES
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    scale += expert * (groups * ROWS)
    if zero is not None:
        zero += expert * (groups * ROWS)
    words += expert * (K_PADDED // 4 * ROWS)
    sums = group_sums + token * ((K + SUM_WIDTH - 1) // SUM_WIDTH)
    acc = -_zero_term(
        scale, zero, row, sums, token_ok, SHAPE, 0 if SCALING != "sum" else OFFSET, BLOCK_ROWS, BLOCK_TOKENS
    )
    acc = _weight_times_x(
        acc, words, scale, row, x + token * x_stride, token_ok, SHAPE, SCALING, OFFSET, ASM, BLOCK_ROWS, STAGES
    )
    if WEIGHT_ON_INPUT:
        acc *= tl.load(topk_weights + slot, mask=token_ok, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        acc += tl.load(bias + expert * ROWS + row, mask=row < ROWS, other=0.0).to(tl.float32)[:, None]
    COLUMNS: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    if GATED:
        pair = acc.reshape(BLOCK_ROWS // 16, 2, 8, BLOCK_TOKENS).permute(0, 2, 3, 1)
        gate, up = tl.split(pair)
        value = gated(gate, up, alpha, limit, ACTIVATION).reshape(COLUMNS, BLOCK_TOKENS)
    else:
        value = pointwise(acc, ACTIVATION)
    value = value.to(out.dtype.element_ty)
    column = row_tile * COLUMNS + tl.arange(0, COLUMNS)
    place = first + t
    tl.store(
        out + place[None, :] * OUT_STRIDE + column[:, None],
        value,
        mask=token_ok[None, :] & (column < OUT_STRIDE)[:, None],
    )
    RUNS: tl.constexpr = COLUMNS // OUT_SUM_WIDTH
    total = tl.sum(value.to(tl.float32).reshape(RUNS, OUT_SUM_WIDTH, BLOCK_TOKENS), 1)
    run = row_tile * RUNS + tl.arange(0, RUNS)
    tl.store(
        out_sums + place[None, :] * OUT_SUMS + run[:, None],
        total,
        mask=token_ok[None, :] & (run < OUT_SUMS)[:, None],
    )


@triton.jit
def down_kernel(
    x,
    words,
    scale,
    zero,
    bias,
    group_sums,
    sorted_slots,
    blocks,
    num_blocks,
    out,
    SHAPE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SUMS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    SCALING: tl.constexpr,
    OFFSET: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w2 x + bias of every slot: x [S, X_STRIDE] in sorted order, out [S, OUT_COLUMNS] by slot."""
    K: tl.constexpr = SHAPE[0]
    ROWS: tl.constexpr = SHAPE[1]
    GROUP: tl.constexpr = SHAPE[2]
    PLANE: tl.constexpr = SHAPE[3]
    ROW_TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    K_PADDED: tl.constexpr = (K + 4 * PLANE - 1) // (4 * PLANE) * (4 * PLANE)
    pid = tl.program_id(0)
    block = pid // ROW_TILES
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(blocks + block * 4).to(tl.int64)
    first = tl.load(blocks + block * 4 + 1).to(tl.int64)
    count = tl.load(blocks + block * 4 + 2)
    t = tl.arange(0, BLOCK_TOKENS)
    token_ok = t < count
    slot = tl.load(sorted_slots + first + t, mask=token_ok, other=0).to(tl.int64)
    row = pid % ROW_TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    scale += expert * (groups * ROWS)
    if zero is not None:
        zero += expert * (groups * ROWS)
    words += expert * (K_PADDED // 4 * ROWS)
    sums = group_sums + (first + t) * X_SUMS
    acc = -_zero_term(
        scale, zero, row, sums, token_ok, SHAPE, 0 if SCALING != "sum" else OFFSET, BLOCK_ROWS, BLOCK_TOKENS
    )
    acc = _weight_times_x(
        acc, words, scale, row, x + (first + t) * X_STRIDE, token_ok, SHAPE, SCALING, OFFSET, ASM, BLOCK_ROWS, STAGES
    )
    if bias is not None:
        acc += tl.load(bias + expert * ROWS + row, mask=row < ROWS, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + slot[None, :] * OUT_COLUMNS + row[:, None],
        acc.to(out.dtype.element_ty),
        mask=token_ok[None, :] & (row < OUT_COLUMNS)[:, None],
    )
