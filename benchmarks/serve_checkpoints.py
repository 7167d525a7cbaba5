"""The checkpoints that `vllm-ext bench serve` serves: random weights in a real model's layer shape, in BF16 and packed;
as files, or as configurations whose weights `serve_weights` draws in the engine.

The packed one is compressed-tensors with integer zero points, which stock vLLM serves through Marlin and the plugin
through its own kernels: the same bits for both.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_ext.quantization import compressed_tensors, quantize_weight

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BF16, PACKED = "bf16", "packed"
FORMAT = {"format": "pt"}
# Drawn, and handed to a model or written, at once: enough that a model's look at its own parameters costs little.
BATCH_BYTES = 1 << 30
Take = Callable[[dict[str, torch.Tensor]], None]
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


class Batches(dict[str, torch.Tensor]):
    """Tensors by name that are given away, a batch at a time, before a new one would make too many."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take = take

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self and sum(held.nbytes for held in self.values()) >= BATCH_BYTES:
            self.give()
        super().__setitem__(name, tensor)

    def give(self) -> None:
        """Give away what is held."""
        held = dict(self)
        self.clear()
        self.take(held)


def draw(kind: str, config: dict[str, Any], seed: int, device: str, take: Take) -> None:
    """Draw the checkpoint of `config`, a family's config.json, and hand it to `take` in batches on `device`."""
    _, make_weights = families()[kind]
    from tiny_model_parts import Weights

    weights = Weights(seed, device, store=device)
    weights.tensors = Batches(take)
    make_weights(weights, config)
    weights.tensors.give()


def rounded(held: dict[str, torch.Tensor], group: int | None) -> dict[str, torch.Tensor]:
    """A batch with its experts rounded to nearest, in int4 with integer zero points; as it is without a `group`."""
    if group is None:
        return held
    found: dict[str, torch.Tensor] = {}
    alike: dict[torch.Size, dict[str, torch.Tensor]] = {}
    for name, tensor in held.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        for module, weight in _projections(name, tensor):
            alike.setdefault(weight.shape, {})[module] = weight
    for weights in alike.values():
        found |= packed_tensors(weights, group)
    return found


class Shards:
    """A checkpoint that is written a file a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write one more file."""
        name = f"model-{len(set(self.files.values())):05d}.safetensors"
        # Cloned: a file holds no tensors that share their memory.
        own = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
        save_file(own, self.folder / name, FORMAT)
        self.files |= dict.fromkeys(tensors, name)

    def finish(self) -> None:
        """Write the index."""
        index = {"metadata": {}, "weight_map": self.files}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_checkpoints(shape: ServedShape, layers: int, folder: Path, *, packed: bool = True) -> dict[str, Path]:
    """Write `folder`/bf16 and, unless `packed` is false, `folder`/packed; the paths by name."""
    paths = write_configs(shape, layers, folder)
    if not packed:
        shutil.rmtree(paths.pop(PACKED))
    shards = {name: Shards(path) for name, path in paths.items()}

    def take(held: dict[str, torch.Tensor]) -> None:
        for name, writer in shards.items():
            writer.add(rounded(held, shape.group if name == PACKED else None))

    draw(shape.kind, config_of(shape, layers), 0, "cuda" if torch.cuda.is_available() else "cpu", take)
    for writer in shards.values():
        writer.finish()
    return paths


def config_of(shape: ServedShape, layers: int) -> dict[str, Any]:
    """The model's config.json."""
    defaults, _ = families()[shape.kind]
    return {**defaults, "num_hidden_layers": layers, **shape.fields}


def write_configs(shape: ServedShape, layers: int, folder: Path) -> dict[str, Path]:
    """As `write_checkpoints` without any weights: the folders with their config.json."""
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


def packed_tensors(weights: dict[str, torch.Tensor], group: int) -> dict[str, torch.Tensor]:
    """Experts' weights of one shape by module, rounded to nearest in compressed-tensors: all in one go, because a model
    has tens of thousands, and each would be some thirty small kernels."""
    stacked = torch.stack(list(weights.values()))
    quantized = quantize_weight(stacked, group, symmetric=False, zero_point="int", method="minmax")
    found: dict[str, torch.Tensor] = {}
    for role, tensor in compressed_tensors.to_tensors("", quantized).items():
        shape_of_all = role == f".{compressed_tensors.SHAPE}"
        parts = [tensor[1:]] * len(weights) if shape_of_all else tensor.unbind()
        found |= {module + role: part for module, part in zip(weights, parts, strict=True)}
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
