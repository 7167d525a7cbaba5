"""What a CANN installation offers the build, and what it lacks. Standard library only: setup.py loads this file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TARGETS = {"dav-2002": "310P", "dav-3002": "310B"}
"""`--npu-arch` of the chips the kernels are written for."""

_COMPILERS = (
    "bin/bisheng",
    "compiler/ccec_compiler/bin/bisheng",
    "ccec_compiler/bin/bisheng",
    "tools/bisheng/bin/bisheng",
)
_INCLUDES = (
    "include",
    "compiler/tikcpp/tikcfw",
    "compiler/tikcpp/tikcfw/impl",
    "compiler/tikcpp/tikcfw/interface",
    "tikcpp/tikcfw",
    "tikcpp/tikcfw/impl",
    "tikcpp/tikcfw/interface",
    "asc/include",
    "asc/impl",
)
_LIBRARIES = ("lib64", "runtime/lib64", "acllib/lib64", "fwkacllib/lib64")


class CannError(Exception):
    """The build cannot go on; the message names what is missing and the way out."""


@dataclass(frozen=True)
class Cann:
    """A complete installation. libraries: what the shared object is linked with beside torch_npu."""

    home: Path
    compiler: Path
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]


def find_compiler(home: Path) -> Path | None:
    """bisheng inside a CANN installation, None when it has none."""
    return next((home / place for place in _COMPILERS if (home / place).is_file()), None)


def include_folders(home: Path) -> tuple[Path, ...]:
    """Where CANN keeps its headers, as far as these folders exist."""
    return tuple(home / place for place in _INCLUDES if (home / place).is_dir())


def find_cann(home: Path) -> Cann:
    """The installation at `home`. Raises CannError naming every part that is missing."""
    if not home.is_dir():
        raise CannError(f"ASCEND_HOME_PATH={home} is not a folder; source CANN's set_env.sh, or unset it")
    compiler = find_compiler(home)
    includes = include_folders(home)
    folders = [home / place for place in _LIBRARIES]
    found = {
        name: next((folder / name for folder in folders if (folder / name).is_file()), None)
        for name in ("libascendcl.so", "libruntime.so")
    }
    missing = []
    if compiler is None:
        missing.append(f"the compiler bisheng (looked for {', '.join(_COMPILERS)})")
    if not any((folder / "kernel_operator.h").is_file() for folder in includes):
        missing.append(f"Ascend C's header kernel_operator.h (looked in {', '.join(_INCLUDES)})")
    if not any((folder / "acl" / "acl.h").is_file() for folder in includes):
        missing.append("the header acl/acl.h (looked in include)")
    if found["libascendcl.so"] is None:
        missing.append(f"libascendcl.so (looked in {', '.join(_LIBRARIES)})")
    if missing:
        raise CannError(
            f"the CANN in ASCEND_HOME_PATH={home} lacks {'; '.join(missing)}. Install the CANN toolkit (not only its "
            "runtime), or unset ASCEND_HOME_PATH for the pure Python package"
        )
    assert compiler is not None
    return Cann(home, compiler, includes, tuple(path for path in found.values() if path is not None))


def targets(environment: Mapping[str, str]) -> list[str]:
    """What to compile for: VLLM_EXT_ASCEND_TARGETS ("dav-2002,dav-3002"), else this machine's chip, else all targets.

    Raises CannError on a name the kernels are not written for.
    """
    named = [name for name in re.split(r"[\s,;]+", environment.get("VLLM_EXT_ASCEND_TARGETS", "")) if name]
    unknown = [name for name in named if name not in TARGETS]
    if unknown:
        known = ", ".join(f"{arch} ({chips})" for arch, chips in TARGETS.items())
        raise CannError(f"VLLM_EXT_ASCEND_TARGETS names {', '.join(unknown)}; the kernels are written for {known}")
    return list(dict.fromkeys(named)) or detected_targets() or list(TARGETS)


def detected_targets() -> list[str]:
    """The targets of the chips `npu-smi info` lists; empty without the tool, or with no chip of ours."""
    tool = shutil.which("npu-smi")
    if tool is None:
        return []
    try:
        text = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [arch for arch, chips in TARGETS.items() if re.search(rf"\b{chips}\d*\b", text)]


_TORCH_PROBE = """
import importlib.util, json, pathlib
import torch
from torch.utils import cpp_extension

npu = importlib.util.find_spec("torch_npu")
print(json.dumps({
    "includes": cpp_extension.include_paths(),
    "libraries": str(pathlib.Path(torch.__file__).parent / "lib"),
    "modern": "-std=c++20" in pathlib.Path(cpp_extension.__file__).read_text(encoding="utf-8"),
    "abi": int(torch.compiled_with_cxx11_abi()),
    "npu": npu and npu.origin,
}))
"""


@dataclass(frozen=True)
class TorchFacts:
    """Of the torch and torch_npu to build against. npu: torch_npu's folder; standard: C++17 or 20, as torch's own."""

    includes: tuple[str, ...]
    libraries: Path
    npu: Path
    standard: int
    abi: int


def _with_and_without_isolation(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment as it is and without PYTHONPATH, by which pip hides what it installs beside from a build."""
    return [dict(environment), {key: value for key, value in environment.items() if key != "PYTHONPATH"}]


def cmake_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Where cmake runs: the one from the package index is a Python script, and pip's isolation hides its package.

    Raises CannError without a cmake, or with one that does not run.
    """
    if shutil.which("cmake", path=environment.get("PATH")) is None:
        raise CannError("cmake is not on the path: pip install cmake")
    reason = ""
    for variables in _with_and_without_isolation(environment):
        command = ["cmake", "--version"]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return variables
        reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
    raise CannError(f"cmake is on the path and does not run ({reason}): pip install cmake")


def torch_facts(environment: Mapping[str, str]) -> TorchFacts:
    """Ask the interpreter that runs the build, with and without the isolation pip built up.

    torch_npu is located, not imported: importing it starts CANN, which a machine that only builds need not have. Raises
    CannError naming what cannot be found.
    """
    reason = ""
    for variables in _with_and_without_isolation({**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):
        command = [sys.executable, "-c", _TORCH_PROBE]
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = f"torch cannot be imported ({(result.stderr.strip().splitlines() or ['no reason'])[-1]})"
            continue
        facts = json.loads(result.stdout.splitlines()[-1])
        if facts["npu"]:
            standard = 20 if facts["modern"] else 17
            npu = Path(facts["npu"]).parent
            return TorchFacts(tuple(facts["includes"]), Path(facts["libraries"]), npu, standard, facts["abi"])
        reason = "torch_npu is not installed"
    raise CannError(f"{reason}: install torch and torch-npu, then build with pip install --no-build-isolation")


def from_environment() -> Cann | None:
    """The installation ASCEND_HOME_PATH names, None when it names none. Raises CannError when it is incomplete."""
    home = os.environ.get("ASCEND_HOME_PATH")
    return find_cann(Path(home)) if home else None
