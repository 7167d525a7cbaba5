"""Layouts of the tiles in UB: dense or blocked, and where a tile is transformed (paper, section 6).

The matrix unit makes and takes blocked tiles; global memory holds dense ones. A vector step runs in one of the two
layouts and needs its tiles in it; a tile is transformed at most once, after which both forms are there. Inside a chunk
the cheapest choice is found exactly, by running through the steps and keeping, for every combination of forms of the
tiles still needed, the least cost so far. Between chunks only the layout of the state passes:
D_i(s) = min_p [D_{i-1}(p) + c(p, s)].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from vllm_ext.ha_npu.graph import Graph, Node
from vllm_ext.ha_npu.lowering import FP32, VECTOR_REPEAT_BYTES

DENSE, BLOCKED = "dense", "blocked"
LAYOUTS = (DENSE, BLOCKED)
ROW_KINDS = frozenset({"cumsum", "exp_tail", "exp_last", "exp_from_middle", "exp_to_middle"})
"""Kinds that walk down the rows of a tile: a blocked tile breaks each row into strips of 16 columns."""


@dataclass(frozen=True)
class LayoutCosts:
    """Cycles, by assumption rather than measurement; what matters is their ratio.

    transform       passes over a tile to bring it into the other layout
    blocked_rows    how much longer a row-walking step takes on a blocked tile
    blocked_other   the same for element-by-element steps, masks and scalings by row
    """

    transform: float = 2.0
    blocked_rows: float = 4.0
    blocked_other: float = 1.0

    def __post_init__(self) -> None:
        if min(self.blocked_rows, self.blocked_other) < 1 or self.transform < 0:
            raise ValueError(f"ha_npu: layout costs must not make blocked steps faster than dense ones: {self}")


@dataclass(frozen=True)
class LayoutPlan:
    """The layouts of one chunk in the steady state.

    steps           per vector step, the layout it runs in
    transforms      the tiles that are transformed, with the layout they are brought into
    chunk_cost      cycles of a chunk; `total_cost` of all chunks, the state's first and last transform included
    """

    steps: Mapping[str, str]
    transforms: tuple[tuple[str, str], ...]
    chunk_cost: float
    total_cost: float
    state: tuple[str, ...]


@dataclass(frozen=True)
class _Layouts:
    """The nodes that matter to layouts, and their costs. Only UB tiles take part."""

    graph: Graph
    costs: LayoutCosts
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, graph: Graph, costs: LayoutCosts) -> _Layouts:
        return cls(graph, costs, tuple(n for n in graph.nodes.values() if _touches_tiles(graph, n)))

    def repeats(self, name: str) -> float:
        return self.graph.tensors[name].elements * FP32 / VECTOR_REPEAT_BYTES

    def run_cost(self, node: Node, layout: str) -> float:
        if node.unit != "vector":
            return 0.0
        slow = self.costs.blocked_rows if node.kind in ROW_KINDS else self.costs.blocked_other
        return self.repeats(node.name) * (slow if layout == BLOCKED else 1.0)

    def transform_cost(self, name: str) -> float:
        return self.costs.transform * self.repeats(name)

    def choices(self, node: Node, state_out: str | None) -> tuple[str, ...]:
        """The layouts a node can run in."""
        if node.unit != "vector":
            return (BLOCKED,)
        if self.graph.tensors[node.name].role == "state_out" and state_out is not None:
            return (state_out,)
        return LAYOUTS

    def needs(self, node: Node, layout: str) -> list[tuple[str, str]]:
        """(tile, layout) pairs a node needs. Operands that come straight from global memory are blocked by the copy."""
        if node.unit == "vector":
            return [(name, layout) for name in _tiles(self.graph, node)]
        tiles = _tiles(self.graph, node)
        return [(name, BLOCKED) for name in tiles if self.graph.tensors[name].role != "input"]

    def last_uses(self) -> dict[str, int]:
        uses: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            for name in _tiles(self.graph, node):
                uses[name] = index
        return uses


def _tiles(graph: Graph, node: Node) -> list[str]:
    return list(dict.fromkeys(name for name in node.inputs if not graph.tensors[name].is_vector))


def _touches_tiles(graph: Graph, node: Node) -> bool:
    return bool(_tiles(graph, node)) or not graph.tensors[node.name].is_vector


def vector_nodes(graph: Graph) -> list[str]:
    """The vector steps on tiles: those with a choice of layout."""
    return [n.name for n in graph.nodes.values() if n.unit == "vector" and _touches_tiles(graph, n)]


def assignment_cost(
    graph: Graph, costs: LayoutCosts, steps: Mapping[str, str], state_in: str
) -> tuple[float, tuple[tuple[str, str], ...]]:
    """Cost of a chunk, and the transforms it takes, when every vector step's layout is given."""
    layouts = _Layouts.of(graph, costs)
    made = {tensor.name: DENSE for tensor in graph.by_role("input")}
    made |= {tensor.name: state_in for tensor in graph.by_role("state_in")}
    total = 0.0
    transforms: dict[tuple[str, str], None] = {}
    for node in layouts.nodes:
        layout = steps.get(node.name, BLOCKED)
        total += layouts.run_cost(node, layout)
        for name, wanted in layouts.needs(node, layout):
            if made[name] != wanted:
                transforms[(name, wanted)] = None
        if not graph.tensors[node.name].is_vector:
            made[node.name] = layout
    for tensor in graph.by_role("output"):
        if not tensor.is_vector and made[tensor.name] != DENSE:
            transforms[(tensor.name, DENSE)] = None
    return total + sum(layouts.transform_cost(name) for name, _ in transforms), tuple(transforms)


def chunk_choice(graph: Graph, costs: LayoutCosts, state_in: str, state_out: str) -> tuple[float, dict[str, str]]:
    """The least cost of a chunk between two layouts of the state, and the layouts that reach it."""
    layouts = _Layouts.of(graph, costs)
    last = layouts.last_uses()
    Forms = tuple[tuple[str, frozenset[str]], ...]
    start: Forms = tuple(
        (t.name, frozenset({state_in if t.role == "state_in" else DENSE})) for t in graph.by_role("input", "state_in")
    )
    table: dict[Forms, tuple[float, tuple[tuple[str, str], ...]]] = {start: (0.0, ())}
    outputs = {tensor.name for tensor in graph.by_role("output")}
    for index, node in enumerate(layouts.nodes):
        following: dict[Forms, tuple[float, tuple[tuple[str, str], ...]]] = {}
        for forms, (cost, path) in table.items():
            for layout in layouts.choices(node, state_out):
                held = dict(forms)
                added = layouts.run_cost(node, layout)
                for name, wanted in layouts.needs(node, layout):
                    if wanted not in held[name]:
                        added += layouts.transform_cost(name)
                        held[name] = held[name] | {wanted}
                held[node.name] = frozenset({layout})
                if node.name in outputs and layout != DENSE:
                    added += layouts.transform_cost(node.name)
                key = tuple(sorted((n, f) for n, f in held.items() if last.get(n, -1) > index))
                steps = (*path, (node.name, layout)) if node.unit == "vector" else path
                if key not in following or cost + added < following[key][0]:
                    following[key] = (cost + added, steps)
        table = following
    cost, path = min(table.values(), key=lambda entry: entry[0])
    return cost, dict(path)


def brute_force_choice(graph: Graph, costs: LayoutCosts, state_in: str, state_out: str) -> float:
    """The least cost over every assignment of layouts. Exponential in the number of vector steps."""
    names = vector_nodes(graph)
    best = float("inf")
    for combination in product(LAYOUTS, repeat=len(names)):
        steps = dict(zip(names, combination, strict=True))
        if steps[graph.state_out.name] == state_out:
            best = min(best, assignment_cost(graph, costs, steps, state_in)[0])
    return best


def state_programme(
    transition: Mapping[tuple[str, str], float], chunks: int, ends: Mapping[str, float]
) -> tuple[float, tuple[str, ...]]:
    """min over the layouts of the state along `chunks` chunks, in time linear in them.

    transition      cost of a chunk between two layouts of the state
    ends            cost of a layout of the state at either end, where global memory holds it dense
    Returns the least total and the layouts from the first state to the last.
    """
    least = dict(ends)
    back: list[dict[str, str]] = []
    for _ in range(chunks):
        step: dict[str, float] = {}
        origin: dict[str, str] = {}
        for s in LAYOUTS:
            p = min(LAYOUTS, key=lambda p, s=s: least[p] + transition[p, s])  # type: ignore[misc]
            step[s], origin[s] = least[p] + transition[p, s], p
        least = step
        back.append(origin)
    last = min(LAYOUTS, key=lambda s: least[s] + ends[s])
    path = [last]
    for origin in reversed(back):
        path.append(origin[path[-1]])
    return least[last] + ends[last], tuple(reversed(path))


def plan_layouts(graph: Graph, chunks: int, costs: LayoutCosts | None = None) -> LayoutPlan:
    """The layout plan of a head of `chunks` chunks."""
    costs = costs or LayoutCosts()
    choices = {(p, s): chunk_choice(graph, costs, p, s) for p in LAYOUTS for s in LAYOUTS}
    edge = _Layouts.of(graph, costs).transform_cost(graph.state_in.name)
    total, states = state_programme(
        {pair: cost for pair, (cost, _) in choices.items()}, chunks, {DENSE: 0.0, BLOCKED: edge}
    )
    # Long runs settle on one layout of the state; the middle of the run is the steady state.
    middle = len(states) // 2
    pair = (states[max(middle - 1, 0)], states[middle]) if chunks else (states[0], states[0])
    cost, steps = choices[pair]
    _, transforms = assignment_cost(graph, costs, steps, pair[0])
    return LayoutPlan(steps, transforms, cost, total, states)


def fixed_layout_cost(graph: Graph, layout: str, costs: LayoutCosts | None = None) -> tuple[float, int]:
    """(cost, transforms) of a chunk with every vector step in one layout: what there is without planning."""
    steps = dict.fromkeys(vector_nodes(graph), layout)
    cost, transforms = assignment_cost(graph, costs or LayoutCosts(), steps, layout)
    return cost, len(transforms)


def fixed_layout_transforms(graph: Graph, layout: str) -> tuple[tuple[str, str], ...]:
    """The transforms of `fixed_layout_cost`."""
    return assignment_cost(graph, LayoutCosts(), dict.fromkeys(vector_nodes(graph), layout), layout)[1]
