"""Plans run step by step on the simulator: the baselines, and HA-NPU's plan as published."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm_ext.benchmarks.ascend_problems import make_call

from vllm_ext.ha_npu import make_plan
from vllm_ext.ops.linear_attention import reference
from vllm_ext.ops.linear_attention.ascend_sim.planned import run_planned
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Task

pytestmark = pytest.mark.usefixtures("prefill_kernels")
STRATEGIES = ("ha-npu", "fla", "fla-megakernel", "flash-qla", "vllm-ascend")

# FP16 operands, and the FP16 tensors that stages leave for each other.
NMSE = 6e-7
TOKENS, HEADS = 192, 3
PADDED_NUMBERS = {("gdn", "vllm-ascend"): 2 * 28}
"""Bytes a chunk of a head beyond the plan: exp(G_last), a float, is written and read as a block of 32 bytes."""


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).square().sum() / wanted.double().square().sum()).item()


@pytest.fixture(params=["gdn", "kda"])
def problem(request: pytest.FixtureRequest):
    """(op, call, o, state): gates in (-0.2, 0), for KDA's plans split decays in the middle of a chunk; FP64 results."""
    op = request.param
    call = make_call(op, tokens=TOKENS, key_heads=HEADS, value_heads=HEADS, steep=0.0, seed=47)
    wide = dataclasses.replace(call, **{name: getattr(call, name).double() for name in ("q", "k", "v")})
    function = reference.chunk_gated_delta_rule if op == "gdn" else reference.chunk_kda
    return op, call, *function(wide)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_computes_right_and_moves_what_it_says(problem, strategy: str) -> None:
    """Outputs and states against FP64; global memory, operands, products and the peak of every buffer to the unit."""
    op, call, o, state = problem
    result = run_planned(op, call, strategy)
    plan = make_plan(op, chip="310p1", num_heads=HEADS, num_tokens=TOKENS, strategy=strategy)
    assert nmse(result.o, o) < NMSE
    assert nmse(result.final_state, state) < NMSE
    padded = HEADS * TOKENS // 64 * PADDED_NUMBERS.get((op, strategy), 0)
    assert result.counters.gm_bytes == plan.traffic.gm_bytes + padded
    assert result.counters.l1_to_l0_bytes == plan.traffic.l1_to_l0_bytes
    assert result.counters.macs == plan.macs
    assert result.counters.peaks == plan.peak_bytes
    if strategy != "vllm-ascend":  # whose plan lets all chunks of an operator go before the next
        assert result.device_bytes == plan.traffic.device_bytes


def test_one_launch_moves_what_six_launches_move(problem) -> None:
    """FLA + MegaKernel: the same dataflow with a barrier of all cores where launches ended, the same bits."""
    op, call, _, _ = problem
    staged, one = run_planned(op, call, "fla"), run_planned(op, call, "fla-megakernel")
    assert (staged.launches, one.launches) == (6, 1)
    assert torch.equal(staged.o, one.o)
    assert torch.equal(staged.final_state, one.final_state)
    assert staged.counters.gm_bytes == one.counters.gm_bytes


def test_the_kernels_move_less_than_every_baseline(problem) -> None:
    """Measured against measured, heads whole, at one shape."""
    op, call, _, _ = problem
    ours = run_prefill(op, call, blocks=[[Task(0, TOKENS, 0, head, 0, 128, 0)] for head in range(HEADS)]).counters
    for strategy in ("fla", "fla-megakernel", "flash-qla", "vllm-ascend"):
        theirs = run_planned(op, call, strategy).counters
        assert ours.gm_bytes < theirs.gm_bytes
        assert ours.l1_to_l0_bytes < theirs.l1_to_l0_bytes
        assert ours.macs < theirs.macs


def test_a_call_that_no_plan_covers_is_refused() -> None:
    """Ragged chunks and grouped heads are the kernels' business."""
    for options in ({"tokens": 100}, {"tokens": 64, "value_heads": 2}, {"tokens": 64, "initial": False}):
        with pytest.raises(ValueError, match="one sequence of whole chunks"):
            run_planned("gdn", make_call("gdn", **options), "fla")
