"""Kernels: how a strategy cuts the graph, and the global memory that costs.

A kernel is named by what it writes to global memory. It computes whatever of the graph leads there and is not already
stored. It reads inputs and earlier kernels' results once, or once a column tile if they do not run over value columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_ext.ha_npu.graph import Graph, Tensor
from vllm_ext.ha_npu.products import ProductCounts, ProductPolicy, count_products, operator_product_order

FP16 = 2


@dataclass(frozen=True)
class Kernel:
    """A launch.

    stores          tensors it writes to global memory ("s_new" is the recurrence: written once a head)
    also            tensors it computes for its own use only
    column_tiles    over how many tiles of value columns its grid runs, each reading the shared operands again
    stores_states   whether it writes the state ahead of every chunk, in FP16, for a later kernel
    """

    name: str
    stores: tuple[str, ...]
    also: tuple[str, ...] = ()
    column_tiles: int = 1
    stores_states: bool = False


@dataclass(frozen=True)
class Dataflow:
    """The kernels of a strategy over one graph.

    policy      how its products use L0
    segments    into how many parts a sequence's recurrence is cut; each part starts from a state in global memory
    retained    stored tensors that live until the end, because they are returned to the caller
    launches    kernel launches, where that differs from the number of kernels
    resident    whether the recurrent kernel keeps the state on its core from chunk to chunk
    """

    name: str
    graph: Graph
    kernels: tuple[Kernel, ...]
    policy: ProductPolicy
    segments: int = 1
    retained: tuple[str, ...] = ()
    launches: int | None = None
    resident: bool = True


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes a chunk of a head costs in one kernel, and what it computes and reads."""

    kernel: Kernel
    computed: tuple[str, ...]
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    recurrent: bool


def tile_bytes(tensor: Tensor, tokens: int) -> int:
    """Bytes of a tensor in global memory for `tokens` tokens of a chunk."""
    return tensor.nbytes if tensor.padded or not tensor.token_axis else tensor.nbytes // tensor.rows * tokens


def kernel_traffic(dataflow: Dataflow, tokens: int | None = None) -> list[KernelTraffic]:
    """Traffic of each kernel for a chunk of `tokens` tokens (a full one by default), without the states at the ends."""
    graph = dataflow.graph
    tokens = graph.chunk_size if tokens is None else tokens
    stored: set[str] = set()
    result = []
    for kernel in dataflow.kernels:
        computed, reads = _closure(graph, kernel, stored)
        recurrent = dataflow.resident and graph.state_out.name in kernel.stores
        if recurrent:
            reads.discard(graph.state_in.name)
        sizes: dict[str, int] = {}
        for name in sorted(reads):
            tensor = graph.tensors[name]
            again = kernel.column_tiles if tensor.value_axis is None else 1
            sizes[name] = again * _stored_bytes(dataflow, tensor, tokens)
        kept = {graph.state_out.name} if recurrent else set()
        writes = {n: tile_bytes(graph.tensors[n], tokens) for n in kernel.stores if n not in kept}
        if kernel.stores_states:
            writes[graph.state_in.name] = _stored_bytes(dataflow, graph.state_in, tokens)
        stored |= set(kernel.stores)
        result.append(KernelTraffic(kernel, computed, sizes, writes, recurrent))
    return result


def _stored_bytes(dataflow: Dataflow, tensor: Tensor, tokens: int) -> int:
    """A state that a resident recurrence leaves for a later kernel is in FP16; everything else in its own type."""
    if tensor.role == "state_in" and dataflow.resident:
        return tensor.elements * FP16
    return tile_bytes(tensor, tokens)


def _closure(graph: Graph, kernel: Kernel, stored: set[str]) -> tuple[tuple[str, ...], set[str]]:
    """The nodes a kernel computes, in the graph's order, and the tensors it reads from global memory."""
    computed: set[str] = set()
    reads: set[str] = set()

    def visit(name: str, *, wanted: bool = False) -> None:
        if name in computed:
            return
        if name not in graph.nodes or (name in stored and not wanted):
            reads.add(name)
            return
        computed.add(name)
        for source in graph.nodes[name].inputs:
            visit(source)

    for name in (*kernel.stores, *kernel.also):
        visit(name, wanted=True)
    return tuple(name for name in graph.nodes if name in computed), reads


def kernel_graph(dataflow: Dataflow, traffic: KernelTraffic) -> Graph:
    """One column tile of one kernel as a graph of its own: what it reads are inputs, what it stores are outputs."""
    graph = dataflow.graph.split(traffic.kernel.column_tiles)
    state = {graph.state_in.name, graph.state_out.name} if traffic.recurrent else set()
    tensors: dict[str, Tensor] = {}
    for name in traffic.computed:
        for used in (name, *graph.nodes[name].inputs):
            tensor = graph.tensors[used]
            role = tensor.role if used in state else "temp"
            if used in traffic.reads:
                role = "input"
            elif used in traffic.writes and used not in state:
                role = "output"
            dtype = "fp16" if tensor.role == "state_in" and used in traffic.reads else tensor.dtype
            tensors[used] = replace(tensor, role=role, dtype=dtype)
    nodes = {name: graph.nodes[name] for name in traffic.computed}
    return Graph(graph.op, tensors, nodes, graph.chunk_size, graph.head_dim)


def chunk_gm_bytes(dataflow: Dataflow, tokens: int | None = None) -> dict[str, int]:
    """Global-memory bytes of a chunk of a head, by kernel."""
    return {
        traffic.kernel.name: sum(traffic.reads.values()) + sum(traffic.writes.values())
        for traffic in kernel_traffic(dataflow, tokens)
    }


def head_state_bytes(dataflow: Dataflow) -> int:
    """Bytes of reading and writing a head's states: one pair a segment of the sequence."""
    return 2 * dataflow.graph.state_in.nbytes * dataflow.segments


def chunk_products(dataflow: Dataflow) -> ProductCounts:
    """Products and fractals of a chunk of a head over all kernels, column tiles included."""
    totals = [0, 0, 0, 0]
    for traffic in kernel_traffic(dataflow):
        tiles = traffic.kernel.column_tiles
        graph = dataflow.graph.split(tiles)
        order = [name for name in operator_product_order(graph) if name in traffic.computed]
        counts = count_products(graph, order, dataflow.policy)
        totals[0] += tiles * counts.products
        totals[1] += tiles * counts.fractals
        totals[2] = max(totals[2], counts.l0a_peak)
        totals[3] = max(totals[3], counts.l0b_peak)
    return ProductCounts(*totals)


def device_bytes(dataflow: Dataflow, num_heads: int, token_counts: Sequence[int]) -> int:
    """Peak bytes of device memory: inputs and states throughout, results and intermediates from kernel to kernel.

    token_counts    the tokens of each sequence
    """
    graph = dataflow.graph
    tokens = sum(token_counts)
    chunks = sum(-(-count // graph.chunk_size) for count in token_counts)

    def size(name: str) -> int:
        tensor = graph.tensors[name]
        if tensor.role == "state_in":
            return num_heads * chunks * tensor.elements * FP16
        if tensor.role == "state_out":
            return num_heads * len(token_counts) * tensor.nbytes
        if tensor.padded:
            return num_heads * chunks * tensor.nbytes
        return num_heads * tile_bytes(tensor, tokens)

    inputs = sum(size(tensor.name) for tensor in graph.by_role("input"))
    states = 2 * num_heads * len(token_counts) * dataflow.segments * graph.state_in.nbytes
    traffics = kernel_traffic(dataflow)
    last_use = {name: index for index, traffic in enumerate(traffics) for name in (*traffic.writes, *traffic.reads)}
    first = {name: index for index in reversed(range(len(traffics))) for name in traffics[index].writes}
    held = set(dataflow.retained) | {tensor.name for tensor in graph.by_role("output")}
    peak = 0
    for index in range(len(traffics)):
        live = [n for n, start in first.items() if start <= index and (n in held or last_use[n] >= index)]
        peak = max(peak, sum(size(name) for name in live))
    return inputs + states + peak
