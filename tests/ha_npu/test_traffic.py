from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ha_npu.dataflow import (
    Dataflow,
    Kernel,
    chunk_gm_bytes,
    chunk_products,
    device_bytes,
    kernel_graph,
    kernel_traffic,
)
from vllm_ext.ha_npu.graph import Graph, Node, Tensor, replace_tensors
from vllm_ext.ha_npu.operators import build_graph, random_inputs
from vllm_ext.ha_npu.plan import make_plan
from vllm_ext.ha_npu.products import (
    FRACTAL_BYTES,
    ProductPolicy,
    cheapest_product_order,
    compulsory_fractals,
    count_products,
    operator_product_order,
)
from vllm_ext.ha_npu.strategies import STRATEGIES, fla, flash_qla, ha_npu, ha_npu_tuned, ha_npu_unordered

CHIP = load_chip("310p1")
KIB, MIB = 1024, 2**20


@settings(max_examples=25, deadline=None)
@given(
    op=st.sampled_from(["gdn", "kda"]),
    heads=st.integers(1, 48),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) > 0),
)
def test_ha_npu_moves_inputs_outputs_and_states_once(op: str, heads: int, lengths: list[int]) -> None:
    """The compulsory traffic, from the shapes alone; a short last chunk moves its own tokens, not the padding."""
    gate = 4 * (1 if op == "gdn" else 128)
    per_token = 4 * 128 * 2 + gate + 4
    plan = make_plan(op, chip="310p1", num_heads=heads, num_tokens=sum(lengths), seq_lens=lengths)
    states = 2 * 128 * 128 * 4 * len(lengths)
    assert plan.traffic.gm_bytes == heads * (sum(lengths) * per_token + states)
    assert plan.traffic.device_bytes == plan.traffic.gm_bytes
    assert sum(plan.traffic.gm_by_kernel.values()) == plan.traffic.gm_bytes


@pytest.mark.parametrize(("op", "gm", "l0", "spilled_l0"), [("gdn", 21.41, 64.53, 84.53), ("kda", 31.33, 74.53, 84.53)])
def test_figure_4(op: str, gm: float, l0: float, spilled_l0: float) -> None:
    plan = make_plan(op, chip="310p1", num_heads=10, num_tokens=2048)
    assert round(plan.traffic.gm_bytes / MIB, 2) == gm
    assert round(plan.traffic.l1_to_l0_bytes / MIB, 2) == l0
    fractals = chunk_products(ha_npu_unordered(op, 64, 128, CHIP)).fractals
    assert round(320 * fractals * FRACTAL_BYTES / MIB, 2) == spilled_l0


def test_figures_follow_the_graph() -> None:
    """No figure is stored: an FP32 v costs its bytes, twice the head dimension quadruples the state."""
    flow = ha_npu("gdn", 64, 128, CHIP)
    base = sum(chunk_gm_bytes(flow).values())
    tensors = dict(flow.graph.tensors)
    tensors["v"] = replace(tensors["v"], dtype="fp32")
    wider = replace(flow, graph=replace_tensors(flow.graph, tensors))
    assert sum(chunk_gm_bytes(wider).values()) - base == 16 * KIB
    small = make_plan("gdn", chip="310p1", num_heads=4, num_tokens=256, head_dim=64)
    large = make_plan("gdn", chip="310p1", num_heads=4, num_tokens=256, head_dim=128)
    assert large.traffic.gm_by_kernel["states"] == 4 * small.traffic.gm_by_kernel["states"]
    assert large.macs > 2 * small.macs


def naive_fractals(graph: Graph, order: Sequence[str], capacity: int, inversion: tuple[int, int]) -> tuple[int, int]:
    """Products and fractals by walking the operands in plain lists; least recently used gives way."""
    held: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    products = fractals = 0
    for name in order:
        node = graph.nodes[name]
        if node.kind == "solve":
            products, fractals = products + inversion[0], fractals + inversion[1]
            held[0].clear()
            held[1].clear()
            continue
        m, n, k = graph.matmul_shape(node)
        products += (m // 16) * (n // 16) * (k // 16)
        for side, operand in zip(held, node.inputs, strict=True):
            tensor = graph.tensors[operand]
            size = tensor.rows * tensor.cols * 2
            if (operand, size) in side:
                side.remove((operand, size))
            else:
                fractals += size // 512
                while side and sum(s for _, s in side) + size > capacity:
                    side.pop(0)
            side.append((operand, size))
    return products, fractals


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("capacity", [32 * KIB, 48 * KIB, 64 * KIB])
def test_operands_kept_in_l0_are_counted_once(op: str, capacity: int) -> None:
    graph = ha_npu(op, 64, 128, CHIP).graph
    order = operator_product_order(graph)
    counts = count_products(graph, order, ProductPolicy(keep=True, capacity=capacity))
    assert (counts.products, counts.fractals) == naive_fractals(graph, order, capacity, (40, 61))
    assert counts.l0a_peak <= capacity
    assert counts.l0b_peak <= capacity


def test_the_longest_unused_operand_gives_way() -> None:
    """x is used again before z comes, so that y has to go: x, y and z come in once, and x as right operand."""
    tensors = {name: Tensor(name, 64, 128, role="input") for name in ("x", "y", "z")}
    nodes: dict[str, Node] = {}
    for index, left in enumerate(("x", "y", "x", "z", "x")):
        name = f"p{index}"
        nodes[name] = Node(name, "matmul", (left, "x"), 1, transpose=(False, True))
        tensors[name] = Tensor(name, 64, 64, role="output")
    graph = Graph("operands", tensors, nodes, 64, 128)
    counts = count_products(graph, tuple(nodes), ProductPolicy(keep=True, capacity=32 * KIB))
    assert counts.fractals == 32 * (3 + 1)


def test_an_operand_larger_than_its_room_passes_through_it() -> None:
    graph = ha_npu("gdn", 64, 128, CHIP).graph
    order = operator_product_order(graph)
    counts = count_products(graph, order, ProductPolicy(keep=True, capacity=8 * KIB))
    every = count_products(graph, order, ProductPolicy(keep=False, capacity=8 * KIB))
    assert counts.fractals == every.fractals
    assert counts.l0b_peak <= 8 * KIB


@pytest.mark.parametrize(("op", "least", "published"), [("gdn", 337, 413), ("kda", 401, 477)])
def test_the_tuned_plan_reaches_the_lower_bound_on_fractals(op: str, least: int, published: int) -> None:
    flow = ha_npu_tuned(op, 64, 128, CHIP)
    order = cheapest_product_order(flow.graph, flow.policy)
    counts = count_products(flow.graph, order, flow.policy)
    assert counts.fractals == compulsory_fractals(flow.graph, order, flow.policy) == least
    plan = make_plan(op, chip="310p1", num_heads=10, num_tokens=2048, strategy="ha-npu-tuned")
    assert plan.traffic.l1_to_l0_bytes == 320 * least * FRACTAL_BYTES
    assert make_plan(op, chip="310p1", num_heads=10, num_tokens=2048).traffic.l1_to_l0_bytes == 320 * published * 512


def test_products_outside_the_inversion_are_those_of_the_formulas() -> None:
    """Default order 1408, GEMM-first 1280 products of 16x16x16: without W, nine per cent fewer."""
    graph = build_graph("gdn")
    policy = ProductPolicy(keep=False, capacity=32 * KIB, inversion="vector-rows")
    assert count_products(graph, operator_product_order(graph), policy).products == 1408
    graph = ha_npu("gdn", 64, 128, CHIP).graph
    assert count_products(graph, operator_product_order(graph), policy).products == 1280


def test_a_stage_reads_what_an_earlier_one_stored() -> None:
    """The traffic of FLA's stages, written out by hand from its public sources; KiB a chunk of a head."""
    expected = {
        "cumsum": 0.25 + 0.25,
        "kkt": 16 + 0.25 + 0.25 + 16,
        "solve": 16 + 8,
        "wu": 16 + 16 + 0.25 + 0.25 + 8 + 16 + 16,
        "h": 2 * 16 + 2 * 16 + 16 + 2 * 0.25 + 16 + 32,
        "o": 2 * 16 + 2 * 16 + 16 + 32 + 2 * 0.25 + 16,
    }
    moved = chunk_gm_bytes(fla("gdn", 64, 128, CHIP))
    assert {name: size / KIB for name, size in moved.items()} == expected


@pytest.mark.parametrize(("dim", "tiles"), [(64, 1), (96, 2), (128, 2), (160, 3), (208, 4)])
def test_fla_covers_every_value_column(dim: int, tiles: int) -> None:
    """Rounding down left columns out: three tiles of 69 for 208 columns, one of 96 where FLA's own take 64 at most."""
    kernel = next(kernel for kernel in fla("gdn", 64, dim, CHIP).kernels if kernel.name == "h")
    width = build_graph("gdn", head_dim=dim).split(kernel.column_tiles).tensors["v"].cols
    assert kernel.column_tiles == tiles
    assert width <= 64
    assert tiles * width >= dim


def test_a_kernels_graph_computes_its_part_of_the_whole() -> None:
    """Cut at FLA's stages and run one after another, the pieces give what the graph gives."""
    flow = fla("kda", 64, 128, CHIP)
    untiled = replace(flow, kernels=tuple(replace(kernel, column_tiles=1) for kernel in flow.kernels))
    memory = random_inputs(flow.graph, 11)
    expected = flow.graph.evaluate(memory)
    for traffic in kernel_traffic(untiled):
        graph = kernel_graph(untiled, traffic)
        values = graph.evaluate({name: memory[name] for name in {*traffic.reads, "s"} if name in graph.tensors})
        memory |= {name: values[name] for name in traffic.kernel.stores}
    assert abs(memory["o"] - expected["o"]).max() < 1e-12
    assert abs(memory["s_new"] - expected["s_new"]).max() < 1e-12


def test_device_memory_counts_what_is_alive_together() -> None:
    graph = ha_npu("gdn", 64, 128, CHIP).graph
    policy = ProductPolicy(keep=False, capacity=32 * KIB)
    staged = Dataflow("staged", graph, (Kernel("one", ("t",)), Kernel("two", ("o", "s_new"))), policy)
    inputs = 48 * KIB + 512
    states = 2 * 64 * KIB
    assert device_bytes(staged, 1, [64]) == inputs + states + 16 * KIB + 16 * KIB
    assert device_bytes(replace(staged, retained=("t",)), 3, [64, 64]) == 3 * (2 * (inputs + 32 * KIB) + 2 * states)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("op", ["gdn", "kda", "gla"])
def test_no_strategy_moves_less_than_the_compulsory_traffic(strategy: str, op: str) -> None:
    flow = STRATEGIES[strategy](op, 64, 128, CHIP)
    compulsory = sum(tensor.nbytes for tensor in flow.graph.by_role("input", "output"))
    moved = sum(chunk_gm_bytes(flow).values())
    assert moved == compulsory if strategy.startswith("ha-npu") else moved > compulsory


def test_flash_qla_makes_the_inverse_twice_and_stores_the_gate_sums() -> None:
    prepare, fused = kernel_traffic(flash_qla("kda", 64, 128, CHIP))
    assert "t" in prepare.computed
    assert "t" in fused.computed
    assert prepare.writes == {"gc": 32 * KIB}
    assert fused.recurrent
