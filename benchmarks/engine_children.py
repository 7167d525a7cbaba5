"""What processes with a vLLM engine begin with, where several are forked from one that has imported vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Not vLLM's worker: what it imports asks for the GPU, and a CUDA context does not survive a fork.
PRELOAD = ("torch", "transformers", "vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine")
_FIRST, _COUNT, _EACH = 12000, 500, 40


def begin(log: Path | str) -> None:
    """Make this process a group of its own, which `end` ends, and send its output to `log`; have its engine search from
    a port of its own, by the process id.

    vLLM asks the system for a free port, lets go of it and opens it later. Of engines started together two got the
    same: one ended because the address was in use, others waited for a store that was not theirs until they were ended.
    """
    os.setsid()
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["VLLM_PORT"] = str(_FIRST + os.getpid() % _COUNT * _EACH)


def end(process: BaseProcess) -> None:
    """End a process that has begun, with all that it has started: ranks left alone go on using the GPU."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def session_threads(session: int, proc: Path = Path("/proc")) -> list[int]:
    """Every thread of every process of a session, as Linux tells them; none where it does not."""
    found: list[int] = []
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name, in brackets, may hold anything; the session is the fourth field behind it.
            if int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[3]) == session:
                found += [int(thread.name) for thread in (process / "task").iterdir()]
    return found


def confine(session: int, cores: Iterable[int]) -> None:
    """Keep a process that has begun, with all that it has started, on these cores.

    An engine's processes go on asking for work for a second after the last one: beside an engine that is timed they
    would take cores from it.
    """
    allowed = set(cores)
    for thread in session_threads(session):
        with contextlib.suppress(OSError):  # it has ended, or may not be moved
            os.sched_setaffinity(thread, allowed)


def inspect_models_in_process() -> None:
    """Let vLLM look at a model's class here: it starts an interpreter for that, which imports everything once more."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def skip_autotuning() -> None:
    """Let vLLM's Triton kernels run with the first of their configurations: trying all takes longer than the check."""
    if find_spec("triton") is None:
        return
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = run_first
