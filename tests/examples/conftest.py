"""Makes the scripts of `examples/` and `tools/` importable, and converts the real model once for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tools")]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SmolLM2 as an exact mixture and as the dense model it is, both in FP32."""
    import smollm2_as_moe

    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_as_moe.convert(folder / "moe", dtype="float32")
    smollm2_as_moe.convert(folder / "dense", dtype="float32", dense=True)
    return {"moe": folder / "moe", "dense": folder / "dense"}
