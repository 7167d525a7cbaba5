"""Launch configurations, and the small table of them that the tuner makes (`vllm-ext bench tune-moe`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm_ext.ops.moe.experts import ExpertsMeta

_TABLES = Path(__file__).parent / "configs"


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


def table_path(device_name: str) -> Path:
    """A GPU's table, whether there is one or not."""
    return _TABLES / (device_name.replace(" ", "_").replace("/", "_") + ".json")


def shape_key(meta: ExpertsMeta, num_experts: int, top_k: int) -> str:
    """A shape's name in a table; `num_experts` are all ranks'."""
    return f"H{meta.hidden_size}_I{meta.intermediate_size}_E{num_experts}_K{top_k}"


def group_key(meta: ExpertsMeta) -> str:
    """What follows a shape's name where rows are for given group sizes only."""
    return f"G{meta.group_size_w13}_{meta.group_size_w2}"


@lru_cache(maxsize=16)
def load_table(device_name: str) -> dict[str, dict[str, Any]]:
    """{shape: {slots per expert, as text: entry}} for a GPU, empty when there is none."""
    path = table_path(device_name)
    if not path.exists():
        return {}
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["shapes"]
    return table
