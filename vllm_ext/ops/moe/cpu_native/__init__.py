"""Our own int4 product for x86 CPUs with BF16 dot products, compiled with the machine's C compiler when first needed.

PyTorch's kernel multiplies in FP32; the dot products are two to three times faster at every number of rows. Where the
CPU or the compiler is missing, the reason is kept and PyTorch's kernel serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

BLOCK = 64
_SOURCE = Path(__file__).with_name("int4_matmul.c")
_FLAGS = ("-O3", "-fPIC", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16")
_COMPILE_SECONDS = 120


class Unavailable(Exception):
    """Why this machine cannot run the kernel."""


@cache
def load() -> tuple[Callable[..., int] | None, str]:
    """(the kernel, what it is), or (None, why not). Compiles at most once for a machine and version of the source."""
    try:
        if not getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() or platform.system() != "Linux":
            raise Unavailable("needs Linux on a CPU with AVX-512 BF16")
        library = _open(_build(_compiler()))
    except (Unavailable, OSError) as error:
        return None, str(error)
    function = library.int4_matmul
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    function.restype = ctypes.c_int
    return function, "BF16 dot products (AVX-512)"


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise Unavailable("no C compiler found (cc, gcc, clang or $CC)")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(root) / "vllm_ext"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="vllm_ext-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="vllm_ext-"))


def _build(compiler: str) -> Path:
    key = hashlib.sha256(_SOURCE.read_bytes() + " ".join((compiler, *_FLAGS)).encode()).hexdigest()[:16]
    target = _cache_folder() / f"int4_matmul-{key}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unlinked, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        # Linked without an OpenMP runtime: the one torch has loaded must serve, a second would start its own threads.
        _run(compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE), "-o", str(unlinked))
        _run(compiler, "-shared", str(unlinked), "-o", str(linked))
        # Processes may build at the same time; each puts a whole file in place.
        os.replace(linked, target)
    return target


def _run(*command: str) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{command[0]} cannot be run: {error}") from error
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise Unavailable(f"{command[0]} failed ({result.returncode}): {lines[-1]}")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        for runtime in _openmp_runtimes():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # Built anew next time: the file may be damaged.
        path.unlink(missing_ok=True)
        raise


def _openmp_runtimes() -> list[Path]:
    package = Path(torch.__file__).parent
    folders = (package / "lib", package.parent / "torch.libs")
    return [path for folder in folders for name in ("libgomp*.so*", "libiomp5.so") for path in folder.glob(name)]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K], N a multiple of 64, in the kernel's order: int16 [N, K / 4], words [N / 64, K / 2, 32].

    Word 2 * lane + p of a pair of columns holds, in nibble j, row 16 * j + lane of column 2 * pair + p.
    """
    rows, columns = codes.shape
    lanes = codes.view(rows // BLOCK, 4, 16, columns // 2, 2)
    low, high = (lanes[:, j] | lanes[:, j + 1] << 4 for j in (0, 2))
    words = torch.stack((low, high), dim=-1).permute(0, 2, 1, 3, 4).contiguous()
    return words.view(torch.int16).view(rows, columns // 4)


def int4_matmul(
    x: torch.Tensor, packed: torch.Tensor, scales_and_zeros: torch.Tensor, kernel_group: int
) -> torch.Tensor:
    """x BF16 [M, K], contiguous, times the matrix: FP32 [M, N]."""
    kernel = load()[0]
    assert kernel is not None
    (rows, columns), width = x.shape, packed.shape[0]
    out = torch.empty(rows, width, dtype=torch.float32, device="cpu")
    pointers = x.data_ptr(), packed.data_ptr(), scales_and_zeros.data_ptr(), out.data_ptr()
    if kernel(*pointers, rows, width, columns, kernel_group):
        raise MemoryError(f"fused_moe_w4a16: no memory for the group sums of {rows} rows of {columns} columns")
    return out
