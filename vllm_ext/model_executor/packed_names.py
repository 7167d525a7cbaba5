"""Tensors of packed experts under names that a model's own loader does not know, handled before it sees them.

Experts fused into one tensor (`experts.gate_up_proj.weight_packed` [E, 2I, H/8]) are split into one a projection, which
every family's loader takes. gpt-oss's loader knows fused names only and passes over all others, so its layers are
filled here directly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vllm_ext._wrapping import wrap_once
from vllm_ext.quantization import compressed_tensors

if TYPE_CHECKING:
    from vllm_ext.model_executor.moe_method import PackedMoEMethod

_LAYER = r"(?P<layer>(?:.+\.)?experts)"
_ROLE = r"(?P<role>packed|scale|zero_point|shape)"
_FUSED = re.compile(rf"{_LAYER}\.(?P<projection>gate_up_proj|down_proj|w13|w2)(?:[._]weight)?_{_ROLE}")
_PER_EXPERT = re.compile(rf"{_LAYER}\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight_{_ROLE}")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
_SHARDS = {"gate_proj": "w1", "w1": "w1", "up_proj": "w3", "w3": "w3", "down_proj": "w2", "w2": "w2"}
_LOADERS_WITHOUT_EXPERT_NAMES = ("GptOssForCausalLM",)

Named = tuple[str, torch.Tensor]


def wrap_get_all_weights(default_loader: Any) -> None:
    """Let `DefaultModelLoader.get_all_weights` give packed experts in the names the model's loader takes."""

    @wrap_once(default_loader.DefaultModelLoader, "get_all_weights")
    def renamed(get_all_weights: Any, self: Any, model_config: Any, model: torch.nn.Module) -> Iterator[Named]:
        return known_names(get_all_weights(self, model_config, model), model)


def known_names(weights: Iterable[Named], model: torch.nn.Module) -> Iterator[Named]:
    """`weights` as `model.load_weights` takes them; unchanged for a model without packed experts.

    Raises ValueError, while it is read, on a packed tensor for a model whose experts are to be quantised at load.
    """
    from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod

    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    layers = {m.prefix.removesuffix(".routed_experts"): m for m in methods if isinstance(m, PackedMoEMethod)}
    if not layers:
        at_load = any(isinstance(method, AtLoadMoEMethod) for method in methods)
        return _unpacked(weights) if at_load else iter(weights)
    split = split_fused(weights)
    return _deliver(split, layers) if type(model).__name__ in _LOADERS_WITHOUT_EXPERT_NAMES else split


def _unpacked(weights: Iterable[Named]) -> Iterator[Named]:
    for name, tensor in weights:
        match = _PER_EXPERT.fullmatch(name) or _FUSED.fullmatch(name)
        if match and match["role"] == "packed":
            raise ValueError(
                f"w4a16-grouped, {name}: the checkpoint's experts are packed already, and its config.json has no "
                "quantization_config that says how; restore the config.json written with them, or start from the "
                "16-bit checkpoint"
            )
        yield name, tensor


def split_fused(weights: Iterable[Named]) -> Iterator[Named]:
    """Tensors [E, rows, ...] of packed experts as one a projection; every other tensor as it is."""
    for name, tensor in weights:
        match = _FUSED.fullmatch(name)
        if match is None:
            yield name, tensor
        elif match["role"] != "shape":  # of all experts at once; each projection gets its own below
            parts = _PARTS.get(match["projection"], (match["projection"],))
            rows = tensor.shape[1] // len(parts)
            for expert in range(tensor.shape[0]):
                for index, part in enumerate(parts):
                    module = f"{match['layer']}.{expert}.{part}"
                    mine = tensor[expert, index * rows : (index + 1) * rows]
                    yield f"{module}.weight_{match['role']}", mine
                    if match["role"] == "packed":
                        shape = torch.tensor([rows, mine.shape[-1] * compressed_tensors.NIBBLES])
                        yield f"{module}.{compressed_tensors.SHAPE}", shape


def _deliver(weights: Iterable[Named], layers: dict[str, PackedMoEMethod]) -> Iterator[Named]:
    """Load what belongs to `layers`, by their names in the checkpoint, and pass on the rest."""
    for name, tensor in weights:
        match = _PER_EXPERT.fullmatch(name)
        method = layers.get(match["layer"]) if match else None
        if match is None or method is None or match["projection"] not in _SHARDS:
            yield name, tensor
        else:
            method.load(tensor, f"weight_{match['role']}", _SHARDS[match["projection"]], int(match["expert"]))
