"""Tiny checkpoints in the layouts model families store their experts in, and packing them."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_ext.quantization.cli import quantize_main

HIDDEN, INTER, EXPERTS = 64, 48, 3
Tensors = dict[str, torch.Tensor]
SMALL_GROUPS = ["--group-size-w13", "32", "--group-size-w2", "16", "--quiet"]


def expert_weights(layer: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """gate [E, I, H], up [E, I, H] and down [E, H, I] of a layer."""
    generator = torch.Generator().manual_seed(layer)

    def weight(rows: int, columns: int) -> torch.Tensor:
        value = torch.randn(EXPERTS, rows, columns, generator=generator)
        return (value * 0.05 + 0.01).to(dtype)

    return {"gate": weight(INTER, HIDDEN), "up": weight(INTER, HIDDEN), "down": weight(HIDDEN, INTER)}


def per_expert(prefix: str, weights: Tensors, names: tuple[str, str, str]) -> Tensors:
    """`PREFIX.experts.E.NAME.weight`, names in the order gate, up, down."""
    return {
        f"{prefix}.experts.{e}.{name}.weight": weights[key][e].clone()
        for e in range(EXPERTS)
        for key, name in zip(("gate", "up", "down"), names, strict=True)
    }


def fused(prefix: str, weights: Tensors) -> Tensors:
    """`PREFIX.experts.gate_up_proj` [E, 2I, H] and `.down_proj` [E, H, I]."""
    return {
        f"{prefix}.experts.gate_up_proj": torch.cat((weights["gate"], weights["up"]), 1),
        f"{prefix}.experts.down_proj": weights["down"].clone(),
    }


def transposed(prefix: str, weights: Tensors) -> Tensors:
    """As `fused`, with each matrix transposed."""
    return {name: value.transpose(1, 2).contiguous() for name, value in fused(prefix, weights).items()}


def interleaved(prefix: str, weights: Tensors) -> Tensors:
    """As gpt-oss: transposed, gate and up rows alternating, biases."""
    rows = torch.stack((weights["gate"], weights["up"]), 2).flatten(1, 2)
    return {
        f"{prefix}.experts.gate_up_proj": rows.transpose(1, 2).contiguous(),
        f"{prefix}.experts.gate_up_proj_bias": torch.randn(EXPERTS, 2 * INTER).bfloat16(),
        f"{prefix}.experts.down_proj": weights["down"].transpose(1, 2).contiguous(),
        f"{prefix}.experts.down_proj_bias": torch.randn(EXPERTS, HIDDEN).bfloat16(),
    }


LAYOUTS: dict[str, tuple[dict[str, object], Callable[[int, Tensors], Tensors]]] = {
    "per_expert": (
        {"model_type": "qwen3_moe"},
        lambda i, w: per_expert(f"model.layers.{i}.mlp", w, ("gate_proj", "up_proj", "down_proj")),
    ),
    "w1_w3_w2": (
        {"model_type": "mixtral"},
        lambda i, w: per_expert(f"model.layers.{i}.block_sparse_moe", w, ("w1", "w3", "w2")),
    ),
    "fused": ({"model_type": "gemma4"}, lambda i, w: fused(f"model.layers.{i}", w)),
    "nested": (
        {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "hidden_size": HIDDEN}},
        lambda i, w: fused(f"model.language_model.layers.{i}.mlp", w),
    ),
    "transposed": ({"model_type": "llama4"}, lambda i, w: transposed(f"model.layers.{i}.feed_forward", w)),
    "gpt_oss": ({"model_type": "gpt_oss"}, lambda i, w: interleaved(f"model.layers.{i}.mlp", w)),
}
PROJECTIONS = {"w1_w3_w2": ("w1", "w3", "w2")}


def dense(layer: int) -> Tensors:
    """What must stay as it is: attention, the router, a shared expert and its gate."""
    generator = torch.Generator().manual_seed(100 + layer)
    prefix = f"model.layers.{layer}"
    shapes = {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{prefix}.mlp.shared_expert.gate_proj.weight": (INTER, HIDDEN),
        f"{prefix}.mlp.shared_expert_gate.weight": (1, HIDDEN),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write_checkpoint(folder: Path, config: dict[str, object], shards: list[Tensors], *, index: bool = True) -> Path:
    """Write shards, an index, config.json and companions that must be copied."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    if index:
        content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "architectures": ["M"], **config}))
    (folder / "tokenizer.json").write_text('{"note": "é"}')
    (folder / "extra").mkdir()
    (folder / "extra" / "template.jinja").write_text("{{ x }}")
    return folder


def forked(action: Callable[[], int]) -> int:
    """Start `action` in a child process and return its process id; the child ends with the status it returns.

    A fork has torch already imported, which a fresh interpreter would spend seconds on. It uses one thread: the
    parent's OpenMP threads do not survive a fork.
    """
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        torch.set_num_threads(1)
        status = action()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(child: int) -> int:
    """Wait for a child and return its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder: its path in it to its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of a checkpoint by its name."""
    merged: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged.update(load_file(path))
    return merged


def quantize(*arguments: object) -> int:
    """The exit status of `vllm-ext quantize` with groups that fit these checkpoints."""
    return quantize_main([*map(str, arguments), *SMALL_GROUPS])
