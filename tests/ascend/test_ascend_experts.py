"""Experts in 4 bits on torch_npu's operators, laid out and called for each kind of chip."""

from __future__ import annotations

from typing import Any

import pytest
from ascend_environment import check_names

SCRIPTS = ("experts_checks.py",)


@pytest.mark.parametrize("chip", ["Ascend910B4", "Ascend310P3"])
@pytest.mark.parametrize("name", check_names(*SCRIPTS))
def test_experts(name: str, chip: str, run_check: Any) -> None:
    """What each check holds is written there."""
    run_check(SCRIPTS, name, chip)
