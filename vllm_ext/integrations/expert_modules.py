"""Where the routed experts of a Hugging Face model are, and what stands in their place once they are quantised."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_ext.integrations.expert_layouts import ExpertWeights, expert_children, is_experts, weight_parameters
from vllm_ext.integrations.quantized_experts import (
    BlockExperts,
    DequantizingExperts,
    JetMoeExperts,
    LogitExperts,
    OneExpert,
    QuantizedExperts,
    SortedExperts,
)
from vllm_ext.quantization import QuantizedWeight
from vllm_ext.quantization.layouts import natural
from vllm_ext.quantization.names import is_routed_experts

_CALLED = {"topk": QuantizedExperts, "sorted": SortedExperts, "blocks": BlockExperts, "logits": LogitExperts}
_EXPERT_SOURCE = re.compile(r"experts\.(?:\*|\\d\+)\.(\w+)\.weight\$?$")


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


def text_config(model: nn.Module) -> Any:
    """The part of a model's config that describes its decoder, None where it has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _top_k(model: nn.Module) -> int | None:
    text = text_config(model)
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


def quantised_part(module: nn.Module) -> QuantizedExperts:
    """The quantised experts in what `put_in_place` put there."""
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
