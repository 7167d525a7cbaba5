"""How long a chunk takes on a core, in cycles: a model for comparing mappings, not a measurement.

The matrix unit does its products at the chip's rate, the vector unit one repeat of 256 bytes a cycle for every pass
over a tile; the two take turns, as the operators of a chunk depend on one another. Global memory is read ahead, so that
a chunk takes the longer of computing and moving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from vllm_ext.ha_npu.chips import Chip
from vllm_ext.ha_npu.dataflow import Dataflow, KernelTraffic, chunk_gm_bytes, kernel_graph, kernel_traffic
from vllm_ext.ha_npu.lowering import FP32, VECTOR_REPEAT_BYTES, lower
from vllm_ext.ha_npu.products import PRODUCT_MACS, count_products, operator_product_order

VECTOR_UNITS = ("vector", "stage", "fetch", "drain", "store")


@dataclass(frozen=True)
class ChunkWork:
    """Cycles of a chunk of a head: the whole of it, one of `n` column parts, and the phases of chunk-head-chunk.

    whole       on one core
    column      by number of parts: one part
    map_chunk, reduce_strip, output_chunk
                chunk-head-chunk: preparing a chunk, one strip of the recurrence, the output
    strips      how many strips of columns the recurrence falls into
    whole_bytes, column_bytes, chunks_bytes
                global-memory bytes of a chunk of a head under each tier, all parts together
    """

    whole: float
    column: dict[int, float]
    map_chunk: float
    reduce_strip: float
    output_chunk: float
    strips: int
    whole_bytes: int
    column_bytes: dict[int, int]
    chunks_bytes: int


def gm_bytes_per_cycle(chip: Chip) -> float:
    """What a core moves to or from global memory in a cycle: as measured if known, else from the platform files."""
    measured = chip.measured_gb_per_s.get("gm_l1")
    return measured * 1000 / chip.clock_mhz if measured else chip.bytes_per_cycle["gm"]


def kernel_cycles(dataflow: Dataflow, traffic: KernelTraffic, chip: Chip) -> float:
    """Cycles of a column tile of a kernel for a chunk: the longer of computing, with copies on the core, and moving."""
    graph = kernel_graph(dataflow, traffic)
    program = lower(graph, chip)
    repeats = sum(
        -(-graph.tensors[step.tensor].split(chip.lanes).elements * FP32 // VECTOR_REPEAT_BYTES)
        for step in program.steps.values()
        if step.unit in VECTOR_UNITS
    )
    products = count_products(graph, operator_product_order(graph), dataflow.policy).products
    moved = (sum(traffic.reads.values()) + sum(traffic.writes.values())) / traffic.kernel.column_tiles
    return max(repeats + products * PRODUCT_MACS / chip.macs_per_cycle, moved / gm_bytes_per_cycle(chip))


@cache
def column_parts(head_dim: int) -> tuple[int, ...]:
    """Into how many column parts a head may be cut: powers of two that leave at least one tile of 16 columns."""
    parts = []
    count = 2
    while head_dim % count == 0 and (head_dim // count) % 16 == 0:
        parts.append(count)
        count *= 2
    return tuple(parts)


def chunk_work(dataflow: Dataflow, fallback: Dataflow, chip: Chip) -> ChunkWork:
    """The work of a chunk under a fused dataflow, and under chunk-head-chunk as the fallback."""

    def part(parts: int) -> Dataflow:
        return replace(dataflow, graph=dataflow.graph.split(parts))

    def fused(parts: int) -> float:
        (traffic,) = kernel_traffic(part(parts))
        return kernel_cycles(part(parts), traffic, chip)

    phases = [kernel_cycles(fallback, traffic, chip) for traffic in kernel_traffic(fallback)]
    strips = fallback.kernels[1].column_tiles
    choices = column_parts(dataflow.graph.head_dim)
    return ChunkWork(
        fused(1),
        {parts: fused(parts) for parts in choices},
        phases[0],
        phases[1],
        phases[2],
        strips,
        sum(chunk_gm_bytes(dataflow).values()),
        {parts: parts * sum(chunk_gm_bytes(part(parts)).values()) for parts in choices},
        sum(chunk_gm_bytes(fallback).values()),
    )


def stage_work(dataflow: Dataflow, chip: Chip) -> ChunkWork:
    """The work of a chunk under a staged baseline: kernels ahead of the recurrence, itself, and those behind it."""
    phases = [0.0, 0.0, 0.0]
    strips, phase = 1, 0
    for traffic in kernel_traffic(dataflow):
        tiles, cycles = traffic.kernel.column_tiles, kernel_cycles(dataflow, traffic, chip)
        if traffic.recurrent:
            phases[1], strips, phase = cycles, tiles, 2
        else:
            phases[phase] += cycles * tiles
    moved = sum(chunk_gm_bytes(dataflow).values())
    return ChunkWork(sum(phases), {}, phases[0], phases[1], phases[2], strips, moved, {}, moved)
