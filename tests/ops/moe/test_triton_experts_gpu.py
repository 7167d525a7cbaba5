"""The Triton experts at full size on a GPU: error against FP64, padding, bits between runs and processes."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu_checks"))
import moe_checks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("number", range(len(moe_checks.cases(small=False))))
def test_layer_at_full_size(number: int) -> None:
    """Shapes of served models, every dtype, zero point and option; outputs start as NaN and reruns are bit-equal."""
    passed, seen = moe_checks.check(moe_checks.cases(small=False)[number], torch.device("cuda", 0))
    assert passed, seen


def test_two_processes_compute_the_same_bits() -> None:
    """No atomics, no order that a scheduler decides (case C09)."""
    wanted = moe_checks.cases(small=True)
    found = []
    for _ in range(2):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append([digest for _, _, digest in pool.map(moe_checks.run_case, wanted)])
    assert found[0] == found[1]
    assert "none" not in found[0]
