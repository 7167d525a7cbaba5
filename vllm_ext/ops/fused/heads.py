"""From the rows of one QKV product to the heads attention reads: norms, rotary embedding and placing, in one kernel."""

from __future__ import annotations

import torch

from vllm_ext.ops.fused.device import runs_triton
from vllm_ext.ops.fused.rms_norm import _normalise


def norm_rope_heads(
    qkv: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """Split `qkv` into heads, norm each (q and k with weights, v without), rotate q and k, and write them.

    qkv     [B * L, (Hq + Hk + Hv) * D]; Hv is Hk, or 0 where the keys' projection serves as values too
    query   written, [B, Hq, L, D]; key and value written at positions 0 .. L - 1 of [B, Hk, >= L, D]
    q_weight, k_weight  [D]; cos, sin  [B or 1, L, D] in qkv's dtype
    """
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    rows = qkv.shape[1] // dim
    if rows not in (heads + kv_heads, heads + 2 * kv_heads) or qkv.shape != (batch * length, rows * dim):
        raise ValueError(
            f"norm_rope_heads: qkv must be [{batch * length}, ({heads} + {kv_heads} or {2 * kv_heads}) * {dim}], got "
            f"{list(qkv.shape)}"
        )
    if runs_triton(qkv) and dim & (dim - 1) == 0:
        from vllm_ext.ops.fused.triton.heads import norm_rope_heads as kernel

        kernel(qkv, query, key, value, q_weight, k_weight, cos, sin, eps)
        return
    every = qkv.view(batch, length, rows, dim)
    q, k = every[:, :, :heads], every[:, :, heads : heads + kv_heads]
    v = every[:, :, heads + kv_heads :] if rows == heads + 2 * kv_heads else k
    angles = cos[:, :, None], sin[:, :, None]
    query.copy_(_rotate(_normalise(q, q_weight, eps), *angles).transpose(1, 2))
    key[:, :, :length].copy_(_rotate(_normalise(k, k_weight, eps), *angles).transpose(1, 2))
    value[:, :, :length].copy_(_normalise(v, None, eps).transpose(1, 2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
