"""The part of a plan that every chunk of every head shares: order, offsets, layouts, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from vllm_ext.ha_npu.allocator import Allocation, allocate
from vllm_ext.ha_npu.chips import BUFFERS, Chip, load_chip
from vllm_ext.ha_npu.dataflow import Dataflow, KernelTraffic, chunk_products, kernel_graph, kernel_traffic
from vllm_ext.ha_npu.graph import Graph
from vllm_ext.ha_npu.layout import BLOCKED, DENSE, LayoutPlan, fixed_layout_transforms, plan_layouts, vector_nodes
from vllm_ext.ha_npu.lowering import FP16, FP32, STAGING_DEPTH, Program, lower
from vllm_ext.ha_npu.products import (
    ProductCounts,
    cheapest_product_order,
    count_products,
    operand_fractals,
    operator_product_order,
)
from vllm_ext.ha_npu.reorder import best_order, operator_order
from vllm_ext.ha_npu.strategies import STRATEGIES

LAYOUT_PREVIEW_CHUNKS = 16
"""Enough chunks for the layout of the state to settle; `make_plan` runs the programme over all of them."""

SEARCH_STATES = 20_000
"""Bounds the exhaustive search for a better order; the graphs here are done after about a thousand."""


@dataclass(frozen=True)
class KernelPlan:
    """Order and offsets of one kernel. `order_kind` is "operator" or "lifetime"."""

    name: str
    program: Program
    order: tuple[str, ...]
    order_kind: str
    allocation: Allocation
    traffic: KernelTraffic

    def path_gm_bytes(self) -> int:
        """Bytes a chunk moves through global memory because the chip lacks the direct path between two buffers."""
        total = 0
        chip = self.program.chip
        for step in self.program.steps.values():
            elements = self.program.graph.tensors[step.tensor].elements
            if step.unit == "stage" and not chip.ub_to_l1:
                total += 2 * FP16 * elements
            if step.unit == "drain" and not chip.l0c_to_ub:
                total += 2 * FP32 * elements
        return total * self.traffic.kernel.column_tiles

    def path_head_gm_bytes(self) -> int:
        """The same for a head of a sequence, once."""
        return 0


@dataclass(frozen=True)
class ChunkPlan:
    """All kernels of a strategy for one chunk of one head; `transforms` are (tile, its new layout, fractals)."""

    dataflow: Dataflow
    kernels: tuple[KernelPlan, ...]
    products: ProductCounts
    layouts: LayoutPlan | None
    transforms: tuple[tuple[str, str, int], ...]

    @property
    def peak_bytes(self) -> dict[str, int]:
        peak = dict.fromkeys(BUFFERS, 0)
        for kernel in self.kernels:
            for buffer, top in kernel.allocation.peak.items():
                peak[buffer] = max(peak[buffer], top)
        if self.kernels[0].program.chip.has_l0:
            peak["l0a"], peak["l0b"] = self.products.l0a_peak, self.products.l0b_peak
        return peak


def _overflow(program: Program, allocation: Allocation) -> list[str]:
    buffers = program.chip.buffers
    return [b for b, top in allocation.peak.items() if top > buffers[b].usable and (b != "l0c" or program.chip.has_l0)]


def _check_items(program: Program, what: str, remedy: str) -> None:
    for item in program.items.values():
        usable = program.chip.buffers[item.buffer].usable
        if item.nbytes > usable:
            raise ValueError(
                f"{what} needs {item.nbytes} bytes of {item.buffer.upper()} for {item.tensor} alone, "
                f"{program.chip.name} has {usable} usable; {remedy}"
            )


def plan_kernel(
    graph: Graph, chip: Chip, traffic: KernelTraffic, products: tuple[str, ...], orders: Sequence[str], label: str
) -> KernelPlan:
    """The first of `orders` that fits the buffers, with a double-buffered staging queue if that fits at all.

    Raises ValueError, with the numbers, when none does.
    """
    what = f"ha_npu: {label}: head_dim {graph.head_dim} with chunk_size {graph.chunk_size}"
    remedy = "take a smaller head_dim or chunk_size, or another chip"
    best: tuple[Program, Allocation] | None = None
    for depth in range(STAGING_DEPTH, 0, -1):
        program = replace(lower(graph, chip, staging_depth=depth), product_order=products)
        _check_items(program, what, remedy)
        for kind in orders:
            order = operator_order(program) if kind == "operator" else best_order(program, max_states=SEARCH_STATES)[0]
            allocation = allocate(program, order)
            if not _overflow(program, allocation):
                return KernelPlan(traffic.kernel.name, program, tuple(order), kind, allocation, traffic)
            if best is None or allocation.peak["ub"] < best[1].peak["ub"]:
                best = program, allocation
    assert best is not None
    buffer = _overflow(*best)[0]
    raise ValueError(
        f"{what} needs {best[1].peak[buffer]} bytes of {buffer.upper()} in its best order, {chip.name} has "
        f"{chip.buffers[buffer].usable} usable; {remedy}"
    )


@cache
def plan_chunk(op: str, chip_name: str, head_dim: int, chunk_size: int, strategy: str) -> ChunkPlan:
    """The chunk plan of a strategy. Raises ValueError when the chip cannot hold it."""
    chip = load_chip(chip_name)
    dataflow = STRATEGIES[strategy](op, chunk_size, head_dim, chip)
    fused = strategy.startswith("ha-npu")
    tuned = strategy == "ha-npu-tuned"
    orders = ("lifetime",) if tuned else ("operator", "lifetime") if fused else ("lifetime",)
    sequence = (
        cheapest_product_order(dataflow.graph, dataflow.policy) if tuned else operator_product_order(dataflow.graph)
    )
    kernels = []
    transforms: list[tuple[str, str, int]] = []
    for traffic in kernel_traffic(dataflow):
        graph = kernel_graph(dataflow, traffic)
        products = tuple(name for name in sequence if name in graph.nodes) if fused else ()
        kernels.append(plan_kernel(graph, chip, traffic, products, orders, f"{strategy} {op}"))
        if chip.blocked_operands and not fused:
            transforms += transformed(graph, fixed_layout_transforms(graph, DENSE)) * traffic.kernel.column_tiles
    layouts = plan_layouts(dataflow.graph, LAYOUT_PREVIEW_CHUNKS) if fused and chip.blocked_operands else None
    if layouts is not None:
        transforms = transformed(dataflow.graph, layouts.transforms)
    counts = count_products(dataflow.graph, sequence, dataflow.policy) if fused else chunk_products(dataflow)
    return ChunkPlan(dataflow, tuple(kernels), counts, layouts, tuple(transforms))


def transformed(graph: Graph, transforms: Sequence[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Transforms with the fractals, 16x16 tiles, they move."""
    return [(name, layout, operand_fractals(graph, name)) for name, layout in transforms]


def tensor_layouts(plan: ChunkPlan) -> Mapping[str, str]:
    """The layout each tile is made in; without planning all vector steps are dense."""
    graph = plan.dataflow.graph
    steps = plan.layouts.steps if plan.layouts else dict.fromkeys(vector_nodes(graph), DENSE)
    products = BLOCKED if plan.kernels[0].program.chip.blocked_operands else DENSE
    return {name: steps.get(name, products) for name in graph.nodes if not graph.tensors[name].is_vector}
