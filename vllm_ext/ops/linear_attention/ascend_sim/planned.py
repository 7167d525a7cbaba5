"""Run a plan on the simulator step by step: the baselines' dataflows, and HA-NPU's own plan as published.

`csrc_ascend/kernels/baselines/planned.h` reads the table made here. Every copy, product and vector step of a plan
becomes an instruction or a few, with tiles where the plan puts them, so that what a strategy moves is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from vllm_ext.ha_npu import Plan, make_plan
from vllm_ext.ha_npu.chunk_plan import KernelPlan
from vllm_ext.ha_npu.inversion import TILE
from vllm_ext.ops.linear_attention.ascend_sim.planned_table import BLOCK, KernelTable, Workspace
from vllm_ext.ops.linear_attention.ascend_sim.prefill import ints, padded, task_table
from vllm_ext.ops.linear_attention.ascend_sim.session import Counters, Session
from vllm_ext.ops.linear_attention.ascend_sim.tasks import CHUNK, Blocks, Task, chunk_of, column_parts, deal
from vllm_ext.ops.linear_attention.problem import Call


@dataclass(frozen=True)
class PlannedResult:
    """o [1, T, HV, V] FP16, the final state [1, HV, V, K] FP32, counters, peak bytes of all tensors, launches."""

    o: torch.Tensor
    final_state: torch.Tensor
    counters: Counters
    device_bytes: int
    launches: int


def run_planned(op: str, call: Call, strategy: str, *, chip: str = "310p1") -> PlannedResult:
    """Run "gdn" or "kda" as a strategy of the planner does it, heads whole.

    One sequence of whole chunks, as many key as value heads, K = V, states [V, K], no normalisation; an initial state.
    Raises ValueError on another call.
    """
    tokens, heads, dim = call.v.shape[1:]
    good = call.q.shape == call.v.shape and call.q.shape[0] == 1 and not tokens % CHUNK and call.state_v_first
    if strategy == "ha-npu-tuned":
        raise ValueError("ascend-sim: strategy 'ha-npu-tuned' keeps states key-first; plans are run with states [V, K]")
    if not good or call.use_qk_l2norm_in_kernel or call.initial_state is None or call.cu_seqlens is not None:
        raise ValueError(
            "ascend-sim: a plan is run on one sequence of whole chunks, as many key as value heads, K = V, an initial "
            f"state [V, K] and no normalisation; got q {tuple(call.q.shape)}, v {tuple(call.v.shape)}"
        )
    plan = make_plan(op, chip=chip, num_heads=heads, num_tokens=tokens, head_dim=dim, strategy=strategy)
    return _Run(plan, call).run()


class _Run:
    def __init__(self, plan: Plan, call: Call) -> None:
        self.plan, self.call, self.flow = plan, call, plan.chunk.dataflow
        self.tokens, self.heads, self.dim = call.v.shape[1:]
        self.chunks = self.tokens // CHUNK
        self.workspace = Workspace(self.flow, self.heads, self.chunks)
        self.tables = [KernelTable(plan, kernel, self.workspace) for kernel in plan.chunk.kernels]
        self.rows = [list(table.rows()) for table in self.tables]

    def tasks(self, kernel: KernelPlan, heads: Sequence[Task], chunk: int | None) -> Blocks:
        """Of a kernel: heads for a recurrence, else chunks; each in its column tiles."""
        tiles = kernel.traffic.kernel.column_tiles
        units = list(heads)
        if not kernel.traffic.recurrent:
            chunks = range(self.chunks) if chunk is None else [chunk]
            units = [chunk_of(head, index) for head in heads for index in chunks]
        parts = [part for unit in units for part in column_parts(unit, tiles)]
        return deal(parts, self.plan.chip.cores)

    def segments(self) -> list[list[Task]]:
        """The heads, by segments of the sequence."""
        count = min(self.flow.segments, self.chunks)
        ends = [CHUNK * (self.chunks * part // count) for part in range(count + 1)]
        return [
            [Task(begin, end - begin, 0, head, 0, self.dim, begin) for head in range(self.heads)]
            for begin, end in pairwise(ends)
        ]

    def program(self, kernels: Sequence[int]) -> torch.Tensor:
        peaks = self.plan.peak_bytes
        header = [len(kernels), peaks["ub"], peaks["l1"], peaks["l0a"], peaks["l0b"], peaks["l0c"], 0, 0]
        phases: list[int] = []
        steps: list[int] = []
        first = 8 + 8 * len(kernels)
        for index in kernels:
            kernel, rows = self.plan.chunk.kernels[index], self.rows[index]
            state = self.tables[index].at("ub:s") if kernel.traffic.recurrent else 0
            keeps = kernel.traffic.kernel.stores_states
            places = self.workspace.place(self.flow.graph.state_in.name) if keeps else (0, 0, 0)
            phases += [first + len(steps), len(rows), int(kernel.traffic.recurrent), state, int(keeps), *places]
            for row in rows:
                steps += row.numbers()
        return ints([*header, *phases, *steps])

    def run(self) -> PlannedResult:
        call, heads = self.call, self.heads
        bounds = [0, self.tokens]
        assert call.initial_state is not None
        gates, beta = (padded(x.float().flatten(0, 1), bounds) for x in (call.g, call.beta))
        initial = call.initial_state.float().contiguous()
        o = torch.full(call.v.shape, float("nan"), dtype=torch.float16)
        final = torch.full((1, heads, self.dim, self.dim), float("nan"))
        between = [torch.empty_like(final) for _ in self.segments()[1:]]
        workspace = torch.empty(max(1, self.workspace.blocks) * BLOCK, dtype=torch.uint8)
        if not self.flow.resident:
            self._states(workspace)[:, 0] = _blocked(initial[0])
        sizes = [heads, heads, self.dim, self.dim, gates.shape[1], 1, 1, 0, 1, 0, 0, 0]
        launches = 0
        with Session(self.plan.chip.name) as session:
            inputs = {"q": call.q, "k": call.k, "v": call.v, "g": gates, "beta": beta, "initial_state": initial}
            fixed = [session.register(name, tensor.contiguous(), "in") for name, tensor in inputs.items()]
            session.register("o", o, "out")
            session.register("workspace", workspace, "workspace", written=not self.flow.resident)
            for state in between:
                session.register("state between segments", state, "workspace")
            if self.flow.resident:
                session.register("final_state", final, "out")
            ends = [fixed[5], *between, final]
            for kernels, segment, blocks in self._launches(session):
                tasks, block_tasks = _tables(blocks)
                states = (ends[segment], o, ends[segment + 1])
                arguments = [*fixed[:5], states[0], o, states[2], workspace, tasks, block_tasks, ints(sizes)]
                session.launch("planned", len(block_tasks) // len(kernels) - 1, [*arguments, self.program(kernels)])
                launches += 1
            session.check_outputs()
            counters = session.counters()
        if not self.flow.resident:
            final = _rows(self._states(workspace)[:, -1])[None]
        # As a plan counts states: what a segment leaves and what the next is given, though here they are one tensor.
        held = [*fixed, *between, *between, final]
        device = sum(tensor.numel() * tensor.element_size() for tensor in held) + self.workspace.blocks * BLOCK
        return PlannedResult(o, final, counters, device, launches)

    def _launches(self, session: Session) -> Iterator[tuple[list[int], int, list[Blocks]]]:
        """(kernels, segment, tasks of each kernel) of one launch after another."""
        plans = self.plan.chunk.kernels
        whole = [Task(0, self.tokens, 0, head, 0, self.dim, 0) for head in range(self.heads)]
        everything = list(range(len(plans)))
        if not self.flow.resident:
            for chunk in range(self.chunks):
                for index in everything:
                    yield [index], 0, [self.tasks(plans[index], whole, chunk)]
        elif self.plan.launches == 1 and len(plans) > 1:
            session.cooperate()
            yield everything, 0, [self.tasks(kernel, whole, None) for kernel in plans]
        else:
            for index in everything:
                if not plans[index].traffic.recurrent:
                    yield [index], 0, [self.tasks(plans[index], whole, None)]
                    continue
                for segment, heads in enumerate(self.segments()):
                    yield [index], segment, [self.tasks(plans[index], heads, None)]

    def _states(self, workspace: torch.Tensor) -> torch.Tensor:
        """[heads, chunks + 1, blocked state]: where a state that stays on no core lies."""
        base, head, _ = self.workspace.place(self.flow.graph.state_in.name)
        part = workspace[base * BLOCK : (base + self.heads * head) * BLOCK]
        return part.view(torch.float32).view(self.heads, self.chunks + 1, self.dim * self.dim)


def _blocked(state: torch.Tensor) -> torch.Tensor:
    """[..., R, C] as strips of 16 columns, flat."""
    *batch, rows, columns = state.shape
    return state.reshape(*batch, rows, columns // TILE, TILE).transpose(-3, -2).reshape(*batch, -1)


def _rows(flat: torch.Tensor) -> torch.Tensor:
    """The inverse of `_blocked` for a square tile."""
    size = int(flat.shape[-1] ** 0.5)
    return (
        flat.reshape(*flat.shape[:-1], size // TILE, size, TILE).transpose(-3, -2).reshape(*flat.shape[:-1], size, size)
    )


def _tables(phases: list[Blocks]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tasks of all kernels of a launch, and for each of them the first task of each block."""
    count = max(len(blocks) for blocks in phases)
    tasks, bounds, done = [], [], 0
    for blocks in phases:
        rows, starts = task_table([*blocks, *([[]] * (count - len(blocks)))])
        tasks.append(rows)
        bounds.append(starts + done)
        done += len(rows)
    return torch.cat(tasks), torch.cat(bounds)
