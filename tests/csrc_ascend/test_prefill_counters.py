"""What the prefill kernels do, counted on the simulator, against their plan: not a byte more, not a byte less."""

from __future__ import annotations

import itertools

import pytest
from vllm_ext.benchmarks.ascend_problems import make_call

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.ascend_kernels import kernel_chunk_counts
from vllm_ext.ha_npu.ascend_tiles import KERNEL_STRATEGY
from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Task, chunk_head_chunk_launches

pytestmark = pytest.mark.usefixtures("prefill_kernels")
OPS = ("gdn", "kda")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("chip", "heads", "lengths", "dim"),
    [
        ("310p1", 10, [256], 128),  # heads whole
        ("310p1", 16, [256], 128),  # and cut by columns, and one by chunks
        ("310p1", 1, [200], 128),  # chunk-head-chunk alone, a ragged end
        ("310p1", 3, [64, 0, 70], 128),  # packed, one of them empty
        ("310p1", 5, [130], 64),
        ("310p3", 9, [65], 128),
        ("310b1", 2, [130, 64], 128),  # operands through global memory
        ("310b4", 2, [70], 64),
    ],
)
def test_counters_equal_the_plan(op: str, chip: str, heads: int, lengths: list[int], dim: int) -> None:
    """Every figure of the kernels' plan, to the unit, cut tails included: a plan that is off by a byte is a guess."""
    tokens, bounds = sum(lengths), [0, *itertools.accumulate(lengths)]
    sizes = {"key_heads": heads, "value_heads": heads, "key_dim": dim, "value_dim": dim}
    call = make_call(op, tokens=tokens, bounds=bounds, seed=37, **sizes)
    counters = run_prefill(op, call, chip=chip).counters
    plan = make_plan(
        op, chip=chip, num_heads=heads, num_tokens=tokens, head_dim=dim, seq_lens=lengths, strategy=KERNEL_STRATEGY
    )
    traffic, tail = plan.traffic, plan.traffic.tail
    assert counters.gm_bytes == traffic.total_gm_bytes
    assert counters.l1_to_l0_bytes == traffic.l1_to_l0_bytes + tail.l1_to_l0_bytes
    assert counters.macs == plan.macs + tail.macs
    assert counters.relaid_fractals == traffic.relaid_fractals + tail.relaid_fractals
    assert counters.peaks == plan.peak_bytes
    assert (counters.cast_overflows, counters.scalar_accesses) == (0, 0)


@pytest.mark.parametrize("op", OPS)
def test_the_kernels_plan_asks_no_more_than_the_papers(op: str) -> None:
    """The same global memory to the byte, fewer operands and products than HA-NPU's own plan at the same work."""
    paper, kernels = (
        make_plan(op, chip="310p1", num_heads=10, num_tokens=256, strategy=strategy)
        for strategy in ("ha-npu", KERNEL_STRATEGY)
    )
    assert kernels.traffic.total_gm_bytes == paper.traffic.total_gm_bytes
    assert kernels.traffic.l1_to_l0_bytes < paper.traffic.l1_to_l0_bytes
    assert kernels.macs < paper.macs


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("by_chunks", [False, True])
def test_a_state_kept_key_first_moves_what_is_planned(op: str, by_chunks: bool) -> None:
    """V' is then the right operand of two products of KDA, and is loaded once for both."""
    call = make_call(op, tokens=128, state_v_first=False, seed=67)
    head = Task(0, 128, 0, 0, 0, 128, 0)
    launches = chunk_head_chunk_launches([head], 8, 10) if by_chunks else [("whole", [[head]])]
    counters = run_prefill(op, call, launches=launches).counters
    chip = load_chip("310p1")
    counts = kernel_chunk_counts(op, chip, 128, 64, by_chunks=by_chunks, value_first=False)
    assert counters.gm_bytes == 2 * counts.gm_bytes + 2 * 128 * 128 * 4
    assert counters.l1_to_l0_bytes == 2 * counts.fractals * 512
    assert counters.mac_fractals == 2 * counts.products
    assert counters.relaid_fractals == 2 * counts.relaid
