from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda

FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}


@pytest.fixture(params=["gdn", "kda"])
def op(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def function(op: str):
    return FUNCTIONS[op]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in FP64; infinite when got is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = expected.double().norm()
    return float((got.double() - expected.double()).norm() / norm) if norm else float(got.double().norm())


@pytest.fixture(scope="session")
def error():
    return relative_error


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Linear attention's kernels for compute capability 9.0, on torch."""
    pytest.importorskip("triton.experimental.gluon")
    from linear_attention_on_torch import interpreted

    return interpreted(monkeypatch)
