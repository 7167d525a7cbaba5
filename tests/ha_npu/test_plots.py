from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from vllm_ext.ha_npu.allocator import Placement
from vllm_ext.ha_npu.plan import make_plan
from vllm_ext.ha_npu.plot import _shown_end
from vllm_ext.ha_npu.plot_dataflow import _crossings, _depths, _heights, _ordered, _routes

OPS = ("gdn", "kda", "gla")


def overlap(one: Placement, other: Placement, ends: dict[str, int]) -> bool:
    in_time = one.start <= ends[other.item] and other.start <= ends[one.item]
    return in_time and one.offset < other.offset + other.nbytes and other.offset < one.offset + one.nbytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", ["ha-npu", "ha-npu-tuned"])
def test_no_two_tiles_are_drawn_over_each_other(op: str, strategy: str) -> None:
    """A tile that takes another's place shares a step with it; drawn as they are, their names ran into each other."""
    plan = make_plan(op, chip="310p1", num_heads=16, num_tokens=4096, strategy=strategy)
    places = [place for place in plan.placements["fused"] if place.buffer == "ub"]
    shown = {place.item: _shown_end(place, places) for place in places}
    assert all(shown[place.item] >= place.start for place in places)
    assert not any(overlap(one, other, shown) for one, other in combinations(places, 2))
    assert any(overlap(one, other, {p.item: p.end for p in places}) for one, other in combinations(places, 2))


@pytest.mark.parametrize("op", OPS)
def test_edges_pass_between_the_boxes(op: str) -> None:
    """An edge has a place of its own in every column it crosses; straight lines used to run behind other boxes."""
    graph = make_plan(op, chip="310p1", num_heads=1, num_tokens=64).chunk.dataflow.graph
    depth = _depths(graph)
    routes = _routes(graph, depth)
    for (source, target), route in routes.items():
        assert [level for _, level in route] == list(range(depth[source], depth[target] + 1))
    links = {pair for route in routes.values() for pair in pairwise(route)}
    points = sorted({(name, level) for name, level in depth.items()} | {p for pair in links for p in pair})
    columns = [[p for p in points if p[1] == level] for level in range(max(depth.values()) + 1)]
    ordered = _ordered([list(column) for column in columns], links)
    assert [sorted(column) for column in ordered] == columns
    assert _crossings(ordered, links) < _crossings(columns, links)
    height = _heights(ordered, links)
    for column in ordered:
        assert all(height[lower] - height[upper] >= 1 - 1e-9 for upper, lower in pairwise(column))
        assert height[column[0]] > 0
        assert height[column[-1]] < max(map(len, ordered))
