"""`quantize_experts`: the routed experts of a Hugging Face model in 4 bits, in place, layer by layer."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vllm_ext.integrations.expert_layouts import (
    ExpertWeights,
    check_readable,
    expert_children,
    is_experts,
    read_experts,
    weight_parameters,
)
from vllm_ext.integrations.quantized_experts import (
    BlockExperts,
    DequantizingExperts,
    JetMoeExperts,
    LogitExperts,
    OneExpert,
    QuantizedExperts,
    SortedExperts,
)
from vllm_ext.quantization import QuantizedWeight, Scheme
from vllm_ext.quantization.layouts import TIED_PREFIXES, natural
from vllm_ext.quantization.names import is_ignored, is_routed_experts, unmatched
from vllm_ext.quantization.progress import Progress

logger = logging.getLogger(__name__)

_CALLED = {"topk": QuantizedExperts, "sorted": SortedExperts, "blocks": BlockExperts, "logits": LogitExperts}
_EXPERT_SOURCE = re.compile(r"experts\.(?:\*|\\d\+)\.(\w+)\.weight\$?$")


@dataclass(frozen=True)
class LayerReport:
    """One layer's experts: what they were, what they are. `runs` is "kernel" or "dequantised"."""

    name: str
    experts: int
    hidden_size: int
    intermediate_size: int
    layout: str
    activation: str
    backend: str
    runs: str
    bytes_before: int
    bytes_after: int
    tied: tuple[str, ...] = ()


@dataclass
class Report:
    """What `quantize_experts` changed; prints as a table.

    layers    one entry per set of experts, tied ones once
    ignored   expert layers left in 16 bits because a pattern matched
    baseline  how transformers ran the experts before: "grouped_mm", "eager", ...
    """

    layers: list[LayerReport] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    baseline: str = "eager"
    seconds: float = 0.0

    @property
    def bytes_before(self) -> int:
        """Bytes of the 16-bit experts that are gone, tied ones counted once."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the 4-bit experts."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        tied = sum(len(layer.tied) for layer in self.layers)
        slow = [layer.name for layer in self.layers if layer.runs != "kernel"]
        backends = ", ".join(sorted({layer.backend for layer in self.layers}))
        ratio = self.bytes_before / max(1, self.bytes_after)
        lines = [
            f"{len(self.layers)} expert layers in 4 bits ({backends}), {self.bytes_before / 1e9:.2f} -> "
            f"{self.bytes_after / 1e9:.2f} GB ({ratio:.2f}x), {self.seconds:.1f} s; they ran as transformers' "
            f"{self.baseline}"
        ]
        kinds: dict[tuple[Any, ...], list[str]] = {}
        for layer in self.layers:
            sizes = (layer.experts, layer.hidden_size, layer.intermediate_size, layer.layout, layer.activation)
            kinds.setdefault(sizes, []).append(layer.name)
        for (experts, hidden, inter, layout, activation), names in kinds.items():
            lines.append(
                f"  {len(names)} x {experts} experts, hidden {hidden}, intermediate {inter}, {activation}, {layout}: "
                f"{names[0]} ... {names[-1]}"
            )
        lines += [f"  {tied} more modules share these weights and were packed with them"] if tied else []
        lines += [f"  left in 16 bits (ignore): {', '.join(self.ignored)}"] if self.ignored else []
        lines += (
            [f"  no kernel computes their activation, dequantised expert by expert: {', '.join(slow)}"] if slow else []
        )
        return "\n".join(lines)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Every set of routed experts in 16 bits, by module name, in layer order."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and _is_routed(name, module) and is_experts(module):
            found[name] = module
    return dict(sorted(found.items(), key=lambda item: natural(item[0])))


def _is_routed(name: str, module: nn.Module) -> bool:
    # JetMoE's mixture has no child that holds all of it; elsewhere the module is called "experts".
    return is_routed_experts(name) or hasattr(module, "input_linear")


def quantize_experts(
    model: nn.Module,
    *,
    group_sizes: tuple[int, int] = (128, 64),
    ignore: Sequence[str] = (),
    backend: str = "auto",
    progress: bool = True,
    symmetric: bool = False,
    zero_point: str = "float",
    method: str = "hqq",
    replay: bool = True,
) -> Report:
    """Put the routed experts of a Hugging Face model into 4 bits, in place, and return what changed.

    model        a loaded model in FP16, BF16 or FP32: transformers 5, on one or several devices, with or without PEFT
                 adapters on other modules. Each layer's 16-bit experts are freed before the next layer is packed.
    group_sizes  columns of a group along the hidden size (gate and up), and along the intermediate size (down)
    ignore       expert layers to leave as they are: names matched by component, or "re:" and a regular expression
                 (one string is one pattern)
    backend      "auto" (by device), "triton", "cpu" or "reference"; see `vllm_ext.ops.moe.prepare_experts`
    progress     show a bar on stderr
    symmetric, zero_point, method  as in `vllm_ext.quantization.Scheme`
    replay       on CUDA devices, record a layer called eagerly with the same number of rows (at most 1024) again and
                 again once, and replay it from a CUDA graph: an eager forward waits for its host (layer_graphs.py).
                 Takes the memory of one layer's intermediates; switch it off where that matters more

    Weights that several modules share (DiffusionGemma's encoder and decoder) are packed once and stay shared.
    Layers that an earlier call left out can follow in another, with the same options.
    Raises TypeError when `model` is no module; ValueError when it has no experts in 16 bits, or they are not in memory,
    or values do not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_experts: model must be a loaded torch module, got {type(model).__name__}")
    if not isinstance(group_sizes, (tuple, list)) or len(group_sizes) != 2:
        raise ValueError(
            f"quantize_experts: group_sizes must be two numbers, (hidden, intermediate), got {group_sizes!r}"
        )
    scheme = Scheme(
        group_size_w13=group_sizes[0],
        group_size_w2=group_sizes[1],
        symmetric=symmetric,
        zero_point=zero_point,
        method=method,
        ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
    )
    from vllm_ext.integrations.hf_quantizer import earlier_scheme, mark_quantized

    _check_adapters(model)
    found = find_experts(model)
    chosen = {name: module for name, module in found.items() if not is_ignored(name, scheme.ignore)}
    packed = [name for name, module in model.named_modules() if isinstance(module, QuantizedExperts)]
    earlier = earlier_scheme(model) if packed else None
    for pattern in unmatched(scheme.ignore, [*found, *packed]):
        logger.warning("quantize_experts: ignore pattern %r matches no experts of this model", pattern)
    if not chosen:
        raise ValueError(_nothing_found(model, found))
    if earlier is not None and replace(earlier, ignore=scheme.ignore) != scheme:
        raise ValueError(
            f"quantize_experts: {len(packed)} expert layers are in 4 bits already, as {earlier}; a checkpoint has one "
            "scheme, so quantise the others with the same options"
        )
    for name, module in chosen.items():
        _check_present(name, module)
        check_readable(module, name)
    groups = _tied_groups(chosen)
    report = Report(ignored=[name for name in found if name not in chosen], baseline=_baseline(model))
    start = time.monotonic()
    total = sum(_nbytes(found[names[0]]) for names in groups)
    bar, done = Progress("experts", total, enabled=progress), 0
    bar.update(0)
    found.clear()
    chosen.clear()
    for names in groups:
        layer = _quantize_layer(model, names, scheme, backend)
        if not replay:
            _quantised_part(model.get_submodule(names[0])).graphs = None
        report.layers.append(layer)
        done += layer.bytes_before
        bar.update(done)
    bar.finish(done)
    report.seconds = time.monotonic() - start
    if any(is_ignored(name, scheme.ignore) for name in packed):
        scheme = replace(scheme, ignore=tuple(report.ignored))
    mark_quantized(model, scheme)
    return report


def _nothing_found(model: nn.Module, found: dict[str, nn.Module]) -> str:
    if any(isinstance(module, QuantizedExperts) for module in model.modules()):
        return "quantize_experts: the experts are already in 4 bits" + (", but for those ignored" if found else "")
    if found:
        return f"quantize_experts: all {len(found)} expert layers are ignored; loosen `ignore`"
    return (
        f"quantize_experts: {type(model).__name__} has no routed experts in a known layout; looked for modules called "
        "'experts' that hold gate_up_proj or up_proj and down_proj, or a list of expert MLPs"
    )


def _check_present(name: str, module: nn.Module) -> None:
    for key, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(
                f"quantize_experts: {name}.{key} is not in memory (offloaded, or never loaded); load the model with a "
                "device_map that keeps its experts on a device or on the CPU"
            )
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(f"quantize_experts: {name}.{key} is {parameter.dtype}; start from 16-bit weights")


def _check_adapters(model: nn.Module) -> None:
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if is_routed_experts(name) and isinstance(base, nn.Module):
            raise ValueError(
                f"quantize_experts: {name} carries an adapter ({type(module).__name__}); merge it first "
                "(`model = model.merge_and_unload()`)"
            )


def _tied_groups(modules: dict[str, nn.Module]) -> list[list[str]]:
    """Names by shared weights; the name a checkpoint keeps comes first."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, module in modules.items():
        key = tuple(parameter.data_ptr() for _, _, parameter in weight_parameters(module))
        groups.setdefault(key, []).append(name)
    for names in groups.values():
        names.sort(key=lambda name: any(alias in name for alias, _ in TIED_PREFIXES))
    return list(groups.values())


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for _, _, parameter in weight_parameters(module))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _baseline(model: nn.Module) -> str:
    return getattr(_text_config(model), "_experts_implementation", None) or "eager"


def _top_k(model: nn.Module) -> int | None:
    text = _text_config(model)
    for name in ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "num_experts_per_token"):
        if isinstance(value := getattr(text, name, None), int):
            return value
    return None


def projection_names(model: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    """What the family's checkpoints call an expert's gate, up and down projections, where transformers renames them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return default
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "named_non_persistent_buffers") and not hasattr(base, "config"):
        return default
    found: dict[str, list[str]] = {}
    for conversion in get_model_conversion_mapping(base):
        for target in conversion.target_patterns:
            key = target.removesuffix("$").rpartition("experts.")[2]
            sources = [_EXPERT_SOURCE.search(source) for source in conversion.source_patterns]
            if key in ("gate_up_proj", "up_proj", "down_proj") and sources and all(sources):
                found[key] = [match[1] for match in sources if match]
    names = (*found.get("gate_up_proj", found.get("up_proj", ())), *found.get("down_proj", ()))
    return names if len(names) == len(default) else default


def _quantize_layer(model: nn.Module, names: list[str], scheme: Scheme, backend: str) -> LayerReport:
    old = model.get_submodule(names[0])
    before = _nbytes(old)
    weights = read_experts(old, names[0])
    weights.names = projection_names(model, weights.names)
    dtype = weights.w13.dtype
    w13 = scheme.quantize(weights.w13, "w13", name=f"{names[0]} (gate and up)")
    w2 = scheme.quantize(weights.w2, "w2", name=f"{names[0]} (down)")
    weights.w13, weights.w2 = (
        weights.w13[:0].new_empty(w13.shape, device="meta"),
        weights.w2.new_empty(w2.shape, device="meta"),
    )
    hook = getattr(old, "_hf_hook", None)
    layout = weights.layout
    del old
    put_in_place(model, names, weights, w13, w2, backend, dtype, hook)
    new = _quantised_part(model.get_submodule(names[0]))
    return LayerReport(
        name=names[0],
        experts=new.num_experts,
        hidden_size=new.hidden_dim,
        intermediate_size=new.intermediate_dim,
        layout=layout,
        activation=weights.options.activation if weights.options else "its own",
        backend="torch" if weights.options is None else new.experts_meta.backend,
        runs="dequantised" if weights.options is None else "kernel",
        bytes_before=before,
        bytes_after=new.nbytes,
        tied=tuple(names[1:]),
    )


def _quantised_part(module: nn.Module) -> QuantizedExperts:
    return next(part for part in module.modules() if isinstance(part, QuantizedExperts))


def put_in_place(
    model: nn.Module,
    names: Sequence[str],
    weights: ExpertWeights,
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    backend: str,
    dtype: torch.dtype,
    hook: Any = None,
) -> None:
    """Replace the modules `names`, which share their weights, by the quantised experts."""
    kernel = weights.options is not None
    kind = _CALLED.get(weights.calling, QuantizedExperts) if kernel else DequantizingExperts
    new = kind(weights, w13, w2, backend=backend, dtype=dtype, top_k=_top_k(model))
    new.aliases = tuple(names[1:])
    for name in names:
        old = model.get_submodule(name)
        training = old.training
        replacement = _wrapped(old, new, weights.calling)
        replacement.train(training)
        if hook is not None:
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(replacement, hook)
        _release(old)
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        if isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
            holder[int(child) if isinstance(holder, nn.ModuleList) else child] = replacement  # type: ignore[index]
        else:
            setattr(holder, child, replacement)


def _wrapped(old: nn.Module, new: QuantizedExperts, calling: str) -> nn.Module:
    if calling == "jetmoe":
        return JetMoeExperts(old, new)
    if calling != "each":
        return new
    # The parent, or the container's own forward, calls expert after expert; the container itself stays.
    for index, (key, _) in enumerate(expert_children(old)):
        old._modules[key] = OneExpert(new, index)
    return old


def _release(module: nn.Module) -> None:
    """Let go of the 16-bit weights now, even where someone still holds the module (hooks, records of outputs)."""
    for owner, key, _ in weight_parameters(module):
        owner._parameters[key] = None
