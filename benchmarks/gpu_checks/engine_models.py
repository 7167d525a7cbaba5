"""The tiny random models that the checks of engines serve, what is made of them, and an adapter for them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# 704 is DiffusionGemma's and Gemma 4's size: 352 a rank. Groups of 64 no longer divide it, so that two ranks round
# other groups than one, and answer as far apart as quantising moves them; groups of 32 are the same ones.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"additional_config": {"vllm_ext": {"group_size_w2": 32}}},
    "hybrid": {"gdn_prefill_backend": "triton"},  # vLLM's first choice on a Hopper GPU is compiled at run time
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3-moe", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 704}),
    "gemma4": ("gemma4-moe", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 704}),
    "hybrid": ("qwen3-next", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 256}),
    # A rank's part of 96 columns begins inside a group of 64. Nothing but a GPU runs this family.
    "kimi": ("kimi-linear", {"moe_intermediate_size": 96}),
}
DEEP = ("hybrid", "kimi")  # of four layers, so that each kind is there
# What a model's key ends with, in this order, says what is made of the model before it.
DRAFTED, MERGED, PACKED = " with a draft", " merged", " packed"
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")
# How much of the last hidden states is the token itself, the draft's and the model's: that much is often drafted right.
EMBEDDED = 4.0


def options_of_model(key: str) -> dict[str, Any]:
    """vLLM's options that engines of the model have in common."""
    return MODEL_OPTIONS.get(_plain(key), {})


def _plain(key: str) -> str:
    for made in (PACKED, MERGED, DRAFTED):
        key = key.removesuffix(made)
    return key


def write_models(keys: Iterable[str], folder: Path) -> dict[str, str]:
    """The folders of `keys`, by key."""
    sys.path.insert(0, str(ROOT / "examples"))
    found: dict[str, str] = {}
    for key in keys:
        _write(key, folder, found)
    return found


def _write(key: str, folder: Path, found: dict[str, str]) -> Path:
    """The model of `key`, written unless it is there."""
    path = folder / key
    if key in found:
        return path
    found[key] = str(path)
    for suffix, make in ((PACKED, _pack), (MERGED, _merge), (DRAFTED, _add_draft)):
        if key.endswith(suffix):
            make(_write(key.removesuffix(suffix), folder, found), path)
            return path
    from tiny_models import write_tiny_model

    kind, fields = MODELS[key]
    write_tiny_model(kind, path, num_hidden_layers=4 if key in DEEP else 2, **fields)
    return path


def _pack(source: Path, target: Path) -> None:
    from vllm_ext.quantization.cli import quantize_main

    if quantize_main([str(source), str(target), "--quiet"]):
        raise RuntimeError(f"serve_engines: {source.name} could not be packed")


def _change(source: Path, target: Path, changed: dict[str, torch.Tensor], **fields: Any) -> None:
    """A copy of a model with these tensors and fields in place of its own."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors") | changed
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))


def _adapter(source: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A random adapter of attention: A and B by the name of the weight they are for."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in TARGETS)):
            down = torch.randn(RANK, weight.shape[1], generator=generator).bfloat16() * weight.shape[1] ** -0.5
            up = torch.randn(weight.shape[0], RANK, generator=generator).bfloat16() * 0.3
            found[name] = (down, up)
    return found


def write_adapter(model: Path, target: Path) -> Path:
    """The adapter of a model, as PEFT stores it."""
    from safetensors.torch import save_file

    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, (down, up) in _adapter(model).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def _merge(source: Path, target: Path) -> None:
    """The model with what its adapter adds in its weights; the experts are the same."""
    from safetensors.torch import load_file

    weights = load_file(source / "model.safetensors")
    added = {name: ALPHA / RANK * (up.float() @ down.float()) for name, (down, up) in _adapter(source).items()}
    _change(
        source,
        target,
        {name: (weights[name].float() + one).to(weights[name].dtype) for name, one in added.items()},
    )


def _add_draft(source: Path, target: Path) -> None:
    """Qwen3-Next's draft for multi-token prediction: a copy of the full-attention layer, experts and all, after the
    next token's embedding alone. What it is right about are the tokens that hang on the token before."""
    from safetensors.torch import load_file

    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    layer, hidden = f"model.layers.{config['full_attention_interval'] - 1}.", config["hidden_size"]
    changed = {
        name.replace(layer, "mtp.layers.0."): one.clone() for name, one in weights.items() if name.startswith(layer)
    }
    eye = EMBEDDED * torch.eye(hidden)
    changed["mtp.fc.weight"] = torch.cat((eye, torch.zeros(hidden, hidden)), 1).bfloat16()
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        changed[f"mtp.{norm}.weight"] = torch.zeros(hidden).bfloat16()
    embedding = "model.embed_tokens.weight"
    changed[embedding] = EMBEDDED * weights[embedding]
    _change(source, target, changed, num_nextn_predict_layers=1)
