"""Build the simulator with the system C++ compiler, once for each state of its sources."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

from vllm_ext.ha_npu.chips import Chip, chip_names, load_chip
from vllm_ext.ha_npu.kernel_header import KERNEL_HEADERS, kernel_header

SOURCE_DIR = Path(__file__).resolve().parents[4] / "csrc_ascend"
KERNEL_ENTRY = SOURCE_DIR / "simulator" / "kernels.cpp"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-fno-math-errno"),
    "-fno-gnu-unique",  # or two objects in one process would share the tables of the first
)
DEFAULT_AICORE = 200
"""What the simulator's headers take `__CCE_AICORE__` for when nothing defines it."""
_AICORE = {"dav-2002": 200, "dav-2201": 220, "dav-3002": 300}


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++ or clang++ on the path."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def missing() -> str:
    """Why the simulator cannot be built here; empty when it can."""
    if not KERNEL_ENTRY.is_file():
        return f"the kernel sources are not installed ({SOURCE_DIR} lacks them); use a source checkout of vllm_ext"
    if compiler() is None:
        return "no C++ compiler: install g++ or clang++, or set CXX"
    return ""


def cache_dir() -> Path:
    """Where built objects are kept: $VLLM_EXT_CACHE, else the user's cache folder."""
    root = os.environ.get("VLLM_EXT_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "vllm_ext" / "ascend_sim"


def simulated_chips() -> tuple[str, ...]:
    """The chips a simulator exists for: those with Ascend C cores."""
    return tuple(name for name in chip_names() if load_chip(name).npu_arch in _AICORE)


def aicore(chip: str) -> int:
    """`__CCE_AICORE__` of a chip's compiler. Raises ValueError for a chip there is no simulator of."""
    if chip not in simulated_chips():
        raise ValueError(f"ascend-sim: no simulated chip {chip!r}; there are {', '.join(simulated_chips())}")
    return _AICORE[load_chip(chip).npu_arch]


def chip_table() -> str:
    """C++ source of the chips' descriptions, from the planner's chip files."""
    rows = ",\n    ".join(_chip_row(load_chip(name)) for name in simulated_chips())
    return (
        '// Generated from vllm_ext/ha_npu/chips.\n#pragma once\n#include "chip.h"\n\n'
        f"namespace AscendC {{\nnamespace sim {{\nconstexpr ChipSpec kChips[] = {{\n    {rows}}};\n}}\n}}\n"
    )


def generated_headers() -> dict[str, str]:
    """What is generated for a build, by file name: the chips, and each kernel's constants from its plan."""
    plans = {name: kernel_header(op) for op, name in KERNEL_HEADERS.items()}
    return {"chip_table.h": chip_table(), **plans}


def _chip_row(chip: Chip) -> str:
    buffers = [chip.buffers[name] for name in ("ub", "l1", "l0a", "l0b", "l0c")]
    has = dict.fromkeys(chip.l0c_exits, "true")
    facts = (
        has.get("Fixpipe:L0C->UB", "false"),
        has.get("Fixpipe:L0C->GM", "false"),
        has.get("DataCopy:L0C->UB", "false"),
        str(chip.ub_to_l1).lower(),
        *(str(api not in chip.missing_apis).lower() for api in ("DataCopyPad", "LoadDataWithTranspose", "Brcb")),
    )
    capacities = ", ".join(str(buffer.usable) for buffer in buffers)
    alignments = ", ".join(str(buffer.alignment) for buffer in buffers)
    return (
        f'{{"{chip.name}", {_AICORE[chip.npu_arch]}, {chip.cores}, {{0, {capacities}}}, {{1, {alignments}}}, '
        f"{', '.join(facts)}}}"
    )


def build(entry: Path = KERNEL_ENTRY, *, include: Iterable[Path] = (), defines: Iterable[str] = ()) -> Path:
    """Compile `entry` (which includes c_api.h) into a shared object and return its path.

    Raises RuntimeError with the compiler's message when it does not compile, or when the cache cannot be written.
    """
    cxx = compiler()
    if cxx is None:
        raise RuntimeError(f"ascend-sim: {missing()}")
    generated = generated_headers()
    folders = [SOURCE_DIR / "simulator", SOURCE_DIR / "kernels", *include]
    flags = [*_FLAGS, *(f"-D{define}" for define in defines)]
    target = cache_dir() / f"{entry.stem}-{_digest(entry, folders, generated, [cxx, *flags])}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return _compile(entry, target, [cxx, *flags], folders, generated)
    except OSError as error:
        raise RuntimeError(
            f"ascend-sim: cannot write to {target.parent} ({error}); set VLLM_EXT_CACHE to another folder"
        ) from error


def _compile(entry: Path, target: Path, command: list[str], folders: list[Path], generated: Mapping[str, str]) -> Path:
    """Run the compiler beside `target` and put the object there whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for name, text in generated.items():
            Path(scratch, name).write_text(text, encoding="utf-8")
        output = Path(scratch, "built.so")
        command = [*command, f"-I{scratch}", *(f"-I{folder}" for folder in folders), str(entry), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"ascend-sim: {entry.name} does not compile with {command[0]}:\n{result.stderr[-4000:]}")
        output.replace(target)
    return target


def _digest(entry: Path, folders: list[Path], generated: Mapping[str, str], command: list[str]) -> str:
    """Of all the object depends on: sources, chips, plans, compiler, flags, the machine -march=native stands for."""
    digest = hashlib.sha256()
    sources = {entry, *(path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cpp"))}
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in (*generated.values(), *command, platform.machine(), _cpu_flags()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


@lru_cache(maxsize=1)
def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@cache
def load(path: Path) -> ctypes.CDLL:
    """Load a built object and declare its C interface."""
    library = ctypes.CDLL(str(path))
    text, pointer, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64
    for name, result, arguments in (
        ("sim_open", pointer, [text, ctypes.c_int]),
        ("sim_close", None, [pointer]),
        ("sim_region", None, [pointer, text, pointer, size, ctypes.c_int, ctypes.c_int]),
        ("sim_launch", ctypes.c_int, [pointer, text, ctypes.c_uint32, pointer, pointer, size]),
        ("sim_check_outputs", ctypes.c_int, [pointer, pointer, size]),
        ("sim_counters", None, [pointer, pointer]),
        ("sim_mutate", None, [pointer, text, text, ctypes.c_int]),
        ("sim_cooperate", None, [pointer]),
        ("sim_watch_places", None, [pointer]),
        ("sim_places", size, [pointer, pointer, size]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
