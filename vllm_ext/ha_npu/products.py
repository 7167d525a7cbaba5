"""Matrix products: multiply-accumulates, and the fractals their operands bring from L1 to L0.

A fractal is a 16x16 tile of FP16, 512 bytes; a 16x16x16 product is 4096 multiply-accumulates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from vllm_ext.ha_npu.graph import Graph, Node
from vllm_ext.ha_npu.inversion import TILE, inversion_counts

FRACTAL_BYTES = 512
PRODUCT_MACS = TILE**3


@dataclass(frozen=True)
class ProductPolicy:
    """How the products of a kernel use L0.

    keep            operands stay in L0 until something else needs the room; else every product brings both of its own
    capacity        bytes of L0A, and of L0B, that hold operands: half of each when the other half is being filled
    skip_zero       leave out tiles above the diagonal of triangular operands and results
    inversion       the method of `inversion.METHODS`
    """

    keep: bool
    capacity: int
    skip_zero: bool = False
    inversion: str = "neumann-merge"


@dataclass(frozen=True)
class ProductCounts:
    """Totals of a chunk: 16x16x16 products and fractals from L1 to L0, and the bytes of L0A and L0B in use at most."""

    products: int
    fractals: int
    l0a_peak: int
    l0b_peak: int

    @property
    def macs(self) -> int:
        return self.products * PRODUCT_MACS


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _triangle(tiles: int) -> int:
    return tiles * (tiles + 1) // 2


def product_tiles(graph: Graph, node: Node, *, skip_zero: bool = False) -> int:
    """16x16x16 products of one matrix node."""
    rows, columns, inner = (_tiles(size) for size in graph.matmul_shape(node))
    left, result = graph.tensors[node.inputs[0]], graph.tensors[node.name]
    if skip_zero and result.triangular:
        return _triangle(rows) * inner
    if skip_zero and left.triangular:
        return _triangle(rows) * columns
    return rows * columns * inner


def operand_fractals(graph: Graph, name: str, *, skip_zero: bool = False) -> int:
    """Fractals of one operand."""
    tensor = graph.tensors[name]
    if skip_zero and tensor.triangular:
        return _triangle(_tiles(tensor.rows))
    return _tiles(tensor.rows) * _tiles(tensor.cols)


class _OperandBuffer:
    """L0A or L0B as a store of whole operands that gives up the longest unused ones."""

    def __init__(self, policy: ProductPolicy) -> None:
        self.policy = policy
        self.held: OrderedDict[str, int] = OrderedDict()
        self.loaded = self.peak = 0

    def use(self, name: str, fractals: int) -> None:
        if self.policy.keep and name in self.held:
            self.held.move_to_end(name)
            return
        size = fractals * FRACTAL_BYTES
        if not self.policy.keep:
            self.held.clear()
        while self.held and sum(self.held.values()) + size > self.policy.capacity:
            self.held.popitem(last=False)
        # An operand larger than the room passes through it in pieces, which leaves nothing behind to use again.
        self.held[name] = min(size, self.policy.capacity)
        self.loaded += fractals
        self.peak = max(self.peak, sum(self.held.values()))
        if size > self.policy.capacity:
            del self.held[name]


def count_products(graph: Graph, order: Sequence[str], policy: ProductPolicy) -> ProductCounts:
    """Counts of the matrix nodes in `order`; an inversion among them empties L0 before and after."""
    left, right = _OperandBuffer(policy), _OperandBuffer(policy)
    products = fractals = 0
    for name in order:
        node = graph.nodes[name]
        if node.unit == "solve":
            extra_products, extra_fractals = inversion_counts(graph.chunk_size, policy.inversion)
            products += extra_products
            fractals += extra_fractals
            left.held.clear()
            right.held.clear()
        elif node.unit == "matrix":
            products += product_tiles(graph, node, skip_zero=policy.skip_zero)
            for side, operand in zip((left, right), node.inputs, strict=True):
                side.use(operand, operand_fractals(graph, operand, skip_zero=policy.skip_zero))
    return ProductCounts(products, fractals + left.loaded + right.loaded, left.peak, right.peak)


def compulsory_fractals(graph: Graph, order: Sequence[str], policy: ProductPolicy) -> int:
    """A lower bound on the fractals of these products: every operand once a side, and the inversion's own."""
    sides = {
        (side, name)
        for n in order
        if graph.nodes[n].unit == "matrix"
        for side, name in enumerate(graph.nodes[n].inputs)
    }
    total = sum(operand_fractals(graph, name, skip_zero=policy.skip_zero) for _, name in sides)
    if any(graph.nodes[name].unit == "solve" for name in order):
        total += inversion_counts(graph.chunk_size, policy.inversion)[1]
    return total


def operator_product_order(graph: Graph) -> tuple[str, ...]:
    """Products in the order of their operators, with those that need no inversion before it and the update last."""
    after: dict[str, bool] = {}
    for node in graph.nodes.values():
        after[node.name] = node.kind == "solve" or any(after.get(source, False) for source in node.inputs)

    def rank(node: Node) -> tuple[bool, int, int]:
        return (
            after[node.name] or node.phase == "update",
            0 if node.unit == "solve" else 1,
            (7 if node.phase == "update" else node.operator),
        )

    wanted = [node for node in graph.nodes.values() if node.unit != "vector"]
    return tuple(node.name for node in sorted(wanted, key=rank))


def cheapest_product_order(graph: Graph, policy: ProductPolicy) -> tuple[str, ...]:
    """The order of the products ahead of the inversion with the fewest fractals; ties keep the operators' order."""
    start = operator_product_order(graph)
    cut = next((i for i, name in enumerate(start) if graph.nodes[name].unit == "solve"), len(start))
    if cut > 7:
        raise ValueError(f"ha_npu: {graph.op}: {cut} products ahead of the inversion are too many to try every order")
    orders = [head + start[cut:] for head in permutations(start[:cut]) if _respects(graph, head)]
    return min(orders, key=lambda order: count_products(graph, order, policy).fractals)


def _respects(graph: Graph, order: Sequence[str]) -> bool:
    position = {name: index for index, name in enumerate(order)}

    def needs(name: str, found: set[str]) -> set[str]:
        for source in graph.nodes[name].inputs if name in graph.nodes else ():
            found.add(source)
            needs(source, found)
        return found

    return all(position[source] < position[name] for name in order for source in needs(name, set()) & set(position))
