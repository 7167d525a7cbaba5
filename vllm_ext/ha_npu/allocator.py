"""Lifetimes of items under an order of steps, and their offsets in each buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_ext.ha_npu.first_fit import Job, Placement, best_fit
from vllm_ext.ha_npu.lowering import Program


@dataclass(frozen=True)
class Lifetime:
    """An item's first and last step, as positions in the order. `root` is the item whose place it takes over."""

    item: str
    root: str
    start: int
    end: int


@dataclass(frozen=True)
class Allocation:
    """Places of all items; `peak` is the highest byte in use by buffer, `live` the largest sum of sizes in use at once.

    occupancy   bytes in use at each step, by buffer
    """

    placements: Mapping[str, Placement]
    peak: Mapping[str, int]
    live: Mapping[str, int]
    occupancy: Mapping[str, tuple[int, ...]]


def lifetimes(program: Program, order: Sequence[str]) -> dict[str, Lifetime]:
    """When each item is in use. Raises ValueError when the order leaves out a step or breaks a dependency."""
    position = {name: index for index, name in enumerate(order)}
    if len(position) != len(order) or set(position) != set(program.steps):
        raise ValueError("ha_npu: an order must name every step exactly once")
    for name, deps in program.deps.items():
        late = [dep for dep in deps if position[dep] > position[name]]
        if late:
            raise ValueError(f"ha_npu: step {name!r} comes before {late[0]!r}, which it needs")
    spans: dict[str, list[int]] = {}
    for index, name in enumerate(order):
        step = program.steps[name]
        for key in (*step.reads, *step.writes):
            spans.setdefault(key, [index, index])[1] = index
    last = len(order) - 1
    for key, item in program.items.items():
        if item.pinned:
            spans[key] = [0, last]
    roots = _take_over(program, order, spans)
    return {key: Lifetime(key, roots[key], start, end) for key, (start, end) in spans.items()}


def _take_over(program: Program, order: Sequence[str], spans: Mapping[str, list[int]]) -> dict[str, str]:
    """Let an element-by-element result take the place of an input that dies in the step."""
    roots = {key: key for key in spans}
    for index, name in enumerate(order):
        step = program.steps[name]
        if not step.in_place or not step.writes:
            continue
        out = program.items[step.writes[0]]
        dying = [
            key
            for key in step.reads
            if spans[key][1] == index
            and not program.items[key].pinned
            and program.items[key].buffer == out.buffer
            and program.items[roots[key]].nbytes >= out.nbytes
        ]
        if dying:
            roots[out.key] = roots[min(dying, key=lambda key: program.items[roots[key]].nbytes)]
    return roots


def allocate(program: Program, order: Sequence[str]) -> Allocation:
    """Give every item an offset: the best of several first-fit orders, by buffer. Pinned items come first."""
    spans = lifetimes(program, order)
    blocks: dict[str, list[int]] = {}
    for life in spans.values():
        block = blocks.setdefault(life.root, [life.start, life.end])
        block[0], block[1] = min(block[0], life.start), max(block[1], life.end)
    occupancy = _occupancy(program, order, blocks)
    placements: dict[str, Placement] = {}
    peak: dict[str, int] = {}
    for buffer in occupancy:
        base = program.static_bytes if buffer == "ub" else 0
        roots = [root for root in blocks if program.items[root].buffer == buffer]
        scratch = {
            f"{buffer}:{name}_workspace": (
                index,
                program.chip.buffers[buffer].align(program.steps[name].workspace[buffer]),
            )
            for index, name in enumerate(order)
            if buffer in program.steps[name].workspace
        }
        offsets, top = _first_fit(program, {root: (blocks[root][0], blocks[root][1]) for root in roots}, scratch)
        peak[buffer] = base + top
        for key, (index, size) in scratch.items():
            placements[key] = Placement(key, buffer, base + offsets[key], size, index, index)
        for key, life in spans.items():
            item = program.items[key]
            if item.buffer == buffer:
                placements[key] = Placement(key, buffer, base + offsets[life.root], item.nbytes, life.start, life.end)
    return Allocation(placements, peak, {key: max(values) for key, values in occupancy.items()}, occupancy)


def _occupancy(program: Program, order: Sequence[str], blocks: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    totals: dict[str, list[int]] = {}
    for buffer in ("ub", "l1", "l0c"):
        base = program.static_bytes if buffer == "ub" else 0
        totals[buffer] = [base + program.steps[name].workspace.get(buffer, 0) for name in order]
    for root, (start, end) in blocks.items():
        item = program.items[root]
        for index in range(start, end + 1):
            totals[item.buffer][index] += item.nbytes
    return {key: tuple(values) for key, values in totals.items()}


def _first_fit(
    program: Program, spans: Mapping[str, tuple[int, int]], scratch: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, int], int]:
    """Offsets that keep overlapping lifetimes apart, and the top: the best of first fit in several orders."""
    jobs: list[Job] = [(root, start, end, program.items[root].nbytes) for root, (start, end) in spans.items()]
    jobs += [(name, index, index, size) for name, (index, size) in scratch.items()]
    return best_fit(jobs, {root for root in spans if program.items[root].pinned})
