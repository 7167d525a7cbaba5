"""The glue to vLLM-Ascend, inside real vllm-ascend 0.23.0 and vLLM 0.23.0, as on an A2 and as on a 310P."""

from __future__ import annotations

from typing import Any

import pytest
from ascend_environment import check_names

SCRIPTS = ("vllm_ascend_prefill_checks.py", "vllm_ascend_experts_checks.py")


@pytest.mark.parametrize("chip", ["Ascend910B4", "Ascend310P3"])
@pytest.mark.parametrize("name", check_names(*SCRIPTS))
def test_vllm_ascend(name: str, chip: str, run_check: Any) -> None:
    """What each check holds is written there."""
    run_check(SCRIPTS, name, chip)
