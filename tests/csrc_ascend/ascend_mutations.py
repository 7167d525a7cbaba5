"""Planted faults: every flag, barrier, layout and buffer of a kernel in turn, and what notices them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm_ext.benchmarks.ascend_problems import make_call

from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.session import SimulatorViolation
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Blocks, Task, chunk_head_chunk_launches
from vllm_ext.ops.linear_attention.problem import Call

Place = tuple[str, str, int]


@dataclass(frozen=True)
class Case:
    """A small call that reaches part of a kernel."""

    call: Call
    state_dtype: torch.dtype
    launches: list[tuple[str, Blocks]] | None = None
    chip: str = "310p1"
    split: bool = False


def cases(op: str) -> list[Case]:
    """Together they run every line of the kernel; the first finds most faults."""
    two_heads = [Task(0, 130, 0, head, 0, 128, 0) for head in range(2)]
    one_core: list[tuple[str, Blocks]] = [("whole", [two_heads])]
    spread = chunk_head_chunk_launches(two_heads, 2, 1)
    spread_one = chunk_head_chunk_launches(two_heads[:1], 2, 1)
    split = [Case(make_call(op, tokens=130, value_heads=2, seed=9), torch.float32, one_core, split=True)]
    split.append(Case(make_call(op, tokens=70, state_v_first=False, seed=10), torch.float32, split=True))
    return [
        *(split if op == "gdn" else []),
        Case(make_call(op, tokens=130, value_heads=2, normalise=True), torch.float32, one_core),
        Case(
            make_call(op, tokens=130, key_heads=2, value_heads=2, state_v_first=False, initial=False, seed=1),
            torch.float32,
            one_core,
        ),
        Case(make_call(op, tokens=130, value_heads=2, normalise=True, seed=6), torch.float32, spread),
        Case(make_call(op, tokens=130, value_heads=2, state_v_first=False, seed=5), torch.float32, spread),
        Case(make_call(op, tokens=64, value_heads=2, key_dim=64, value_dim=64, seed=2), torch.float16),
        Case(make_call(op, tokens=70, bounds=[0, 0, 70], seed=4), torch.float32),
        Case(make_call(op, tokens=100, bounds=[0, 36, 36, 100], initial=False, seed=3), torch.float16),
        Case(make_call(op, tokens=130, normalise=True, seed=7), torch.float32, chip="310b1"),
        Case(make_call(op, tokens=130, state_v_first=False, seed=8), torch.float16, spread_one, chip="310b1"),
    ]


def places(op: str) -> set[Place]:
    """Every fault that can be planted in the kernel of `op`."""
    found: set[Place] = set()
    for case in cases(op):
        found |= _run(op, case, watch_places=True).places
    return found


def notices(op: str, place: Place, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """How the fault is noticed: the rule broken, "wrong numbers", or "" when it survives every case."""
    for case, (o, state) in zip(cases(op), expected, strict=True):
        try:
            result = _run(op, case, mutation=place)
        except SimulatorViolation as violation:
            message = str(violation)
            return message[message.index("[") + 1 : message.index("]")]
        if not (torch.equal(result.o, o) and torch.equal(result.final_state, state)):
            return "wrong numbers"
    return ""


def expected(op: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel computes without a fault."""
    results = [_run(op, case) for case in cases(op)]
    return [(result.o, result.final_state) for result in results]


def _run(op: str, case: Case, **options):
    options |= {"chip": case.chip, "state_dtype": case.state_dtype, "split_operands": case.split}
    return run_prefill(op, case.call, launches=case.launches, threads=1, **options)
