"""Lay a call out for the prefill kernels and launch them on the simulator."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ha_npu.mapping import HeadMapping
from vllm_ext.ops.linear_attention.ascend_sim.session import Counters, Session
from vllm_ext.ops.linear_attention.problem import Call

CHUNK = 64
_TASK_FIELDS = 8


@dataclass(frozen=True)
class Task:
    """Value columns [column_begin, column_begin + column_count) of one value head of one sequence, on one core."""

    token_begin: int
    token_count: int
    sequence: int
    head: int
    column_begin: int
    column_count: int
    gate_begin: int


def make_tasks(bounds: list[int], num_value_heads: int, value_dim: int, cores: int) -> list[list[Task]]:
    """Each core's tasks: whole heads while there are enough for all cores, then heads split by value columns.

    Of the heads left over after the last full round, as many are split in two as there are idle cores.
    """
    units = sorted(_units(bounds, num_value_heads, value_dim), key=lambda unit: -unit.token_count)
    rest = len(units) % cores
    whole, tail = units[: len(units) - rest], units[len(units) - rest :]
    splits = min(rest, cores - rest) if value_dim >= 64 else 0
    parts: list[Task] = []
    for index, unit in enumerate(tail):
        if index < splits:
            parts += _parts(unit, 2)
        else:
            parts.append(unit)
    blocks: list[list[Task]] = [[] for _ in range(min(cores, max(1, len(units) if not splits else cores)))]
    for index, unit in enumerate([*whole, *parts]):
        blocks[index % len(blocks)].append(unit)
    return [block for block in blocks if block] or [[]]


def _units(bounds: list[int], num_value_heads: int, value_dim: int) -> list[Task]:
    """Every value head of every sequence, whole."""
    units: list[Task] = []
    gate_begin = 0
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        units += [Task(begin, end - begin, sequence, head, 0, value_dim, gate_begin) for head in range(num_value_heads)]
        gate_begin += -(-(end - begin) // CHUNK) * CHUNK
    return units


Blocks = list[list[Task]]
PHASES = {"whole": 0, "map": 1, "reduce": 2, "output": 3}
STAGES = ("cumsum", "kkt", "solve", "wu", "h", "o")
_LOWER_HALVES = 10 * 16 * 16


def chunk_head_chunk_launches(heads: list[Task], parts: int, cores: int) -> list[tuple[str, Blocks]]:
    """The three launches of chunk-head-chunk for whole heads given as tasks: chunks, column parts of heads, chunks."""
    chunks = [_chunk_of(task, chunk) for task in heads for chunk in range(-(-task.token_count // CHUNK))]
    columns = [part for task in heads for part in _parts(task, parts)]
    return [("map", _deal(chunks, cores)), ("reduce", _deal(columns, cores)), ("output", _deal(chunks, cores))]


def planned_launches(mapping: HeadMapping, bounds: list[int], value_dim: int) -> list[tuple[str, Blocks]]:
    """The launches of a plan's mapping: whole heads and column parts in one, then chunk-head-chunk for the rest."""
    heads = {
        (task.sequence, task.head): task for task in _units(bounds, 1 + max(p.head for p in mapping.pieces), value_dim)
    }
    blocks: dict[str, Blocks] = {}
    for piece in sorted(mapping.pieces, key=lambda piece: piece.start):
        head = heads[piece.sequence, piece.head]
        phase = piece.phase or "whole"
        if phase in ("whole", "reduce"):
            tasks = [_parts(head, piece.parts)[piece.part]]
        else:
            chunks = -(-head.token_count // CHUNK)
            first, last = (chunks * part // piece.parts for part in (piece.part, piece.part + 1))
            tasks = [_chunk_of(head, chunk) for chunk in range(first, last)]
        blocks.setdefault(phase, [[] for _ in range(mapping.cores)])[piece.core] += tasks
    empty = [task for task in heads.values() if task.token_count == 0]
    if empty:
        blocks.setdefault("whole", [[]])[0] += empty
    return [(phase, blocks[phase]) for phase in PHASES if phase in blocks]


def staged_launches(heads: list[Task], cores: int) -> list[tuple[str, Blocks]]:
    """The six launches of flash-linear-attention's dataflow: chunks, but for the recurrence, which runs by heads."""
    chunks = [_chunk_of(task, chunk) for task in heads for chunk in range(-(-task.token_count // CHUNK))]
    halves = {
        "h": [part for task in heads for part in _parts(task, 2)],
        "o": [part for chunk in chunks for part in _parts(chunk, 2)],
    }
    return [(stage, _deal(halves.get(stage, chunks), cores)) for stage in STAGES]


def _chunk_of(task: Task, chunk: int) -> Task:
    done = chunk * CHUNK
    count = min(CHUNK, task.token_count - done)
    return replace(task, token_begin=task.token_begin + done, token_count=count, gate_begin=task.gate_begin + done)


def _parts(task: Task, parts: int) -> list[Task]:
    width = task.column_count // parts
    return [replace(task, column_begin=task.column_begin + part * width, column_count=width) for part in range(parts)]


def _deal(tasks: list[Task], cores: int) -> Blocks:
    """Tasks to cores in turn."""
    return [tasks[core::cores] for core in range(min(cores, len(tasks)))] or [[]]


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
    mutation: tuple[str, str, int] | None = None,
    watch_places: bool = False,
) -> Result:
    """Run "gdn" or "kda" prefill, or "fla_gdn", the staged baseline (V-first states, K = V = 128, not normalised).

    Work is dealt to cores as the planner says; `blocks` replaces that by one launch of these tasks, `launches` by
    several: (phase, blocks) one after another, phases as in `PHASES`. The last two arguments are for tests.

    Raises SimulatorViolation when the kernel breaks a rule of the chip.
    """
    num_heads, key_dim = call.q.shape[2:]
    num_value_heads, value_dim = call.v.shape[2:]
    bounds = call.sequence_bounds()
    gates = _padded(call.g.float().flatten(0, 1), bounds)
    beta = _padded(call.beta.float().flatten(0, 1), bounds)
    states = (len(bounds) - 1, num_value_heads, key_dim, value_dim)
    if call.state_v_first:
        states = (*states[:2], value_dim, key_dim)
    initial = None if call.initial_state is None else call.initial_state.to(state_dtype).contiguous()
    o = torch.full(call.v.shape, float("nan"), dtype=torch.float16)
    final = torch.full(states, float("nan"), dtype=state_dtype) if call.output_final_state else None
    if launches is None:
        launches = [("whole", blocks)] if blocks is not None else default_launches(op, call, chip)
    scale_bits = struct.unpack("<i", struct.pack("<f", call.scale))[0]
    sizes = [num_heads, num_value_heads, key_dim, value_dim, gates.shape[1]]
    options = [initial is not None, final is not None, state_dtype == torch.float16]
    options += [call.state_v_first, call.use_qk_l2norm_in_kernel]
    workspace = None
    if any(phase != "whole" for phase, _ in launches):
        units = num_value_heads * gates.shape[1] // CHUNK
        halves = 2 * _LOWER_HALVES + (CHUNK + key_dim) * value_dim
        if op.startswith("fla"):
            halves = 2 * CHUNK + 3 * CHUNK * CHUNK + 3 * CHUNK * value_dim + key_dim * value_dim
        workspace = torch.empty(units * halves, dtype=torch.float16)
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
            tasks, block_tasks = _task_table(phase_blocks)
            number = STAGES.index(phase) if phase in STAGES else PHASES[phase]
            shape = _ints([*sizes, *options, scale_bits, number])
            session.launch(
                op if phase in STAGES else f"{op}_prefill", len(phase_blocks), [*arguments, tasks, block_tasks, shape]
            )
        session.check_outputs()
        return Result(o, final, session.counters(), session.places() if watch_places else set())


def _padded(values: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """[tokens, HV, ...] to [HV, padded tokens, ...]: each sequence begins at a multiple of a chunk, zeros fill up."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    total = sum(-(-length // CHUNK) * CHUNK for length in lengths)
    out = values.new_zeros(values.shape[1], max(total, CHUNK), *values.shape[2:])
    at = 0
    for begin, length in zip(bounds, lengths, strict=False):
        out[:, at : at + length] = values[begin : begin + length].transpose(0, 1)
        at += -(-length // CHUNK) * CHUNK
    return out


def _task_table(blocks: list[list[Task]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [tasks, 8] and the first task of each block, one more at the end."""
    rows = [
        [t.token_begin, t.token_count, t.sequence, t.head, t.column_begin, t.column_count, t.gate_begin, 0]
        for block in blocks
        for t in block
    ]
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block))
    return _ints(rows or [[0] * _TASK_FIELDS]), _ints(starts)


def _ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
