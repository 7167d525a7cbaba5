"""Programmatic dependent launch (compute capability 9.0 and up): a kernel is placed on the GPU while its predecessor
drains, and waits on the device, so that the launches of a layer's four kernels overlap.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MINIMUM_CAPABILITY = (9, 0)


@functools.lru_cache(maxsize=64)
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` are launched so."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= MINIMUM_CAPABILITY
    )


_CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
_ALL = 100
_carved: set[int] = set()


def carve_shared_memory(kernel: Any) -> None:
    """Have a kernel that needs no shared memory run on multiprocessors set up for kernels that need all of it.

    A multiprocessor changes how much of its memory is L1 only when nothing runs on it, so programs of the GEMMs could
    not be placed beside those of this kernel. `kernel` is what a launch returned.
    """
    function = getattr(kernel, "function", None)
    if function is None or function in _carved:
        return
    _carved.add(function)
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT_ATTRIBUTE, _ALL)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """First statement of every kernel: all that the previous kernel wrote is visible after it."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_tiles(base, stride, size, TILES: tl.constexpr):
    """Ask for `size` bytes (a multiple of 128) at base + i * stride, i < TILES, to be brought into L2."""
    PIECES: tl.constexpr = 8
    place = tl.arange(0, PIECES * triton.next_power_of_2(TILES))
    tile = place // PIECES
    tile = tl.where(tile < TILES, tile, 0)
    address = (base + tile * stride).to(tl.int64) + place % PIECES * (size // PIECES)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, size // PIECES + tl.zeros_like(tile)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
