"""Processes with an engine, moved between cores with all that they started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from vllm_ext.benchmarks import serve_engine
from vllm_ext.benchmarks.engine_children import confine, session_threads
from vllm_ext.benchmarks.serve_engine import EngineProcess, cores_apart

if not hasattr(os, "sched_setaffinity"):
    pytest.skip("only Linux tells and moves threads", allow_module_level=True)

# A session with a thread, and a child in a group of its own whose name looks like the fields behind it.
PARENT = """
import os, subprocess, sys, threading, time
os.setsid()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
renamed = "import os, time; os.setpgid(0, 0); open('/proc/self/comm', 'w').write(') S 1 2 3'); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", renamed])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_session_is_moved_with_its_threads_and_children() -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}/comm").read_text() != ") S 1 2 3\n":
            assert time.monotonic() < deadline, "the child has not changed its name"
            time.sleep(0.01)
        threads = session_threads(parent.pid)
        assert {parent.pid, child} < set(threads), "a process of the session is missing"
        assert len(threads) >= 3, "the thread is missing"
        assert os.getpid() not in threads
        confine(parent.pid, one)
        assert [os.sched_getaffinity(thread) for thread in threads] == [one] * len(threads)
        assert os.sched_getaffinity(0) == cores, "a process of another session was moved"
        confine(parent.pid, cores)
        assert os.sched_getaffinity(child) == cores
    finally:
        for process in (parent.pid, child):
            os.kill(process, 9)
        parent.wait()


def test_no_session_has_no_threads(tmp_path: Path) -> None:
    for name, text in (("7", "7 (a) b) S 1 2"), ("8", ""), ("9", "9 (x) S 1 2 nine 4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(text)
    (tmp_path / "10").mkdir()  # has ended since it was listed
    assert session_threads(9, tmp_path) == []
    assert session_threads(9, tmp_path / "missing") == []


@pytest.mark.parametrize(("count", "expected"), [(1, None), (4, None), (5, ({0, 1, 2, 3}, {4}))])
def test_waiting_engines_have_a_core_where_there_are_enough(
    count: int, expected: tuple[set[int], set[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(count)))
    assert cores_apart() == expected


@pytest.mark.parametrize("fails", [None, "error", "lost"])
def test_an_engine_has_the_cores_while_it_is_asked_and_waits_beside_them(
    fails: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine whose request failed waits there too, or it would disturb the one that is timed next."""
    done: list[Any] = []

    class Connection:
        def send(self, request: dict[str, Any]) -> None:
            done.append(request["op"])
            if fails == "lost":
                raise BrokenPipeError

        def poll(self, timeout: float) -> bool:
            return True

        def recv(self) -> dict[str, Any]:
            return {"error": "no memory"} if fails else {"tokens": 5}

    monkeypatch.setattr(serve_engine, "cores_apart", lambda: ({0, 1, 2, 3}, {4}))
    monkeypatch.setattr(serve_engine, "confine", lambda session, cores: done.append((session, cores)))
    engine = object.__new__(EngineProcess)
    engine.name, engine.log = "arm", tmp_path / "arm.log"
    vars(engine).update(_connection=Connection(), _process=types.SimpleNamespace(pid=17))
    if fails:
        with pytest.raises(RuntimeError, match="'arm' ended" if fails == "lost" else "no memory"):
            engine.ask("generate", 1.0)
    else:
        assert engine.ask("generate", 1.0) == {"tokens": 5}
    assert done == [(17, {0, 1, 2, 3}), "generate", (17, {4})]
