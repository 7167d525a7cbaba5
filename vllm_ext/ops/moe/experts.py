"""What a prepared set of experts is, and the options a call carries. Shared by every backend; no kernels here."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_ext.quantization import QuantizedWeight

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
    """Experts in a backend's own order. `tensors` are what the kernels read.

    Each has the expert as its first dimension, so that experts can move between ranks, unless the backend was told
    top_k and joined the experts.
    """

    meta: ExpertsMeta
    tensors: dict[str, torch.Tensor] = field(repr=False)

    @property
    def backend(self) -> str:
        """Name of the backend that prepared, and alone can run, these experts."""
        return self.meta.backend

    @property
    def device(self) -> torch.device:
        """Where the prepared tensors are."""
        return next(iter(self.tensors.values())).device

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


def experts_meta(backend: str, w13: QuantizedWeight, w2: QuantizedWeight, dtype: torch.dtype) -> ExpertsMeta:
    """The meta of a pair of weights that `check_weights` has accepted."""
    num_experts, hidden_size, intermediate_size = w2.shape
    return ExpertsMeta(
        backend=backend,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        group_size_w13=w13.group_size,
        group_size_w2=w2.group_size,
        gated=w13.shape[1] == 2 * intermediate_size,
        zero_point=w13.zero_point_kind,
        dtype=dtype,
    )


def check_weights(
    w13: QuantizedWeight, w2: QuantizedWeight, w13_bias: torch.Tensor | None, w2_bias: torch.Tensor | None
) -> None:
    """Raise ValueError, naming the rule and the numbers, unless the weights and biases make a set of experts; TypeError
    for weights that are not quantised."""
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, QuantizedWeight):
            raise TypeError(
                f"prepare_experts: {name} must be a QuantizedWeight, as quantize_weight returns, "
                f"got {type(weight).__name__}"
            )
        if len(weight.shape) != 3:
            raise ValueError(
                f"prepare_experts: {name} must be [experts, rows, columns], got shape {list(weight.shape)}"
            )
    (experts, rows, hidden), (experts_w2, hidden_w2, intermediate) = w13.shape, w2.shape
    if experts != experts_w2:
        raise ValueError(f"prepare_experts: w13 has {experts} experts and w2 has {experts_w2}; they must agree")
    if 0 in w13.shape or 0 in w2.shape:
        raise ValueError(f"prepare_experts: empty experts: w13 {list(w13.shape)}, w2 {list(w2.shape)}")
    if hidden != hidden_w2:
        raise ValueError(
            f"prepare_experts: w13 [E, 2I or I, H] has H={hidden} columns, w2 [E, H, I] has H={hidden_w2} rows; "
            "they must agree"
        )
    if rows not in (2 * intermediate, intermediate):
        raise ValueError(
            f"prepare_experts: w2 has I={intermediate} columns, so w13 must have 2I={2 * intermediate} rows "
            f"(gate, then up) or I={intermediate} rows (no gate), got {rows}"
        )
    if w13.zero_point_kind != w2.zero_point_kind:
        raise ValueError(
            f"prepare_experts: w13 and w2 must be quantised with one kind of zero point, got "
            f"{w13.zero_point_kind or 'symmetric'} and {w2.zero_point_kind or 'symmetric'}"
        )
    for name, bias, shape in (("w13_bias", w13_bias, (experts, rows)), ("w2_bias", w2_bias, (experts, hidden))):
        if bias is not None and (tuple(bias.shape) != shape or not bias.is_floating_point()):
            raise ValueError(
                f"prepare_experts: {name} must be floating {list(shape)}, got {bias.dtype} {list(bias.shape)}"
            )
