"""A call in a process of its own, for what may crash or never end: its result, or the reason why there is none."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.engine_children import end

_FRAME = re.compile(r'File "(.*?)", line (\d+) in (\S+)')


class CallFailed(RuntimeError):
    """The process raised, crashed or took too long; the text says which, and where."""


def reason(error: BaseException) -> str:
    """An exception's type, text and place, in one line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"


def run_apart(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """function(*arguments) in a new interpreter, ended with all that it has started once `seconds` are over.

    The function must be found by name there, and its arguments and result must pickle.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_call, args=(sender, trace, seconds, function, arguments))
        process.start()
        sender.close()
        try:
            if not receiver.poll(seconds):
                raise CallFailed(f"not over after {seconds:.0f} s{_place(trace)}")
            done, result = receiver.recv()
        except EOFError:
            process.join(5)
            code = process.exitcode or 0
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
            raise CallFailed(f"its process ended {how}{_place(trace)}") from None
        finally:
            end(process)
    if not done:
        raise CallFailed(result)
    return result


def _call(sender: Connection, trace: Path, seconds: float, function: Callable[..., Any], arguments: Any) -> None:
    os.setsid()
    with trace.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(max(0.1, seconds - 1.0), file=file)
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, reason(error))
        faulthandler.cancel_dump_traceback_later()
        sender.send(answer)


def _place(trace: Path) -> str:
    """The innermost frames of the thread that crashed, or of the one that was dumped last."""
    text = trace.read_text(encoding="utf-8", errors="replace") if trace.exists() else ""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)[1:]
    if not threads:
        return ""
    crashed = [thread for thread in threads if thread.startswith("Current")] or threads[-1:]
    frames = [f"{Path(file).name}:{line} {name}" for file, line, name in _FRAME.findall(crashed[0])[:3]]
    return f", in {' < '.join(frames)}"
