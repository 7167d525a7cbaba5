"""What the linear-attention benchmark concludes from its measurements, and that it measures nothing that is wrong."""

from __future__ import annotations

import argparse
import threading
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from vllm_ext.benchmarks import linear_attention
from vllm_ext.benchmarks.linear_attention_common import FUNCTIONS, Row, errors, first_heads, make_call
from vllm_ext.benchmarks.registry import CheckFailed


def measured(arm: str, ms: float, timed: str = "graph") -> dict[str, Any]:
    return {"row": "r", "op": "gdn", "arm": arm, "ms": ms, "timed": timed, "failed": None}


def test_a_live_time_replaces_the_same_peers_published_one() -> None:
    """FlashQLA's newer version beats its own table at 32768 tokens, and older versions would flatter ours elsewhere."""
    rows = [measured("ours", 0.1), measured("FlashQLA", 0.12), measured("FlashQLA, published", 0.05, "published")]
    linear_attention._compare(rows)
    assert rows[0]["best_peer"] == "FlashQLA"
    assert rows[0]["reached"]
    rows = [measured("ours", 0.1), measured("FlashQLA", 0.12), measured("FlashInfer, published", 0.09, "published")]
    linear_attention._compare(rows)
    assert rows[0]["best_peer"] == "FlashInfer, published"
    assert not rows[0]["reached"]


def test_first_heads_are_what_the_whole_call_gives_them() -> None:
    row = Row("gdn", 2, 4, (100, 30))
    call = make_call(row, "cpu")
    result = FUNCTIONS["gdn"](**call, backend="cpu")
    assert max(errors(result, first_heads(row, call))) < 5e-3
    wrong = (result[0], result[1].transpose(-1, -2))
    assert errors(wrong, first_heads(row, call))[1] > 0.5


def test_ours_is_not_timed_when_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("gdn", 1, 2, (70,))
    monkeypatch.setattr(linear_attention, "make_call", lambda row: make_call(row, "cpu"))

    def wrong(backend: str, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = FUNCTIONS["gdn"](**call, backend="cpu")
        return 1.01 * o, state

    def timed(*_: Any) -> tuple[float, str]:
        raise AssertionError("a wrong result was timed")

    monkeypatch.setattr(linear_attention, "FUNCTIONS", {"gdn": wrong})
    monkeypatch.setattr(linear_attention, "_milliseconds", timed)
    with pytest.raises(CheckFailed, match="gdn 1/2 1x70, ours"):
        linear_attention._measure(row, argparse.Namespace(peers=[], fla_heads=[], replays=1), 1e12, 1e14)


def test_rows_go_without_the_peers_that_are_still_compiling() -> None:
    """FlashQLA takes more than 80 s a head configuration: three runs on a GPU ended before a peer was timed at all."""
    several, single = Row("gdn", 2, 8, (64,) * 2), Row("gdn", 2, 8, (64,))
    of_fla = Row("kda", 4, 4, (64,))
    slow = [([several], "FlashQLA"), ([of_fla], "FLA")]
    go_on = threading.Event()

    def compile_them(task: linear_attention.Task) -> str:
        if task in slow:
            go_on.wait(20)
        return ""

    with ThreadPool(3) as pool:
        unfinished = linear_attention.finish(pool, compile_them, [*slow, ([single], "FlashQLA"), ([single], None)], 0.5)
        go_on.set()
    assert unfinished == slow
    assert linear_attention.left_out(unfinished, several, "FlashQLA")
    assert not linear_attention.left_out(unfinished, single, "FlashQLA")
    assert linear_attention.left_out(unfinished, Row("kda", 4, 4, (128,)), "FLA")
    assert not linear_attention.left_out(unfinished, single, "FLA")
