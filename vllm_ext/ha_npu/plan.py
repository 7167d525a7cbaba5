"""The planner's front door: `make_plan`."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vllm_ext.ha_npu.ascend_kernels import kernel_tail, plan_kernel_chunk
from vllm_ext.ha_npu.ascend_tiles import CHUNK, KERNEL_STRATEGY
from vllm_ext.ha_npu.chips import Chip, load_chip
from vllm_ext.ha_npu.chunk_plan import ChunkPlan, plan_chunk, tensor_layouts
from vllm_ext.ha_npu.dataflow import chunk_gm_bytes, chunk_products, device_bytes, head_state_bytes
from vllm_ext.ha_npu.first_fit import Placement
from vllm_ext.ha_npu.inversion import TILE
from vllm_ext.ha_npu.layout import LayoutCosts, LayoutPlan, plan_layouts
from vllm_ext.ha_npu.mapping import CHUNKS, HeadMapping, map_heads, map_stages
from vllm_ext.ha_npu.operators import OPERATORS
from vllm_ext.ha_npu.products import FRACTAL_BYTES, PRODUCT_MACS, count_products
from vllm_ext.ha_npu.strategies import STRATEGIES, chunk_head_chunk
from vllm_ext.ha_npu.work import ChunkWork, chunk_work, stage_work


@dataclass(frozen=True)
class TailCost:
    """What cut heads cost over whole ones: operands and products their parts repeat, what chunk-head-chunk stores.

    `l1_to_l0_bytes` is negative where a part's operands fit in L0 together and a whole head's do not.
    """

    gm_bytes: int = 0
    l1_to_l0_bytes: int = 0
    device_bytes: int = 0
    macs: int = 0
    relaid_fractals: int = 0


@dataclass(frozen=True)
class Traffic:
    """What a forward pass moves, and what it keeps in device memory, in bytes.

    gm_bytes            global memory, heads whole: inputs, results, states and whatever kernels leave for one another
    tail                what cutting the tail heads adds, in full chunks
    path_gm_bytes       what goes through global memory because the chip lacks the direct path between two buffers
    l1_to_l0_bytes      operands of the matrix unit
    device_bytes        peak of device memory
    transforms          tiles brought from one layout into the other
    relaid_fractals     the same in 16x16 tiles: what those transforms move
    gm_by_kernel        gm_bytes by kernel, the states at the ends under "states"
    """

    gm_bytes: int
    tail: TailCost
    path_gm_bytes: int
    l1_to_l0_bytes: int
    device_bytes: int
    transforms: int
    relaid_fractals: int
    gm_by_kernel: Mapping[str, int]

    @property
    def total_gm_bytes(self) -> int:
        return self.gm_bytes + self.tail.gm_bytes + self.path_gm_bytes


@dataclass(frozen=True)
class Plan:
    """A static plan of a prefill.

    macs            multiply-accumulates of the matrix unit, heads whole, padding of a short last chunk included
    peak_bytes      by buffer ("ub", "l1", "l0a", "l0b", "l0c"): the highest byte in use on a core
    mapping         which core does which part of which head when
    order           the steps of a chunk; with several kernels "kernel: step"
    layouts         per tile, "dense" or "blocked"
    placements      per kernel, the offset of every item in its buffer
    chunk           the plan of a chunk, with programs, lifetimes and layouts in full
    """

    op: str
    chip: Chip
    num_heads: int
    seq_lens: tuple[int, ...]
    head_dim: int
    chunk_size: int
    strategy: str
    traffic: Traffic
    macs: int
    mapping: HeadMapping
    launches: int
    chunk: ChunkPlan
    layout_plan: LayoutPlan | None

    @property
    def num_tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def peak_bytes(self) -> dict[str, int]:
        return self.chunk.peak_bytes

    @property
    def order(self) -> tuple[str, ...]:
        kernels = self.chunk.kernels
        if len(kernels) == 1:
            return kernels[0].order
        return tuple(f"{kernel.name}: {step}" for kernel in kernels for step in kernel.order)

    @property
    def layouts(self) -> Mapping[str, str]:
        return tensor_layouts(self.chunk)

    @property
    def placements(self) -> dict[str, tuple[Placement, ...]]:
        return {
            kernel.name: tuple(
                sorted(kernel.allocation.placements.values(), key=lambda p: (p.buffer, p.offset, p.start))
            )
            for kernel in self.chunk.kernels
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings."""
        mapping = self.mapping
        return {
            "op": self.op,
            "chip": self.chip.name,
            "strategy": self.strategy,
            "num_heads": self.num_heads,
            "num_tokens": self.num_tokens,
            "seq_lens": list(self.seq_lens),
            "head_dim": self.head_dim,
            "chunk_size": self.chunk_size,
            "launches": self.launches,
            "macs": self.macs,
            "traffic": {
                "gm_bytes": self.traffic.gm_bytes,
                "tail": vars(self.traffic.tail),
                "path_gm_bytes": self.traffic.path_gm_bytes,
                "total_gm_bytes": self.traffic.total_gm_bytes,
                "l1_to_l0_bytes": self.traffic.l1_to_l0_bytes,
                "device_bytes": self.traffic.device_bytes,
                "transforms": self.traffic.transforms,
                "relaid_fractals": self.traffic.relaid_fractals,
                "gm_by_kernel": dict(self.traffic.gm_by_kernel),
            },
            "peak_bytes": self.peak_bytes,
            "usable_bytes": {name: self.chip.buffers[name].usable for name in self.peak_bytes},
            "order": list(self.order),
            "layouts": dict(self.layouts),
            "transforms": [list(pair) for pair in self.layout_plan.transforms] if self.layout_plan else [],
            "placements": {
                kernel: [vars(placement) for placement in placements] for kernel, placements in self.placements.items()
            },
            "mapping": {
                "cores": mapping.cores,
                "makespan_cycles": mapping.makespan,
                "head_only_makespan_cycles": mapping.head_only_makespan,
                "idle_share": mapping.idle_share,
                "tiers": {tier: [list(name) for name in names] for tier, names in mapping.tiers.items()},
                "column_parts": [[*name, parts] for name, parts in mapping.column_parts.items()],
                "pieces": [vars(piece) for piece in mapping.pieces],
            },
        }

    def to_json(self, indent: int | None = 1) -> str:
        return json.dumps(self.to_dict(), indent=indent)


MAX_TOKENS = 2**24
MAX_HEADS = 2**16
MAX_SEQUENCE_HEADS = 2**18
"""What is planned in seconds: the layout programme is linear in tokens, the mapping in heads times sequences. A head's
number has 16 bits in the kernels' header."""


def _whole_number(name: str, value: object, *, least: int = 1, most: int | None = None, multiple: int = 1) -> int:
    if isinstance(value, bool):
        raise ValueError(f"ha_npu: {name} must be a whole number, got {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"ha_npu: {name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"ha_npu: {name} must be at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"ha_npu: {name} must be at most {most}, got {number}; plan a larger batch in parts")
    if number % multiple:
        raise ValueError(f"ha_npu: {name} must be a multiple of {multiple}, got {number}")
    return number


def _sequences(num_tokens: object, seq_lens: Sequence[int] | None, heads: int) -> tuple[int, ...]:
    total = _whole_number("num_tokens", num_tokens, most=MAX_TOKENS)
    if seq_lens is None:
        return (total,)
    if isinstance(seq_lens, (str, bytes)) or not isinstance(seq_lens, Iterable):
        raise ValueError(f"ha_npu: seq_lens must be a sequence of whole numbers, got {seq_lens!r}")
    lengths = tuple(_whole_number("seq_lens", length, least=0) for length in seq_lens)
    _whole_number("num_heads times the number of sequences", heads * len(lengths), least=0, most=MAX_SEQUENCE_HEADS)
    if sum(lengths) != total:
        raise ValueError(f"ha_npu: seq_lens sum to {sum(lengths)}, num_tokens is {total}")
    return lengths


@cache
def _work(op: str, chip_name: str, head_dim: int, chunk_size: int, strategy: str) -> ChunkWork:
    chip = load_chip(chip_name)
    dataflow = STRATEGIES[strategy](op, chunk_size, head_dim, chip)
    if not strategy.startswith("ha-npu"):
        return stage_work(dataflow, chip)
    return chunk_work(dataflow, chunk_head_chunk(op, chunk_size, head_dim, chip), chip)


def make_plan(
    op: str,
    *,
    chip: str,
    num_heads: int,
    num_tokens: int,
    head_dim: int = 128,
    chunk_size: int = 64,
    strategy: str = "ha-npu",
    seq_lens: Sequence[int] | None = None,
) -> Plan:
    """Plan a prefill of linear attention.

    op          "gdn", "kda" or "gla"
    chip        the name of a file in `chips/`
    num_heads   heads; num_tokens tokens in all, of one sequence, or of several whose lengths are `seq_lens`
    head_dim    key and value dimension of a head, chunk_size tokens a chunk; both multiples of 16
    strategy    "ha-npu", "ha-npu-tuned", or a baseline: "fla", "fla-megakernel", "flash-qla", "vllm-ascend"; or
                "ha-npu-kernel", what this project's Ascend C kernels do (gdn, kda; head_dim 64, 128; 310P, 310B)

    Raises ValueError on an unknown name, a value that is no positive whole number, a head the chip cannot hold, or more
    than `MAX_HEADS` heads, `MAX_TOKENS` tokens or `MAX_SEQUENCE_HEADS` heads of all sequences together.
    """
    if not isinstance(op, str) or op not in OPERATORS:
        raise ValueError(f"ha_npu: unknown operator {op!r}; known: {', '.join(sorted(OPERATORS))}")
    if not isinstance(strategy, str) or strategy not in (*STRATEGIES, KERNEL_STRATEGY):
        raise ValueError(f"ha_npu: unknown strategy {strategy!r}; known: {', '.join((*STRATEGIES, KERNEL_STRATEGY))}")
    target = load_chip(chip)
    heads = _whole_number("num_heads", num_heads, most=MAX_HEADS)
    dim = _whole_number("head_dim", head_dim, least=TILE, multiple=TILE)
    chunk = _whole_number("chunk_size", chunk_size, least=TILE, multiple=TILE)
    lengths = _sequences(num_tokens, seq_lens, heads)

    chunk_plan, work = _chunk_plan(op, target.name, dim, chunk, strategy)
    chunks = [-(-length // chunk) for length in lengths]
    if strategy.startswith("ha-npu"):
        mapping = map_heads(heads, target.cores, chunks, work)
        layout_plan = chunk_plan.layouts
        if layout_plan is not None and strategy != KERNEL_STRATEGY:
            layout_plan = plan_layouts(chunk_plan.dataflow.graph, max(chunks), LayoutCosts())
    else:
        mapping = map_stages(heads, target.cores, chunks, work)
        layout_plan = None
    traffic = _traffic(chunk_plan, target, heads, lengths, mapping)
    macs = heads * sum(chunks) * chunk_plan.products.macs
    launches = chunk_plan.dataflow.launches or len(chunk_plan.dataflow.kernels)
    return Plan(
        op, target, heads, lengths, dim, chunk, strategy, traffic, macs, mapping, launches, chunk_plan, layout_plan
    )


def _chunk_plan(op: str, chip: str, head_dim: int, chunk_size: int, strategy: str) -> tuple[ChunkPlan, ChunkWork]:
    """The kernels' own plan deals heads to cores as HA-NPU's does."""
    if strategy != KERNEL_STRATEGY:
        return plan_chunk(op, chip, head_dim, chunk_size, strategy), _work(op, chip, head_dim, chunk_size, strategy)
    if chunk_size != CHUNK:
        raise ValueError(f"ha_npu: {KERNEL_STRATEGY}: the kernels take a chunk_size of {CHUNK}, got {chunk_size}")
    return plan_kernel_chunk(op, chip, head_dim), _work(op, chip, head_dim, chunk_size, "ha-npu")


def _traffic(plan: ChunkPlan, chip: Chip, heads: int, lengths: Sequence[int], mapping: HeadMapping) -> Traffic:
    dataflow = plan.dataflow
    size = dataflow.graph.chunk_size
    by_kernel = {kernel.name: 0 for kernel in plan.kernels}
    counts: dict[int, int] = {}
    for length in lengths:
        counts[size] = counts.get(size, 0) + length // size
        if length % size:
            counts[length % size] = counts.get(length % size, 0) + 1
    for tokens, count in counts.items():
        for name, moved in chunk_gm_bytes(dataflow, tokens).items():
            by_kernel[name] += heads * count * moved
    by_kernel["states"] = heads * len(lengths) * head_state_bytes(dataflow) if dataflow.resident else 0
    chunks = heads * sum(counts.values())
    return Traffic(
        gm_bytes=sum(by_kernel.values()),
        tail=_tail(plan, chip, lengths, mapping),
        path_gm_bytes=chunks * sum(kernel.path_gm_bytes() for kernel in plan.kernels)
        + heads * len(lengths) * sum(kernel.path_head_gm_bytes() for kernel in plan.kernels),
        l1_to_l0_bytes=chunks * plan.products.fractals * FRACTAL_BYTES if chip.has_l0 else 0,
        device_bytes=device_bytes(dataflow, heads, lengths),
        transforms=chunks * len(plan.transforms),
        relaid_fractals=chunks * sum(fractals for _, _, fractals in plan.transforms),
        gm_by_kernel=by_kernel,
    )


def _tail(plan: ChunkPlan, chip: Chip, lengths: Sequence[int], mapping: HeadMapping) -> TailCost:
    flow = plan.dataflow
    size = flow.graph.chunk_size
    if flow.name == KERNEL_STRATEGY:
        more = kernel_tail(flow.graph.op, chip, flow.graph.head_dim, lengths, mapping)
        return TailCost(more.gm_bytes, more.fractals * FRACTAL_BYTES, 0, more.products * PRODUCT_MACS, more.relaid)
    whole = plan.products
    fractals = products = device = 0
    for (sequence, _), parts in mapping.column_parts.items():
        counts = count_products(flow.graph.split(parts), plan.kernels[0].program.product_order, flow.policy)
        chunks = -(-lengths[sequence] // size)
        fractals += chunks * (parts * counts.fractals - whole.fractals)
        products += chunks * (parts * counts.products - whole.products)
    cut = mapping.tiers[CHUNKS] if flow.name.startswith("ha-npu") else ()
    if cut:
        fallback = chunk_head_chunk(flow.graph.op, size, flow.graph.head_dim, chip)
        counts = chunk_products(fallback)
        for sequence, _ in cut:
            chunks = -(-lengths[sequence] // size)
            fractals += chunks * (counts.fractals - whole.fractals)
            products += chunks * (counts.products - whole.products)
            one = [lengths[sequence]]
            device += device_bytes(fallback, 1, one) - device_bytes(flow, 1, one)
    moved = fractals * FRACTAL_BYTES if chip.has_l0 else 0
    return TailCost(mapping.tail_gm_bytes, moved, device, products * PRODUCT_MACS)
