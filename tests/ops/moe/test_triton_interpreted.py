"""Runs the tests of Triton kernels in a process where Triton interprets from its import on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KINDS = ("experts", "routing", "assembly")
KERNEL_TESTS = [str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in KINDS]


def test_triton_kernels_through_the_interpreter() -> None:
    """In one process with other tests, whoever imports Triton first would decide for all."""
    command = [sys.executable, "-m", "pytest", "--no-header", "-p", "no:cacheprovider", *KERNEL_TESTS]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
