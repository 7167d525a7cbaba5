"""What the launches of a call hand to one another."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """num_tokens is of all sequences if packed, else of one."""

    num_sequences: int
    num_tokens: int
    packed: bool
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Chunks:
    """What the recurrence reads of every chunk, as `recurrence_kernel` describes; tails is None for GDN, and so are
    scores that the recurrence makes itself.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    tails: torch.Tensor | None
    inverse: torch.Tensor
    scores: torch.Tensor | None
    factors: torch.Tensor
