"""Random operands in the ranges measured on trained hybrid models, for tests, benchmarks and checks.

N(0, 1) values with decays near 0 hide the faults that trained weights show: log decays reach -316, values reach 24.8
and never fall below -0.28 (they come out of a SiLU), and heads differ by orders of magnitude in how long they remember.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

MIN_LOG_DECAY = -316.0
MAX_VALUE = 24.8
_SLOWEST, _FASTEST = 1e-3, 30.0  # nats forgotten per token, spread log-uniformly over heads (and channels, for KDA)
_CUT_PROBABILITY = 1 / 256  # a token that wipes the state
_SPIKE_PROBABILITY = 1 / 100


def sample_operands(
    op: str,
    batch: int,
    num_tokens: int,
    num_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    normalised: bool = True,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """q, k, v (`dtype`), g (FP32) and beta (`dtype`) for "gdn" or "kda", as keyword arguments of the operators.

    normalised: q and k have unit length before rounding; otherwise they are what a convolution and SiLU leave, for
    use_qk_l2norm_in_kernel. Drawn on the CPU, so every device gets the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def uniform(*sizes: int) -> torch.Tensor:
        return torch.rand(*sizes, generator=generator)

    q, k = (F.silu(normal(batch, num_tokens, num_heads, key_dim)) for _ in range(2))
    if normalised:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    v = F.silu(normal(batch, num_tokens, num_value_heads, value_dim))
    v = torch.where(uniform(*v.shape) < _SPIKE_PROBABILITY, MAX_VALUE * uniform(*v.shape), v).clamp(max=MAX_VALUE)
    channels = (num_value_heads, key_dim) if op == "kda" else (num_value_heads,)
    rate = torch.exp(math.log(_SLOWEST) + uniform(*channels) * math.log(_FASTEST / _SLOWEST))
    g = -rate * F.softplus(2 * normal(batch, num_tokens, *channels))
    g = torch.where(uniform(*g.shape) < _CUT_PROBABILITY, torch.tensor(MIN_LOG_DECAY), g).clamp(min=MIN_LOG_DECAY)
    beta = torch.sigmoid(2 * normal(batch, num_tokens, num_value_heads))
    operands = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": beta.to(dtype)}
    return {name: tensor.to(device) for name, tensor in operands.items()}


def sample_state(
    num_sequences: int, num_value_heads: int, key_dim: int, value_dim: int, *, seed: int = 0
) -> torch.Tensor:
    """A FP32 state [N, HV, K, V] of the size a prompt leaves behind (unit keys, values of order 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_sequences, num_value_heads, key_dim, value_dim, generator=generator)
