"""Reads the experts of a Hugging Face module, whatever its layout, as w13 [E, 2I or I, H] and w2 [E, H, I].

Families are told apart by what their module holds, and their activation by what it computes, not by class name: a
family that transformers adds tomorrow in a known layout works today.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_ext.ops.moe import CallOptions
from vllm_ext.ops.moe.activation import apply_activation

Activation = Callable[[torch.Tensor], torch.Tensor]

_FUSED = "gate_up_proj"
_GATE_NAMES = ("gate_proj", "w1", "wi_0")
_UP_NAMES = ("up_proj", "w3", "wi_1")
_DOWN_NAMES = ("down_proj", "w2", "wo", "fc2")
_SINGLE_NAMES = ("wi", "fc1")
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "activation", "act")


@dataclass
class ExpertWeights:
    """One layer's experts in the order our kernels are prepared from.

    w13         [E, 2I, H] (gate rows, then up rows) or [E, I, H]; w2 [E, H, I]; biases [E, rows] or None
    options     the call's activation, or None where no kernel computes it; then `activation` does, on [M, rows of w13]
    calling     how the module is called: "topk", "sorted", "blocks", "logits", "jetmoe" or "each"
                (see quantized_experts.py); route: from router logits to (ids, weights), where it is called with logits
    layout      the layout in words, for the report
    identity    experts past the last that hand their input through (LongCat)
    names       the projections' names in a checkpoint: gate (if any), up, down
    stored_biases  the biases by their names in a checkpoint, under the experts' module, in the order it keeps them
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    options: CallOptions | None
    activation: Activation
    layout: str
    calling: str = "topk"
    identity: int = 0
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stored_biases: dict[str, torch.Tensor] = field(default_factory=dict)
    route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows."""
        return self.w13.shape[1] == 2 * self.w2.shape[2]


def is_experts(module: nn.Module) -> bool:
    """Whether `module` is a layer's set of routed experts in a layout this file reads."""
    return _reader(module) is not None


def weight_parameters(module: Any) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(owner, key, parameter) of the experts' matrices: freed when they are replaced, and what tells tied experts."""
    holders = [module.input_linear, module.output_linear] if _is_jetmoe(module) else list(module.modules())
    found = [(holder, key, value) for holder in holders for key, value in holder._parameters.items()]
    return [item for item in found if item[2] is not None and item[2].dim() > 1 and not _is_bias(item[1])]


def _is_bias(key: str) -> bool:
    return key == "bias" or key.endswith("_bias")


def read_experts(module: nn.Module, name: str) -> ExpertWeights:
    """The experts of `module`. Raises ValueError, naming the layer, where shapes contradict the layout."""
    reader = _reader(module)
    if reader is None:
        raise ValueError(f"quantize_experts: {name}: {type(module).__name__} is in no known experts layout")
    weights = reader(module)
    experts, rows, hidden = weights.w13.shape
    if weights.w2.shape[:2] != (experts, hidden) or rows not in (weights.w2.shape[2], 2 * weights.w2.shape[2]):
        raise ValueError(
            f"quantize_experts: {name}: w13 {list(weights.w13.shape)} and w2 {list(weights.w2.shape)} are no gate/up "
            "and down projections of one layer"
        )
    return weights


def check_readable(module: Any, name: str) -> None:
    """Raise ValueError, before anything is replaced, where `read_experts` would for want of an activation."""
    listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    holder = expert_children(module)[0][1] if listed else module
    if hasattr(holder, "_apply_gate") or hasattr(holder, "route_tokens_to_experts"):
        return
    try:
        activation_module(holder)
    except ValueError as error:
        raise ValueError(f"{error}; leave {name} out with `ignore`") from None


def _reader(module: nn.Module) -> Callable[[Any], ExpertWeights] | None:
    if _is_3d(module, "down_proj") and (_is_3d(module, _FUSED) or _is_3d(module, "up_proj")):
        return _read_fused
    inner = getattr(module, "mlp", None)
    if hasattr(module, "num_experts") and all(isinstance(getattr(inner, n, None), nn.Parameter) for n in ("w1", "v1")):
        return _read_blocks
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _uniform([child for _, child in expert_children(module)]):
        return _read_each
    if _is_jetmoe(module):
        return _read_jetmoe
    if hasattr(module, "route_tokens_to_experts") and all(_holds_3d(module, name) for name in ("fc1", "fc2")):
        return _read_grouped
    return None


def _holds_3d(module: nn.Module, name: str) -> bool:
    part = getattr(module, name, None)
    return part is not None and _is_3d(part, "weight")


def _is_3d(module: nn.Module, name: str) -> bool:
    value = getattr(module, name, None)
    return isinstance(value, nn.Parameter) and value.dim() == 3


def _is_jetmoe(module: nn.Module) -> bool:
    # JetMoE's mixture of attention heads has the same linears, and no activation between them.
    return hasattr(module, "activation") and all(_holds_3d(module, name) for name in ("input_linear", "output_linear"))


def expert_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(key, expert) of a list or dictionary of experts; a dropout beside them has no parameters."""
    return [(key, child) for key, child in module.named_children() if next(child.parameters(), None) is not None]


def _uniform(children: Sequence[nn.Module]) -> bool:
    """Two-layer or gated MLPs of linear layers, all of one class."""
    return bool(children) and len({type(c) for c in children}) == 1 and _linears(children[0]) is not None


def _linears(child: nn.Module) -> tuple[str | None, str, str] | None:
    """(gate or None, up, down) by the names of the linear layers of one expert."""
    linear = {n for n, m in child.named_children() if isinstance(m, nn.Linear)}
    down = [n for n in _DOWN_NAMES if n in linear]
    gates, ups = ([n for n in names if n in linear] for names in (_GATE_NAMES, _UP_NAMES))
    singles = [n for n in (*_SINGLE_NAMES, *_UP_NAMES) if n in linear]
    if down and gates and ups and len(linear) == 3:
        return gates[0], ups[0], down[0]
    if down and singles and len(linear) == 2:
        return None, singles[0], down[0]
    return None


def activation_module(module: nn.Module) -> Activation:
    """The activation a module or one of its experts carries."""
    for holder in (module, getattr(module, "mlp", None)):
        for name in _ACTIVATION_NAMES:
            found = getattr(holder, name, None)
            if callable(found):
                return found
    raise ValueError(f"quantize_experts: {type(module).__name__} has no activation among {_ACTIVATION_NAMES}")


def _read_fused(module: Any) -> ExpertWeights:
    gated = _is_3d(module, _FUSED)
    first = getattr(module, _FUSED if gated else "up_proj").detach()
    down = module.down_proj.detach()
    experts, factor = down.shape[0], 2 if gated else 1
    straight = first.shape[1] == factor * down.shape[2] and first.shape[2] == down.shape[1]
    turned = first.shape[2] == factor * down.shape[1] and first.shape[1] == down.shape[2]
    alone = len(inspect.signature(type(module).forward).parameters) == 2
    # Both hold for a square layer only; then the class says which it is, or that rows come alone (Llama 4: x @ w).
    transposed = bool(getattr(module, "is_transposed", alone)) if straight and turned else turned
    if transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    bias_names = [f"{n}_bias" for n in (_FUSED if gated else "up_proj", "down_proj")]
    biases = {n: b.detach() for n in bias_names if isinstance(b := getattr(module, n, None), torch.Tensor)}
    first_bias, down_bias = (biases.get(n) for n in bias_names)
    gate = getattr(module, "_apply_gate", None)
    options, interleaved = (None, False)
    if gated and gate is not None:
        options, interleaved = recognise_gate(gate)
        computes: Activation = gate
        if options is None and not getattr(module, "is_concatenated", True):
            raise ValueError(
                f"quantize_experts: {type(module).__name__} interleaves gate and up in an unknown activation"
            )
    else:
        pointwise = activation_module(module)
        options = recognise_pointwise(pointwise)
        computes = _gate_with(pointwise) if gated else pointwise
    if interleaved:
        first = torch.cat((first[:, 0::2], first[:, 1::2]), dim=1)
        first_bias = None if first_bias is None else torch.cat((first_bias[:, 0::2], first_bias[:, 1::2]), dim=1)
    identity = max(0, first.shape[0] - experts)
    words = [_FUSED if gated else "up_proj, no gate", *(["transposed"] if transposed else [])]
    words += ["interleaved"] if interleaved else []
    words += ["biases"] if first_bias is not None else []
    words += [f"{identity} identity experts"] if identity else []
    return ExpertWeights(
        w13=first[:experts],
        w2=down,
        w13_bias=first_bias,
        w2_bias=down_bias,
        options=options,
        activation=computes,
        stored_biases=biases,
        layout=", ".join(words),
        calling="sorted" if alone else "topk",
        identity=identity,
    )


def _read_blocks(module: Any) -> ExpertWeights:
    """DBRX: three matrices [E * F, H]; the last is applied untransposed."""
    shape = (module.num_experts, -1, module.mlp.w1.shape[1])
    gate, up, down = (getattr(module.mlp, name).detach().view(shape) for name in ("w1", "v1", "w2"))
    pointwise = activation_module(module)
    return ExpertWeights(
        torch.cat((gate, up), dim=1), down.transpose(1, 2), None, None,
        recognise_pointwise(pointwise), _gate_with(pointwise), "w1, v1, w2 blocks", calling="blocks",
        names=("w1", "w3", "w2"),
    )  # fmt: skip


def _read_jetmoe(module: Any) -> ExpertWeights:
    pointwise = activation_module(module)
    return ExpertWeights(
        module.input_linear.weight.detach(), module.output_linear.weight.detach(), None, None,
        recognise_pointwise(pointwise), _gate_with(pointwise), "parallel linears", calling="jetmoe",
    )  # fmt: skip


def _read_grouped(module: Any) -> ExpertWeights:
    """Aria before transformers 5.18: two grouped products [E, in, out], always SiLU, routed inside from its logits."""
    return ExpertWeights(
        module.fc1.weight.detach().transpose(1, 2), module.fc2.weight.detach().transpose(1, 2), None, None,
        CallOptions(activation="silu"), _gate_with(nn.functional.silu), "grouped products, transposed",
        calling="logits", route=module.route_tokens_to_experts,
    )  # fmt: skip


def _read_each(module: Any) -> ExpertWeights:
    children = [child for _, child in expert_children(module)]
    found = _linears(children[0])
    assert found is not None
    gate, up, down = found
    wanted = [n for n in (gate, up) if n is not None]
    biased = getattr(children[0], up).bias is not None

    def stacked(names: Sequence[str], part: str) -> torch.Tensor:
        return torch.stack([torch.cat([getattr(getattr(c, n), part).detach() for n in names]) for c in children])

    pointwise = activation_module(children[0])
    return ExpertWeights(
        w13=stacked(wanted, "weight"),
        w2=stacked([down], "weight"),
        w13_bias=stacked(wanted, "bias") if biased else None,
        w2_bias=stacked([down], "bias") if getattr(children[0], down).bias is not None else None,
        options=recognise_pointwise(pointwise),
        activation=_gate_with(pointwise) if gate is not None else pointwise,
        layout=f"{type(module).__name__} of {type(children[0]).__name__}",
        stored_biases={
            f"{key}.{n}.bias": getattr(child, n).bias.detach()
            for key, child in expert_children(module)
            for n in (*wanted, down)
            if getattr(child, n).bias is not None
        },
        calling="each",
        names=(*wanted, down),
    )


def _gate_with(pointwise: Activation) -> Activation:
    def gate(first: torch.Tensor) -> torch.Tensor:
        left, right = first.chunk(2, dim=-1)
        return pointwise(left) * right

    return gate


def _probe_values() -> torch.Tensor:
    # Wide enough to reach every published clamp, dense enough to tell the two GELUs apart.
    return torch.linspace(-40, 40, 321, dtype=torch.float32)


def recognise_pointwise(function: Activation) -> CallOptions | None:
    """The options whose one-argument activation equals `function`, None where no kernel has it."""
    x = _probe_values()
    for name in ("silu", "gelu_tanh", "gelu", "relu2"):
        options = CallOptions(activation=name)
        if _same(function(x), apply_activation(x, False, options)):
            return options
    return None


def recognise_gate(function: Activation) -> tuple[CallOptions | None, bool]:
    """(options, interleaved) of a function of gate and up columns; (None, False) where no kernel has it."""
    gate = _probe_values()
    up = torch.linspace(-30, 30, 17).repeat(19)[: gate.numel()]
    pair = torch.cat((gate, up))
    holder = getattr(function, "__self__", None)
    alphas = {float(getattr(holder, n)) for n in ("alpha", "swiglu_alpha") if _number(getattr(holder, n, None))}
    limits = {float(getattr(holder, n)) for n in ("limit", "swiglu_limit") if _number(getattr(holder, n, None))}
    candidates = [CallOptions(activation=name) for name in ("silu", "gelu_tanh", "gelu", "relu2")]
    candidates += [
        CallOptions(activation="swigluoai", swiglu_alpha=a, swiglu_limit=x)
        for a in sorted(alphas or {1.702})
        for x in sorted(limits or {7.0})
    ]
    for interleaved in (False, True):
        given = torch.stack((gate, up), dim=-1).flatten() if interleaved else pair
        found = function(given)
        for options in candidates:
            if _same(found, apply_activation(pair, True, options)):
                return options, interleaved
    return None, False


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.float(), right.float(), rtol=1e-5, atol=1e-6)
