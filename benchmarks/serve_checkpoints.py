"""The checkpoints that `vllm-ext bench serve` serves: random weights in a real model's layer shape, in BF16 and packed;
as files, or as configurations whose weights `serve_weights` draws in the engine.

The packed one is compressed-tensors with integer zero points, which stock vLLM serves through Marlin and the plugin
through its own kernels: the same bits for both.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_ext.quantization import compressed_tensors, quantize_weight

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BF16, PACKED = "bf16", "packed"
# Every linear module that is no routed expert.
PLAIN_MODULES = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*router.*",
    r"re:.*\.mlp\.(gate|gate_proj|up_proj|down_proj|gate_up_proj)$",
)


@dataclass(frozen=True)
class ServedShape:
    """One model to serve.

    kind      family, as examples/tiny_models.py names it
    fields    of config.json: the published model's sizes
    layer     the name by which results/moe_*.json know its MoE layer, if they do
    group     columns of a group in the packed checkpoint: the widest that Marlin takes
    """

    kind: str
    fields: dict[str, Any]
    group: int
    layer: str | None = None
    note: str = ""


SHAPES = {
    "Qwen3-30B-A3B": ServedShape(
        "qwen3-moe",
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
        },
        128,
        "Qwen3-30B-A3B",
    ),
    "Gemma-4-26B-A4B": ServedShape(
        "gemma4-moe",
        {
            "hidden_size": 2816,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "global_head_dim": 256,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "intermediate_size": 2112,
            "vocab_size": 262144,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
        },
        64,
        "DiffusionGemma",
        note="the experts are DiffusionGemma's too; all attention heads are 256 wide",
    ),
    "tiny": ServedShape("qwen3-moe", {}, 64, note="for trying the command on a CPU"),
}


def write_checkpoints(shape: ServedShape, layers: int, folder: Path, *, packed: bool = True) -> dict[str, Path]:
    """Write `folder`/bf16 and, unless `packed` is false, `folder`/packed; the paths by name."""
    families()
    from tiny_models import write_tiny_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = {BF16: folder / BF16}
    write_tiny_model(shape.kind, paths[BF16], device=device, num_hidden_layers=layers, **shape.fields)
    if packed:
        paths[PACKED] = folder / PACKED
        pack(paths[BF16], paths[PACKED], shape.group, device)
    return paths


def config_of(shape: ServedShape, layers: int) -> dict[str, Any]:
    """The model's config.json."""
    defaults, _ = families()[shape.kind]
    return {**defaults, "num_hidden_layers": layers, **shape.fields}


def write_configs(shape: ServedShape, layers: int, folder: Path) -> dict[str, Path]:
    """As `write_checkpoints` without any weights."""
    config = config_of(shape, layers)
    quantization = compressed_tensors.make_config(shape.group, symmetric=False, ignore=PLAIN_MODULES)
    paths = {BF16: folder / BF16, PACKED: folder / PACKED}
    for name, path in paths.items():
        path.mkdir(parents=True, exist_ok=True)
        written = {**config, "quantization_config": quantization} if name == PACKED else config
        (path / "config.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return paths


def families() -> dict[str, Any]:
    """The families that the examples know. Raises FileNotFoundError where they are not beside the benchmarks."""
    if not (EXAMPLES / "tiny_models.py").is_file():
        raise FileNotFoundError(f"bench serve: needs {EXAMPLES}/tiny_models.py; run it from the project's source tree")
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from tiny_model_families import KINDS

    return dict(KINDS)


def pack(source: Path, target: Path, group: int, device: str) -> None:
    """Round the experts of a one-file checkpoint to nearest, in int4 with integer zero points."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    plain: list[str] = []
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118  a safe_open is no mapping
            if ".experts." not in name:
                tensors[name] = file.get_tensor(name)
                if name.endswith(".weight") and tensors[name].ndim == 2:
                    plain.append(name.removesuffix(".weight"))
                continue
            for key, packed in packed_tensors(name, file.get_tensor(name).to(device), group).items():
                tensors[key] = packed.cpu()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = compressed_tensors.make_config(group, symmetric=False, ignore=["lm_head", *plain])
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def packed_tensors(name: str, tensor: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """An expert's tensor of a 16-bit checkpoint, or that of all experts, rounded to nearest in compressed-tensors."""
    found: dict[str, torch.Tensor] = {}
    for module, weight in _projections(name, tensor):
        quantized = quantize_weight(weight, group, symmetric=False, zero_point="int", method="minmax")
        found |= compressed_tensors.to_tensors(module, quantized)
    return found


def _projections(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(module, [N, K]) of each expert in a checkpoint's tensor, which may hold one expert or all."""
    if tensor.ndim == 2:
        return [(name.removesuffix(".weight"), tensor)]
    prefix, _, projection = name.rpartition(".")
    parts = {"gate_proj": 0, "up_proj": 1} if projection == "gate_up_proj" else {projection: 0}
    rows = tensor.shape[1] // len(parts)
    return [
        (f"{prefix}.{expert}.{part}", tensor[expert, rows * index : rows * (index + 1)])
        for expert in range(tensor.shape[0])
        for part, index in parts.items()
    ]
