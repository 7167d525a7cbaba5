"""benchmarks/apart.py: a call that crashes, hangs or raises costs its caller nothing but a reason."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
from vllm_ext.benchmarks.apart import CallFailed, run_apart


def double(value: int) -> int:
    return 2 * value


def crash() -> None:
    ctypes.string_at(0)


def hang() -> None:
    time.sleep(600)


def refuse() -> None:
    raise ValueError("no such layer")


def leave() -> None:
    os._exit(3)


def test_a_result_comes_back() -> None:
    assert run_apart(double, 21, seconds=60) == 42


@pytest.mark.parametrize(
    ("call", "seconds", "words"),
    [
        (crash, 60, "SIGSEGV.*string_at.*crash"),
        (hang, 8, "not over after 8 s.*hang"),
        (refuse, 60, "ValueError: no such layer"),
        (leave, 60, "ended with 3"),
    ],
)
def test_a_failure_says_how_and_where(call, seconds, words) -> None:
    with pytest.raises(CallFailed, match=words):
        run_apart(call, seconds=seconds)
