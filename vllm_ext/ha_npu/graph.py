"""The operator graph of one chunk of one head, and its evaluation in numpy.

Tensors are two-dimensional tiles; a node makes one tensor, of its own name. The graph is pure mathematics: buffers,
casts and copies come in `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

ITEM_BYTES = {"fp16": 2, "fp32": 4}
ROLES = ("input", "output", "state_in", "state_out", "temp")


@dataclass(frozen=True)
class Tensor:
    """A tile [rows, cols].

    dtype       the type it has in global memory, "fp16" or "fp32"
    role        "input" and "output" are in global memory, one a chunk; "state_in" and "state_out" carry the recurrence
    value_axis  which axis runs over the value columns, 0 or 1, or None: a head is split along it without a reduction
    token_axis  whether the rows run over tokens, so that a short last chunk has fewer of them
    triangular  whether only the part on and below the diagonal is used
    stored      elements in global memory where those are not all of them: a triangle stored without its other half
    padded      whether global memory holds the rows of a short last chunk that it does not have
    """

    name: str
    rows: int
    cols: int
    dtype: str = "fp32"
    role: str = "temp"
    value_axis: int | None = None
    token_axis: bool = True
    triangular: bool = False
    stored: int | None = None
    padded: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def nbytes(self) -> int:
        """Bytes in global memory."""
        return (self.elements if self.stored is None else self.stored) * ITEM_BYTES[self.dtype]

    @property
    def is_vector(self) -> bool:
        """One number a row, or one row: too small for the tile buffers."""
        return self.rows == 1 or self.cols == 1

    def split(self, parts: int) -> Tensor:
        """The tile one of `parts` column parts works on, the widest of them if the columns do not divide evenly."""
        if self.value_axis is None:
            return self
        if self.value_axis == 0:
            return replace(self, rows=-(-self.rows // parts))
        return replace(self, cols=-(-self.cols // parts))


@dataclass(frozen=True)
class Node:
    """One operation. `operator` is the paper's number, 1 to 6; `phase` splits operator 5 into "read" and "update"."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    operator: int
    phase: str = ""
    transpose: tuple[bool, bool] = (False, False)
    factor: float = 1.0

    @property
    def unit(self) -> str:
        return {"matmul": "matrix", "solve": "solve"}.get(self.kind, "vector")


Array = np.ndarray
VECTOR_KINDS: dict[str, Callable[..., Array]] = {
    "cumsum": lambda x: np.cumsum(x, axis=0),
    "exp": np.exp,
    "exp_tail": lambda x: np.exp(x[-1:] - x),
    "exp_last": lambda x: np.exp(x[-1:]),
    "exp_from_middle": lambda x: np.exp(x - x[len(x) // 2]),
    "exp_to_middle": lambda x: np.exp(x[len(x) // 2] - x),
    "decay": lambda x: np.tril(np.exp(np.tril(x - x.T))),
    "mul": lambda x, y: x * y,
    "scale": lambda x: x,
    "row_scale": lambda x, c: x * c,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "lower": np.tril,
    "strict_lower": lambda x: np.tril(x, -1),
    "state_update": lambda s, decay, kv: s * decay + kv,
    "state_update_keys": lambda s, decay, kv: s * decay.T + kv,
}
"""What a vector node computes, by kind, before its factor is applied."""

IN_PLACE_KINDS = frozenset(VECTOR_KINDS) - {"decay", "exp_last"}
"""Element by element, so that the result may take the place of an input."""


@dataclass(frozen=True)
class Graph:
    """Tensors and nodes by name; the nodes are in an order that respects their dependencies."""

    op: str
    tensors: Mapping[str, Tensor]
    nodes: Mapping[str, Node]
    chunk_size: int
    head_dim: int
    consumers: Mapping[str, tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        consumers: dict[str, list[str]] = {name: [] for name in self.tensors}
        known = {name for name, tensor in self.tensors.items() if tensor.role in ("input", "state_in")}
        for node in self.nodes.values():
            for name in node.inputs:
                if name not in known:
                    raise ValueError(f"ha_npu: {self.op}: node {node.name!r} reads {name!r} before it is made")
                if node.name not in consumers[name]:
                    consumers[name].append(node.name)
            known.add(node.name)
        object.__setattr__(self, "consumers", {name: tuple(users) for name, users in consumers.items()})

    def by_role(self, *roles: str) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if tensor.role in roles]

    @property
    def state_in(self) -> Tensor:
        return self.by_role("state_in")[0]

    @property
    def state_out(self) -> Tensor:
        return self.by_role("state_out")[0]

    @property
    def recurrent(self) -> bool:
        """Whether the graph carries a state; that of a single kernel may not."""
        return bool(self.by_role("state_out"))

    def matmul_shape(self, node: Node) -> tuple[int, int, int]:
        """(M, N, K) of a matrix product."""
        left, right = (self.tensors[name] for name in node.inputs)
        rows, inner = (left.cols, left.rows) if node.transpose[0] else (left.rows, left.cols)
        columns = right.rows if node.transpose[1] else right.cols
        return rows, columns, inner

    def split(self, parts: int) -> Graph:
        """The graph of one of `parts` column parts of a head: value columns divided, everything else repeated."""
        return replace_tensors(self, {name: tensor.split(parts) for name, tensor in self.tensors.items()})

    def evaluate(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Every tensor's value in FP64, from those of the inputs and the incoming state."""
        result = {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}
        for node in self.nodes.values():
            result[node.name] = apply_node(node, [result[name] for name in node.inputs])
        return result


def apply_node(node: Node, inputs: list[Array]) -> Array:
    """The value of one node."""
    if node.kind == "matmul":
        left, right = (x.T if flip else x for x, flip in zip(inputs, node.transpose, strict=True))
        return left @ right
    if node.kind == "solve":
        return np.linalg.inv(np.eye(len(inputs[0])) + inputs[0])
    return VECTOR_KINDS[node.kind](*inputs) * node.factor


def replace_tensors(graph: Graph, tensors: Mapping[str, Tensor]) -> Graph:
    return Graph(graph.op, dict(tensors), dict(graph.nodes), graph.chunk_size, graph.head_dim)


def with_nodes(graph: Graph, nodes: Iterable[Node], tensors: Mapping[str, Tensor]) -> Graph:
    """A graph of the nodes that lead to an output, in dependency order, with the tensors they touch."""
    made = {node.name: node for node in nodes}
    order: dict[str, Node] = {}

    def visit(name: str) -> None:
        if name in made and name not in order:
            for source in made[name].inputs:
                visit(source)
            order[name] = made[name]

    for name, tensor in tensors.items():
        if tensor.role in ("output", "state_out"):
            visit(name)
    used = {name for node in order.values() for name in (*node.inputs, node.name)}
    kept = {name: tensor for name, tensor in tensors.items() if name in used}
    return Graph(graph.op, kept, order, graph.chunk_size, graph.head_dim)
