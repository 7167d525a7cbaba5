"""RMSNorm in every form that models use, and chains of norms and additions between two matrix products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ext.ops.fused.device import runs_triton

# One program holds a whole row.
MAX_COLUMNS = 1 << 15
MAX_OUTPUTS = 3


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> torch.Tensor:
    """RMSNorm over the last dimension, FP32 inside. Returns [..., N] in x's dtype.

    weight         [N] or None; `weight_offset` is added to it (1.0: Gemma's 1 + w)
    round_before_weight  the normalised value is rounded to x's dtype before the weight multiplies it (Llama's form)

    Raises ValueError where shapes do not fit.
    """
    return _rms_norm(x, None, weight, eps, weight_offset, round_before_weight)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of x + residual, x + residual); residual [..., N] as x, the sum rounded to x's dtype first."""
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual must be {list(x.shape)} as x, got {list(residual.shape)}")
    return _rms_norm(x, residual, weight, eps, weight_offset, round_before_weight)


def _rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    if weight is not None and tuple(weight.shape) != (columns,):
        raise ValueError(f"rms_norm: weight must be [{columns}] as x's last dimension, got {list(weight.shape)}")
    if runs_triton(x) and 0 < columns <= MAX_COLUMNS and x.numel():
        from vllm_ext.ops.fused.triton.rms_norm import rms_norm as kernel

        return kernel(x, weight, eps, offset, round_first, residual)
    total = x if residual is None else x + residual
    return _normalise(total, weight, eps, offset, round_first), total


def _normalise(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, round_first: bool = False
) -> torch.Tensor:
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if round_first:
        value = value.to(x.dtype).float()
    if weight is not None:
        value = value * (weight.float() + offset)
    return value.to(x.dtype)


def norm_chain(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    next_weights: Sequence[torch.Tensor | None] = (),
    eps: float = 1e-6,
    *,
    branches: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """What stands between two matrix products of a layer that norms before and after each, in one pass over the rows.

    x             [M, N], a product's output
    branches      (weight of x, y [M, N], weight of y): the value is norm(x) + norm(y) instead of x
    residual      [M, N] or None; h = (residual + norm(value) * weight) * scale, or scale * the value without a residual
    scale         one element, or None
    next_weights  up to three: for each, norm(h) * weight is returned too (None: without a weight)

    Returns (h, norm(h) * w1, ...), each in x's dtype. Every step rounds to it, as separate modules would.
    Raises ValueError where shapes do not fit or there are more than three `next_weights`.
    """
    if x.dim() != 2 or any(t is not None and t.shape != x.shape for t in (residual, branches[1] if branches else None)):
        raise ValueError(f"norm_chain: x, residual and the second branch must all be [M, N]; x is {list(x.shape)}")
    if len(next_weights) > MAX_OUTPUTS:
        raise ValueError(f"norm_chain: at most {MAX_OUTPUTS} next_weights, got {len(next_weights)}")
    if runs_triton(x) and 0 < x.shape[1] <= MAX_COLUMNS and x.shape[0]:
        from vllm_ext.ops.fused.triton.rms_norm import norm_chain as kernel

        return kernel(x, residual, weight, next_weights, eps, branches, scale)
    value = x
    if branches is not None:
        value = _normalise(x, branches[0], eps) + _normalise(branches[1], branches[2], eps)
    h = value if residual is None else residual + _normalise(value, weight, eps)
    if scale is not None:
        h = h * scale
    return (h, *(_normalise(h, w, eps) for w in next_weights))
