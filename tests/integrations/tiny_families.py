"""Every experts class of the installed transformers, tiny, with random weights, and each layout written backwards."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, HIDDEN, INTER, TOP_K = 4, 32, 24, 2
_DECORATED = re.compile(r"^@use_experts_implementation.*?^class (\w+)", re.MULTILINE | re.DOTALL)
# Not routed through the decorator, and called as the decorated ones are.
_OTHERS = (("step3p7", "Step3p7Experts"), ("longcat_flash", "LongcatFlashExperts"), ("dbrx", "DbrxExperts"))


def families() -> list[tuple[str, str]]:
    """(modelling module, class name) of every class that takes (hidden_states, top_k_index, top_k_weights)."""
    found = []
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "@use_experts_implementation" in text:
            name = f"transformers.models.{file.parent.name}.{file.stem}"
            found += [(name, match) for match in _DECORATED.findall(text)]
    found += [(f"transformers.models.{n}.modeling_{n}", c) for n, c in _OTHERS if (MODELS / n).is_dir()]
    return found


class TinyConfig:
    """A family's own configuration with its sizes made tiny: activations, limits and switches stay real."""

    def __init__(self, real: Any) -> None:
        self.__dict__["real"] = real
        self.__dict__["_experts_implementation"] = "eager"

    def __getattr__(self, name: str) -> Any:
        if "real" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.__dict__["real"], name)
        # Sizes without a default, or with one for each kind of layer, are sizes too.
        if isinstance(value, bool) or not isinstance(value, (int, list, type(None))):
            return value
        if "per_tok" in name or "topk" in name or "top_k" in name:
            return TOP_K
        if "zero_expert" in name:
            return 2
        if "expert" in name and "size" not in name:
            return EXPERTS
        if "intermediate" in name or "ffn" in name:
            return INTER
        return HIDDEN if name in ("hidden_size", "d_model") else value


def _configs(module_name: str) -> Iterator[Any]:
    package = module_name.rpartition(".")[0]
    for file in sorted((MODELS / package.rpartition(".")[2]).glob("configuration_*.py")):
        configuration = importlib.import_module(f"{package}.{file.stem}")
        for name in vars(configuration):
            if name.endswith("Config") and getattr(configuration, name).__module__ == configuration.__name__:
                yield getattr(configuration, name)


def make_experts(module_name: str, class_name: str) -> nn.Module:
    """The class with random FP32 weights of unit gain."""
    kind = getattr(importlib.import_module(module_name), class_name)
    failures = []
    for config in _configs(module_name):
        try:
            module = kind(TinyConfig(config()))
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            failures.append(f"{config.__name__}: {error}")
            continue
        generator = torch.Generator().manual_seed(5)
        for name, parameter in module.named_parameters():
            gain = 0.3 if "bias" in name else 2.0 / parameter.shape[-1] ** 0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * gain
        return module.float().eval()
    raise AssertionError(f"{class_name} can be made from none of its configurations: {failures}")


def inputs(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden_states, top_k_index, top_k_weights): every expert is hit, no token uses one twice."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.stack([torch.arange(tokens) % EXPERTS, (torch.arange(tokens) + 1) % EXPERTS], dim=1)
    return x, ids, torch.rand(tokens, TOP_K, generator=generator) + 0.2


def write_back(module: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Put w13 [E, 2I or I, H] and w2 [E, H, I] into a module of any layout, by its own flags; biases stay."""
    with torch.no_grad():
        if hasattr(module, "mlp"):
            gate, up = w13.chunk(2, dim=1)
            module.mlp.w1.copy_(gate.flatten(0, 1))
            module.mlp.v1.copy_(up.flatten(0, 1))
            module.mlp.w2.copy_(w2.transpose(1, 2).flatten(0, 1))
            return
        first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
        if not getattr(module, "is_concatenated", True):
            gate, up = w13.chunk(2, dim=1)
            w13 = torch.stack((gate, up), dim=2).flatten(1, 2)
        if getattr(module, "is_transposed", False):
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        first[: w13.shape[0]].copy_(w13)
        module.down_proj.copy_(w2)
