"""A session of the simulator: tensors in its global memory, kernel launches, counters."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import TracebackType

import torch

from vllm_ext.ha_npu.ascend_tiles import FAMILIES
from vllm_ext.ha_npu.chips import BUFFERS, load_chip
from vllm_ext.ops.linear_attention.ascend_sim.build import DEFAULT_AICORE, aicore, build, load

_MODES = {"in": 0, "out": 1, "workspace": 2}
_ERROR_BYTES = 4096


@cache
def prefill_kernels(chip: str) -> Path:
    """The kernels compiled for a chip's family; looks at the sources once a process.

    Raises RuntimeError for a family there are no prefill kernels for.
    """
    if load_chip(chip).npu_arch not in FAMILIES:
        raise RuntimeError(f"ascend-sim: there are no prefill kernels for {chip}, only for {', '.join(FAMILIES)}")
    family = aicore(chip)
    return build() if family == DEFAULT_AICORE else build(defines=(f"__CCE_AICORE__={family}",))


class SimulatorViolation(RuntimeError):
    """A kernel did what the chip does not allow; the message names kernel, line, buffer, offset and rule."""


@dataclass(frozen=True)
class Counters:
    """What the launches of a session did. Sums over cores and launches; the peaks are the largest of any core."""

    gm_read_bytes: int
    gm_write_bytes: int
    gm_bursts: int
    l1_to_l0a_fractals: int
    l1_to_l0b_fractals: int
    mac_fractals: int
    mmad_instructions: int
    vector_repeats: int
    vector_instructions: int
    l0c_to_ub_bytes: int
    ub_to_l1_bytes: int
    gm_to_l1_bytes: int
    flags: int
    barriers: int
    relaid_elements: int
    cast_overflows: int
    scalar_accesses: int
    peak_ub: int
    peak_l1: int
    peak_l0a: int
    peak_l0b: int
    peak_l0c: int

    @property
    def gm_bytes(self) -> int:
        """Bytes to and from global memory."""
        return self.gm_read_bytes + self.gm_write_bytes

    @property
    def l1_to_l0_bytes(self) -> int:
        """Bytes from L1 to the cube's operand buffers."""
        return 512 * (self.l1_to_l0a_fractals + self.l1_to_l0b_fractals)

    @property
    def relaid_fractals(self) -> int:
        """Tiles of 16x16 whose layout changed on the core, rows to blocks or back."""
        return self.relaid_elements // 256

    @property
    def peaks(self) -> dict[str, int]:
        """The highest byte in use of each buffer, as a plan's `peak_bytes`."""
        return {name: getattr(self, f"peak_{name}") for name in BUFFERS}

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cube, whole fractals."""
        return 4096 * self.mac_fractals


class Session:
    """Open it with `with`; launches share the tensors registered so far."""

    def __init__(self, chip: str, *, library: Path | None = None, threads: int | None = None) -> None:
        self._library = load(library or prefill_kernels(chip))
        count = threads or min(4, os.cpu_count() or 1)
        self._handle = self._library.sim_open(chip.encode(), count)
        if not self._handle:
            raise ValueError(f"ascend-sim: no simulated chip {chip!r}")
        self._kept: list[torch.Tensor] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.sim_close(self._handle)
        self._handle = None

    def register(self, name: str, tensor: torch.Tensor, mode: str, *, written: bool = False) -> torch.Tensor:
        """Make a contiguous CPU tensor known as "in", "out" or "workspace"; `written` when it already holds data."""
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"ascend-sim: {name} must be a contiguous CPU tensor")
        self._kept.append(tensor)
        size = tensor.numel() * tensor.element_size()
        self._library.sim_region(self._handle, name.encode(), tensor.data_ptr(), size, _MODES[mode], int(written))
        return tensor

    def launch(self, kernel: str, blocks: int, arguments: Sequence[torch.Tensor | None]) -> None:
        """Run a kernel on `blocks` blocks. Raises SimulatorViolation."""
        pointers = (ctypes.c_void_p * max(1, len(arguments)))()
        for index, tensor in enumerate(arguments):
            pointers[index] = None if tensor is None else tensor.data_ptr()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._library.sim_launch(self._handle, kernel.encode(), blocks, pointers, error, _ERROR_BYTES):
            raise SimulatorViolation(error.value.decode(errors="replace"))

    def check_outputs(self) -> None:
        """Raises SimulatorViolation unless every byte of every output has been written."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._library.sim_check_outputs(self._handle, error, _ERROR_BYTES):
            raise SimulatorViolation(error.value.decode(errors="replace"))

    def mutate(self, kind: str, file: str, place: int) -> None:
        """Plant a fault: kind "flag", "barrier" or "layout" at a line of a kernel file, or "view" with its number."""
        self._library.sim_mutate(self._handle, kind.encode(), file.encode(), place)

    def cooperate(self) -> None:
        """From now on run the blocks of a launch at once, a thread for each, so that they may wait for each other."""
        self._library.sim_cooperate(self._handle)

    def watch_places(self) -> None:
        """Note, from now on, where faults could be planted; launches run on one thread."""
        self._library.sim_watch_places(self._handle)

    def places(self) -> set[tuple[str, str, int]]:
        """(kind, file, place) of every fault that `mutate` could have planted since `watch_places`."""
        size = self._library.sim_places(self._handle, None, 0) + 1
        text = ctypes.create_string_buffer(size)
        self._library.sim_places(self._handle, text, size)
        rows = (line.split() for line in text.value.decode().splitlines())
        return {(kind, file, int(place)) for kind, file, place in rows}

    def counters(self) -> Counters:
        """Everything counted since the session was opened."""
        values = (ctypes.c_uint64 * len(fields(Counters)))()
        self._library.sim_counters(self._handle, values)
        return Counters(*values)
