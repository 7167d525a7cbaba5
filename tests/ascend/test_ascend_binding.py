"""The binding, compiled by setup.py against torch_npu's own headers and run beside its libraries on a stub of CANN."""

from __future__ import annotations

from typing import Any

import pytest
from ascend_environment import check_names

SCRIPTS = ("binding_checks.py",)


@pytest.mark.parametrize("name", check_names(*SCRIPTS))
def test_binding(name: str, run_check: Any) -> None:
    """What each check holds is written there."""
    run_check(SCRIPTS, name)
