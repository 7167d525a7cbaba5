"""Processes with an engine, moved between cores with all that they started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_ext.benchmarks.engine_children import confine, session_threads
from vllm_ext.benchmarks.serve_engine import cores_apart

if not hasattr(os, "sched_setaffinity"):
    pytest.skip("only Linux tells and moves threads", allow_module_level=True)

# A session with a thread, and a child whose name looks like the fields behind it.
PARENT = """
import os, subprocess, sys, threading, time
os.setsid()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
renamed = "import time; open('/proc/self/comm', 'w').write(') S 1 2 3'); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", renamed])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_session_is_moved_with_its_threads_and_children() -> None:
    cores = os.sched_getaffinity(0)
    one = {min(cores)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
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
        os.killpg(parent.pid, 9)
        parent.wait()


def test_no_session_has_no_threads(tmp_path: Path) -> None:
    for name, text in (("7", "7 (a) b) S 1 2"), ("8", ""), ("9", "9 (x) S 1 2 nine 4")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(text)
    assert session_threads(9, tmp_path) == []
    assert session_threads(9, tmp_path / "missing") == []


@pytest.mark.parametrize(("count", "expected"), [(1, None), (4, None), (5, ({0, 1, 2, 3}, {4}))])
def test_waiting_engines_have_a_core_where_there_are_enough(
    count: int, expected: tuple[set[int], set[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(count)))
    assert cores_apart() == expected
