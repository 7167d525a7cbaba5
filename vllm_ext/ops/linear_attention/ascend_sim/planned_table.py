"""The kernels of a plan as a table of steps, which `csrc_ascend/kernels/baselines/planned.h` reads.

Every copy, product and vector step becomes a row; tiles lie where the plan puts them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ext.ha_npu import Plan
from vllm_ext.ha_npu.chunk_plan import KernelPlan
from vllm_ext.ha_npu.dataflow import Dataflow, kernel_traffic
from vllm_ext.ha_npu.first_fit import place_tiles
from vllm_ext.ha_npu.graph import Node, Tensor
from vllm_ext.ha_npu.inversion import TILE
from vllm_ext.ha_npu.lowering import FP16, FP32, VECTOR_REPEAT_BYTES, Step

MOVES = (
    *("load vector", "load tile", "load operand", "fetch", "stage", "product", "drain"),
    *("store vector", "store tile", "store output"),
)
KINDS = (
    *("cumsum", "exp", "exp_tail", "exp_last", "exp_from_middle", "exp_to_middle", "decay", "mul", "scale"),
    *("row_scale", "add", "sub", "lower", "strict_lower", "state_update", "solve", "solve powers", "solve rows"),
)
CODES = {name: number for number, name in enumerate((*MOVES, *KINDS))}
INVERSIONS = {"vector-merge": "solve", "neumann-merge": "solve powers", "vector-rows": "solve rows"}
MEMORIES = {"q": 0, "k": 1, "v": 2, "o": 3, "g": 4, "beta": 5}
WORKSPACE = 6
TRANSPOSE_LEFT, TRANSPOSE_RIGHT, LOAD_LEFT, LOAD_RIGHT = 1, 2, 4, 8
FRACTAL_BYTES = 512
BLOCK = 32


@dataclass(frozen=True)
class Row:
    """One line of the table; the fields of `StepRow` in planned.h, in order."""

    code: str
    destination: int = 0
    rows: int = 0
    columns: int = 0
    source: int = 0
    second: int = 0
    third: int = 0
    sizes: int = 0
    factor: float = 1.0
    memory: int = 0
    base: int = 0
    head_stride: int = 0
    chunk_stride: int = 0
    axis: int = -1
    is_half: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    flags: int = 0
    left: int = 0
    right: int = 0

    def numbers(self) -> list[int]:
        factor = struct.unpack("<i", struct.pack("<f", self.factor))[0]
        row = [CODES[self.code], self.destination, self.rows, self.columns, self.source, self.second, self.third]
        row += [self.sizes, factor, self.memory, self.base, self.head_stride, self.chunk_stride]
        return [*row, self.axis, self.is_half, self.m, self.n, self.k, self.flags, self.left, self.right]


class Workspace:
    """Places of what kernels leave for one another, in blocks of 32 bytes, free again after their last reader.

    The outputs have a place as well, though they are not written there: memory holds them from their first kernel.
    """

    def __init__(self, flow: Dataflow, heads: int, chunks: int) -> None:
        self.flow = flow
        state, new_state = flow.graph.state_in.name, flow.graph.state_out.name
        sizes: dict[str, int] = {}
        spans: dict[str, tuple[int, int]] = {}
        traffics = kernel_traffic(flow)
        for index, traffic in enumerate(traffics):
            for name in (*traffic.writes, *traffic.reads):
                root = state if name == new_state else name
                if flow.graph.tensors[root].role == "input":
                    continue
                # A state that stays on no core is kept ahead of every chunk, and behind the last.
                count = chunks + (root == state and not flow.resident)
                sizes[root] = heads * count * self.tile_blocks(root)
                last = len(traffics) if name in (*flow.retained, "o") or not flow.resident else index
                spans[root] = spans.get(root, (index, 0))[0], last
        offsets, self.blocks = place_tiles(sizes, spans)
        self.places = {name: (offset, sizes[name] // heads, self.tile_blocks(name)) for name, offset in offsets.items()}

    def tile_blocks(self, name: str) -> int:
        return -(-self.flow.graph.tensors[name].elements * self.item_bytes(name) // BLOCK)

    def place(self, name: str) -> tuple[int, int, int]:
        """(base, head stride, chunk stride). The state behind a chunk is the one ahead of the next."""
        if name != self.flow.graph.state_out.name:
            return self.places[name]
        base, head, chunk = self.places[self.flow.graph.state_in.name]
        return base + chunk, head, chunk

    def item_bytes(self, name: str) -> int:
        tensor = self.flow.graph.tensors[name]
        if tensor.role in ("state_in", "state_out"):
            return FP16 if self.flow.resident else FP32
        return FP16 if tensor.dtype == "fp16" else FP32


class _Operands:
    """Which operands L0A or L0B holds, as `products` counts it, and where: first fit between those held."""

    def __init__(self, keep: bool, capacity: int) -> None:
        self.keep, self.capacity = keep, capacity
        self.held: dict[tuple[str, bool], tuple[int, int]] = {}

    def use(self, name: tuple[str, bool], fractals: int) -> tuple[int, bool]:
        """(offset, whether it must be loaded)."""
        if self.keep and name in self.held:
            self.held[name] = self.held.pop(name)
            return self.held[name][0], False
        size = fractals * FRACTAL_BYTES
        if not self.keep:
            self.held.clear()
        while self.held and sum(held for _, held in self.held.values()) + size > self.capacity:
            del self.held[next(iter(self.held))]
        offset = 0
        for begin, held in sorted(self.held.values()):
            if begin - offset >= size:
                break
            offset = begin + held
        self.held[name] = offset, size
        return offset, True


class KernelTable:
    """The rows of one kernel of a plan."""

    def __init__(self, plan: Plan, kernel: KernelPlan, workspace: Workspace) -> None:
        self.plan, self.kernel, self.workspace = plan, kernel, workspace
        self.graph, self.program = kernel.program.graph, kernel.program
        policy = plan.chunk.dataflow.policy
        self.left, self.right = (_Operands(policy.keep, policy.capacity) for _ in range(2))
        self.row_offsets = self._row_offsets()

    def _row_offsets(self) -> dict[str, int]:
        """Row vectors lie in their part of UB one after another, as the header says."""
        offsets, at = {}, self.program.static.get("staging", 0)
        for tensor in self.graph.tensors.values():
            if tensor.is_vector:
                offsets[tensor.name] = at
                at += -(-tensor.elements * FP32 // VECTOR_REPEAT_BYTES) * VECTOR_REPEAT_BYTES
        return offsets

    def at(self, item: str) -> int:
        return self.kernel.allocation.placements[item].offset

    def ub(self, name: str) -> int:
        """Where a tensor lies in UB; the new state takes the place of the old one."""
        if self.graph.tensors[name].is_vector:
            return self.row_offsets[name]
        if self.graph.tensors[name].role == "state_out" and f"ub:{name}" not in self.program.items:
            name = self.graph.state_in.name
        return self.at(f"ub:{name}")

    def rows(self) -> Iterator[Row]:
        for name in self.kernel.order:
            yield self._row(self.program.steps[name])

    def _row(self, step: Step) -> Row:
        tensor = self.graph.tensors[step.tensor]
        size = {"rows": tensor.rows, "columns": tensor.cols}
        if step.unit == "load":
            return self._load(step, tensor)
        if step.unit == "store":
            return self._store(tensor)
        if step.unit in ("fetch", "stage", "drain"):
            return Row(step.unit, self.at(step.writes[0]), source=self.at(step.reads[0]), **size)
        node = self.graph.nodes[step.tensor]
        if step.unit == "matrix":
            return self._product(step, node)
        if step.unit == "solve":
            return self._solve(step, node, tensor)
        sources = [self.ub(name) for name in node.inputs]
        if node.kind == "state_update":
            sources = [sources[0], sources[2], sources[1]]
        widths = [self.graph.tensors[name] for name in node.inputs]
        read = widths[1].cols if node.kind == "state_update" else widths[0].cols
        places = dict(zip(("source", "second", "third"), sources, strict=False))
        return Row(node.kind, self.ub(step.tensor), sizes=read, factor=node.factor, **size, **places)

    def _memory(self, tensor: Tensor) -> dict[str, int]:
        whole = self.workspace.flow.graph.tensors[tensor.name]
        if tensor.name in MEMORIES:
            place = {"memory": MEMORIES[tensor.name]}
        else:
            base, head, chunk = self.workspace.place(tensor.name)
            place = {"memory": WORKSPACE, "base": base, "head_stride": head, "chunk_stride": chunk}
        is_half = whole.dtype == "fp16" if tensor.name in MEMORIES else self.workspace.item_bytes(tensor.name) == FP16
        axis = -1 if whole.value_axis is None else whole.value_axis
        return {**place, "axis": axis, "is_half": int(is_half), "rows": tensor.rows, "columns": tensor.cols}

    def _load(self, step: Step, tensor: Tensor) -> Row:
        if tensor.is_vector:
            return Row("load vector", self.row_offsets[tensor.name], **self._memory(tensor))
        code = "load operand" if step.writes[0].startswith("l1:") else "load tile"
        return Row(code, self.at(step.writes[0]), **self._memory(tensor))

    def _store(self, tensor: Tensor) -> Row:
        code = "store vector" if tensor.is_vector else "store output" if tensor.name == "o" else "store tile"
        return Row(code, source=self.ub(tensor.name), **self._memory(tensor))

    def _product(self, step: Step, node: Node) -> Row:
        m, n, k = (size // TILE for size in self.graph.matmul_shape(node))
        left, load_left = self.left.use((node.inputs[0], node.transpose[0]), m * k)
        right, load_right = self.right.use((node.inputs[1], node.transpose[1]), k * n)
        flags = TRANSPOSE_LEFT * node.transpose[0] + TRANSPOSE_RIGHT * node.transpose[1]
        flags += LOAD_LEFT * load_left + LOAD_RIGHT * load_right
        sources = [self.at(f"l1:{name}") for name in node.inputs]
        return Row(
            "product",
            self.at(step.writes[0]),
            source=sources[0],
            second=sources[1],
            m=m,
            n=n,
            k=k,
            flags=flags,
            left=left,
            right=right,
        )

    def _solve(self, step: Step, node: Node, tensor: Tensor) -> Row:
        self.left.held.clear()
        self.right.held.clear()
        return Row(
            INVERSIONS[self.plan.chunk.dataflow.policy.inversion],
            self.ub(step.tensor),
            tensor.rows,
            tensor.cols,
            self.ub(node.inputs[0]),
            self.at(f"l1:{step.name}_workspace"),
            self.at(f"l0c:{step.name}_workspace"),
        )
