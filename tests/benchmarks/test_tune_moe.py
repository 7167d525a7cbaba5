"""How the tuner of the Triton experts chooses; what it times only a GPU can."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm_ext.benchmarks import tune_moe
from vllm_ext.benchmarks.moe_common import SHAPES

from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

TILES = GemmConfig(16, 64, 4, 4)
STREAMED = GemmConfig(16, *tune_moe.streamed(128, 4, 2))
SHARED = GemmConfig(8, *tune_moe.streamed(64, 4, 4, True))
WIDE = GemmConfig(32, *tune_moe.wide(128, 4, 2))


@dataclass
class Call:
    """A layer to be timed."""

    launch: LaunchConfig
    out: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.out


def choose(
    monkeypatch: pytest.MonkeyPatch, alone: dict[GemmConfig, float], layers: Any, wrong: GemmConfig | None = None
) -> LaunchConfig:
    """The pair chosen when GEMMs take `alone` ms, layers `layers(launch)` ms, and `wrong` computes nonsense."""
    right = torch.ones(4)

    class Layer:
        weights = (torch.zeros(64, 8),)
        experts = SimpleNamespace(meta=SimpleNamespace(num_experts=128))

        def whole(self, launch: LaunchConfig) -> list[Any]:
            out = right * 2 if wrong in (launch.gate_up, launch.down) else right
            return [Call(launch, out)]

    monkeypatch.setattr(tune_moe, "graph_milliseconds", lambda calls: layers(calls[0].launch))
    rows = [
        {"gemm": gemm, "plane": 32, "tokens": 64, "ms": ms, "config": vars(made)}
        for gemm in ("gate_up", "down")
        for made, ms in alone.items()
    ]
    rows += [{**row, "tokens": 8, "ms": 0.0} for row in rows] + [{**row, "plane": 16, "ms": 0.0} for row in rows]
    launch, milliseconds = tune_moe.choose_pair(Layer(), rows, (32, 32), 64)  # type: ignore[arg-type]
    assert milliseconds == layers(launch)
    return launch


def test_the_fastest_layer_is_chosen_among_the_three_fastest_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the fastest alone: that one finds its weights in the cache. The fourth alone is not timed in a layer."""
    order = {TILES: 0.1, STREAMED: 0.2, WIDE: 0.3, SHARED: 0.4}
    times = {TILES: 3.0, STREAMED: 2.0, WIDE: 1.0, SHARED: 0.0}

    def layers(launch: LaunchConfig) -> float:
        return times[replace(launch.gate_up, guess=False)] * 10 + times[launch.down]

    assert choose(monkeypatch, order, layers) == LaunchConfig(WIDE, WIDE)
    assert choose(monkeypatch, order, layers, wrong=WIDE).down == STREAMED


def test_only_what_can_ask_for_weights_early_is_tried_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def layers(launch: LaunchConfig) -> float:
        seen.append(launch)
        return 1.0 - 0.1 * launch.gate_up.guess

    assert choose(monkeypatch, {STREAMED: 0.1, WIDE: 0.2, SHARED: 0.3}, layers).gate_up == replace(STREAMED, guess=True)
    assert {launch.gate_up for launch in seen if launch.gate_up.guess} == {replace(STREAMED, guess=True)}
    assert not any(launch.down.guess for launch in seen)


def test_candidates_are_those_of_the_blocks_a_batch_needs() -> None:
    sizes = [tune_moe.block_tokens_for(slots) for slots in (0.06, 6, 7, 16, 30, 64, 8192)]
    assert sizes == [(8, 16), (8, 16), (8, 16, 32), (16, 32), (32, 64), (64, 128), (64, 128)]
    made = tune_moe.gemm_configs()
    assert len(set(made)) == len(made)
    assert {gemm.block_tokens for gemm in made} == {8, 16, 32, 64, 128}
    assert all(LaunchConfig.from_json(LaunchConfig(gemm, gemm).to_json()).down == gemm for gemm in made)


def test_any_shape_can_be_tuned() -> None:
    assert tune_moe.parse_shape("DiffusionGemma") is SHAPES["DiffusionGemma"]
    shape = tune_moe.parse_shape("4096,1536,128,8")
    assert (shape.hidden, shape.inter, shape.experts, shape.top_k, shape.group_w13, shape.group_w2) == (
        4096, 1536, 128, 8, 128, 64,
    )  # fmt: skip
    assert tune_moe.parse_shape("4096,768,128,8,32,32").group_w2 == 32
    for wrong in ("Qwen3", "4096,1536", "4096,1536,128,0", "1,2,3,4,5"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"hidden,intermediate,experts,top_k.*got"):
            tune_moe.parse_shape(wrong)


def test_without_a_gpu_the_tuner_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune_moe.main(["--shape", "2048,768,128,8"]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
