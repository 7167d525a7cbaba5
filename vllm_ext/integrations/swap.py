"""The routed experts of a Hugging Face model into 4 bits, in place, layer by layer, and what that changed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vllm_ext.integrations.expert_layouts import check_readable, read_experts, weight_parameters
from vllm_ext.integrations.expert_modules import (
    find_experts,
    projection_names,
    put_in_place,
    quantised_part,
    text_config,
)
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.quantization import Scheme
from vllm_ext.quantization.layouts import TIED_PREFIXES
from vllm_ext.quantization.names import is_ignored, is_routed_experts, unmatched
from vllm_ext.quantization.progress import Progress

logger = logging.getLogger(__name__)


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


def packed_experts(model: nn.Module) -> list[str]:
    """Names of the expert layers that are in 4 bits already."""
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedExperts)]


def swap_experts(
    model: nn.Module,
    scheme: Scheme,
    *,
    backend: str = "auto",
    progress: bool = True,
    replay: bool = True,
    earlier: Scheme | None = None,
) -> Report:
    """Quantise each layer of routed experts that `scheme` does not ignore, and free its 16-bit weights before the next.

    earlier  the scheme of experts that are in 4 bits already; a model has one scheme
    backend, progress, replay  see `quantize_experts`

    Raises ValueError when there are no experts in 16 bits, or they are not in memory, or the schemes differ.
    """
    _check_adapters(model)
    found, packed = find_experts(model), packed_experts(model)
    chosen = {name: module for name, module in found.items() if not is_ignored(name, scheme.ignore)}
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
            quantised_part(model.get_submodule(names[0])).graphs = None
        report.layers.append(layer)
        done += layer.bytes_before
        bar.update(done)
    bar.finish(done)
    report.seconds = time.monotonic() - start
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


def _baseline(model: nn.Module) -> str:
    return getattr(text_config(model), "_experts_implementation", None) or "eager"


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
    new = quantised_part(model.get_submodule(names[0]))
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
