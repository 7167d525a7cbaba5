"""RMSNorm and chains of norms, one program a row."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device


@triton.jit
def _normalised(x, mask, COLUMNS: tl.constexpr, eps):
    # Code that torch.compile makes passes Python's numbers as FP64, which the square root refuses.
    return x / tl.sqrt_rn(tl.sum(tl.where(mask, x * x, 0.0), axis=0) / COLUMNS + tl.cast(eps, tl.float32))


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    weight_offset,
    HEADS,
    OUTER_STRIDE,
    INNER_STRIDE,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    start = (row // HEADS) * OUTER_STRIDE + (row % HEADS) * INNER_STRIDE
    value = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * COLUMNS + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    value = _normalised(value, mask, COLUMNS, eps)
    if ROUND_FIRST:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        value *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + tl.cast(weight_offset, tl.float32)
    tl.store(out + row * COLUMNS + column, value.to(out.dtype.element_ty), mask=mask)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(x, inner rows, outer stride, inner stride): slices of a wider product are read where they are."""
    if x.stride(-1) == 1:
        if x.dim() == 2:
            return x, 1, x.stride(0), 0
        lead = x.shape[:-2]
        strides, expected = x.stride()[:-2], 1
        uniform = True
        for size, stride in zip(reversed(lead), reversed(strides), strict=True):
            uniform &= size == 1 or stride == strides[-1] * expected
            expected *= size
        if x.dim() > 2 and uniform:
            return x, x.shape[-2], x.stride(-3), x.stride(-2)
    x = x.contiguous()
    return x, 1, x.shape[-1], 0


def _warps(block: int) -> int:
    return 1 if block <= 512 else 4 if block <= 4096 else 8


@on_its_device
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, x + residual or x); both contiguous where written."""
    columns = x.shape[-1]
    x, heads, outer, inner = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(columns)
    _rms_norm_kernel[(x.numel() // columns,)](
        x,
        x if residual is None else residual.contiguous(),
        x if weight is None else weight,
        out,
        total,
        eps,
        weight_offset,
        heads,
        outer,
        inner,
        COLUMNS=columns,
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=residual is not None,
        ROUND_FIRST=round_before_weight,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out, total


@triton.jit
def _weighted(value, weight, column, mask, HAS: tl.constexpr):
    if HAS:
        value *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _chain_kernel(
    x,
    x_weight,
    y,
    y_weight,
    residual,
    weight,
    scale,
    h,
    weight_0,
    weight_1,
    weight_2,
    out_0,
    out_1,
    out_2,
    eps,
    COLUMNS: tl.constexpr,
    BRANCHES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    place = row * COLUMNS + column
    dtype = h.dtype.element_ty
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if BRANCHES:
        other = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
        value = _weighted(_normalised(value, mask, COLUMNS, eps), x_weight, column, mask, True).to(dtype).to(tl.float32)
        other = _weighted(_normalised(other, mask, COLUMNS, eps), y_weight, column, mask, True).to(dtype).to(tl.float32)
        value = (value + other).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        value = _weighted(_normalised(value, mask, COLUMNS, eps), weight, column, mask, HAS_WEIGHT)
        value = value.to(dtype).to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
    if HAS_SCALE:
        value = (value * tl.load(scale).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(h + place, value.to(dtype), mask=mask)
    if OUTPUTS > 0:
        value = _normalised(value, mask, COLUMNS, eps)
        tl.store(out_0 + place, _weighted(value, weight_0, column, mask, WEIGHTED[0]).to(dtype), mask=mask)
    if OUTPUTS > 1:
        tl.store(out_1 + place, _weighted(value, weight_1, column, mask, WEIGHTED[1]).to(dtype), mask=mask)
    if OUTPUTS > 2:
        tl.store(out_2 + place, _weighted(value, weight_2, column, mask, WEIGHTED[2]).to(dtype), mask=mask)


@on_its_device
def norm_chain(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    next_weights: Sequence[torch.Tensor | None],
    eps: float,
    branches: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(h, norm(h) * w1, ...)."""
    rows, columns = x.shape
    x = x.contiguous()
    made = [torch.empty_like(x) for _ in range(1 + len(next_weights))]
    spare = [x] * (3 - len(next_weights))
    block = triton.next_power_of_2(columns)
    first, other, second = branches if branches is not None else (x, x, x)
    _chain_kernel[(rows,)](
        x,
        first,
        other.contiguous(),
        second,
        x if residual is None else residual.contiguous(),
        x if weight is None else weight,
        x if scale is None else scale,
        made[0],
        *(x if w is None else w for w in next_weights),
        *spare,
        *made[1:],
        *spare,
        eps,
        COLUMNS=columns,
        BRANCHES=branches is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_SCALE=scale is not None,
        OUTPUTS=len(next_weights),
        WEIGHTED=tuple(w is not None for w in next_weights) + (False,) * len(spare),
        BLOCK=block,
        num_warps=8 if block >= 4096 else _warps(block),
    )
    return tuple(made)
