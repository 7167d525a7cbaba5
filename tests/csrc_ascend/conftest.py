"""The tests here need a C++ compiler; what they build is cached by its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.ops.linear_attention.ascend_sim import build


@pytest.fixture(scope="session")
def rule_kernels() -> Path:
    """The shared object of rule_kernels.cpp."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    return build.build(Path(__file__).with_name("rule_kernels.cpp"), include=[Path(__file__).parent])


@pytest.fixture(scope="session")
def prefill_kernels() -> Path:
    """The shared object of the prefill kernels; `run_prefill` finds it by itself."""
    if build.missing():
        pytest.skip(build.missing())
    return build.build()
