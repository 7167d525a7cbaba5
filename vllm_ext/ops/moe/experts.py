"""What a prepared set of experts is, and the options a call carries. Shared by every backend; no kernels here."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")


@dataclass(frozen=True)
class ExpertsMeta:
    """Sizes and kinds of a set of experts; hashable, so that a compiled graph can carry it as a constant.

    num_experts E (on this rank), hidden_size H, intermediate_size I; group_size_w13 along H, group_size_w2 along I;
    gated: w13 is [E, 2I, H] (gate rows, then up rows), else [E, I, H];
    zero_point: "float", "int" or None (symmetric); dtype of the activations the experts were prepared for.
    """

    backend: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    group_size_w13: int
    group_size_w2: int
    gated: bool
    zero_point: str | None
    dtype: torch.dtype


@dataclass(frozen=True)
class PreparedExperts:
    """Experts in a backend's own order. `tensors` are what the kernels read, each with the expert as its first dimension."""

    meta: ExpertsMeta
    tensors: dict[str, torch.Tensor] = field(repr=False)

    @property
    def backend(self) -> str:
        """Name of the backend that prepared, and alone can run, these experts."""
        return self.meta.backend

    @property
    def nbytes(self) -> int:
        """Bytes held by the prepared tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class CallOptions:
    """The per-call options of `fused_moe_w4a16`, validated once by the dispatcher."""

    activation: str = "silu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    apply_router_weight_on_input: bool = False
    batch_invariant: bool = False
