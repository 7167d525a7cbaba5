"""The layer as an operator that a compiled graph can carry."""

from __future__ import annotations

import pytest
import torch
from moe_samples import make_layer

from vllm_ext.ops.moe import CallOptions
from vllm_ext.ops.moe.custom_op import call_experts, encode_call, fused_moe_w4a16_op

OPTIONS = CallOptions("swigluoai", 1.5, 6.0, True, True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_op_equals_the_function(backend: str) -> None:
    layer = make_layer(bias=True, distinct=False)
    experts = layer.prepare(backend=backend)
    expected = layer.run(
        experts,
        activation="swigluoai",
        swiglu_alpha=1.5,
        swiglu_limit=6.0,
        apply_router_weight_on_input=True,
        batch_invariant=True,
    )
    expert_map = torch.arange(8)
    for call in (fused_moe_w4a16_op, call_experts):
        assert torch.equal(
            call(layer.x, layer.weights, layer.ids, expert_map, *encode_call(experts, OPTIONS)), expected
        )


@pytest.mark.parametrize("by_columns", [False, True])
def test_schema_fake_and_aliasing_are_right(by_columns: bool) -> None:
    """The output is in rows whatever order the activations are in; a compiled graph believes what the fake says."""
    layer = make_layer(hidden=64, intermediate=32)
    x = layer.x.t().contiguous().t() if by_columns else layer.x
    arguments = (x, layer.weights, layer.ids, None, *encode_call(layer.prepare(), CallOptions()))
    torch.library.opcheck(fused_moe_w4a16_op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_graph_takes_it_whole_for_any_number_of_rows() -> None:
    layer = make_layer(hidden=64, intermediate=32, tokens=12)
    experts = layer.prepare()
    tensors, meta = encode_call(experts, CallOptions())
    calls = 0

    def count(graph, inputs):
        nonlocal calls
        calls += 1
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert fused_moe_w4a16_op in targets or fused_moe_w4a16_op.default in targets
        return graph.forward

    def block(x, weights, ids):
        return call_experts(x * 2, weights, ids, None, tensors, meta) + x

    compiled = torch.compile(block, backend=count, fullgraph=True, dynamic=True)
    for rows in (12, 5, 7):
        # Copies: dynamo would guard on the size of what a view is taken from.
        part = layer.rows(torch.arange(rows))
        assert torch.equal(compiled(part.x, part.weights, part.ids), block(part.x, part.weights, part.ids))
    assert calls == 1
