"""Realistic calls for the prefill kernels: seeded, FP16 operands, gates from near 0 down to -316."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_ext.ops.linear_attention.problem import Call

LOWEST_GATE = -316.0
HIGHEST_VALUE = 24.8


def make_call(
    op: str,
    *,
    tokens: int,
    batch: int = 1,
    key_heads: int = 1,
    value_heads: int = 1,
    key_dim: int = 128,
    value_dim: int = 128,
    bounds: Sequence[int] | None = None,
    initial: bool = True,
    normalise: bool = False,
    state_v_first: bool = True,
    steep: float = 0.05,
    seed: int = 0,
) -> Call:
    """A call of "gdn" or "kda".

    q and k have unit length (or are left to the kernel to normalise), v is skewed to [-0.28, 24.8] as measured on
    served models, beta in (0, 1); a share `steep` of the gates lies anywhere down to -316, the rest in (-0.2, 0).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    q, k = (normal(batch, tokens, key_heads, key_dim) for _ in range(2))
    if not normalise:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    v = (normal(batch, tokens, value_heads, value_dim).exp() - 0.28).clamp(-0.28, HIGHEST_VALUE)
    gates = (batch, tokens, value_heads) if op == "gdn" else (batch, tokens, value_heads, key_dim)
    g = torch.where(uniform(*gates) < steep, LOWEST_GATE * uniform(*gates), -0.2 * uniform(*gates))
    sequences = batch if bounds is None else len(bounds) - 1
    sizes = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    return Call(
        q=q.half(),
        k=k.half(),
        v=v.half(),
        g=g,
        beta=uniform(batch, tokens, value_heads),
        scale=key_dim**-0.5,
        initial_state=0.3 * normal(sequences, value_heads, *sizes) if initial else None,
        output_final_state=True,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
        use_qk_l2norm_in_kernel=normalise,
        state_v_first=state_v_first,
    )
