"""Where a fused operation runs: Triton kernels on CUDA devices (or under its interpreter), plain torch elsewhere."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Launcher = Callable[Concatenate[torch.Tensor, P], R]


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels take `tensor`. TRITON_INTERPRET=1 runs them on the CPU, for tests."""
    wanted = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return wanted and _triton_installed() and tensor.device.type in ("cuda", "cpu")


def on_its_device(launch: Launcher[P, R]) -> Launcher[P, R]:
    """`launch` with the device of its first argument current: Triton launches on the current one, wherever tensors are.

    A model that is spread over several GPUs never changes it. Code that torch.compile makes sets it itself.
    """

    @wraps(launch)
    def guarded(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        there = not tensor.is_cuda or torch.compiler.is_compiling()
        if there or tensor.get_device() == torch.cuda.current_device():
            return launch(tensor, *args, **kwargs)
        with torch.cuda.device(tensor.get_device()):
            return launch(tensor, *args, **kwargs)

    return guarded
