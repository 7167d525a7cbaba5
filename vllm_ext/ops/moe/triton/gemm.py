"""The two grouped GEMMs. Weights are the left operand, out^T = W x^T, and stay in registers after the expansion.

A program computes BLOCK_ROWS rows of one expert's weight for one block of at most BLOCK_TOKENS slots, tile by tile
(`tile.py`), and finishes with the activation or by writing its slots.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.moe.triton.activation import gated, pointwise
from vllm_ext.ops.moe.triton.dequant import scale_activations
from vllm_ext.ops.moe.triton.pdl import prefetch_tiles, wait_for_previous
from vllm_ext.ops.moe.triton.tile import add_tile, finish

# About as many programs as a GPU holds at once: only these can start before the first GEMM ends.
_EARLY_PROGRAMS = tl.constexpr(1024)


@triton.jit
def _finish_gate_up(
    acc,
    factors,
    bias,
    row,
    sums,
    token_ok,
    row_tile,
    place,
    slot,
    topk_weights,
    out,
    out_sums,
    alpha,
    limit,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    ASM: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_SUM_WIDTH: tl.constexpr,
    OUT_SUMS: tl.constexpr,
    OUT_EXPONENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Activate a row tile and store it at the tokens' places, with its sums over runs of columns."""
    acc = finish(acc, factors, row, sums, token_ok, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM)
    if WEIGHT_ON_INPUT:
        acc *= tl.load(topk_weights + slot, mask=token_ok, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        acc += tl.load(bias + row, mask=row < SHAPE[1], other=0.0).to(tl.float32)[:, None]
    COLUMNS: tl.constexpr = BLOCK_ROWS // 2 if GATED else BLOCK_ROWS
    if GATED:
        pair = acc.reshape(BLOCK_ROWS // 16, 2, 8, BLOCK_TOKENS).permute(0, 2, 3, 1)
        gate, up = tl.split(pair)
        value = gated(gate, up, alpha, limit, ACTIVATION).reshape(COLUMNS, BLOCK_TOKENS)
    else:
        value = pointwise(acc, ACTIVATION)
    # The sums are of what the second GEMM reads: the rounded values.
    value = value.to(out.dtype.element_ty).to(tl.float32)
    column = row_tile * COLUMNS + tl.arange(0, COLUMNS)
    scaled = scale_activations(value, column[:, None], OUT_EXPONENT[0], OUT_EXPONENT[1], OUT_EXPONENT[2])
    tl.store(
        out + place[None, :] * OUT_STRIDE + column[:, None],
        scaled.to(out.dtype.element_ty),
        mask=token_ok[None, :] & (column < OUT_STRIDE)[:, None],
    )
    RUNS: tl.constexpr = COLUMNS // OUT_SUM_WIDTH
    run = row_tile * RUNS + tl.arange(0, RUNS)
    tl.store(
        out_sums + place[None, :] * OUT_SUMS + run[:, None],
        tl.sum(value.reshape(RUNS, OUT_SUM_WIDTH, BLOCK_TOKENS), 1),
        mask=token_ok[None, :] & (run < OUT_SUMS)[:, None],
    )


@triton.jit
def _finish_down(
    acc,
    factors,
    bias,
    row,
    sums,
    token_ok,
    slot,
    out,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    SCALING: tl.constexpr,
    ASM: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
):
    """Store a row tile by slot."""
    acc = finish(acc, factors, row, sums, token_ok, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM)
    if bias is not None:
        acc += tl.load(bias + row, mask=row < SHAPE[1], other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + slot[None, :] * OUT_COLUMNS + row[:, None],
        acc.to(out.dtype.element_ty),
        mask=token_ok[None, :] & (row < OUT_COLUMNS)[:, None],
    )


@triton.jit
def _load_block(blocks, block):
    """(expert, first place, slots) of a block."""
    expert = tl.load(blocks + block * 4).to(tl.int64)
    first = tl.load(blocks + block * 4 + 1).to(tl.int64)
    return expert, first, tl.load(blocks + block * 4 + 2)


@triton.jit(do_not_specialize_on_alignment=["topk_weights"])
def gate_up_kernel(
    x,
    words,
    factors,
    bias,
    group_sums,
    topk_weights,
    sorted_slots,
    blocks,
    out,
    out_sums,
    x_stride,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    SHAPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_SUM_WIDTH: tl.constexpr,
    OUT_SUMS: tl.constexpr,
    OUT_EXPONENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    SCALING: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """activation(w13 x + bias) of every slot, in sorted order: out [S, OUT_STRIDE], and its sums over runs of columns.

    A program computes ROW_TILES tiles of BLOCK_ROWS rows one after another, in one loop: the loads of the next tile are
    under way while a tile is finished. SHAPE is (K, rows, group size, plane width, columns of one sum); FORM (offset,
    unit, activation exponent, scale exponent, step) of dequant.CodeForm; OUT_EXPONENT (exponent, its step, plane
    width) is the power of two that the second GEMM wants its activations times.
    """
    K: tl.constexpr = SHAPE[0]
    ROWS: tl.constexpr = SHAPE[1]
    TILES: tl.constexpr = (K + 4 * SHAPE[3] - 1) // (4 * SHAPE[3])
    STEPS: tl.constexpr = (TILES + UNROLL - 1) // UNROLL
    ALL_ROW_TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    PROGRAMS: tl.constexpr = (ALL_ROW_TILES + ROW_TILES - 1) // ROW_TILES
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    expert, first, count = _load_block(blocks, pid // PROGRAMS)
    if count == 0:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    token_ok = t < count
    slot = tl.load(sorted_slots + first + t, mask=token_ok, other=0).to(tl.int64)
    token = slot // TOP_K
    factors += expert * ((K + SHAPE[2] - 1) // SHAPE[2] * ROWS)
    words += expert * (TILES * SHAPE[3] * ROWS)
    if bias is not None:
        bias += expert * ROWS
    sums = group_sums + token * ((K + SHAPE[4] - 1) // SHAPE[4])
    xs = x + token * x_stride
    row_tile = pid % PROGRAMS * ROW_TILES
    row_tiles = tl.minimum(ALL_ROW_TILES - row_tile, ROW_TILES)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for i in tl.range(0, row_tiles * STEPS, num_stages=STAGES):
        at = row_tile + i // STEPS
        step = i % STEPS
        row = at * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        for u in tl.static_range(UNROLL):
            acc = add_tile(
                acc, words, factors, row, xs, token_ok, step * UNROLL + u, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM,
                BLOCK_ROWS, TILES % UNROLL == 0,
            )  # fmt: skip
        # With one row tile a program, finishing it after the loop leaves the loop's shared memory to it.
        if ROW_TILES > 1 and step == STEPS - 1:
            _finish_gate_up(
                acc, factors, bias, row, sums, token_ok, at, first + t, slot, topk_weights, out, out_sums, alpha, limit,
                SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM, OUT_STRIDE, OUT_SUM_WIDTH, OUT_SUMS, OUT_EXPONENT, ACTIVATION,
                GATED, WEIGHT_ON_INPUT, BLOCK_TOKENS, BLOCK_ROWS,
            )  # fmt: skip
            acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    if ROW_TILES == 1:
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        _finish_gate_up(
            acc, factors, bias, row, sums, token_ok, row_tile, first + t, slot, topk_weights, out, out_sums, alpha,
            limit, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM, OUT_STRIDE, OUT_SUM_WIDTH, OUT_SUMS, OUT_EXPONENT,
            ACTIVATION, GATED, WEIGHT_ON_INPUT, BLOCK_TOKENS, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def down_kernel(
    x,
    words,
    factors,
    bias,
    group_sums,
    sorted_slots,
    blocks,
    out,
    num_experts,
    SHAPE: tl.constexpr,
    FACTOR_DTYPE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SUMS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    SCALING: tl.constexpr,
    FORM: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """w2 x + bias of every slot: x [S, X_STRIDE] in sorted order, out [S, OUT_COLUMNS] by slot. See gate_up_kernel."""
    K: tl.constexpr = SHAPE[0]
    ROWS: tl.constexpr = SHAPE[1]
    PLANE: tl.constexpr = SHAPE[3]
    TILES: tl.constexpr = (K + 4 * PLANE - 1) // (4 * PLANE)
    STEPS: tl.constexpr = (TILES + UNROLL - 1) // UNROLL
    ALL_ROW_TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    PROGRAMS: tl.constexpr = (ALL_ROW_TILES + ROW_TILES - 1) // ROW_TILES
    pid = tl.program_id(0)
    row_tile = pid % PROGRAMS * ROW_TILES
    if PDL and pid < _EARLY_PROGRAMS:
        # While the first GEMM drains, memory idles: start on this program's weights. Only a hint rests on the block
        # table's being there already; it is read again after the wait.
        early = tl.load(blocks + pid // PROGRAMS * 4, cache_modifier=".cg")
        early = tl.minimum(tl.maximum(early, 0), num_experts - 1).to(tl.int64)
        prefetch_tiles(
            words + early * (TILES * PLANE * ROWS) + row_tile * (BLOCK_ROWS * PLANE),
            ROWS * PLANE,
            tl.minimum(BLOCK_ROWS, ROWS - row_tile * BLOCK_ROWS) * PLANE * 2,
            TILES,
        )
    wait_for_previous(PDL)
    expert, first, count = _load_block(blocks, pid // PROGRAMS)
    if count == 0:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    token_ok = t < count
    slot = tl.load(sorted_slots + first + t, mask=token_ok, other=0).to(tl.int64)
    factors += expert * ((K + SHAPE[2] - 1) // SHAPE[2] * ROWS)
    words += expert * (TILES * PLANE * ROWS)
    if bias is not None:
        bias += expert * ROWS
    sums = group_sums + (first + t) * X_SUMS
    xs = x + (first + t) * X_STRIDE
    row_tiles = tl.minimum(ALL_ROW_TILES - row_tile, ROW_TILES)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for i in tl.range(0, row_tiles * STEPS, num_stages=STAGES):
        step = i % STEPS
        row = (row_tile + i // STEPS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        for u in tl.static_range(UNROLL):
            acc = add_tile(
                acc, words, factors, row, xs, token_ok, step * UNROLL + u, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM,
                BLOCK_ROWS, TILES % UNROLL == 0,
            )  # fmt: skip
        if ROW_TILES > 1 and step == STEPS - 1:
            _finish_down(
                acc, factors, bias, row, sums, token_ok, slot, out, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM, OUT_COLUMNS
            )  # fmt: skip
            acc = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    if ROW_TILES == 1:
        row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        _finish_down(
            acc, factors, bias, row, sums, token_ok, slot, out, SHAPE, FORM, FACTOR_DTYPE, SCALING, ASM, OUT_COLUMNS
        )  # fmt: skip
