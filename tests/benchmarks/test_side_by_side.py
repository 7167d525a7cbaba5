"""benchmarks/gpu_checks/serve_engines.py: engines side by side, one of which may fail, hang or say the wrong thing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu_checks"


@pytest.fixture(scope="module")
def engines():
    sys.path.insert(0, str(SCRIPTS))
    import serve_engines

    return serve_engines


def answering(text: str, result: Path) -> None:
    print(text, flush=True)
    result.write_text(json.dumps({"text": text}))


def failing(result: Path) -> None:
    raise RuntimeError("no such engine")


def hanging(result: Path) -> None:
    time.sleep(600)


@pytest.mark.vllm
def test_one_engine_that_fails_or_hangs_costs_the_others_nothing(engines, tmp_path):
    pytest.importorskip("vllm")
    jobs = {
        "fails": (failing,),
        "hangs": (hanging,),
        "answers": (answering, "hello"),
        "says something else": (answering, "hello"),
    }
    seen = []
    args = argparse.Namespace(at_once=2, each=30, timeout=100)
    says = {"says something else": "goodbye"}
    engines.side_by_side(jobs, says, tmp_path, args, lambda answers: seen.append(dict(answers)))
    assert [len(answers) for answers in seen] == [1, 2, 3, 4]
    answers = seen[-1]
    assert "no such engine" in answers["fails"]["error"]
    assert "error" in answers["hangs"]
    assert answers["answers"] == {"text": "hello"}
    assert "does not say 'goodbye'" in answers["says something else"]["error"]


def test_engines_differ_where_the_mean_or_a_sure_token_does(engines):
    plain = {"log_probs": [-1.0, -2.0], "tokens": [[1, 2]], "margins": [[1.0, 0.1]]}
    assert engines.compare(plain, plain, 0.08)["ok"]
    assert engines.compare(plain, {**plain, "tokens": [[1, 3]]}, 0.08)["ok"]
    assert not engines.compare(plain, {**plain, "tokens": [[3, 2]]}, 0.08)["ok"]
    far = {**plain, "log_probs": [-1.0, -2.3]}
    assert not engines.compare(plain, far, 0.08)["ok"]
    assert engines.compare(plain, far, 0.25)["ok"]
    assert not engines.compare(plain, {"error": "late"}, 0.25)["ok"]


def test_stacks_of_a_slow_engine_name_its_threads_and_leave_it_running(engines, capfd):
    """faulthandler's dump ended engines whose frames torch.compile had put in."""
    import threading

    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="the slow one")
    thread.start()
    try:
        engines.engine_processes.print_stacks()
    finally:
        waiting.set()
        thread.join()
    said = capfd.readouterr().err
    assert "thread the slow one:" in said
    assert "waiting.wait" in said or "in wait" in said
    assert "test_stacks_of_a_slow_engine" in said
