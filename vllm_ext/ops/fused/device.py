"""Where a fused operation runs: Triton kernels on CUDA devices (or under its interpreter), plain torch elsewhere."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether the kernels take `tensor`. TRITON_INTERPRET=1 runs them on the CPU, for tests."""
    wanted = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return wanted and _triton_installed() and tensor.device.type in ("cuda", "cpu")
