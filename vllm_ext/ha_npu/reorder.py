"""Orders of the steps of a chunk: the paper's, a lifetime-aware one, and a proof of how good an order can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ext.ha_npu.lowering import Program, Step

SEARCHED_BUFFER = "ub"


def _emit(program: Program, targets: Iterable[str]) -> list[str]:
    """Each target after what it still needs, needs first seen first emitted."""
    rank = {name: index for index, name in enumerate(program.steps)}
    order: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in order:
            for dep in sorted(program.deps[name], key=rank.__getitem__):
                visit(dep)
            order[name] = None

    for target in targets:
        visit(target)
    return list(order)


def depends_on(program: Program, unit: str) -> dict[str, bool]:
    """Whether each step waits, directly or not, for a step of that unit (itself included)."""
    found: dict[str, bool] = {}

    def visit(name: str) -> bool:
        if name not in found:
            own = program.steps[name].unit == unit
            found[name] = own or any(visit(dep) for dep in program.deps[name])
        return found[name]

    for name in program.steps:
        visit(name)
    return found


def _operator_rank(step: Step) -> tuple[int, int]:
    """Operators in order, the update of the state (the second half of 5) last: chunk-first."""
    return (7 if step.phase == "update" else step.operator, {"read": 0, "update": 1}.get(step.phase, 0))


def operator_order(program: Program) -> list[str]:
    """The paper's order: inputs, gates, all products that need no inversion together, then operators 2, 3, 4, 5-read, 6
    and 5-update (section 5, chunk-first and GEMM-first)."""
    steps = program.steps
    solved = depends_on(program, "solve")
    by_operator = sorted(steps.values(), key=_operator_rank)
    targets = [step.name for step in steps.values() if step.unit == "load"]
    targets += [step.name for step in by_operator if step.operator == 1 and step.unit == "vector"]
    early = [s for s in by_operator if s.unit in ("matrix", "drain") and not solved[s.name] and s.phase != "update"]
    if any(solved.values()):
        targets += [step.name for step in early]
    targets += [step.name for step in by_operator if step.operator > 1]
    targets += [step.name for step in steps.values()]
    return _emit(program, targets)


@dataclass(frozen=True)
class _Masks:
    """The program as bit masks: one bit a step."""

    names: tuple[str, ...]
    deps: tuple[int, ...]
    readers: Mapping[str, int]
    program: Program

    @classmethod
    def of(cls, program: Program) -> _Masks:
        names = tuple(program.steps)
        bit = {name: 1 << index for index, name in enumerate(names)}
        readers = dict.fromkeys(program.items, 0)
        for step in program.steps.values():
            for item in (*step.reads, *step.writes):
                readers[item] |= bit[step.name]
        deps = tuple(sum(bit[dep] for dep in program.deps[name]) for name in names)
        return cls(names, deps, readers, program)

    def run(self, index: int, done: int) -> tuple[int, int, int]:
        """(bytes added during the step, net change after it, change of L0C) for a step that runs after `done`."""
        program = self.program
        step = program.steps[self.names[index]]
        after = done | (1 << index)
        made = freed = accumulator = 0
        reusable: list[int] = []
        size = 0
        for key in step.writes:
            item = program.items[key]
            if item.pinned:
                continue
            if item.buffer == SEARCHED_BUFFER:
                made += item.nbytes
                size = item.nbytes
            elif item.buffer == "l0c":
                accumulator += item.nbytes
        for key in step.reads:
            item = program.items[key]
            if item.pinned or self.readers[key] & ~after:
                continue
            if item.buffer == SEARCHED_BUFFER:
                freed += item.nbytes
                reusable.append(item.nbytes)
            elif item.buffer == "l0c":
                accumulator -= item.nbytes
        taken = size if step.in_place and any(value >= size for value in reusable) else 0
        return made - taken + step.workspace.get(SEARCHED_BUFFER, 0), made - freed, accumulator

    def ready(self, done: int) -> list[int]:
        return [i for i, deps in enumerate(self.deps) if not done >> i & 1 and deps & ~done == 0]

    def base(self) -> int:
        pinned = sum(i.nbytes for i in self.program.items.values() if i.pinned and i.buffer == SEARCHED_BUFFER)
        return self.program.static_bytes + pinned


def lifetime_order(program: Program, *, width: int = 24) -> list[str]:
    """A lifetime-aware order: beam search over the sets of finished steps for the lowest peak of UB.

    L0C is kept within its capacity. Ties go to the lower occupancy along the way, then to the operators' order.
    """
    masks = _Masks.of(program)
    limit = program.chip.buffers["l0c"].usable
    base = masks.base()
    beam: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {0: (base, base, 0, 0, ())}
    for _ in masks.names:
        following: dict[int, tuple[int, int, int, int, tuple[int, ...]]] = {}
        for done, (peak, live, area, accumulator, path) in beam.items():
            for index in masks.ready(done):
                during, change, l0c = masks.run(index, done)
                if limit and accumulator + l0c > limit:
                    continue
                after = done | (1 << index)
                entry = (
                    max(peak, live + during),
                    live + change,
                    area + live + change,
                    accumulator + l0c,
                    (*path, index),
                )
                if after not in following or entry < following[after]:
                    following[after] = entry
        if not following:
            raise ValueError(
                f"ha_npu: {program.chip.name}: no order of {program.graph.op} keeps its products within the {limit} "
                "bytes of L0C; take a smaller head_dim or chunk_size"
            )
        kept = sorted(following.items(), key=lambda pair: pair[1])[:width]
        beam = dict(kept)
    ((_, (_, _, _, _, path)),) = beam.items()
    return [masks.names[index] for index in path]


@dataclass(frozen=True)
class Proof:
    """Whether some order stays under a bound of UB, and after how many sets of finished steps that was known."""

    bound: int
    order: tuple[str, ...] | None
    states: int
    complete: bool


def order_below(program: Program, bound: int, *, max_states: int = 2_000_000) -> Proof:
    """Search all orders for one whose peak of UB stays below `bound` bytes. Exhaustive unless `complete` is false.

    A ready step that fits now and leaves no more in use than before is taken at once: delaying it never helps.
    """
    masks = _Masks.of(program)
    limit = program.chip.buffers["l0c"].usable
    full = (1 << len(masks.names)) - 1
    seen: set[int] = set()
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, masks.base(), 0, ())]
    while stack:
        done, live, accumulator, path = stack.pop()
        if done == full:
            return Proof(bound, tuple(masks.names[index] for index in path), len(seen), True)
        if done in seen:
            continue
        seen.add(done)
        if len(seen) > max_states:
            return Proof(bound, None, len(seen), False)
        options: list[tuple[int, int, int, int]] = []
        for index in masks.ready(done):
            during, change, l0c = masks.run(index, done)
            if live + during >= bound or (limit and accumulator + l0c > limit):
                continue
            if change <= 0 and l0c <= 0:
                options = [(change, index, change, l0c)]
                break
            options.append((change, index, change, l0c))
        for _, index, change, l0c in sorted(options, reverse=True):
            stack.append((done | (1 << index), live + change, accumulator + l0c, (*path, index)))
    return Proof(bound, None, len(seen), True)


def best_order(program: Program, *, max_states: int = 2_000_000) -> tuple[list[str], int, bool]:
    """(order, its peak of live bytes, whether that is proven the least), by tightening the bound until none is left."""
    order = lifetime_order(program)
    peak = live_peak(program, order)
    while True:
        proof = order_below(program, peak, max_states=max_states)
        if proof.order is None:
            return order, peak, proof.complete
        order = list(proof.order)
        peak = live_peak(program, order)


def live_peak(program: Program, order: Sequence[str]) -> int:
    """The largest number of bytes of UB in use at once under an order."""
    masks = _Masks.of(program)
    position = {name: index for index, name in enumerate(masks.names)}
    done, live = 0, masks.base()
    peak = live
    for name in order:
        index = position[name]
        during, change, _ = masks.run(index, done)
        peak = max(peak, live + during)
        live += change
        done |= 1 << index
    return peak


ORDERS: Mapping[str, Callable[[Program], list[str]]] = {"operator": operator_order, "lifetime": lifetime_order}
