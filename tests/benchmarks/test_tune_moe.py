"""How the tuner of the Triton experts searches; what it times only a GPU can."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm_ext.benchmarks import tune_moe
from vllm_ext.benchmarks.moe_common import FAMILIES, SHAPES, shape_of
from vllm_ext.benchmarks.tune_moe_candidates import candidates, every_kernel

from vllm_ext.ops.moe import ExpertsMeta
from vllm_ext.ops.moe.triton import backend, choice, stream
from vllm_ext.ops.moe.triton.choice import streamed, wide
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig, load_table

TILES = GemmConfig(16, 64, 4, 4)
FIRST, SECOND, THIRD = streamed(8, 64, 4, 4), streamed(8, 128, 4, 4, guess=True), wide(32, 128, 4, 2)
GEMMS = (TILES, FIRST, SECOND, THIRD)
# gate and up is fastest by THIRD, down by FIRST; but THIRD's output is not to be had beside FIRST's.
COST = {TILES: 4.0, FIRST: 3.0, SECOND: 2.0, THIRD: 1.0}


class FakeLayer:
    """A layer whose configurations give `out(launch)`."""

    experts, x, options = None, None, None

    def __init__(self, out: Any) -> None:
        self.out, self.called = out, []

    def whole(self, launch: LaunchConfig) -> list[Any]:
        def call() -> torch.Tensor:
            self.called.append(launch)
            return self.out(launch)

        call.launch = launch  # type: ignore[attr-defined]
        return [call]


def cell_of(
    monkeypatch: pytest.MonkeyPatch, times: Any, out: Any = lambda launch: torch.ones(4)
) -> tuple[tune_moe.Cell, list[dict[str, Any]]]:
    """A cell of which a layer takes `times(launch)` ms; and what it reports."""
    monkeypatch.setattr(tune_moe, "graph_milliseconds", lambda calls, replays: times(calls[0].launch))
    monkeypatch.setattr(tune_moe.backend, "served", lambda launch, *call: launch)
    reported: list[dict[str, Any]] = []
    return tune_moe.Cell(FakeLayer(out), torch.ones(4), reported.append, 1), reported  # type: ignore[arg-type]


def test_the_fastest_layer_is_found_one_gemm_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GEMM is tried beside the two fastest firsts: what is best beside the start need not be at the end."""

    def times(launch: LaunchConfig) -> float:
        bonus = 2.5 if launch == LaunchConfig(SECOND, THIRD) else 0.0
        return COST[launch.gate_up] + COST[launch.down] - bonus

    cell, reported = cell_of(monkeypatch, times)
    best = cell.search(LaunchConfig(TILES, TILES), [FIRST, SECOND, THIRD], [FIRST, SECOND, THIRD])
    assert best == LaunchConfig(SECOND, THIRD)
    assert cell.seen[best] == times(best) == min(cell.seen.values())
    in_turns = [row for row in reported if row["what"] == "in turns"]
    assert [len(row["all"]) for row in in_turns] == [6, 6, 6]
    assert {row["what"] for row in reported} == {"start", "layer", "in turns"}


def test_a_place_in_the_round_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs on one kind of GPU found opposite winners at 1024 tokens, 3 and 5% ahead: what a round began with."""
    slow, fast = LaunchConfig(FIRST, FIRST), LaunchConfig(SECOND, SECOND)
    timed: list[LaunchConfig] = []

    def times(launch: LaunchConfig) -> float:
        timed.append(launch)
        second_in_its_round = len(timed) % 2 == 0
        return (1.0 if launch == slow else 0.98) * (1.05 if second_in_its_round else 1.0)

    cell, _ = cell_of(monkeypatch, times)
    for order in ([slow, fast], [fast, slow]):
        assert cell.in_turns(order) == fast


@pytest.mark.parametrize("how", ["wrong", "NaN", "unstable", "fails"])
def test_what_is_not_right_is_never_chosen_however_fast(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def out(launch: LaunchConfig) -> torch.Tensor:
        if THIRD not in (launch.gate_up, launch.down):
            return torch.ones(4)
        if how == "fails":
            raise RuntimeError("out of resources")
        return {
            "wrong": torch.ones(4) * 1.1,
            "NaN": torch.full((4,), float("nan")),
            "unstable": torch.ones(4) + torch.rand(4) * 1e-3,
        }[how]

    cell, reported = cell_of(monkeypatch, lambda launch: COST[launch.gate_up] + COST[launch.down], out)
    best = cell.search(LaunchConfig(TILES, TILES), [FIRST, SECOND, THIRD], [FIRST, SECOND, THIRD])
    assert best == LaunchConfig(SECOND, SECOND)
    refused = [row for row in reported if "refused" in row]
    assert refused
    assert all(THIRD.block_rows == 128 and "ms" not in row for row in refused)
    everything, _ = cell_of(monkeypatch, lambda launch: 1.0, lambda launch: torch.zeros(4))
    assert everything.search(LaunchConfig(TILES, TILES), [FIRST], [FIRST]) is None


def test_what_others_would_run_for_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another GPU, or with biases, the persistent kernels are replaced: their row would hold another's time."""
    cell, reported = cell_of(monkeypatch, lambda launch: COST[launch.gate_up] + COST[launch.down])
    monkeypatch.setattr(tune_moe.backend, "served", lambda launch, *call: LaunchConfig(TILES, TILES))
    assert cell.search(LaunchConfig(TILES, TILES), [FIRST], [SECOND]) == LaunchConfig(TILES, TILES)
    assert [row.get("refused", "") for row in reported if row["what"] == "layer"] == [
        "the kernels it asks for do not serve this layer here"
    ] * 2


def test_noise_of_one_timing_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best three are timed again, five times in turns, and the medians decide."""
    taken: dict[LaunchConfig, int] = {}

    def times(launch: LaunchConfig) -> float:
        taken[launch] = taken.get(launch, 0) + 1
        lucky = launch == LaunchConfig(FIRST, TILES) and taken[launch] == 1
        return 1.0 if lucky else COST[launch.gate_up] + COST[launch.down]

    cell, _ = cell_of(monkeypatch, times)
    assert cell.search(LaunchConfig(TILES, TILES), [FIRST, SECOND], []) == LaunchConfig(SECOND, TILES)


def sizes_of(hidden: int, inter: int, groups: tuple[int, int]) -> tuple[stream.Sizes, stream.Sizes]:
    return choice.sizes_of(ExpertsMeta("triton", 8, hidden, inter, *groups, True, "float", torch.bfloat16))


def test_candidates_are_what_the_weights_allow_and_begin_with_what_won() -> None:
    """Every block that tables use is there, and no configuration that `served` would replace by another."""
    seen = set()
    for slots in (0.06, 1, 4, 8, 16, 32, 64, 256, 8192):
        sizes = sizes_of(2048, 768, (128, 128))
        for gemms, size in zip(candidates(slots, sizes, True), sizes, strict=True):
            assert len(set(gemms)) == len(gemms) >= 4
            assert all(not gemm.programs or size.covered(gemm) for gemm in gemms)
            seen |= {gemm.block_tokens for gemm in gemms}
    assert seen == {8, 16, 32, 64, 128}
    odd = sizes_of(200, 88, (32, 8))
    for sizes, persistent in ((odd, True), (sizes_of(2048, 768, (128, 128)), False)):
        for gemms in (gemms for slots in (1, 16, 32, 256) for gemms in candidates(slots, sizes, persistent)):
            assert len(set(gemms)) == len(gemms) >= 4
            assert not any(gemm.programs for gemm in gemms)


def test_a_search_of_a_family_tries_what_its_rows_hold() -> None:
    """Mixtral's first had no second GEMM that shares K tiles: its rows took 6 to 42% longer than those that do."""
    table, checked = load_table("NVIDIA H200"), 0
    for shape in FAMILIES.values():
        rows = table.get(f"H{shape.hidden}_I{shape.inter}_E{shape.experts}_K{shape.top_k}", {})
        sizes = sizes_of(shape.hidden, shape.inter, (shape.group_w13, shape.group_w2))
        for slots, row in rows.items():
            launch = LaunchConfig.from_json(row)
            firsts, seconds = candidates(float(slots), sizes, True)
            assert launch.gate_up in firsts, (shape.name, slots)
            assert launch.down in seconds, (shape.name, slots)
            checked += 1
    assert checked > 40


def test_every_kernel_is_compiled_before_anything_is_timed() -> None:
    """A kernel compiled while others are timed takes seconds; each pair's must be among the pairs that are compiled.

    The first depends on the second's scaling, the second on whether blocks begin with one for every expert.
    """
    firsts, seconds = list(GEMMS), [*GEMMS, streamed(16, 256, 4, 2, apart=True)]

    def kernels(launch: LaunchConfig) -> set[Any]:
        sparse = backend._sparse(launch)
        blocks = (launch.gate_up.block_tokens, launch.down.block_tokens)
        return {(launch.gate_up, launch.down.scaling), (launch.down, sparse), ("align", blocks, sparse)}

    compiled = {kernel for launch in every_kernel(firsts, seconds) for kernel in kernels(launch)}
    for first in firsts:
        for second in seconds:
            assert kernels(LaunchConfig(first, second)) <= compiled


def test_a_search_starts_with_what_would_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of("2048,1024,64,8")
    experts = tune_moe._few_experts(shape, torch.device("cpu"))
    assert experts.meta.num_experts == 64
    assert experts.tensors["w13_words"].shape[0] == 2
    monkeypatch.setattr(choice, "_device_name", lambda index: "NVIDIA H200 of another table")
    monkeypatch.setattr(stream, "usable", lambda device: True)
    choice.choose.cache_clear()
    wanted = tune_moe.plan(shape, 64, experts, 0)
    choice.choose.cache_clear()
    assert wanted.slots == 8
    assert wanted.start == choice.persistent(experts.meta, 64, 8, 64)
    assert wanted.rule == wanted.start
    assert {wanted.rule, choice.portable(8)} <= set(replace(wanted, start=choice.portable(1)).layers())


def test_any_shape_can_be_tuned() -> None:
    assert shape_of("DiffusionGemma") is SHAPES["DiffusionGemma"]
    assert shape_of("Mixtral-8x7B") is FAMILIES["Mixtral-8x7B"]
    shape = shape_of("4096,1536,128,8")
    assert (shape.hidden, shape.inter, shape.experts, shape.top_k, shape.group_w13, shape.group_w2) == (
        4096, 1536, 128, 8, 128, 64,
    )  # fmt: skip
    assert shape_of("4096,768,128,8,32,32").group_w2 == 32
    for wrong in ("Qwen3", "4096,1536", "4096,1536,128,0", "1,2,3,4,5"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"hidden,intermediate,experts,top_k.*got"):
            shape_of(wrong)


def test_without_a_gpu_the_tuner_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_moe.main(["--shape", "2048,768,128,8"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


def test_a_run_that_is_cut_off_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Rows are in the table, and timings in the file beside it, before the next batch size is begun."""
    table = tmp_path / "table.json"
    table.write_text('{"shapes": {"other": {"1": {}}}}', encoding="utf-8")
    launch = LaunchConfig(FIRST, TILES).to_json()

    def tune(plans: Any, until: float, report: Any) -> Any:
        report({"ms": 1.0})
        yield "shape", "2", launch
        raise KeyboardInterrupt

    fakes = {"tune": tune, "_few_experts": lambda shape, device: None, "plan": lambda *arguments: SimpleNamespace()}
    for name, fake in fakes.items():
        monkeypatch.setattr(tune_moe, name, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nothing")
    options = ["--shape", "2048,768,128,8", "--workers", "0", "--table", str(table), "--raw", str(tmp_path / "raw")]
    with pytest.raises(KeyboardInterrupt):
        tune_moe.main(options)
    assert json.loads(table.read_text(encoding="utf-8"))["shapes"] == {
        "other": {"1": {}}, "shape": {"2": launch},
    }  # fmt: skip
    assert (tmp_path / "raw").read_text(encoding="utf-8") == '{"ms": 1.0}\n'
