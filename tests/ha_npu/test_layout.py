from __future__ import annotations

import time
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu.layout import (
    BLOCKED,
    DENSE,
    LAYOUTS,
    LayoutCosts,
    assignment_cost,
    brute_force_choice,
    chunk_choice,
    fixed_layout_cost,
    plan_layouts,
    state_programme,
    vector_nodes,
)
from vllm_ext.ha_npu.operators import build_graph
from vllm_ext.ha_npu.rewrite import gemm_first

COSTS = (LayoutCosts(), LayoutCosts(transform=0.5, blocked_rows=3, blocked_other=1.7))


@pytest.mark.parametrize("op", ["gdn", "gla"])
@pytest.mark.parametrize("costs", COSTS, ids=["cheap blocked", "dear blocked"])
def test_the_programme_agrees_with_every_assignment(op: str, costs: LayoutCosts) -> None:
    graph, _ = gemm_first(build_graph(op))
    assert len(vector_nodes(graph)) <= 13
    for state_in, state_out in ((DENSE, BLOCKED), (BLOCKED, BLOCKED)):
        cost, steps = chunk_choice(graph, costs, state_in, state_out)
        assert cost == pytest.approx(brute_force_choice(graph, costs, state_in, state_out))
        assert assignment_cost(graph, costs, steps, state_in)[0] == pytest.approx(cost)


@settings(max_examples=40, deadline=None)
@given(
    transition=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    edge=st.integers(0, 20),
    chunks=st.integers(0, 7),
)
def test_the_state_programme_agrees_with_every_path(transition: list[int], edge: int, chunks: int) -> None:
    costs = {pair: float(cost) for pair, cost in zip(product(LAYOUTS, LAYOUTS), transition, strict=True)}
    ends = {DENSE: 0.0, BLOCKED: float(edge)}

    def cost(path: tuple[str, ...]) -> float:
        return ends[path[0]] + ends[path[-1]] + sum(costs[pair] for pair in pairwise(path))

    total, path = state_programme(costs, chunks, ends)
    assert total == min(cost(option) for option in product(LAYOUTS, repeat=chunks + 1))
    assert len(path) == chunks + 1
    assert cost(path) == total


@pytest.mark.parametrize("op", ["gdn", "kda", "gla"])
def test_planning_beats_one_layout_throughout(op: str) -> None:
    """No step of GDN walks down the rows of a tile, so that all blocked is as good there; KDA's cumsum does."""
    graph, _ = gemm_first(build_graph(op))
    plan = plan_layouts(graph, 64)
    dense, transforms = fixed_layout_cost(graph, DENSE)
    assert plan.chunk_cost < dense
    assert len(plan.transforms) < transforms
    blocked, _ = fixed_layout_cost(graph, BLOCKED)
    assert plan.chunk_cost == blocked if op == "gdn" else plan.chunk_cost < blocked
    assert plan.total_cost <= 64 * plan.chunk_cost + 2 * 256 * COSTS[0].transform


def test_dear_blocked_steps_make_the_chain_dense() -> None:
    """The trade-off goes both ways: with free transforms and slow blocked steps everything is dense."""
    graph, _ = gemm_first(build_graph("gdn"))
    plan = plan_layouts(graph, 16, LayoutCosts(transform=0.0, blocked_rows=9.0, blocked_other=9.0))
    assert set(plan.steps.values()) == {DENSE}
    plan = plan_layouts(graph, 16, LayoutCosts(transform=50.0, blocked_rows=1.0, blocked_other=1.0))
    assert [pair for pair in plan.transforms if pair[1] == DENSE] == [("o", DENSE)]


def test_costs_that_favour_blocked_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="must not make blocked steps faster"):
        LayoutCosts(blocked_other=0.5)


def test_the_time_of_a_plan_is_linear_in_the_chunks() -> None:
    """Doubling the chunks doubles the work of the programme, 64K tokens take well under a second."""
    graph, _ = gemm_first(build_graph("gdn"))
    plan_layouts(graph, 8)
    start = time.process_time()
    short = plan_layouts(graph, 1024)
    assert time.process_time() - start < 1
    assert plan_layouts(graph, 2048).total_cost - short.total_cost == pytest.approx(1024 * short.chunk_cost)
    costs = dict.fromkeys(product(LAYOUTS, LAYOUTS), 1.0)
    visits = 0

    class Counted(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> float:
            nonlocal visits
            visits += 1
            return float(super().__getitem__(key))

    def work(chunks: int) -> int:
        nonlocal visits
        visits = 0
        state_programme(Counted(costs), chunks, {DENSE: 0.0, BLOCKED: 1.0})
        return visits

    assert work(2000) == 2 * work(1000)
