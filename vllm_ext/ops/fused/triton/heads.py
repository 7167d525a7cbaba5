"""Norm, rotary embedding and placing of heads, one program a token and head."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device


@triton.jit
def _heads_kernel(
    qkv,
    query,
    key,
    value,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    length,
    capacity,
    angle_batch,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SEPARATE: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch, position = token // length, token % length
    column = tl.arange(0, HALF)
    dtype = query.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF
    is_value = head >= HEADS + KV_HEADS
    source = tl.where(is_value, head, head) if SEPARATE else tl.where(is_value, head - KV_HEADS, head)
    x = qkv + (token * ROWS + source) * DIM + column
    first, second = tl.load(x).to(tl.float32), tl.load(x + HALF).to(tl.float32)
    root = tl.sqrt_rn(
        (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + tl.cast(eps, tl.float32)
    )
    first, second = first / root, second / root
    if is_value:
        place = value + ((batch * KV_HEADS + head - HEADS - KV_HEADS) * capacity + position) * DIM + column
        tl.store(place, first.to(dtype))
        tl.store(place + HALF, second.to(dtype))
    else:
        weight = q_weight if head < HEADS else k_weight
        first = (first * tl.load(weight + column).to(tl.float32)).to(dtype).to(tl.float32)
        second = (second * tl.load(weight + HALF + column).to(tl.float32)).to(dtype).to(tl.float32)
        angle = (batch * angle_batch * length + position) * DIM + column
        cos_1, cos_2 = tl.load(cos + angle).to(tl.float32), tl.load(cos + angle + HALF).to(tl.float32)
        sin_1, sin_2 = tl.load(sin + angle).to(tl.float32), tl.load(sin + angle + HALF).to(tl.float32)
        left = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
        right = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
        if head < HEADS:
            place = query + ((batch * HEADS + head) * length + position) * DIM + column
        else:
            place = key + ((batch * KV_HEADS + head - HEADS) * capacity + position) * DIM + column
        tl.store(place, left.to(dtype))
        tl.store(place + HALF, right.to(dtype))


@on_its_device
def norm_rope_heads(
    qkv: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> None:
    """Fills query, and the first L positions of key and value."""
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    rows = qkv.shape[1] // dim
    _heads_kernel[(batch * length, heads + 2 * kv_heads)](
        qkv.contiguous(),
        query,
        key,
        value,
        q_weight,
        k_weight,
        cos.contiguous(),
        sin.contiguous(),
        eps,
        length,
        key.shape[2],
        int(cos.shape[0] > 1),
        ROWS=rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SEPARATE=rows == heads + 2 * kv_heads,
        HALF=dim // 2,
        num_warps=1,
    )
