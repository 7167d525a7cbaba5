"""The long mixed load of benchmarks/gpu_checks/serve_soak.py, short and on the CPU; and that its judge sees faults."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_checks" / "serve_soak.py"


@pytest.fixture(scope="module")
def soak():
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("serve_soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.vllm
@pytest.mark.parametrize("way", [[], ["--http", "--model", "moe"]])
def test_mixed_requests_are_answered_as_alone_across_a_restart(tmp_path, way):
    """Aborts, stop tokens, several samples, streaming, and an engine that is shut down in the middle."""
    pytest.importorskip("vllm")
    from engine_environment import ENVIRONMENT

    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--requests", "60", "--repeats", "3", "--longest", "200", "--eager", *way]
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    process = subprocess.run(
        [*command, "--out", str(out)],
        env={**os.environ, **environment},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert out.exists(), process.stdout[-4000:]
    result = json.loads(out.read_text())
    assert result["ok"], {key: result[key] for key in ("lost", "changed", "memory growth, MiB")}
    for kind in ("aborted", "several samples", "streamed", "ended by a stop token"):
        assert result[kind] > 0, f"no request was {kind}"


@pytest.fixture
def case(soak):
    """A plan of two requests, one of them aborted, with right answers."""
    greedy = soak.Request(1, 8, 4, 1, 0.0, (), streamed=False)
    seeded = soak.Request(2, 8, 4, 2, 0.8, (), streamed=True)
    alone = {
        1: {"tokens": [[1, 2, 3, 4]], "margins": [[1.0, 0.1, 1.0, 1.0]]},
        2: {"tokens": [[5, 6], [7, 8]], "margins": [[1.0, 1.0], [1.0, 1.0]]},
    }
    answers = {
        "a": {"tokens": [[1, 2, 3, 4]], "ends": ["length"], "aborted": False},
        "b": {"tokens": [[5, 6], [7]], "ends": [None, None], "aborted": True},
    }
    args = argparse.Namespace(batch_invariant=True, near=0.2, leak_mib=100, http=False)
    flat = [[{"host": 10.0}], [{"host": 10.0}, {"host": 20.0}]]
    return [("a", greedy, None), ("b", seeded, 3)], answers, alone, flat, args


def test_right_answers_pass(soak, case):
    assert soak.judge(*case)["ok"]


@pytest.mark.parametrize(
    "fault", ["lost", "failed", "changed", "unfinished", "empty", "wrong before the abort", "leak"]
)
def test_each_fault_is_seen(soak, case, fault):
    _, answers, alone, memory, _ = case
    if fault == "lost":
        del answers["a"]
    elif fault == "failed":
        answers["a"] = {"error": "EngineDeadError"}
    elif fault == "changed":
        answers["a"]["tokens"][0][1] = 9
    elif fault == "unfinished":
        answers["a"]["ends"] = [None]
    elif fault == "empty":
        answers["a"]["tokens"], alone[1] = [[]], {"tokens": [[]], "margins": [[]]}
    elif fault == "wrong before the abort":
        answers["b"]["tokens"][0][0] = 9
    else:
        memory[1][-1]["host"] = 200.0
    assert not soak.judge(*case)["ok"]


def test_without_batch_invariance_only_a_close_call_may_differ(soak, case):
    _, answers, _, _, args = case
    args.batch_invariant = False
    answers["a"]["tokens"] = [[1, 9, 9, 9]]
    assert soak.judge(*case)["ok"]
    answers["a"]["tokens"] = [[1, 2, 9, 9]]
    assert not soak.judge(*case)["ok"]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4, 5]])
def test_answer_that_is_cut_or_goes_on_is_no_close_call(soak, case, tokens):
    """A lost tail was let through where the first token that lacked had a near rival."""
    _, answers, _, _, args = case
    args.batch_invariant = False
    answers["a"]["tokens"] = [tokens]
    assert not soak.judge(*case)["ok"]


@pytest.mark.parametrize("end", ["error", "abort"])
def test_answer_that_the_engine_gave_up_is_seen(soak, case, end):
    _, answers, _, _, _ = case
    answers["a"]["ends"] = [end]
    assert not soak.judge(*case)["ok"]
