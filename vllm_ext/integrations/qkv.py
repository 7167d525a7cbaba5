"""Projections of one input as one product: q, k and v of an attention, gate and up of an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_ext.integrations.norms import Patch, set_forward

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class SharedProjection:
    """Several linear layers over one input: the first one asked computes all, the others take their columns.

    The layers' weights become views of the joined matrix: nothing is held twice, and state dicts stay as they were.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = list(layers)
        self.widths = [layer.out_features for layer in layers]
        with torch.no_grad():
            self.weight = torch.cat([layer.weight for layer in layers])
            biased = layers[0].bias is not None
            self.bias = torch.cat([layer.bias for layer in layers]) if biased else None
            for layer, part in zip(layers, torch.split(self.weight, self.widths), strict=True):
                layer.weight.data = part
            if self.bias is not None:
                for layer, part in zip(layers, torch.split(self.bias, self.widths), strict=True):
                    layer.bias.data = part
        self._source: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Columns of layer `index` for input `x`."""
        layer = self.layers[index]
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and layer.weight.requires_grad):
            # A compiler sees no addresses, and the joined matrix would keep gradients from the layers.
            return F.linear(x, layer.weight, layer.bias)
        if layer.weight.data_ptr() - self.weight.data_ptr() != self._offset(index) or layer.weight.device != x.device:
            # Moved, reloaded or merged since: the joined matrix is no longer what the layer holds.
            return F.linear(x, layer.weight, layer.bias)
        if self._source is not x or index not in self._parts:
            parts = torch.split(F.linear(x, self.weight, self.bias), self.widths, dim=-1)
            self._source, self._parts = x, dict(enumerate(parts))
        found = self._parts.pop(index)
        if not self._parts:
            self._source = None
        return found

    def _offset(self, index: int) -> int:
        return sum(self.widths[:index]) * self.weight.shape[1] * self.weight.element_size()


class _Part:
    """A layer's forward. Not a closure: a copy of the model must compute with the copy's layers."""

    def __init__(self, shared: SharedProjection, index: int) -> None:
        self.shared, self.index = shared, index

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self.shared.part(self.index, input)


def _candidates(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The linear layers called `names` that can be joined; a missing last one (keys that serve as values) is fine."""
    found = [getattr(module, name, None) for name in names]
    layers = [layer for layer in found if layer is not None]
    # Exactly nn.Linear: quantised layers and attached adapters compute something else.
    if len(layers) < 2 or any(type(layer) is not nn.Linear for layer in layers):
        return []
    sizes = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}
    return layers if len(sizes) == 1 and layers[0].weight.device.type != "meta" else []


def join_projections(model: nn.Module, *, qkv: bool = True, gate_up: bool = True) -> Patch:
    """Evaluate q, k, v (and gate, up) as one product wherever a module has them as plain linear layers.

    LoRA adapters that are still attached are skipped with the reason; `merge_lora` first. Layers that share weights
    (DiffusionGemma's encoder and decoder) share the joined matrix. `undo()` restores the forwards; weights keep their
    values throughout.
    """
    patch = Patch()
    joined: dict[tuple[int, ...], SharedProjection] = {}
    for name, module in model.named_modules():
        for names in ([QKV] if qkv else []) + ([GATE_UP] if gate_up else []):
            attached = [n for n in names if hasattr(getattr(module, n, None), "base_layer")]
            if attached:
                patch.skipped[name] = f"{', '.join(attached)} carry an adapter; merge it first"
                continue
            layers = _candidates(module, names)
            if not layers:
                continue
            key = tuple(id(layer.weight) for layer in layers)
            if key not in joined:
                joined[key] = SharedProjection(layers)
            shared = SharedProjection.__new__(SharedProjection)
            shared.__dict__.update(joined[key].__dict__, layers=layers, _source=None, _parts={})
            for index, layer in enumerate(layers):
                patch._undo.append(set_forward(layer, _Part(shared, index)))
            patch.count += 1
    return patch


def merge_lora(model: Any) -> Any:
    """The model with its LoRA adapters folded into the base weights; a model without adapters is returned as it is."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def joined_weight(layers: Sequence[nn.Linear]) -> torch.Tensor:
    """[sum of rows, K] of the layers' weights: the joined matrix itself where they are views of one, else a copy."""
    first = layers[0].weight
    start = first.data_ptr()
    step = 0
    together = True
    for layer in layers:
        weight = layer.weight
        together &= weight.is_contiguous() and weight.data_ptr() == start + step
        step += weight.nbytes
    if together and first.untyped_storage().nbytes() >= step:
        rows = sum(layer.out_features for layer in layers)
        return first.data.as_strided((rows, first.shape[1]), (first.shape[1], 1))
    return torch.cat([layer.weight.data for layer in layers])
