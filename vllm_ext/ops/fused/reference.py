"""The definitions in FP64 that kernels and CPU forms are tested against. No rounding between steps."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension (Zhang and Sennrich, 2019)."""
    value = x.double()
    value = value * (value.square().mean(-1, keepdim=True) + eps).rsqrt()
    return value if weight is None else value * (weight.double() + weight_offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with halves (Su et al., 2021, as GPT-NeoX stores it): x cos + (-x2, x1) sin, in FP64."""
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cos.double() + torch.cat((-second, first), dim=-1) * sin.double()


def process_logits(logits: torch.Tensor, softcap: float | None, temperature: float) -> torch.Tensor:
    """cap * tanh(logits / cap) / temperature in FP64."""
    x = logits.double()
    return (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature


def statistics(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(confidence, argmax, entropy in nats) of softmax(logits) over the last dimension; the lowest index of a tie."""
    x = logits.double()
    logs = x - torch.logsumexp(x, -1, keepdim=True)
    p = logs.exp()
    top = x.amax(-1, keepdim=True)
    index = torch.where(x == top, torch.arange(x.shape[-1], device=x.device), x.shape[-1]).amin(-1)
    return p.amax(-1), index, -torch.where(p > 0, p * logs, 0.0).sum(-1)
