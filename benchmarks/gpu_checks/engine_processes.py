"""Processes that run vLLM engines for the GPU checks.

They are forked from a server that has imported vLLM once: importing it in every process costs more than the checks do.
The server starts from a fresh interpreter, so a CUDA context of the caller is not inherited.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from vllm_ext.benchmarks.engine_children import PRELOAD, begin, end, inspect_models_in_process

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


def context(environment: dict[str, str]) -> ForkServerContext:
    """The server's context; `environment` is added to this process's and so to that of every engine's."""
    os.environ |= {**ENVIRONMENT, **environment}
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(PRELOAD))
    return found


def start(
    server: ForkServerContext,
    function: Callable[..., None],
    arguments: tuple[object, ...],
    log: Path,
    patience: float = 45,
) -> ForkServerProcess:
    """Run `function(*arguments)` in a process, and a group, of its own; its output goes to `log`, and after `patience`
    seconds its stacks too.
    """
    process = server.Process(target=_logged, args=(function, arguments, log, patience))
    process.start()
    return process


def _logged(function: Callable[..., None], arguments: tuple[object, ...], log: Path, patience: float) -> None:
    begin(log)
    timer = threading.Timer(patience, print_stacks)
    timer.daemon = True
    timer.start()
    inspect_models_in_process()
    function(*arguments)


def print_stacks() -> None:
    """Print where each thread is. By the interpreter's own means: faulthandler walks frames that torch.compile has put
    in, and two engines of a run ended while their stacks were printed.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)}:", file=sys.stderr)
        traceback.print_stack(frame, file=sys.stderr)
    sys.stderr.flush()


def join(process: ForkServerProcess, deadline: float) -> None:
    """Wait until a monotonic time, then `end` the process."""
    process.join(max(0.5, deadline - time.monotonic()))
    end(process)
