"""What the experts' benchmark checks before it times a layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from vllm_ext.benchmarks import moe

ARM = next(arm for arm in moe.ARMS if arm.name == "ours")


@pytest.mark.parametrize(("wrong", "value"), [(1, 2.0), (256, 2.0), (4096, math.nan), (None, 1.0)])
def test_ours_is_checked_at_every_size_that_is_timed(wrong: int | None, value: float) -> None:
    """A table has a row of its own for nearly every size: one that computes nonsense must not be timed."""
    x = torch.rand(moe.LARGE_CHECK_TOKENS, 4) + 1
    expected = x[: moe.CHECK_TOKENS].double()
    checked = moe.Checked((None, None), x, x, x, expected)  # type: ignore[arg-type]
    seen = []

    def call(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        assert rows.shape == weights.shape == ids.shape
        seen.append(rows.shape[0])
        return rows * (value if rows.shape[0] == wrong else 1.0)

    error = checked.error(ARM, call, list(moe.TOKENS))
    assert seen == [1, 8, 32, 64, 256, 1024, 4096]
    assert (error <= moe.OURS_TOLERANCE) == (wrong is None)
    seen.clear()
    assert checked.error(replace(ARM, ours=False), call, list(moe.TOKENS)) == 0
    assert seen == [moe.CHECK_TOKENS]
