"""Chip descriptions: loaded from `chips/<name>.json`, where every number names its source.

A number in a chip file is an object {"value": number, "source": key}; `sources` in the same file spells the key out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CHIP_DIR = Path(__file__).with_name("chips")
BUFFERS = ("ub", "l1", "l0a", "l0b", "l0c")


@dataclass(frozen=True)
class Buffer:
    """One on-core memory: capacity and usable capacity in bytes, and the alignment of an address in bytes."""

    capacity: int
    usable: int
    alignment: int

    def align(self, size: int) -> int:
        """Round `size` bytes up to the buffer's alignment."""
        return -(-size // self.alignment) * self.alignment


@dataclass(frozen=True)
class Chip:
    """What the planner knows of a chip. Rates are bytes a cycle of `clock_mhz`; `cores` counts matrix cores.

    buffers             per core, by name: "ub", "l1", "l0a", "l0b", "l0c", and the shared "l2"
    missing_apis        what the kernels may not use; a path is written "DataCopy:FROM->TO"
    l0c_exits           the ways out of the accumulator, written "DataCopy:L0C->TO" or "Fixpipe:L0C->TO"
    blocked_operands    whether the matrix unit reads blocked layouts only, so that a layout transform has a cost
    split_cores         whether matrix and vector units sit in different cores
    """

    name: str
    title: str
    npu_arch: str
    cores: int
    vector_cores: int | None
    clock_mhz: float
    macs_per_cycle: int
    buffers: Mapping[str, Buffer]
    bytes_per_cycle: Mapping[str, float]
    measured_gb_per_s: Mapping[str, float]
    missing_apis: tuple[str, ...]
    l0c_exits: tuple[str, ...]
    dtypes: tuple[str, ...]
    blocked_operands: bool
    split_cores: bool

    @property
    def lanes(self) -> int:
        """How many vector cores serve a matrix core, each with its share of the value columns in a UB of its own."""
        return self.vector_cores // self.cores if self.vector_cores else 1

    @property
    def has_l0(self) -> bool:
        """Whether the matrix unit has operand buffers of its own, filled from L1."""
        return self.buffers["l0a"].usable > 0

    @property
    def ub_to_l1(self) -> bool:
        """Whether a vector result reaches the matrix unit without global memory."""
        return not self.split_cores and "DataCopy:UB->L1" not in self.missing_apis

    @property
    def l0c_to_ub(self) -> bool:
        """Whether a matrix result reaches the vector unit without global memory."""
        return not self.has_l0 or any(path.endswith(":L0C->UB") for path in self.l0c_exits)


def chip_names() -> tuple[str, ...]:
    """The names of the chips there are files for, sorted."""
    return tuple(sorted(path.stem for path in CHIP_DIR.glob("*.json")))


def load_chip(name: str) -> Chip:
    """Read a chip by name. Raises ValueError, naming the known chips, when there is no such file."""
    if not isinstance(name, str) or name not in chip_names():
        known = ", ".join(chip_names())
        raise ValueError(f"ha_npu: unknown chip {name!r}; known: {known}; a new one is a file chips/<name>.json")
    return _read_chip(name)


@cache
def _read_chip(name: str) -> Chip:
    return parse_chip(json.loads((CHIP_DIR / f"{name}.json").read_text(encoding="utf-8")))


def _number(entry: Mapping[str, Any]) -> Any:
    return entry["value"]


def parse_chip(data: Mapping[str, Any]) -> Chip:
    """Turn the contents of a chip file into a `Chip`. Raises ValueError on a missing key or an unexplained number."""
    for path in unsourced_numbers(data):
        raise ValueError(f"ha_npu: chip {data.get('name')!r}: {path} has no source")
    try:
        return Chip(
            name=data["name"],
            title=data["title"],
            npu_arch=data["arch"]["npu_arch"],
            cores=_number(data["cores"]),
            vector_cores=_number(data["vector_cores"]) if data["vector_cores"] else None,
            clock_mhz=_number(data["clock_mhz"]),
            macs_per_cycle=_number(data["cube"]["macs_per_cycle"]),
            buffers={
                key: Buffer(_number(value["capacity"]), _number(value["usable"]), _number(value["alignment"]))
                for key, value in data["buffers"].items()
            },
            bytes_per_cycle={key: _number(value) for key, value in data["bytes_per_cycle"].items()},
            measured_gb_per_s={key: _number(value) for key, value in data["measured_gb_per_s"].items()},
            missing_apis=tuple(data["missing_apis"]),
            l0c_exits=tuple(data["l0c_exits"]),
            dtypes=tuple(data["dtypes"]),
            blocked_operands=data["matrix_layout"]["needs_blocked_operands"],
            split_cores=data["arch"]["split_cores"],
        )
    except KeyError as error:
        raise ValueError(f"ha_npu: chip {data.get('name')!r}: the file lacks {error.args[0]!r}") from error


def unsourced_numbers(data: Any, path: str = "", sources: Mapping[str, str] | None = None) -> list[str]:
    """The paths of numbers in a chip file that are not {"value": .., "source": key of `sources`}."""
    if sources is None:
        sources = data.get("sources", {})
    if isinstance(data, Mapping):
        if set(data) == {"value", "source"}:
            return [] if data["source"] in sources else [path]
        return [
            p for key, value in data.items() for p in unsourced_numbers(value, f"{path}.{key}".lstrip("."), sources)
        ]
    if isinstance(data, list):
        return [p for i, value in enumerate(data) for p in unsourced_numbers(value, f"{path}[{i}]", sources)]
    return [path] if isinstance(data, (int, float)) and not isinstance(data, bool) else []
