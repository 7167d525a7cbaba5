"""Launching a compiled kernel by the C function that Triton made for it. What differs between Triton versions is here.

Triton's own path to that function asks of every argument what kernels are specialised on, and the driver whether it is
an address. The function itself takes integers for addresses, and asks nothing of them. Known is Triton 3.6 for CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import triton

_KNOWN = ("3.6",)
_runtime = triton.knobs.runtime
_HOOKS = ("launch_enter_hook", "launch_exit_hook")


class Launcher(NamedTuple):
    """`run(*grid, stream, *head, *arguments)`; `descriptors` are the encodings of the kernel's tensor descriptors."""

    run: Callable[..., Any]
    head: tuple[Any, ...]
    descriptors: tuple[dict[str, Any], ...]


@functools.lru_cache(maxsize=1)
def known() -> bool:
    """Whether this Triton is one whose launchers are known."""
    version = ".".join(triton.__version__.split(".")[:2])
    return version in _KNOWN and torch.version.hip is None and not _runtime.interpret


def serves(tensor: torch.Tensor) -> bool:
    """Whether kernels that read `tensor` can be launched so."""
    return tensor.is_cuda and known()


def unwatched() -> bool:
    """Whether nobody, a profiler for one, has asked to be told of launches."""
    chains = [getattr(_runtime, name) for name in _HOOKS]
    return not any(chain is not None and getattr(chain, "calls", True) for chain in chains)


def debugging() -> bool:
    """What every kernel is compiled for besides its arguments."""
    return bool(_runtime.debug)


def stream_of(device: int) -> int:
    """The current stream of a CUDA device."""
    stream: int = triton.runtime.driver.active.get_current_stream(device)
    return stream


def launcher(compiled: Any) -> Launcher | None:
    """The launcher of what a launch returned, or None where it is not of the kind that is known."""
    if not known() or getattr(compiled, "function", None) is None:
        return None
    made = compiled.run
    if (
        type(made).__module__ != "triton.backends.nvidia.driver"
        or made.global_scratch_size
        or made.profile_scratch_size
    ):
        return None
    run, encodings = made.launch, ()
    if isinstance(run, FunctionType):
        # With tensor descriptors among the arguments, a function that expands them holds the C function.
        inside = dict(
            zip(run.__code__.co_freevars, (cell.cell_contents for cell in run.__closure__ or ()), strict=True)
        )
        run, encodings = inside.get("launcher"), inside.get("tensordesc_meta") or ()
    if not isinstance(run, BuiltinFunctionType) or None in encodings:
        return None
    watchers = (None, None, None)
    head = (compiled.function, made.launch_cooperative_grid, made.launch_pdl, None, None, compiled.packed_metadata)
    return Launcher(run, (*head, *watchers), tuple(encodings))


def encoding(descriptor: Any, kernel: dict[str, Any]) -> tuple[Any, ...]:
    """What `tensor_map` must be told, besides an address, to encode `descriptor`; else LookupError."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if kernel["fp4_padded"] or descriptor.padding != "zero":
        raise LookupError(f"direct_launch.encoding: only descriptors of plain tiles are known, not {kernel}")
    kind = TMA_DTYPE_DEVICE_TO_HOST[kernel["elem_type"]]
    shape, strides = tuple(descriptor.shape), tuple(descriptor.strides)
    return kernel["swizzle"], kernel["elem_size"], kind, tuple(kernel["block_size"]), shape, strides, 0


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, encoded: tuple[Any, ...]) -> Any:
    """A tensor descriptor as kernels take it."""
    return triton.runtime.driver.active.utils.fill_tma_descriptor(address, *encoded)
