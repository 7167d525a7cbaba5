"""The strategies: HA-NPU's one kernel, and the baselines the paper compares with, each as a cut of the same graph.

What the baselines do is read off their public sources; where a paper's port must differ, `docs/planner.md` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from vllm_ext.ha_npu.chips import Chip
from vllm_ext.ha_npu.dataflow import Dataflow, Kernel
from vllm_ext.ha_npu.graph import Graph, replace_tensors
from vllm_ext.ha_npu.inversion import TILE
from vllm_ext.ha_npu.operators import build_graph
from vllm_ext.ha_npu.products import ProductPolicy
from vllm_ext.ha_npu.rewrite import gemm_first

FLA_TILE_COLUMNS = 64
"""flash-linear-attention runs its state and output kernels over tiles of so many value columns."""

QLA_SEGMENTS = 2
"""FlashQLA's context parallelism cuts a sequence at least in two, or there would be no such stage."""


def operand_capacity(chip: Chip) -> int:
    """Half of L0A, of L0B: the other half is being filled while a product runs."""
    return min(chip.buffers["l0a"].usable, chip.buffers["l0b"].usable) // 2


def _fused(graph: Graph) -> tuple[Kernel, ...]:
    return (Kernel("fused", (*(t.name for t in graph.by_role("output")), graph.state_out.name)),)


def ha_npu(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """One kernel, GEMM-first, operands kept in L0 from product to product."""
    graph, _ = gemm_first(build_graph(op, chunk_size=chunk_size, head_dim=head_dim))
    return Dataflow("ha-npu", graph, _fused(graph), ProductPolicy(keep=True, capacity=operand_capacity(chip)))


def ha_npu_tuned(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """HA-NPU taken further: a key-first state, so that V' is the right operand of both its products; no zero tiles."""
    graph, _ = gemm_first(build_graph(op, chunk_size=chunk_size, head_dim=head_dim, value_first=False))
    policy = ProductPolicy(keep=True, capacity=operand_capacity(chip), skip_zero=True)
    return Dataflow("ha-npu-tuned", graph, _fused(graph), policy)


def ha_npu_unordered(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """HA-NPU's kernel without its reordering: every product brings its own operands. For the ablation only."""
    graph, _ = gemm_first(build_graph(op, chunk_size=chunk_size, head_dim=head_dim))
    return Dataflow(
        "ha-npu-unordered", graph, _fused(graph), ProductPolicy(keep=False, capacity=operand_capacity(chip))
    )


def fla(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """flash-linear-attention: one kernel a stage, states ahead of every chunk in FP16, T returned to the caller."""
    graph = build_graph(op, chunk_size=chunk_size, head_dim=head_dim)
    graph = _stored_as(graph, "fp16", "t", "p", "kt")
    tiles = -(-head_dim // FLA_TILE_COLUMNS)
    stages = {
        "gdn": (
            Kernel("cumsum", ("gc",)),
            Kernel("kkt", ("a",)),
            Kernel("solve", ("t",)),
            Kernel("wu", ("u", "w")),
            Kernel("h", ("vn", "s_new"), column_tiles=tiles, stores_states=True),
            Kernel("o", ("o",), column_tiles=tiles),
        ),
        "kda": (
            Kernel("cumsum", ("gc",)),
            Kernel("intra", ("a", "p")),
            Kernel("solve", ("t",)),
            Kernel("wu", ("u", "w", "kt")),
            Kernel("h", ("vn", "s_new"), column_tiles=tiles, stores_states=True),
            Kernel("o", ("o",), column_tiles=tiles),
        ),
        "gla": (
            Kernel("cumsum", ("gc",)),
            Kernel("h", ("s_new",), column_tiles=tiles, stores_states=True),
            Kernel("intra", ("p",)),
            Kernel("o", ("o",), column_tiles=tiles),
        ),
    }
    retained = ("t",) if "t" in graph.nodes else ()
    policy = ProductPolicy(keep=False, capacity=operand_capacity(chip))
    return Dataflow("fla", graph, _stages(stages, op), policy, retained=retained)


def fla_megakernel(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """The stages of flash-linear-attention in one launch: the same traffic."""
    base = fla(op, chunk_size, head_dim, chip)
    return Dataflow("fla-megakernel", base.graph, base.kernels, base.policy, retained=base.retained, launches=1)


def flash_qla(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """FlashQLA: a preparation over chunks that stores the gate sums, a fused recurrence over segments of a sequence.

    Its own algebra is GEMM-first as well: there is no product W. Its public code stores T; the paper's figure 16 leaves
    4 KiB a chunk of a head for all it stores, less than T's 8 KiB, so here T is made again in the fused kernel.
    """
    graph, _ = gemm_first(build_graph(op, chunk_size=chunk_size, head_dim=head_dim))
    kernels = (Kernel("prepare", ("gc",), also=("t",) if "t" in graph.nodes else ()), *_fused(graph))
    policy = ProductPolicy(keep=False, capacity=operand_capacity(chip))
    return Dataflow("flash-qla", graph, kernels, policy, segments=QLA_SEGMENTS)


def vllm_ascend(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """vLLM-Ascend's torch path: one framework operator a node, FP32 throughout, the inversion a loop over rows.

    Traffic counts one pass over each operand and result; the row loop reads and writes its matrix once here and 63
    times there, so this is a lower bound.
    """
    graph = build_graph(op, chunk_size=chunk_size, head_dim=head_dim)
    graph = _stored_as(graph, "fp32", *(name for name in graph.nodes if graph.tensors[name].role == "temp"))
    kernels = tuple(Kernel(name, (name,)) for name in graph.nodes)
    policy = ProductPolicy(keep=False, capacity=operand_capacity(chip), inversion="vector-rows")
    return Dataflow("vllm-ascend", graph, kernels, policy, resident=False)


def chunk_head_chunk(op: str, chunk_size: int, head_dim: int, chip: Chip) -> Dataflow:
    """The third tier of the mapping: preparation by chunks, recurrence by strips of 16 columns, output by chunks."""
    strips = head_dim // TILE
    graph, _ = gemm_first(build_graph(op, chunk_size=chunk_size, head_dim=head_dim))
    graph = _stored_as(graph, "fp16", "t", "p", "vn")
    first = tuple(name for name in ("t", "p") if name in graph.nodes)
    values = ("vn",) if "vn" in graph.nodes else ()
    kernels = (
        Kernel("map", first),
        Kernel("reduce", (*values, graph.state_out.name), column_tiles=strips, stores_states=True),
        Kernel("output", tuple(t.name for t in graph.by_role("output"))),
    )
    return Dataflow("chunk-head-chunk", graph, kernels, ProductPolicy(keep=True, capacity=operand_capacity(chip)))


def _stages(stages: Mapping[str, tuple[Kernel, ...]], op: str) -> tuple[Kernel, ...]:
    if op not in stages:
        raise ValueError(
            f"ha_npu: the stages of flash-linear-attention for {op!r} are not described; see strategies.py"
        )
    return stages[op]


def _stored_as(graph: Graph, dtype: str, *names: str) -> Graph:
    tensors = {name: replace(graph.tensors[name], dtype=dtype) for name in names if name in graph.tensors}
    return replace_tensors(graph, {**graph.tensors, **tensors})


Strategy = Callable[[str, int, int, Chip], Dataflow]

STRATEGIES: Mapping[str, Strategy] = {
    "ha-npu": ha_npu,
    "ha-npu-tuned": ha_npu_tuned,
    "fla": fla,
    "fla-megakernel": fla_megakernel,
    "flash-qla": flash_qla,
    "vllm-ascend": vllm_ascend,
}
