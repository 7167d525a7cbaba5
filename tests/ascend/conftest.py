"""Results of the scripts of checks, each script run once a session."""

from __future__ import annotations

from functools import cache
from typing import Any

import ascend_environment as environment
import pytest


@cache
def _results(scripts: tuple[str, ...], chip: str) -> dict[str, Any] | BaseException:
    """What became of scripts' checks, or why they could not be run; asked once, or every test would try again."""
    try:
        return _run(scripts, chip)
    except (Exception, pytest.skip.Exception) as error:
        return error


def _run(scripts: tuple[str, ...], chip: str) -> dict[str, Any]:
    path = [environment.vllm_folder(), environment.vllm_ascend_folder()] if scripts[0].startswith("vllm_ascend") else []
    plugins = "ascend,vllm_ext" if path else ""
    return environment.run_checks(*scripts, path=path, STUB_SOC_NAME=chip, VLLM_PLUGINS=plugins, HF_HUB_OFFLINE="1")


@pytest.fixture
def run_check() -> Any:
    """Assert that a check of scripts that share a process passed on a chip ("Ascend310P3", "Ascend910B4")."""

    def run(scripts: tuple[str, ...], name: str, chip: str = "Ascend310P3") -> None:
        results = _results(scripts, chip)
        if isinstance(results, BaseException):
            raise results
        if results[name].startswith(environment.SKIPPED):
            pytest.skip(results[name].removeprefix(environment.SKIPPED))
        assert not results[name], results[name]

    return run
