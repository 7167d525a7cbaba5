"""The article's first grouped kernel, kept as the baseline that the production path is measured against.

Sort by expert, pad to regular blocks, one grouped GEMM twice, a separate activation, and a combine in fixed order.
Tokens are the left operand; weights are in plain order, two codes a byte, and are dequantised a group at a time:
scale * (q - zero) rounded to 16 bits. Gated experts without biases, every expert on this rank.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_ext.ops.moe.triton.activation import gated
from vllm_ext.ops.moe.triton.align import TokenForm, align
from vllm_ext.ops.moe.triton.combine import combine
from vllm_ext.quantization import QuantizedWeight
from vllm_ext.quantization.weight import SYMMETRIC_ZERO

BLOCK_TOKENS = 64
_BLOCK_ROWS = 128
_MOST_COLUMNS = 128


@dataclass(frozen=True)
class ExpertsV1:
    """w13 [E, 2I, H] and w2 [E, H, I] in plain order."""

    w13: QuantizedWeight
    w2: QuantizedWeight


@triton.jit
def _gemm_kernel(
    x,
    packed,
    scale,
    zero,
    sorted_slots,
    blocks,
    out,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    SYMMETRIC_ZERO_POINT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out [slots, ROWS] = x [tokens, K] W^T by slot; x's row is slot // TOP_K. WIDE computes in FP32 (interpreter).

    BLOCK_COLUMNS divides GROUP, so that a K tile has one scale and one zero point a row.
    """
    row_tiles: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    BYTES: tl.constexpr = (K + 1) // 2
    pid = tl.program_id(0)
    block = blocks + pid // row_tiles * 4
    expert = tl.load(block).to(tl.int64)
    first = tl.load(block + 1)
    count = tl.load(block + 2)
    if count == 0:
        return
    t = tl.arange(0, BLOCK_TOKENS)
    slot = tl.load(sorted_slots + first + t, mask=t < count, other=0).to(tl.int64)
    row = pid % row_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_ok = row < ROWS
    weight = packed + (expert * ROWS + row)[:, None] * BYTES
    group_row = (expert * ROWS + row) * groups
    dtype: tl.constexpr = tl.float32 if WIDE else x.dtype.element_ty
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_COLUMNS):
        k = start + tl.arange(0, BLOCK_COLUMNS)
        a = tl.load(
            x + (slot // TOP_K)[:, None] * K + k[None, :], mask=(t < count)[:, None] & (k < K)[None, :], other=0.0
        )
        place = start // 2 + tl.arange(0, BLOCK_COLUMNS // 2)
        byte = tl.load(weight + place[None, :], mask=row_ok[:, None] & (place < BYTES)[None, :], other=0)
        s = tl.load(scale + group_row + start // GROUP, mask=row_ok, other=0.0).to(tl.float32)
        z = tl.full([BLOCK_ROWS], SYMMETRIC_ZERO_POINT, tl.float32)
        if zero is not None:
            z = tl.load(zero + group_row + start // GROUP, mask=row_ok, other=0).to(tl.float32)
        low = (s[:, None] * ((byte & 0xF).to(tl.float32) - z[:, None])).to(dtype)
        high = (s[:, None] * ((byte >> 4).to(tl.float32) - z[:, None])).to(dtype)
        w = tl.join(low, high).reshape(BLOCK_ROWS, BLOCK_COLUMNS)
        acc = tl.dot(a.to(dtype), tl.trans(w), acc, input_precision="ieee" if WIDE else "tf32")
    tl.store(
        out + slot[:, None] * ROWS + row[None, :],
        acc.to(out.dtype.element_ty),
        mask=(t < count)[:, None] & (row < ROWS)[None, :],
    )


@triton.jit
def _activate_kernel(x, out, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < COLUMNS
    gate = tl.load(x + slot * (2 * COLUMNS) + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + slot * (2 * COLUMNS) + COLUMNS + column, mask=ok, other=0.0).to(tl.float32)
    value = gated(gate, up, 1.702, 7.0, ACTIVATION)
    tl.store(out + slot * COLUMNS + column, value.to(out.dtype.element_ty), mask=ok)


def _gemm(
    x: torch.Tensor, weight: QuantizedWeight, slots: torch.Tensor, blocks: torch.Tensor, top_k: int
) -> torch.Tensor:
    rows, columns = weight.shape[1:]
    out = torch.empty(slots.shape[0], rows, dtype=x.dtype, device=x.device)
    _gemm_kernel[(blocks.shape[0] * triton.cdiv(rows, _BLOCK_ROWS),)](
        x,
        weight.packed,
        weight.scale,
        weight.zero_point,
        slots,
        blocks,
        out,
        K=columns,
        ROWS=rows,
        GROUP=weight.group_size,
        TOP_K=top_k,
        SYMMETRIC_ZERO_POINT=float(SYMMETRIC_ZERO),
        WIDE=not x.is_cuda or x.dtype == torch.float32,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_COLUMNS=min(_MOST_COLUMNS, weight.group_size & -weight.group_size),
        num_warps=8,
        num_stages=3,
    )
    return out


def grouped_v1(
    hidden_states: torch.Tensor,
    experts: ExpertsV1,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    """The layer [M, H], M > 0; ids outside the experts are not routed."""
    num_experts, _, inter = experts.w2.shape
    aligned = align(hidden_states, topk_ids, None, num_experts, (BLOCK_TOKENS, BLOCK_TOKENS), TokenForm(128, 16, 0, 0))
    first = _gemm(hidden_states, experts.w13, aligned.sorted_slots, aligned.blocks, topk_ids.shape[1])
    second = torch.empty(first.shape[0], inter, dtype=first.dtype, device=first.device)
    block = min(1024, triton.next_power_of_2(inter))
    _activate_kernel[(first.shape[0], triton.cdiv(inter, block))](
        first, second, COLUMNS=inter, ACTIVATION=activation, BLOCK=block
    )
    slots = _gemm(second, experts.w2, aligned.sorted_slots, aligned.blocks, 1)
    return combine(slots, topk_ids, topk_weights, None, num_experts, True)
