"""The picture of how tiles flow: nodes in columns by depth, edges that pass between the boxes and never behind them.

An edge over several columns has a waypoint in each column it crosses, shared by the edges of one source. Columns are
ordered by the mean place of their neighbours, keeping the order with the fewest crossings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from vllm_ext.ha_npu.graph import Graph
from vllm_ext.ha_npu.layout import BLOCKED, DENSE
from vllm_ext.ha_npu.plan import Plan

UNIT_COLOURS = {"matrix": "#4c78a8", "solve": "#b279a2", "vector": "#eeca3b", "input": "#d9d9d9"}
LAYOUT_COLOURS = {DENSE: "#2f6f2f", BLOCKED: "#b3261e"}
VECTOR_COLOUR = "#bbbbbb"
SWEEPS = 24

Point = tuple[str, int]
"""A node at its own level, or a waypoint of its edges at a later one."""


def _depths(graph: Graph) -> dict[str, int]:
    depth = {tensor.name: 0 for tensor in graph.by_role("input", "state_in")}
    for node in graph.nodes.values():
        depth[node.name] = 1 + max(depth[name] for name in node.inputs)
    return depth


def _routes(graph: Graph, depth: Mapping[str, int]) -> dict[tuple[str, str], list[Point]]:
    """Per edge, the points from the source over its waypoints to the target."""
    return {
        (source, node.name): [
            *((source, level) for level in range(depth[source], depth[node.name])),
            (node.name, depth[node.name]),
        ]
        for node in graph.nodes.values()
        for source in node.inputs
    }


def _crossings(columns: Sequence[Sequence[Point]], links: set[tuple[Point, Point]]) -> int:
    place = {point: index for column in columns for index, point in enumerate(column)}
    by_level: dict[int, list[tuple[int, int]]] = {}
    for one, other in links:
        by_level.setdefault(one[1], []).append((place[one], place[other]))
    return sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for pairs in by_level.values() for a, b in combinations(pairs, 2))


def _ordered(columns: list[list[Point]], links: set[tuple[Point, Point]]) -> list[list[Point]]:
    """The columns in the order with the fewest crossings that sweeps to and fro come by."""
    near: dict[bool, dict[Point, list[Point]]] = {True: {}, False: {}}
    for one, other in sorted(links):
        near[True].setdefault(other, []).append(one)
        near[False].setdefault(one, []).append(other)
    best = [list(column) for column in columns]
    for sweep in range(SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            place = {p: (i + 0.5) / len(other) for other in columns for i, p in enumerate(other)}

            def mean(
                point: Point, place: Mapping[Point, float] = place, beside: Mapping[Point, list[Point]] = near[forward]
            ) -> float:
                around = beside.get(point, [point])
                return sum(place[p] for p in around) / len(around)

            column.sort(key=mean)
        if _crossings(columns, links) < _crossings(best, links):
            best = [list(column) for column in columns]
    return best


def _heights(columns: Sequence[Sequence[Point]], links: set[tuple[Point, Point]]) -> dict[Point, float]:
    """Heights near the mean of a point's neighbours, one apart at least, in the order of the columns."""
    tallest = max(len(column) for column in columns)
    height = {p: (i + 0.5) * tallest / len(column) for column in columns for i, p in enumerate(column)}
    near: dict[Point, list[Point]] = {}
    for one, other in sorted(links):
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    for _ in range(SWEEPS):
        for column in columns:
            wish = [sum(height[p] for p in near[point]) / len(near[point]) for point in column]
            for index, value in enumerate(wish):
                room = tallest - (len(column) - index) + 0.5
                floor = height[column[index - 1]] + 1 if index else 0.5
                height[column[index]] = max(min(value, room), floor)
    return height


def draw_dataflow(plan: Plan) -> Any:
    """The graph of a chunk; edges show the layout a tile is used in, thick edges a transform."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    graph = plan.chunk.dataflow.graph
    depth = _depths(graph)
    routes = _routes(graph, depth)
    links = {pair for route in routes.values() for pair in pairwise(route)}
    points = sorted({(name, level) for name, level in depth.items()} | {p for pair in links for p in pair})
    columns = [[p for p in points if p[1] == level] for level in range(max(depth.values()) + 1)]
    columns = _ordered(columns, links)
    height = _heights(columns, links)
    tallest = max(len(column) for column in columns)
    figure = Figure(figsize=(1.35 * (len(columns) + 1), 0.55 * tallest + 1.2))
    axis = figure.subplots()
    transforms = set(plan.layout_plan.transforms) if plan.layout_plan else set()
    for (source, target), route in routes.items():
        colour, width = _style(plan, source, target, transforms)
        stops = [(float(level), height[name, level]) for name, level in route]
        stops[0] = (depth[source] + _half_width(source), stops[0][1])
        stops[-1] = (depth[target] - _half_width(target), stops[-1][1])
        _edge(axis, stops, colour, width)
    for name, level in depth.items():
        unit = graph.nodes[name].unit if name in graph.nodes else "input"
        box = {"boxstyle": "round,pad=0.35", "facecolor": UNIT_COLOURS[unit], "edgecolor": "#444444"}
        mark = "*" if any(tensor == name for tensor, _ in transforms) else ""
        axis.text(level, height[name, level], name + mark, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    handles: list[Any] = [Patch(facecolor=colour, label=unit) for unit, colour in UNIT_COLOURS.items()]
    lines = {f"{layout} tile": (colour, 1.1) for layout, colour in LAYOUT_COLOURS.items()}
    lines |= {"transformed tile (*)": (LAYOUT_COLOURS[BLOCKED], 2.6)} if transforms else {}
    lines["row vector"] = (VECTOR_COLOUR, 0.8)
    handles += [Line2D([0], [0], color=c, linewidth=w, label=label) for label, (c, w) in lines.items()]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=8, fontsize=8)
    axis.set(xlim=(-0.6, len(columns) - 0.4), ylim=(tallest + 0.2, -0.2))
    axis.axis("off")
    count = f"; * transformed ({len(transforms)} a chunk)" if plan.layout_plan else ""
    axis.set_title(f"{plan.strategy} {plan.op} on {plan.chip.name}: dataflow of a chunk{count}")
    return figure


def _style(plan: Plan, source: str, target: str, transforms: set[tuple[str, str]]) -> tuple[str, float]:
    """(colour, width) of an edge."""
    graph = plan.chunk.dataflow.graph
    if graph.tensors[source].is_vector:
        return VECTOR_COLOUR, 0.8
    operands = BLOCKED if plan.chip.blocked_operands else DENSE
    layout = plan.layouts.get(target, DENSE) if graph.nodes[target].unit == "vector" else operands
    return LAYOUT_COLOURS[layout], 2.6 if (source, layout) in transforms else 1.1


def _half_width(name: str) -> float:
    """Half the width of a box, and a little room, in columns."""
    return 0.08 + 0.025 * len(name)


def _edge(axis: Any, stops: Sequence[tuple[float, float]], colour: str, width: float) -> None:
    """A curve that is level at every stop, with an arrow head at the last."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    points, codes = [stops[0]], [Path.MOVETO]
    for one, other in pairwise(stops):
        middle = (one[0] + other[0]) / 2
        points += [(middle, one[1]), (middle, other[1]), other]
        codes += [Path.CURVE4] * 3
    arrow = FancyArrowPatch(
        path=Path(points, codes),
        arrowstyle="-|>",
        mutation_scale=9,
        color=colour,
        linewidth=width,
        zorder=1,
    )
    axis.add_patch(arrow)
