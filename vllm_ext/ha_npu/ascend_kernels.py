"""The plan that the Ascend C kernels of this project follow, as strategy `ha-npu-kernel`.

HA-NPU's dataflow with the kernels' own choices, each of which the simulator's counters confirm to the last unit:
operands stay in all of L0; tiles above diagonals are left out; the diagonal tiles are inverted on the vector unit;
KDA splits its decays at every 16 rows and sums the diagonal tiles of K K^T and Q K^T on the vector unit; gates come
padded to whole chunks; a tail head by chunks stores T and P as lower triangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from vllm_ext.ha_npu.allocator import Allocation
from vllm_ext.ha_npu.ascend_tiles import (
    BELOW_FRACTALS,
    CHUNK,
    FAMILIES,
    INVENTORIES,
    KERNEL_DIMS,
    KERNEL_STRATEGY,
    LOWER_FRACTALS,
    TILE,
    TILES,
    tile_places,
)
from vllm_ext.ha_npu.chips import Chip, load_chip
from vllm_ext.ha_npu.chunk_plan import ChunkPlan, KernelPlan, transformed
from vllm_ext.ha_npu.dataflow import Dataflow, Kernel, chunk_gm_bytes, chunk_products, kernel_traffic
from vllm_ext.ha_npu.graph import Graph, Node, Tensor, replace_tensors, with_nodes
from vllm_ext.ha_npu.layout import BLOCKED, DENSE, LayoutPlan, vector_nodes
from vllm_ext.ha_npu.lowering import Item, Program, Step
from vllm_ext.ha_npu.mapping import CHUNKS, HeadMapping
from vllm_ext.ha_npu.operators import build_graph
from vllm_ext.ha_npu.products import (
    FRACTAL_BYTES,
    ProductPolicy,
    cheapest_product_order,
    count_products,
    operand_fractals,
)
from vllm_ext.ha_npu.rewrite import gemm_first


def kernel_graph_of(op: str, head_dim: int, value_first: bool = True) -> Graph:
    """The chunk as the kernels compute it, in the types in which they leave tensors in global memory."""
    graph, _ = gemm_first(build_graph(op, chunk_size=CHUNK, head_dim=head_dim, value_first=value_first))
    graph = _row_block_pairs(graph) if op == "kda" else _tail_values(graph)
    tensors = dict(graph.tensors)
    # Padded to whole chunks: gates and beta by the host, the rest as the launches leave it for one another.
    for name in ("g", "beta", "t", "p", "vn"):
        tensors[name] = replace(tensors[name], padded=True)
    for name in ("t", "p"):
        tensors[name] = replace(tensors[name], dtype="fp16", stored=LOWER_FRACTALS * TILE * TILE)
    return replace_tensors(graph, tensors)


def _tail_values(graph: Graph) -> Graph:
    """S' = exp(G_C) S + (exp(G_C - G) V')^T K: the decay scales V', a float tile then, and K stays as it came."""
    nodes, tensors = dict(graph.nodes), dict(graph.tensors)
    nodes["vt"] = Node("vt", "row_scale", ("vn", "er"), 5, "update")
    tensors["vt"] = replace(tensors["vn"], name="vt")
    # K once more: turned the other way in L0 than for the reading products.
    nodes["ku"] = Node("ku", "scale", ("k",), 5, "update")
    tensors["ku"] = replace(tensors["k"], name="ku", role="temp")
    change = nodes["kv"]
    nodes["kv"] = replace(change, inputs=tuple({"vn": "vt", "kt": "ku"}[name] for name in change.inputs))
    return with_nodes(graph, nodes.values(), tensors)


def _row_block_pairs(graph: Graph) -> Graph:
    """K K^T and Q K^T by row blocks of 16: keys and queries of a block, stacked, against the keys before it.

    For counting only: the operands' making is one node each, and what assembles the products another.
    """
    dim, nodes, tensors = graph.head_dim, dict(graph.nodes), dict(graph.tensors)
    pairs = []
    for block in range(1, TILES):
        left, right, pair = f"later{block}", f"earlier{block}", f"pair{block}"
        nodes[left] = Node(left, "row_block", ("k", "q", "gc"), 2)
        nodes[right] = Node(right, "row_block", ("k", "gc"), 2)
        nodes[pair] = Node(pair, "matmul", (left, right), 2, transpose=(False, True))
        tensors[left] = Tensor(left, 2 * TILE, dim)
        tensors[right] = Tensor(right, block * TILE, dim)
        tensors[pair] = Tensor(pair, 2 * TILE, block * TILE)
        pairs.append(pair)
    for name in ("kk", "qk"):
        nodes[name] = Node(name, "assemble", (*pairs, "k" if name == "kk" else "q", "gc"), nodes[name].operator)
    return with_nodes(graph, nodes.values(), tensors)


def kernel_dataflow(op: str, head_dim: int, chip: Chip, *, value_first: bool = True) -> Dataflow:
    """One kernel, whole heads."""
    graph = kernel_graph_of(op, head_dim, value_first)
    fused = Kernel("fused", (*(t.name for t in graph.by_role("output")), graph.state_out.name))
    return Dataflow(KERNEL_STRATEGY, graph, (fused,), _policy(chip))


def kernel_tail_dataflow(op: str, head_dim: int, chip: Chip, *, value_first: bool = True) -> Dataflow:
    """Chunk-head-chunk in three launches, the recurrence by strips of 16 columns."""
    graph = kernel_graph_of(op, head_dim, value_first)
    kernels = (
        Kernel("map", ("t", "p")),
        Kernel("reduce", ("vn", graph.state_out.name), column_tiles=head_dim // TILE, stores_states=True),
        Kernel("output", ("o",)),
    )
    return Dataflow(f"{KERNEL_STRATEGY}-tail", graph, kernels, _policy(chip))


def _policy(chip: Chip) -> ProductPolicy:
    capacity = min(chip.buffers["l0a"].usable, chip.buffers["l0b"].usable)
    return ProductPolicy(keep=True, capacity=capacity, skip_zero=True, inversion="vector-merge")


@dataclass(frozen=True)
class AscendKernelPlan(KernelPlan):
    """Operands go through global memory, there and back, where the chip has no way from UB to L1."""

    def path_gm_bytes(self) -> int:
        return 0 if self.program.chip.ub_to_l1 else 2 * FRACTAL_BYTES * _staged_fractals(self.program.graph)

    def path_head_gm_bytes(self) -> int:
        """KDA's state starts in L1, as it is and as an operand."""
        graph = self.program.graph
        if self.program.chip.ub_to_l1 or graph.op != "kda":
            return 0
        return 2 * FRACTAL_BYTES * 3 * operand_fractals(graph, "s")


def _staged_fractals(graph: Graph) -> int:
    """512-byte fractals a chunk brings from UB to L1."""
    state, chunk = operand_fractals(graph, "s"), operand_fractals(graph, "k")
    pairs, later = BELOW_FRACTALS * graph.head_dim // TILE, (TILES - 1) * graph.head_dim // TILE
    triangles = BELOW_FRACTALS + LOWER_FRACTALS + TILES + 2 * BELOW_FRACTALS  # A, P, the inverse and its sums
    if graph.op == "gdn":  # K, Q, right-hand side, V', its tail; the state
        return 5 * chunk + state + triangles
    # K, Q and K's tail with their decays, right-hand side, V'; later rows of K and Q, earlier rows; the state twice
    return 5 * chunk + 2 * later + pairs + 3 * state + triangles


@cache
def plan_kernel_chunk(op: str, chip_name: str, head_dim: int) -> ChunkPlan:
    """The chunk plan of `ha-npu-kernel`, state value-first. Raises ValueError where there is no such kernel."""
    chip = load_chip(chip_name)
    _check(op, chip, head_dim)
    flow = kernel_dataflow(op, head_dim, chip)
    (traffic,) = kernel_traffic(flow)
    steps, _ = INVENTORIES[op]
    places, peaks = tile_places(op, head_dim, head_dim, chip)
    items = {p.item: Item(p.item, p.buffer, p.item.split(":")[1], p.nbytes) for p in places.values()}
    used = [tuple(p.item for p in places.values() if p.start <= index <= p.end) for index in range(len(steps))]
    program = Program(
        flow.graph,
        chip,
        items,
        {name: Step(name, "vector", name, 0, "", used[index], ()) for index, name in enumerate(steps)},
        {},
    )
    occupancy = {
        buffer: tuple(sum(items[key].nbytes for key in keys if items[key].buffer == buffer) for keys in used)
        for buffer in peaks
    }
    live = {buffer: max(values) for buffer, values in occupancy.items()}
    allocation = Allocation({p.item: p for p in places.values()}, peaks, live, occupancy)
    counts = count_products(flow.graph, cheapest_product_order(flow.graph, flow.policy), flow.policy)
    products = replace(counts, l0a_peak=peaks["l0a"], l0b_peak=peaks["l0b"])
    kernel = AscendKernelPlan("fused", program, steps, "kernel", allocation, traffic)
    layouts = _layouts(flow, chip)
    return ChunkPlan(flow, (kernel,), products, layouts, tuple(transformed(flow.graph, layouts.transforms)))


def _check(op: str, chip: Chip, head_dim: int) -> None:
    if op not in INVENTORIES:
        raise ValueError(f"ha_npu: {KERNEL_STRATEGY}: no kernel for {op!r}; there are {', '.join(INVENTORIES)}")
    if chip.npu_arch not in FAMILIES:
        raise ValueError(
            f"ha_npu: {KERNEL_STRATEGY}: no kernel for {chip.name} ({chip.npu_arch}); there are kernels for "
            f"{', '.join(FAMILIES)}"
        )
    if head_dim not in KERNEL_DIMS:
        raise ValueError(f"ha_npu: {KERNEL_STRATEGY}: the kernels take a head_dim of 64 or 128, got {head_dim}")


def _layouts(flow: Dataflow, chip: Chip) -> LayoutPlan:
    """Every vector step blocked, so that tiles change their layout where they enter and leave UB, and nowhere else."""
    graph = flow.graph
    enter = [(name, BLOCKED) for name in _relaid(flow, chip) if graph.tensors[name].role == "input"]
    leave = [(name, DENSE) for name in _relaid(flow, chip) if graph.tensors[name].role == "output"]
    return LayoutPlan(dict.fromkeys(vector_nodes(graph), BLOCKED), (*enter, *leave), 0.0, 0.0, (BLOCKED,))


def _relaid(flow: Dataflow, chip: Chip) -> list[str]:
    """The tiles that change their layout on the core: those that come from the caller or go there.

    Where operands reach L1 through global memory, a copy from there blocks those that no vector step touches.
    """
    graph = flow.graph
    tiles = [t for t in graph.by_role("input", "output") if not t.is_vector]
    copied = () if chip.ub_to_l1 or graph.op != "gdn" else ("q", "k")
    return [t.name for t in tiles if t.name not in copied]


@dataclass(frozen=True)
class KernelCounts:
    """What a chunk of a head costs: global-memory bytes, products, fractals from L1 to L0, fractals relaid in UB."""

    gm_bytes: int
    products: int
    fractals: int
    relaid: int

    def __sub__(self, other: KernelCounts) -> KernelCounts:
        return KernelCounts(
            self.gm_bytes - other.gm_bytes,
            self.products - other.products,
            self.fractals - other.fractals,
            self.relaid - other.relaid,
        )


def kernel_chunk_counts(
    op: str,
    chip: Chip,
    head_dim: int,
    tokens: int,
    *,
    parts: int = 1,
    by_chunks: bool = False,
    value_first: bool = True,
) -> KernelCounts:
    """Of a chunk of `tokens` tokens, its head whole, in `parts` column parts, or chunk-head-chunk."""
    if by_chunks:
        flow = kernel_tail_dataflow(op, head_dim, chip, value_first=value_first)
        counts = chunk_products(flow)
        return KernelCounts(_moved(flow, tokens), counts.products, counts.fractals, relaid_fractals(flow, chip))
    flow = kernel_dataflow(op, head_dim, chip, value_first=value_first)
    part = replace(flow, graph=flow.graph.split(parts))
    counts = count_products(part.graph, cheapest_product_order(part.graph, part.policy), part.policy)
    relaid = relaid_fractals(part, chip)
    return KernelCounts(parts * _moved(part, tokens), parts * counts.products, parts * counts.fractals, parts * relaid)


def _moved(flow: Dataflow, tokens: int) -> int:
    return sum(chunk_gm_bytes(flow, tokens).values())


def relaid_fractals(flow: Dataflow, chip: Chip) -> int:
    """16x16 tiles a chunk of a head that change their layout on the core."""
    total = 0
    names = set(_relaid(flow, chip))
    for traffic in kernel_traffic(flow):
        tiles = traffic.kernel.column_tiles
        for name in names & {*traffic.reads, *traffic.writes}:
            tensor = flow.graph.tensors[name]
            if tensor.split(tiles).cols > TILE:  # one strip is dense and blocked at once
                total += (tiles if tensor.value_axis is None else 1) * operand_fractals(flow.graph, name)
    return total


def kernel_tail(op: str, chip: Chip, head_dim: int, lengths: Sequence[int], mapping: HeadMapping) -> KernelCounts:
    """What cut heads cost over whole ones."""
    total = KernelCounts(0, 0, 0, 0)
    whole = {tokens: kernel_chunk_counts(op, chip, head_dim, tokens) for tokens in _chunk_tokens(lengths)}
    cuts = [(sequence, {"parts": parts}) for (sequence, _), parts in mapping.column_parts.items()]
    cuts += [(sequence, {"by_chunks": True}) for sequence, _ in mapping.tiers[CHUNKS]]
    for sequence, how in cuts:
        for tokens, count in _chunk_tokens([lengths[sequence]]).items():
            more = kernel_chunk_counts(op, chip, head_dim, tokens, **how) - whole[tokens]  # type: ignore[arg-type]
            total = KernelCounts(
                total.gm_bytes + count * more.gm_bytes,
                total.products + count * more.products,
                total.fractals + count * more.fractals,
                total.relaid + count * more.relaid,
            )
    return total


def _chunk_tokens(lengths: Sequence[int]) -> dict[int, int]:
    """How many chunks there are of each number of tokens."""
    counts: dict[int, int] = {}
    for length in lengths:
        for tokens, count in ((CHUNK, length // CHUNK), (length % CHUNK, 1)):
            if tokens and count:
                counts[tokens] = counts.get(tokens, 0) + count
    return counts
