from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu import first_fit
from vllm_ext.ha_npu.allocator import allocate, lifetimes
from vllm_ext.ha_npu.chips import Chip, load_chip
from vllm_ext.ha_npu.graph import Graph, Node, Tensor
from vllm_ext.ha_npu.lowering import Program, lower
from vllm_ext.ha_npu.operators import OPERATORS, build_graph
from vllm_ext.ha_npu.reorder import best_order, lifetime_order, live_peak, operator_order, order_below
from vllm_ext.ha_npu.rewrite import gemm_first
from vllm_ext.ha_npu.spill import _candidates, _cost, cheapest_spill

KIB = 1024
OPS = sorted(OPERATORS)


def program(op: str, chip: str = "310p1", *, in_place: bool = True) -> Program:
    return lower(gemm_first(build_graph(op))[0], load_chip(chip), state_in_place=in_place)


def random_order(of: Program, seed: int) -> list[str]:
    rng = random.Random(seed)
    order: list[str] = []
    while len(order) < len(of.steps):
        order.append(rng.choice([n for n in of.steps if n not in order and of.deps[n] <= set(order)]))
    return order


@settings(max_examples=40, deadline=None)
@given(op=st.sampled_from(OPS), in_place=st.booleans(), seed=st.integers(0, 2**32))
def test_live_items_never_share_bytes(op: str, in_place: bool, seed: int) -> None:
    """Any order at all: places are aligned and below the peak; items overlap only where one takes another's place."""
    of = program(op, in_place=in_place)
    order = random_order(of, seed)
    spans = lifetimes(of, order)
    allocation = allocate(of, order)
    assert set(allocation.placements) >= set(of.items)
    for place in allocation.placements.values():
        buffer = of.chip.buffers[place.buffer]
        assert place.offset % buffer.alignment == 0
        assert place.offset + place.nbytes <= allocation.peak[place.buffer]
        if place.buffer == "ub":
            assert place.offset >= of.static_bytes
    for one, other in combinations(allocation.placements.values(), 2):
        apart = one.end < other.start or other.end < one.start or one.buffer != other.buffer
        disjoint = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
        if not apart and not disjoint:
            assert spans[one.item].root == spans[other.item].root
            assert one.end == other.start or other.end == one.start
    for buffer, live in allocation.live.items():
        assert live <= allocation.peak[buffer]
    assert allocation.live["ub"] == live_peak(of, order)


def test_what_a_step_reads_and_what_it_writes_lie_apart() -> None:
    """Lifetimes that share one step overlap: the step reads the one while it writes the other."""
    offsets, top = first_fit.place([("a", 0, 5, 64), ("b", 5, 9, 64), ("c", 6, 9, 64)])
    assert offsets == {"a": 0, "b": 64, "c": 0}
    assert top == 128


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("in_place", [True, False])
def test_orders_respect_every_dependency(op: str, in_place: bool) -> None:
    of = program(op, in_place=in_place)
    for order in (operator_order(of), lifetime_order(of), best_order(of)[0]):
        lifetimes(of, order)
        made = {t.name for t in of.graph.by_role("state_in")}
        for name in order:
            step = of.steps[name]
            if step.unit == "load":
                made.add(step.tensor)
            elif step.tensor in of.graph.nodes and step.unit in ("vector", "matrix", "solve"):
                assert set(of.graph.nodes[step.tensor].inputs) <= made, f"{name} runs before its inputs"
                made.add(step.tensor)


def test_a_broken_order_is_refused() -> None:
    of = program("gdn")
    order = operator_order(of)
    with pytest.raises(ValueError, match="exactly once"):
        lifetimes(of, order[:-1])
    with pytest.raises(ValueError, match="which it needs"):
        lifetimes(of, order[::-1])


def test_gdn_needs_244_kib_in_the_papers_order_and_308_with_two_states() -> None:
    one, two = program("gdn"), program("gdn", in_place=False)
    assert allocate(one, operator_order(one)).peak["ub"] == 244 * KIB
    assert allocate(two, operator_order(two)).peak["ub"] == 308 * KIB
    assert load_chip("310p1").buffers["ub"].usable == 248 * KIB


def test_the_peak_is_made_of_the_tiles_it_should_be() -> None:
    """At the peak UB holds the state, [K;Q] S, KK^T, QK^T, the decays and V, next to the static part."""
    of = program("gdn")
    order = operator_order(of)
    allocation = allocate(of, order)
    at = allocation.occupancy["ub"].index(244 * KIB)
    roots = {
        lifetimes(of, order)[p.item].root
        for p in allocation.placements.values()
        if p.buffer == "ub" and p.start <= at <= p.end
    }
    assert roots == {"ub:s", "ub:k_s", "ub:q_s", "ub:kk", "ub:qk", "ub:dm", "ub:v"}
    assert of.static == {"staging": 32 * KIB, "row_vectors": 2 * KIB, "broadcast": 2 * KIB}


@pytest.mark.parametrize(("op", "least"), [("gdn", 164), ("kda", 226.75), ("gla", 192.5)])
def test_no_order_needs_less_and_the_allocator_reaches_it(op: str, least: float) -> None:
    of = program(op)
    order, peak, proven = best_order(of)
    assert proven
    assert peak == least * KIB
    assert allocate(of, order).peak["ub"] == peak
    proof = order_below(of, peak)
    assert proof.complete
    assert proof.order is None
    found = order_below(of, peak + 1).order
    assert found is not None
    assert live_peak(of, found) == peak


def test_the_heuristic_is_optimal_on_310p_and_not_always() -> None:
    """How far the beam search is from the optimum: nothing on 310P, 16 KiB for KDA with half the columns (910B)."""
    for op in OPS:
        of = program(op)
        assert live_peak(of, lifetime_order(of)) == best_order(of)[1]
    halves = program("kda", "910b4")
    assert live_peak(halves, lifetime_order(halves)) - best_order(halves)[1] == 16 * KIB


def test_a_small_l0c_is_never_overfull() -> None:
    """With room for the state's change alone, the search must drain products in time, not paint itself in."""
    chip = load_chip("310p1")
    small = replace(chip, buffers={**chip.buffers, "l0c": replace(chip.buffers["l0c"], usable=64 * KIB)})
    of = replace(lower(gemm_first(build_graph("gdn"))[0], small), product_order=("kk", "qk", "k_s", "q_s"))
    order, peak, proven = best_order(of)
    assert proven
    assert peak == 164 * KIB
    assert allocate(of, order).live["l0c"] <= 64 * KIB
    found = order_below(of, peak + 1).order
    assert found is not None
    assert allocate(of, found).live["l0c"] <= 64 * KIB


def small_program(seed: int, chip: Chip) -> Program:
    """A random graph of a few vector steps and a product, small enough to try every order."""
    rng = random.Random(seed)
    tensors = {
        "x": Tensor("x", 64, 128, role="input"),
        "y": Tensor("y", 64, 64, role="input"),
        "s": Tensor("s", 64, 64, role="state_in", token_axis=False),
    }
    nodes: dict[str, Node] = {}
    for index in range(4):
        name = f"n{index}"
        wide = rng.random() < 0.5
        kind = rng.choice(["exp", "cumsum"])
        source = rng.choice([n for n, t in tensors.items() if (t.cols == 128) == wide and t.role != "state_in"])
        nodes[name] = Node(name, kind, (source,), 1)
        tensors[name] = Tensor(name, 64, 128 if wide else 64)
    last = [n for n in nodes if not any(n in other.inputs for other in nodes.values())]
    for name in last:
        tensors[name] = replace(tensors[name], role="output")
    nodes["s_new"] = Node("s_new", "add", ("s", "y"), 5, phase="update")
    tensors["s_new"] = Tensor("s_new", 64, 64, role="state_out", token_axis=False)
    return lower(Graph("small", tensors, nodes, 64, 64), chip)


def brute_force_peak(of: Program) -> int:
    """The least peak over all orders, by listing them."""
    best = 1 << 60

    def extend(order: tuple[str, ...], left: frozenset[str]) -> None:
        nonlocal best
        if not left:
            best = min(best, max(allocate(of, order).occupancy["ub"]))
            return
        for name in left:
            if not of.deps[name] & left:
                extend((*order, name), left - {name})

    extend((), frozenset(of.steps))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_search_agrees_with_listing_every_order(seed: int) -> None:
    of = small_program(seed, load_chip("310p1"))
    order, peak, proven = best_order(of)
    assert proven
    assert peak == brute_force_peak(of)
    assert live_peak(of, order) == peak


def test_the_cheapest_spill_of_the_second_state_is_the_state() -> None:
    """Figure 4: of everything that could leave UB, the old state's FP16 operand, written and read back, costs least."""
    of = program("gdn", in_place=False)
    spill = cheapest_spill(of, operator_order(of), 248 * KIB)
    assert spill.items == ("ub:s",)
    assert spill.gm_bytes == 64 * KIB
    assert cheapest_spill(of, operator_order(of), 308 * KIB).gm_bytes == 0
    with pytest.raises(ValueError, match="no choice of spilled tensors"):
        cheapest_spill(of, operator_order(of), 100 * KIB)


@pytest.mark.parametrize("capacity", [290, 270, 250, 230])
def test_the_spill_search_agrees_with_trying_every_set(capacity: int) -> None:
    of = program("gdn", in_place=False)
    order = operator_order(of)
    spans = lifetimes(of, order)
    occupancy = allocate(of, order).occupancy["ub"]
    over = [i for i, used in enumerate(occupancy) if used > capacity * KIB]
    keys = _candidates(of, spans)
    best = None
    for count in range(len(keys) + 1):
        for chosen in combinations(keys, count) if count <= 4 else ():
            freed = {
                i: sum(
                    of.items[k].nbytes
                    for k in chosen
                    if spans[k].start <= i <= spans[k].end
                    and k not in (*of.steps[order[i]].reads, *of.steps[order[i]].writes)
                )
                for i in over
            }
            if all(occupancy[i] - freed[i] <= capacity * KIB for i in over):
                cost = sum(_cost(of, k) for k in chosen)
                best = cost if best is None else min(best, cost)
    assert cheapest_spill(of, order, capacity * KIB).gm_bytes == best
