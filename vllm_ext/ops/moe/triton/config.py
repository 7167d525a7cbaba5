"""Launch configurations: a small table made by the tuner (`vllm-ext bench tune-moe`), and a rule for what it lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vllm_ext.ops.moe.experts import ExpertsMeta

_TABLES = Path(__file__).parent / "configs"
# One block size for every batch, so that no row's bits can depend on how many others there are.
_BATCH_INVARIANT_TOKENS = 32


@dataclass(frozen=True)
class GemmConfig:
    """How one grouped GEMM is launched. `scaling` is explained in gemm.py.

    unroll     K tiles of one iteration of the inner loop
    row_tiles  tiles of `block_rows` rows that one program computes
    programs   persistent programs a multiprocessor (stream.py), or 0: one program a tile (gemm.py)
    split      whether persistent programs share K tiles evenly, so that several add up one piece of work
    guess      whether gate and up's persistent programs ask for their first weights while slots are listed, every
               expert's first block being theirs whether it gets slots or not
    apart      whether streaming programs free a tile's words as soon as they are in registers, before its products
    """

    block_tokens: int
    block_rows: int
    num_warps: int
    num_stages: int
    scaling: str = "sum"
    max_registers: int | None = None
    unroll: int = 1
    row_tiles: int = 1
    programs: int = 0
    split: bool = False
    guess: bool = False
    apart: bool = False


@dataclass(frozen=True)
class LaunchConfig:
    """How a layer's two GEMMs are launched."""

    gate_up: GemmConfig
    down: GemmConfig

    @staticmethod
    def from_json(entry: dict[str, Any]) -> LaunchConfig:
        """Undo `to_json`."""
        return LaunchConfig(GemmConfig(**entry["gate_up"]), GemmConfig(**entry["down"]))

    def to_json(self) -> dict[str, Any]:
        """Plain types for a table."""
        return {"gate_up": vars(self.gate_up), "down": vars(self.down)}


def table_name(device_name: str) -> str:
    """File name of a GPU's table."""
    return device_name.replace(" ", "_").replace("/", "_") + ".json"


def shape_key(meta: ExpertsMeta, top_k: int) -> str:
    """A shape's name in a table."""
    return f"H{meta.hidden_size}_I{meta.intermediate_size}_E{meta.num_experts}_K{top_k}"


def group_key(meta: ExpertsMeta) -> str:
    """What follows a shape's name where rows are for given group sizes only."""
    return f"G{meta.group_size_w13}_{meta.group_size_w2}"


# FP32 activations are for checking: a ring of few and small tiles, which fits into every GPU's shared memory.
_FP32 = LaunchConfig(GemmConfig(16, 64, 4, 2), GemmConfig(16, 64, 4, 2))


@lru_cache(maxsize=16)
def load_table(device_name: str) -> dict[str, dict[str, Any]]:
    """{shape: {slots per expert, as text: entry}} for a GPU, empty when there is none."""
    path = _TABLES / table_name(device_name)
    if not path.exists():
        return {}
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["shapes"]
    return table


@lru_cache(maxsize=64)
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def rule(slots_per_expert: float) -> LaunchConfig:
    """The configuration for a GPU or a shape that no table has, from the mean number of slots an expert gets."""
    if slots_per_expert <= 8:
        config = LaunchConfig(GemmConfig(16, 64, 4, 4), GemmConfig(16, 64, 4, 4))
    elif slots_per_expert <= 24:
        config = LaunchConfig(GemmConfig(32, 128, 4, 3), GemmConfig(32, 128, 4, 3))
    else:
        config = LaunchConfig(GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3))
    return config


def row(rows: dict[str, Any], slots_per_expert: float) -> str:
    """The key of a shape's row for so many slots an expert: the nearest at or below, or the lowest."""
    tuned = sorted(rows, key=float)
    below = [key for key in tuned if float(key) <= slots_per_expert * 1.001]
    return below[-1] if below else tuned[0]


@lru_cache(maxsize=4096)
def choose(meta: ExpertsMeta, num_tokens: int, top_k: int, batch_invariant: bool, device_index: int) -> LaunchConfig:
    """The configuration for a call. device_index -1 is the interpreter.

    The table is looked up by the number of slots an expert gets on average, nearest below in its rows; a shape that it
    lacks takes the rows of no other shape but the rule. Rows for given group sizes go before those of the shape. A
    batch-invariant call takes one configuration for all sizes, and so does every call in FP32.
    """
    per_expert = num_tokens * top_k / meta.num_experts
    if meta.dtype == torch.float32:
        return _FP32
    if batch_invariant:
        return rule(_BATCH_INVARIANT_TOKENS / 2)
    table = load_table(_device_name(device_index)) if device_index >= 0 else {}
    key = shape_key(meta, top_k)
    rows = table.get(key, {}) | table.get(f"{key}_{group_key(meta)}", {})
    if not rows:
        return rule(per_expert)
    return LaunchConfig.from_json(rows[row(rows, per_expert)])
