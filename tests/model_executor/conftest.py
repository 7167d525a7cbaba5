"""Engines for tests through real vLLM: one process runs a batch of them, so that vLLM is imported once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_environment import ENVIRONMENT

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
Job = dict[str, Any]
Result = dict[str, Any]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """tiny_model(kind, **config fields): directory of a tiny random checkpoint, written once a session."""
    import tiny_models

    root = tmp_path_factory.mktemp("tiny_models")
    written: dict[str, str] = {}

    def get(kind: str, **overrides: Any) -> str:
        name = "-".join([kind, *(f"{key}={value}" for key, value in sorted(overrides.items()))])
        if name not in written:
            written[name] = str(tiny_models.write_tiny_model(kind, root / name, **overrides))
        return written[name]

    return get


@pytest.fixture(scope="session")
def run_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Result]]:
    """run_engines(jobs, **environment): each job's answers (see engine_runner), from one fresh process.

    The process's output is in a result's "log"; a job that failed has "error" instead of answers.
    """
    pytest.importorskip("vllm")

    def run(jobs: list[Job], *, timeout: int = 300, **environment: str) -> list[Result]:
        folder = tmp_path_factory.mktemp("engines")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        runner = Path(__file__).with_name("engine_runner.py")
        process = subprocess.run(
            [sys.executable, str(runner), str(folder / "jobs.json"), str(folder / "results.json")],
            env={**os.environ, **ENVIRONMENT, **environment},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert process.returncode == 0, process.stdout[-6000:]
        results: list[Result] = json.loads((folder / "results.json").read_text())
        return [{**result, "log": process.stdout} for result in results]

    return run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of prompts around one and several chunks of 64, up to 300."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (1, 5, 63, 64, 65, 130, 300)]
