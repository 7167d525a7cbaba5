"""From a graph to the steps of one core: copies between buffers, matrix products, vector operations.

An item is a tensor in a buffer ("ub:kk"); a step reads items and writes items. In UB tiles are FP32, as gates and state
are; operands of the matrix unit lie in L1 in FP16, its results in L0C in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_ext.ha_npu.chips import Chip
from vllm_ext.ha_npu.graph import IN_PLACE_KINDS, Graph, Node, Tensor

FP32, FP16 = 4, 2
VECTOR_REPEAT_BYTES = 256
BROADCAST_BLOCK_BYTES = 32
STAGING_DEPTH = 2


@dataclass(frozen=True)
class Item:
    """A tensor in a buffer. A pinned item keeps its place in every chunk, whether or not it is in use."""

    key: str
    buffer: str
    tensor: str
    nbytes: int
    pinned: bool = False


@dataclass(frozen=True)
class Step:
    """One instruction of the plan. The inversion works in the staging queue and leaves T in the place of A.

    unit        "load" (from global memory), "fetch" (L1 to UB), "stage" (UB to L1), "matrix", "drain" (L0C to UB),
                "vector", "solve" or "store"
    after       steps it follows for the sake of row vectors, which have a place of their own and are no items
    in_place    whether the result may take the place of an input that nobody reads afterwards
    workspace   bytes needed during the step only, by buffer
    """

    name: str
    unit: str
    tensor: str
    operator: int
    phase: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: tuple[str, ...] = ()
    in_place: bool = False
    workspace: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """The steps of a chunk, in some order that respects `deps`, and what they need of the buffers.

    static          bytes of UB that are in use throughout: the staging queue, the row vectors, a broadcast block
    product_order   matrix products that must follow one another in this order
    """

    graph: Graph
    chip: Chip
    items: Mapping[str, Item]
    steps: Mapping[str, Step]
    static: Mapping[str, int]
    product_order: tuple[str, ...] = ()
    deps: Mapping[str, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        writer = {item: step.name for step in self.steps.values() for item in step.writes if not self._is_update(step)}
        deps: dict[str, set[str]] = {}
        for step in self.steps.values():
            deps[step.name] = {writer[item] for item in step.reads if item in writer} | set(step.after)
        for update in (step for step in self.steps.values() if self._is_update(step)):
            overwritten = set(update.writes)
            deps[update.name] |= {
                step.name for step in self.steps.values() if step.name != update.name and overwritten & set(step.reads)
            }
        for earlier, later in zip(self.product_order, self.product_order[1:], strict=False):
            deps[later].add(earlier)
        object.__setattr__(self, "deps", {name: frozenset(found) for name, found in deps.items()})

    @staticmethod
    def _is_update(step: Step) -> bool:
        """A step that overwrites what it reads comes after every other reader."""
        return bool(set(step.writes) & set(step.reads))

    @property
    def static_bytes(self) -> int:
        return sum(self.static.values())


class _Lowering:
    def __init__(self, graph: Graph, chip: Chip, state_in_place: bool, staging_depth: int) -> None:
        self.graph, self.chip, self.state_in_place, self.staging_depth = graph, chip, state_in_place, staging_depth
        self.items: dict[str, Item] = {}
        self.steps: dict[str, Step] = {}

    def item(self, buffer: str, tensor: Tensor, *, pinned: bool = False) -> str:
        # Vector cores that share a matrix core split the value columns; L1 and L0C hold all of them.
        elements = tensor.split(self.chip.lanes).elements if buffer == "ub" else tensor.elements
        size = elements * (FP16 if buffer == "l1" else FP32)
        key = f"{buffer}:{tensor.name}"
        self.items[key] = Item(key, buffer, tensor.name, self.chip.buffers[buffer].align(size), pinned)
        return key

    def step(self, unit: str, tensor: str, reads: list[str], writes: list[str], **extra: object) -> None:
        name = tensor if unit in ("vector", "matrix", "solve") else f"{unit} {tensor}"
        node = self.graph.nodes.get(tensor)
        operator, phase = (node.operator, node.phase) if node else (0, "")
        after = self.vector_sources(node) if node and unit in ("vector", "matrix", "solve") else ()
        self.steps[name] = Step(name, unit, tensor, operator, phase, tuple(reads), tuple(writes), after, **extra)  # type: ignore[arg-type]

    def vector_sources(self, node: Node) -> tuple[str, ...]:
        """The steps that make the row vectors a node reads."""
        vectors = [name for name in node.inputs if self.graph.tensors[name].is_vector]
        return tuple(name if name in self.graph.nodes else f"load {name}" for name in vectors)

    def users(self, name: str) -> tuple[list[Node], list[Node]]:
        """(matrix, other) nodes that read a tensor."""
        users = [self.graph.nodes[user] for user in self.graph.consumers[name]]
        return [n for n in users if n.unit == "matrix"], [n for n in users if n.unit != "matrix"]

    def lower_input(self, tensor: Tensor) -> None:
        """FP16 tiles that several steps want go to L1 and are fetched from there; the others go straight to UB."""
        if tensor.is_vector:
            self.step("load", tensor.name, [], [])
            return
        matrix, vector = self.users(tensor.name)
        through_l1 = bool(matrix) or (tensor.dtype == "fp16" and len(vector) > 1)
        if through_l1:
            self.step("load", tensor.name, [], [self.item("l1", tensor)])
        if vector:
            reads = [f"l1:{tensor.name}"] if through_l1 else []
            self.step("fetch" if through_l1 else "load", tensor.name, reads, [self.item("ub", tensor)])

    def lower_state(self, tensor: Tensor) -> None:
        self.item("ub", tensor, pinned=True)
        if self.users(tensor.name)[0]:
            self.step("stage", tensor.name, [f"ub:{tensor.name}"], [self.item("l1", tensor)])

    def tiles(self, node: Node, buffer: str) -> list[str]:
        return [f"{buffer}:{name}" for name in node.inputs if not self.graph.tensors[name].is_vector]

    def lower_node(self, node: Node) -> None:
        tensor = self.graph.tensors[node.name]
        matrix, vector = self.users(node.name)
        if node.unit == "matrix":
            self.lower_product(node, tensor, matrix, vector)
            return
        reads = self.tiles(node, "ub")
        if node.unit == "solve":
            c = self.graph.chunk_size
            workspace = {"l1": 2 * c * c * FP16, "l0c": c * c * FP32} if self.chip.has_l0 else {"l1": 2 * c * c * FP16}
            self.step("solve", node.name, reads, [self.item("ub", tensor)], in_place=True, workspace=workspace)
        elif tensor.role == "state_out" and self.state_in_place:
            self.step("vector", node.name, reads, [f"ub:{self.graph.state_in.name}"])
        else:
            pinned = tensor.role == "state_out"
            writes = [] if tensor.is_vector else [self.item("ub", tensor, pinned=pinned)]
            in_place = node.kind in IN_PLACE_KINDS and not pinned
            self.step("vector", node.name, reads, writes, in_place=in_place)
        if matrix:
            self.step("stage", node.name, [f"ub:{node.name}"], [self.item("l1", tensor)])

    def lower_product(self, node: Node, tensor: Tensor, matrix: list[Node], vector: list[Node]) -> None:
        reads = self.tiles(node, "l1")
        needed_in_ub = matrix or vector or tensor.role == "output"
        if not self.chip.has_l0:
            self.step("matrix", node.name, reads, [self.item("ub", tensor)])
        else:
            accumulator = self.item("l0c", tensor)
            self.step("matrix", node.name, reads, [accumulator])
            if needed_in_ub:
                self.step("drain", node.name, [accumulator], [self.item("ub", tensor)])
        if matrix:
            self.step("stage", node.name, [f"ub:{node.name}"], [self.item("l1", tensor)])

    def static(self) -> dict[str, int]:
        """What UB holds throughout: the queue of FP16 tiles, the row vectors, a vector broadcast to blocks."""
        c = self.graph.chunk_size
        vectors = [tensor for tensor in self.graph.tensors.values() if tensor.is_vector]
        align = VECTOR_REPEAT_BYTES
        sizes = {
            "staging": self.staging_depth * c * self.graph.head_dim * FP16,
            "row_vectors": sum(-(-t.elements * FP32 // align) * align for t in vectors),
        }
        if any(node.kind == "row_scale" for node in self.graph.nodes.values()):
            sizes["broadcast"] = c * BROADCAST_BLOCK_BYTES
        return sizes

    def run(self) -> Program:
        for tensor in self.graph.by_role("input"):
            self.lower_input(tensor)
        for tensor in self.graph.by_role("state_in"):
            self.lower_state(tensor)
        for node in self.graph.nodes.values():
            self.lower_node(node)
        for tensor in self.graph.by_role("output"):
            name = f"store {tensor.name}"
            if tensor.is_vector:
                self.steps[name] = Step(name, "store", tensor.name, 0, "", (), (), after=(tensor.name,))
            else:
                self.step("store", tensor.name, [f"ub:{tensor.name}"], [])
        return Program(self.graph, self.chip, self.items, self.steps, self.static())


def lower(graph: Graph, chip: Chip, *, state_in_place: bool = True, staging_depth: int = STAGING_DEPTH) -> Program:
    """The steps of one chunk on one core of `chip`.

    With `state_in_place` the new state overwrites the old one, after its last reader (paper, section 5, chunk-first).
    Without, the two states swap places from chunk to chunk, so that both keep a place of their own throughout.
    `staging_depth` is the number of FP16 tiles in the staging queue; 2 lets a copy run beside the next tile's cast.
    """
    return _Lowering(graph, chip, state_in_place, staging_depth).run()
