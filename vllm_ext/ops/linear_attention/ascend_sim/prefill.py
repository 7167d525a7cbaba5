"""Lay a call out for the prefill kernels and launch them on the simulator."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

import torch

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ops.linear_attention.ascend_sim.session import Counters, Session
from vllm_ext.ops.linear_attention.ascend_sim.tasks import (
    CHUNK,
    LOWER_HALVES,
    PHASES,
    Blocks,
    Task,
    make_tasks,
    planned_launches,
)
from vllm_ext.ops.linear_attention.problem import Call


def default_launches(op: str, call: Call, chip: str) -> list[tuple[str, Blocks]]:
    """The planner's mapping where it knows the shape (K = V, some tokens), else `make_tasks`."""
    bounds = call.sequence_bounds()
    num_value_heads, value_dim = call.v.shape[2:]
    if call.q.shape[-1] != value_dim or bounds[-1] == 0:
        return [("whole", make_tasks(bounds, num_value_heads, value_dim, load_chip(chip).cores))]
    lengths = [end - begin for begin, end in pairwise(bounds)]
    plan = make_plan(
        op, chip=chip, num_heads=num_value_heads, num_tokens=bounds[-1], head_dim=value_dim, seq_lens=lengths
    )
    return planned_launches(plan.mapping, bounds, value_dim)


@dataclass(frozen=True)
class Result:
    """o [B, T, HV, V] FP16, the final state in the state dtype or None, counters, and where faults could be planted."""

    o: torch.Tensor
    final_state: torch.Tensor | None
    counters: Counters
    places: set[tuple[str, str, int]]


def run_prefill(
    op: str,
    call: Call,
    *,
    chip: str = "310p1",
    state_dtype: torch.dtype = torch.float32,
    blocks: Blocks | None = None,
    launches: list[tuple[str, Blocks]] | None = None,
    threads: int | None = None,
    split_operands: bool = False,
    mutation: tuple[str, str, int] | None = None,
    watch_places: bool = False,
) -> Result:
    """Run "gdn" or "kda" prefill.

    Work is dealt to cores as the planner says; `blocks` replaces that by one launch of these tasks, `launches` by
    several: (phase, blocks) one after another, phases as in `PHASES`. The last two arguments are for tests.

    `split_operands` keeps what rounding takes from an operand as a second operand (gdn, no chunk-head-chunk): states as
    accurate as FP32 sums allow, for up to three times the products they enter.

    Raises SimulatorViolation when the kernel breaks a rule of the chip.
    """
    num_heads, key_dim = call.q.shape[2:]
    num_value_heads, value_dim = call.v.shape[2:]
    bounds = call.sequence_bounds()
    gates = padded(call.g.float().flatten(0, 1), bounds)
    beta = padded(call.beta.float().flatten(0, 1), bounds)
    states = (len(bounds) - 1, num_value_heads, key_dim, value_dim)
    if call.state_v_first:
        states = (*states[:2], value_dim, key_dim)
    initial = None if call.initial_state is None else call.initial_state.to(state_dtype).contiguous()
    o = torch.full(call.v.shape, float("nan"), dtype=torch.float16)
    final = torch.full(states, float("nan"), dtype=state_dtype) if call.output_final_state else None
    if split_operands and op != "gdn":
        raise ValueError(f"ascend-sim: only gdn takes operands in two halves, not {op}")
    if launches is None:
        if split_operands and blocks is None:
            blocks = make_tasks(bounds, num_value_heads, value_dim, load_chip(chip).cores)
        launches = [("whole", blocks)] if blocks is not None else default_launches(op, call, chip)
    if split_operands and any(phase != "whole" for phase, _ in launches):
        raise ValueError("ascend-sim: operands in two halves need heads whole or cut by columns, not by chunks")
    scale_bits = struct.unpack("<i", struct.pack("<f", call.scale))[0]
    sizes = [num_heads, num_value_heads, key_dim, value_dim, gates.shape[1]]
    options: list[int] = [initial is not None, final is not None, state_dtype == torch.float16]
    options += [call.state_v_first, call.use_qk_l2norm_in_kernel + 2 * split_operands]
    workspace = None
    scratch = 0 if load_chip(chip).ub_to_l1 else 2 * key_dim * value_dim * max(len(blocks) for _, blocks in launches)
    if scratch or any(phase != "whole" for phase, _ in launches):
        units = num_value_heads * gates.shape[1] // CHUNK
        halves = 2 * LOWER_HALVES + (CHUNK + key_dim) * value_dim
        workspace = torch.empty(units * halves + scratch, dtype=torch.float16)
    with Session(chip, threads=threads) as session:
        if mutation is not None:
            session.mutate(*mutation)
        if watch_places:
            session.watch_places()
        arguments: list[torch.Tensor | None] = []
        inputs = {"q": call.q, "k": call.k, "v": call.v, "g": gates, "beta": beta, "initial_state": initial}
        for name, tensor in inputs.items():
            arguments.append(None if tensor is None else session.register(name, tensor.contiguous(), "in"))
        for name, output in {"o": o, "final_state": final}.items():
            arguments.append(None if output is None else session.register(name, output, "out"))
        arguments.append(None if workspace is None else session.register("workspace", workspace, "workspace"))
        for phase, phase_blocks in launches:
            tasks, block_tasks = task_table(phase_blocks)
            shape = ints([*sizes, *options, scale_bits, PHASES[phase]])
            session.launch(f"{op}_prefill", len(phase_blocks), [*arguments, tasks, block_tasks, shape])
        session.check_outputs()
        return Result(o, final, session.counters(), session.places() if watch_places else set())


def padded(values: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """[tokens, HV, ...] to [HV, padded tokens, ...]: each sequence begins at a multiple of a chunk, zeros fill up."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    total = sum(-(-length // CHUNK) * CHUNK for length in lengths)
    out = values.new_zeros(values.shape[1], max(total, CHUNK), *values.shape[2:])
    at = 0
    for begin, length in zip(bounds, lengths, strict=False):
        out[:, at : at + length] = values[begin : begin + length].transpose(0, 1)
        at += -(-length // CHUNK) * CHUNK
    return out


def task_table(blocks: list[list[Task]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [tasks, 8] and the first task of each block, one more at the end."""
    rows = [
        [t.token_begin, t.token_count, t.sequence, t.head, t.column_begin, t.column_count, t.gate_begin, 0]
        for block in blocks
        for t in block
    ]
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block))
    return ints(rows or [[0] * 8]), ints(starts)


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
