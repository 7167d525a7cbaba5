"""Which core does what: tasks, and the launches they are dealt to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from vllm_ext.ha_npu.mapping import HeadMapping

CHUNK = 64


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
            parts += column_parts(unit, 2)
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
"""Of a launch: each block's tasks."""

PHASES = {"whole": 0, "map": 1, "reduce": 2, "output": 3}
LOWER_HALVES = 10 * 16 * 16
"""Elements of a lower triangle of tiles [64, 64], as the kernels pack it in global memory."""


def chunk_head_chunk_launches(heads: list[Task], parts: int, cores: int) -> list[tuple[str, Blocks]]:
    """The three launches of chunk-head-chunk for whole heads given as tasks: chunks, column parts of heads, chunks."""
    chunks = [chunk_of(task, chunk) for task in heads for chunk in range(-(-task.token_count // CHUNK))]
    columns = [part for task in heads for part in column_parts(task, parts)]
    return [("map", deal(chunks, cores)), ("reduce", deal(columns, cores)), ("output", deal(chunks, cores))]


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
            tasks = [column_parts(head, piece.parts)[piece.part]]
        else:
            chunks = -(-head.token_count // CHUNK)
            first, last = (chunks * part // piece.parts for part in (piece.part, piece.part + 1))
            tasks = [chunk_of(head, chunk) for chunk in range(first, last)]
        blocks.setdefault(phase, [[] for _ in range(mapping.cores)])[piece.core] += tasks
    empty = [task for task in heads.values() if task.token_count == 0]
    if empty:
        blocks.setdefault("whole", [[]])[0] += empty
    return [(phase, blocks[phase]) for phase in PHASES if phase in blocks]


def chunk_of(task: Task, chunk: int) -> Task:
    done = chunk * CHUNK
    count = min(CHUNK, task.token_count - done)
    return replace(task, token_begin=task.token_begin + done, token_count=count, gate_begin=task.gate_begin + done)


def column_parts(task: Task, parts: int) -> list[Task]:
    width = task.column_count // parts
    return [replace(task, column_begin=task.column_begin + part * width, column_count=width) for part in range(parts)]


def deal(tasks: list[Task], cores: int) -> Blocks:
    """Tasks to cores in turn."""
    return [tasks[core::cores] for core in range(min(cores, len(tasks)))] or [[]]
