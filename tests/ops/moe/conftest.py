"""What the tests of the interpreted Triton kernels share."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

FAR_OUTSIDE = -(1 << 20)


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    """The Triton backend's module."""
    return importlib.import_module("vllm_ext.ops.moe.triton.backend")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the backend allocates starts as NaN, or as an index far outside."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(FAR_OUTSIDE) if tensor.dtype in (torch.int32, torch.int64) else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
