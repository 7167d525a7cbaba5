from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu.graph import Graph, Node, Tensor, apply_node, with_nodes
from vllm_ext.ha_npu.operators import OPERATORS, build_graph, random_inputs
from vllm_ext.ha_npu.rewrite import RULES, gemm_first

OPS = sorted(OPERATORS)
TOLERANCE = 1e-12
"""FP64 rounding of a few hundred additions of numbers near 1."""


def token_recurrence(op: str, x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The operator a token at a time: outputs [C, V] and the state [V, K], from the definition, not the graph."""
    state = x["s"].T.copy()
    scale = x["q"].shape[1] ** -0.5
    outputs = []
    for t in range(len(x["q"])):
        state = state * np.exp(x["g"][t]).reshape(-1, 1)
        value = x["v"][t]
        if op != "gla":
            value = x["beta"][t] * (value - x["k"][t] @ state)
        state = state + np.outer(x["k"][t], value)
        outputs.append(scale * x["q"][t] @ state)
    return np.array(outputs), state.T


def results(graph: Graph, x: dict[str, np.ndarray], *, value_first: bool = True) -> tuple[np.ndarray, np.ndarray]:
    given = x if value_first else {**x, "s": x["s"].T}
    values = graph.evaluate(given)
    return values["o"], values["s_new"] if value_first else values["s_new"].T


@settings(max_examples=12, deadline=None)
@given(
    op=st.sampled_from(OPS),
    chunk=st.sampled_from([16, 48, 64]),
    dim=st.sampled_from([16, 64, 128]),
    seed=st.integers(0, 2**16),
    value_first=st.booleans(),
)
def test_the_graph_computes_the_token_recurrence(op: str, chunk: int, dim: int, seed: int, value_first: bool) -> None:
    graph = build_graph(op, chunk_size=chunk, head_dim=dim, value_first=value_first)
    x = random_inputs(graph, seed)
    for ours, expected in zip(results(graph, x, value_first=value_first), token_recurrence(op, x), strict=True):
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE * 100)


@settings(max_examples=12, deadline=None)
@given(
    op=st.sampled_from(OPS), seed=st.integers(0, 2**16), gate=st.sampled_from([0.01, 0.3]), value_first=st.booleans()
)
def test_gemm_first_is_equivalent_on_random_inputs(op: str, seed: int, gate: float, value_first: bool) -> None:
    graph = build_graph(op, value_first=value_first)
    rewritten, _ = gemm_first(graph)
    x = random_inputs(graph, seed, gate=gate)
    for ours, expected in zip(
        results(rewritten, x, value_first=value_first), results(graph, x, value_first=value_first), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_gemm_first_takes_the_product_w_away_and_frees_k_s_from_the_inversion(op: str) -> None:
    """The paper's step: W = T K' is gone, and the product of keys and state no longer waits for T."""
    graph = build_graph(op)
    rewritten, applied = gemm_first(graph)
    products = [n for n in graph.nodes.values() if n.kind == "matmul"]
    fewer = [n for n in rewritten.nodes.values() if n.kind == "matmul"]
    assert "w" in graph.nodes
    assert "w" not in rewritten.nodes
    assert len(fewer) == len(products) - 1
    assert {"associate", "factor"} <= set(applied)
    waiting = {"t"}
    for node in rewritten.nodes.values():
        if waiting & set(node.inputs):
            waiting.add(node.name)
    state_products = [n.name for n in fewer if "s" in n.inputs]
    assert len(state_products) == 2
    assert not waiting & set(state_products)


def test_gdn_reads_plain_keys_and_queries_in_every_product() -> None:
    """One decay a token leaves the operand alone, so that L0 can hold K and Q; KDA's per-channel decay cannot."""
    graph, _ = gemm_first(build_graph("gdn"))
    left = {n.inputs[0] for n in graph.nodes.values() if n.kind == "matmul" and n.inputs[1] in ("k", "s")}
    assert left == {"k", "q"}
    graph, _ = gemm_first(build_graph("kda"))
    assert {n.inputs[0] for n in graph.nodes.values() if n.kind == "matmul" and n.inputs[1] == "s"} == {"ke", "qe"}


def test_a_rewrite_that_does_not_fit_leaves_the_graph_alone() -> None:
    graph = build_graph("gla")
    rewritten, applied = gemm_first(graph)
    assert applied == ()
    assert set(rewritten.nodes) == set(graph.nodes)


def test_products_with_different_factors_are_not_drawn_together() -> None:
    """T X - R Y has no common factor; neither does a difference of which one product is read elsewhere too."""
    names = ("t", "r", "x", "y")
    tensors = {name: Tensor(name, 16, 16, role="input") for name in names}
    nodes = {
        "tx": Node("tx", "matmul", ("t", "x"), 1),
        "ry": Node("ry", "matmul", ("r", "y"), 1),
        "o": Node("o", "sub", ("tx", "ry"), 1),
    }
    tensors |= {"tx": Tensor("tx", 16, 16), "ry": Tensor("ry", 16, 16), "o": Tensor("o", 16, 16, role="output")}
    assert RULES["factor"](Graph("different", tensors, nodes, 16, 16)) is None
    nodes["ry"] = Node("ry", "matmul", ("t", "y"), 1)
    assert RULES["factor"](Graph("common", tensors, nodes, 16, 16)) is not None
    nodes["p"] = Node("p", "exp", ("tx",), 1)
    tensors["p"] = Tensor("p", 16, 16, role="output")
    assert RULES["factor"](Graph("shared", tensors, nodes, 16, 16)) is None


@pytest.mark.parametrize("rule", sorted(RULES))
def test_each_rule_alone_keeps_the_value(rule: str) -> None:
    """Each rule is checked where it first fits on the way to the end, not only the chain of all of them."""
    graph = build_graph("gdn")
    x = random_inputs(graph, 3)
    expected = results(graph, x)
    used = False
    for _ in range(20):
        found = next(((name, rule_of(graph)) for name, rule_of in RULES.items() if rule_of(graph)), None)
        if found is None:
            break
        name, state = found
        assert state is not None
        graph = with_nodes(graph, state[0].values(), state[1])
        if name == rule:
            used = True
            for ours, reference in zip(results(graph, x), expected, strict=True):
                np.testing.assert_allclose(ours, reference, atol=TOLERANCE)
    assert used


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("parts", [2, 8])
def test_column_parts_need_no_reduction(op: str, parts: int) -> None:
    """The second tier of the mapping: parts of the value columns, computed apart, are the columns of the whole."""
    graph, _ = gemm_first(build_graph(op))
    x = random_inputs(graph, 5)
    whole = graph.evaluate(x)
    width = graph.head_dim // parts
    part_graph = graph.split(parts)
    for part in range(parts):
        columns = slice(part * width, (part + 1) * width)
        piece = {**x, "v": x["v"][:, columns], "s": x["s"][columns]}
        assert {name: value.shape for name, value in piece.items()} == {
            name: (part_graph.tensors[name].rows, part_graph.tensors[name].cols) for name in piece
        }
        values = part_graph.evaluate(piece)
        np.testing.assert_allclose(values["o"], whole["o"][:, columns], atol=TOLERANCE)
        np.testing.assert_allclose(values["s_new"], whole["s_new"][columns], atol=TOLERANCE)


@pytest.mark.parametrize("op", OPS)
def test_tiles_above_the_diagonal_do_not_matter(op: str) -> None:
    """What `skip_zero` leaves out: whatever stands in those tiles, the steps that follow mask it."""
    graph, _ = gemm_first(build_graph(op))
    x = random_inputs(graph, 7)
    expected = graph.evaluate(x)
    above = np.kron(np.triu(np.ones((4, 4)), 1), np.ones((16, 16))) > 0
    values = dict(x)
    for node in graph.nodes.values():
        value = apply_node(node, [values[name] for name in node.inputs])
        if node.kind == "matmul" and graph.tensors[node.name].triangular:
            value = np.where(above, 1e3, value)
        values[node.name] = value
    np.testing.assert_allclose(values["o"], expected["o"], atol=TOLERANCE)
    np.testing.assert_allclose(values["s_new"], expected["s_new"], atol=TOLERANCE)


def test_a_node_that_reads_what_is_not_there_is_refused() -> None:
    graph = build_graph("gdn")
    nodes = dict(graph.nodes)
    nodes["eg"] = Node("eg", "exp", ("nothing",), 1)
    with pytest.raises(ValueError, match="reads 'nothing' before it is made"):
        replace(graph, nodes=nodes)


@pytest.mark.parametrize("op", ["", "delta", None, 3])
def test_an_unknown_operator_names_the_known_ones(op: object) -> None:
    with pytest.raises(ValueError, match="gdn, gla, kda"):
        build_graph(op)  # type: ignore[arg-type]
