"""What the linear-attention benchmark concludes from its measurements, and that it measures nothing that is wrong."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from vllm_ext.benchmarks import linear_attention
from vllm_ext.benchmarks.linear_attention_common import FUNCTIONS, Row, end_heads, errors, make_call
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


def test_end_heads_are_what_the_whole_call_gives_them() -> None:
    row = Row("gdn", 3, 6, (100, 30))
    call = make_call(row, "cpu")
    result = FUNCTIONS["gdn"](**call, backend="cpu")
    expected = end_heads(row, call)
    assert expected[2] == [0, 1, 4, 5]
    assert max(errors(result, expected)) < 5e-3
    assert errors((result[0], result[1].transpose(-1, -2)), expected)[1] > 0.5
    of_another_head = result[0].clone()
    of_another_head[:, :, 5] = result[0][:, :, 1]
    assert errors((of_another_head, result[1]), expected)[0] > 0.1


@pytest.mark.parametrize("lengths", [(2048, 2048), (4096,)])
def test_prompts_do_not_repeat_from_chunk_to_chunk(lengths: tuple[int, ...]) -> None:
    """The first 2048 tokens stood again in every other sequence: reading these in their place passed the check."""
    call = make_call(Row("gdn", 1, 1, lengths), "cpu")
    for name in ("q", "k", "v", "g", "beta"):
        chunks = call[name][0].unflatten(0, (64, 64)).flatten(1)
        assert len(chunks.unique(dim=0)) == 64, name


def _wrong_output(o: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return 1.01 * o, state


def _last_head(o: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return o, state * torch.tensor([1.0, 1.0, 1.0, 1.1])[None, :, None, None]


def _no_state(o: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return o, torch.full_like(state, float("nan"))


def _unwritten(o: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(o), state


@pytest.mark.parametrize("fault", [_wrong_output, _last_head, _no_state, _unwritten])
def test_ours_is_not_timed_when_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Outputs; states, of which NaN once passed for right; the last head; and results that nothing has written."""
    row = Row("gdn", 2, 4, (70,))
    monkeypatch.setattr(linear_attention, "make_call", lambda row: make_call(row, "cpu"))

    def wrong(backend: str, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return fault(*FUNCTIONS["gdn"](**call, backend="cpu"))

    def timed(*_: Any) -> tuple[float, str]:
        raise AssertionError("a wrong result was timed")

    monkeypatch.setattr(linear_attention, "FUNCTIONS", {"gdn": wrong})
    monkeypatch.setattr(linear_attention, "_milliseconds", timed)
    with pytest.raises(CheckFailed, match="gdn 2/4 1x70, ours"):
        linear_attention._measure(row, argparse.Namespace(peers=[], fla_heads=[], replays=1), 1e12, 1e14)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_time_is_of_several_calls_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call alone in its graph 3 to 12 us are the launch, which the published times do not have."""
    captured: list[int] = []

    def timed(calls: Any, replays: int) -> float:
        captured.append(len(calls))
        assert len({id(call) for call in calls}) == 1
        return 0.25 * replays

    monkeypatch.setattr(linear_attention, "graph_milliseconds", timed)
    assert linear_attention._milliseconds(lambda: None, 3) == (0.75, "graph")
    assert captured == [linear_attention.CALLS]
    assert linear_attention.CALLS > 1


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
