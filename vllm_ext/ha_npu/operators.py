"""The operators the planner knows: each a function that builds the graph of one chunk of one head.

To add one, write such a function and name it in `OPERATORS`. Formulas: HA-NPU paper, section 2.1; C tokens a chunk,
head dimension d, gates g (natural-log decays), G = cumsum(g); the state lies value-first, [V, K], as vLLM keeps it, or
key-first. Tiles that matter only on and below the diagonal are marked `triangular`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from vllm_ext.ha_npu.graph import Graph, Node, Tensor


class GraphBuilder:
    """Collects tensors and nodes; a node's tensor is declared along with it.

    `value_first` keeps the state as [V, K], else as [K, V]: which of them is a matter of the core's own buffers.
    """

    def __init__(self, op: str, chunk_size: int, head_dim: int, value_first: bool) -> None:
        self.op, self.chunk_size, self.head_dim, self.value_first = op, chunk_size, head_dim, value_first
        self.tensors: dict[str, Tensor] = {}
        self.nodes: dict[str, Node] = {}

    def tensor(self, name: str, rows: int, cols: int, **kind: object) -> str:
        self.tensors[name] = Tensor(name, rows, cols, **kind)  # type: ignore[arg-type]
        return name

    def node(
        self, name: str, kind: str, inputs: tuple[str, ...], shape: tuple[int, int], operator: int, **kind_of: object
    ) -> str:
        node_keys = {"phase", "transpose", "factor"}
        self.nodes[name] = Node(name, kind, inputs, operator, **{k: v for k, v in kind_of.items() if k in node_keys})  # type: ignore[arg-type]
        return self.tensor(name, shape[0], shape[1], **{k: v for k, v in kind_of.items() if k not in node_keys})

    def inputs(self, gate_columns: int, *, beta: bool) -> None:
        """q, k, v in FP16, the gates and beta in FP32, and the incoming state."""
        c, d = self.chunk_size, self.head_dim
        self.tensor("q", c, d, dtype="fp16", role="input")
        self.tensor("k", c, d, dtype="fp16", role="input")
        self.tensor("v", c, d, dtype="fp16", role="input", value_axis=1)
        self.tensor("g", c, gate_columns, role="input")
        if beta:
            self.tensor("beta", c, 1, role="input")
        self.tensor("s", d, d, role="state_in", value_axis=self.value_axis, token_axis=False)

    @property
    def value_axis(self) -> int:
        """The axis of the state that runs over the value columns."""
        return 0 if self.value_first else 1

    def read_state(self, name: str, rows: str, operator: int, phase: str = "") -> str:
        """The product of a [C, K] tile with the state, [C, V]."""
        shape = (self.chunk_size, self.head_dim)
        transpose = (False, self.value_first)
        return self.node(name, "matmul", (rows, "s"), shape, operator, phase=phase, transpose=transpose, value_axis=1)

    def build(self) -> Graph:
        return Graph(self.op, self.tensors, self.nodes, self.chunk_size, self.head_dim)


def build_gdn(chunk_size: int, head_dim: int, value_first: bool) -> Graph:
    """Gated DeltaNet: one decay a token. A_ij = beta_i exp(G_i - G_j) k_i.k_j below the diagonal, T = (I + A)^-1."""
    c, d = chunk_size, head_dim
    b = GraphBuilder("gdn", c, d, value_first)
    b.inputs(1, beta=True)
    b.node("gc", "cumsum", ("g",), (c, 1), 1)
    b.node("eg", "exp", ("gc",), (c, 1), 1)
    b.node("er", "exp_tail", ("gc",), (c, 1), 1)
    b.node("el", "exp_last", ("gc",), (1, 1), 1, token_axis=False)
    b.node("seg", "scale", ("eg",), (c, 1), 1, factor=d**-0.5)
    b.node("dm", "decay", ("gc",), (c, c), 1, triangular=True)
    b.node("kk", "matmul", ("k", "k"), (c, c), 2, triangular=True, transpose=(False, True))
    b.node("kkd", "mul", ("kk", "dm"), (c, c), 2, triangular=True)
    b.node("kkb", "row_scale", ("kkd", "beta"), (c, c), 2, triangular=True)
    b.node("a", "strict_lower", ("kkb",), (c, c), 2, triangular=True)
    _solve_and_read(b, ("row_scale", "k", "eg"))
    b.node("qe", "row_scale", ("q", "seg"), (c, d), 6)
    b.read_state("qs", "qe", 6)
    b.node("qk", "matmul", ("q", "k"), (c, c), 6, triangular=True, transpose=(False, True))
    b.node("qkd", "mul", ("qk", "dm"), (c, c), 6, triangular=True)
    b.node("p", "scale", ("qkd",), (c, c), 6, triangular=True, factor=d**-0.5)
    _output_and_update(b, "vn", ("row_scale", "k", "er"))
    return b.build()


def build_kda(chunk_size: int, head_dim: int, value_first: bool) -> Graph:
    """Kimi Delta Attention: one decay a token and channel, so the decay sits inside both products of keys and queries.

    exp(G_i - G_j) is split at the middle of the chunk: exp(G_i - G_mid) on the left operand, exp(G_mid - G_j) on the
    right one, as the paper's count of operands implies. In FP16 that holds while gates sum to less than 11 in half a
    chunk; for steeper ones a kernel splits at every 16 rows, see docs/planner.md for what that costs.
    """
    c, d = chunk_size, head_dim
    b = GraphBuilder("kda", c, d, value_first)
    b.inputs(d, beta=True)
    _channel_gates(b)
    b.node("kp", "mul", ("k", "df"), (c, d), 2)
    b.node("kn", "mul", ("k", "dt"), (c, d), 2)
    b.node("kk", "matmul", ("kp", "kn"), (c, c), 2, triangular=True, transpose=(False, True))
    b.node("kkb", "row_scale", ("kk", "beta"), (c, c), 2, triangular=True)
    b.node("a", "strict_lower", ("kkb",), (c, c), 2, triangular=True)
    _solve_and_read(b, ("mul", "k", "eg"))
    _channel_attention(b)
    _output_and_update(b, "vn", ("mul", "k", "er"))
    return b.build()


def build_gla(chunk_size: int, head_dim: int, value_first: bool) -> Graph:
    """Gated Linear Attention: the decays of KDA without the delta rule, hence no beta, no inversion; V' is V."""
    c, d = chunk_size, head_dim
    b = GraphBuilder("gla", c, d, value_first)
    b.inputs(d, beta=False)
    _channel_gates(b)
    b.node("kn", "mul", ("k", "dt"), (c, d), 2)
    _channel_attention(b)
    _output_and_update(b, "v", ("mul", "k", "er"))
    return b.build()


def _channel_gates(b: GraphBuilder) -> None:
    c, d = b.chunk_size, b.head_dim
    b.node("gc", "cumsum", ("g",), (c, d), 1)
    b.node("df", "exp_from_middle", ("gc",), (c, d), 1)
    b.node("dt", "exp_to_middle", ("gc",), (c, d), 1)
    b.node("eg", "exp", ("gc",), (c, d), 1)
    b.node("er", "exp_tail", ("gc",), (c, d), 1)
    b.node("el", "exp_last", ("gc",), (1, d), 1, token_axis=False)


def _solve_and_read(b: GraphBuilder, decayed_keys: tuple[str, str, str]) -> None:
    """Operators 3, 4 and the reading half of 5: U = T diag(beta) V, W = T diag(beta) K', V' = U - W S."""
    c, d = b.chunk_size, b.head_dim
    kind, *of = decayed_keys
    b.node("t", "solve", ("a",), (c, c), 3, triangular=True)
    b.node("bv", "row_scale", ("v", "beta"), (c, d), 4, value_axis=1)
    b.node("u", "matmul", ("t", "bv"), (c, d), 4, value_axis=1, dtype="fp16")
    b.node("ke", kind, tuple(of), (c, d), 4)
    b.node("kb", "row_scale", ("ke", "beta"), (c, d), 4)
    b.node("w", "matmul", ("t", "kb"), (c, d), 4, dtype="fp16")
    b.read_state("ws", "w", 5, "read")
    b.node("vn", "sub", ("u", "ws"), (c, d), 5, phase="read", value_axis=1, dtype="fp16")


def _channel_attention(b: GraphBuilder) -> None:
    """The query side of operator 6 with per-channel decays."""
    c, d = b.chunk_size, b.head_dim
    b.node("qe", "mul", ("q", "eg"), (c, d), 6, factor=d**-0.5)
    b.read_state("qs", "qe", 6)
    b.node("qp", "mul", ("q", "df"), (c, d), 6, factor=d**-0.5)
    b.node("qk", "matmul", ("qp", "kn"), (c, c), 6, triangular=True, transpose=(False, True))
    b.node("p", "lower", ("qk",), (c, c), 6, triangular=True)


def _output_and_update(b: GraphBuilder, values: str, tail_keys: tuple[str, str, str]) -> None:
    """O = [Q' S] + P V' and the updating half of operator 5, S' = exp(G_C) S + V'^T K''."""
    c, d = b.chunk_size, b.head_dim
    b.node("pv", "matmul", ("p", values), (c, d), 6, value_axis=1)
    b.node("o", "add", ("qs", "pv"), (c, d), 6, value_axis=1, dtype="fp16", role="output")
    kind, *of = tail_keys
    state = {"phase": "update", "value_axis": b.value_axis, "token_axis": False}
    b.node("kt", kind, tuple(of), (c, d), 5, phase="update")
    factors = (values, "kt") if b.value_first else ("kt", values)
    update = "state_update" if b.value_first else "state_update_keys"
    b.node("kv", "matmul", factors, (d, d), 5, transpose=(True, False), **state)
    b.node("s_new", update, ("s", "el", "kv"), (d, d), 5, role="state_out", **state)


OPERATORS: Mapping[str, Callable[[int, int, bool], Graph]] = {"gdn": build_gdn, "kda": build_kda, "gla": build_gla}


def build_graph(op: str, *, chunk_size: int = 64, head_dim: int = 128, value_first: bool = True) -> Graph:
    """The graph of one chunk of one head, in the default order. Raises ValueError on an unknown operator."""
    if not isinstance(op, str) or op not in OPERATORS:
        raise ValueError(f"ha_npu: unknown operator {op!r}; known: {', '.join(sorted(OPERATORS))}")
    return OPERATORS[op](chunk_size, head_dim, value_first)


def random_inputs(graph: Graph, seed: int, *, gate: float = 0.1) -> dict[str, np.ndarray]:
    """Random inputs of a graph in FP64: unit-length q and k, gates in (-gate, 0), beta in (0, 1), a dense state."""
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for tensor in graph.by_role("input", "state_in"):
        shape = (tensor.rows, tensor.cols)
        if tensor.name == "g":
            values["g"] = -gate * rng.random(shape)
        elif tensor.name == "beta":
            values["beta"] = rng.random(shape)
        else:
            values[tensor.name] = rng.standard_normal(shape)
    for name in ("q", "k"):
        values[name] /= np.linalg.norm(values[name], axis=1, keepdims=True)
    return values
