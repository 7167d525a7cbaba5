"""What must leave UB, and what that costs, when an order of steps needs more than there is.

An item that is live, but not in use, at the peak can be written to global memory and read back later. The paper's
capacity ablation (figure 4) does this to one tensor; here the cheapest set is found by trying all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ext.ha_npu.allocator import Lifetime, allocate, lifetimes
from vllm_ext.ha_npu.lowering import FP16, Program


@dataclass(frozen=True)
class Spill:
    """Items sent to global memory in every chunk, the bytes of UB that frees, and the traffic it adds to a chunk."""

    items: tuple[str, ...]
    freed: int
    gm_bytes: int


def _cost(program: Program, key: str) -> int:
    """Bytes of writing an item and reading it back.

    An input is still in global memory. Of the old state only its FP16 operand is read again. The rest is FP32.
    """
    tensor = program.graph.tensors[program.items[key].tensor]
    if tensor.role == "input":
        return tensor.nbytes
    if tensor.role == "state_in":
        return 2 * tensor.elements * FP16
    return 2 * program.items[key].nbytes


def _candidates(program: Program, spans: Mapping[str, Lifetime]) -> list[str]:
    """Items of UB that could leave it. The state in place, and the new one out of place, are what the chunk is for."""
    in_place = program.graph.state_out.name not in {item.tensor for item in program.items.values()}
    staying = ("state_out", "state_in") if in_place else ("state_out",)
    return [
        key
        for key, item in program.items.items()
        if item.buffer == "ub" and spans[key].root == key and program.graph.tensors[item.tensor].role not in staying
    ]


def cheapest_spill(program: Program, order: Sequence[str], capacity: int) -> Spill:
    """The cheapest set of items whose absence keeps every step of `order` within `capacity` bytes of UB.

    Branch and bound over all sets. Raises ValueError when the steps' own operands do not fit.
    """
    spans = lifetimes(program, order)
    occupancy = allocate(program, order).occupancy["ub"]
    excess = {index: used - capacity for index, used in enumerate(occupancy) if used > capacity}
    candidates = sorted(_candidates(program, spans), key=lambda key: _cost(program, key))
    relief = {key: _relief(program, order, spans[key], excess) for key in candidates}
    best: tuple[int, tuple[str, ...]] | None = None

    def search(start: int, chosen: tuple[str, ...], cost: int, left: Mapping[int, int]) -> None:
        nonlocal best
        if best is not None and cost >= best[0]:
            return
        if all(bytes_over <= 0 for bytes_over in left.values()):
            best = cost, chosen
            return
        for index in range(start, len(candidates)):
            key = candidates[index]
            if any(left[step] > 0 for step in relief[key]):
                rest = {step: over - relief[key].get(step, 0) for step, over in left.items()}
                search(index + 1, (*chosen, key), cost + _cost(program, key), rest)

    search(0, (), 0, excess)
    if best is None:
        raise ValueError(f"ha_npu: no choice of spilled tensors brings UB from {max(occupancy)} to {capacity} bytes")
    return Spill(best[1], sum(program.items[key].nbytes for key in best[1]), best[0])


def _relief(program: Program, order: Sequence[str], span: Lifetime, steps: Iterable[int]) -> dict[int, int]:
    """Bytes an item gives up at those of the steps where it is live without being read or written."""
    size = program.items[span.item].nbytes
    idle = {}
    for index in steps:
        step = program.steps[order[index]]
        if span.start <= index <= span.end and span.item not in (*step.reads, *step.writes):
            idle[index] = size
    return idle
