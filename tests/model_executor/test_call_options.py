"""What a model's layer says of its computation reaches the kernels: no default stands in for it."""

from __future__ import annotations

import json

import pytest
import torch
from experts_layer import EXPERTS, HIDDEN, experts_layer, random_experts

from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _vllm():
    pytest.importorskip("vllm")


def inputs():
    """x [5, H], weights and ids [5, 2]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16() * 3
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]], dtype=torch.int32)
    return x, torch.rand(5, 2, generator=generator), ids


def computed(**fields):
    layer = experts_layer("reference", **fields)
    return layer.quant_method.apply(layer, *inputs())


def wanted(**options):
    """The operator called by hand with the same weights."""
    return fused_moe_w4a16(
        inputs()[0], prepare_experts(*random_experts(), backend="reference"), *inputs()[1:], **options
    )


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"activation": "gelu_pytorch_tanh"}, {"activation": "gelu_tanh"}),
        ({"apply_router_weight_on_input": True}, {"apply_router_weight_on_input": True}),
        ({"activation": "swigluoai"}, {"activation": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
        (
            {"activation": "swigluoai", "swiglu_alpha": 1.2, "swiglu_limit": 0.5},
            {"activation": "swigluoai", "swiglu_alpha": 1.2, "swiglu_limit": 0.5},
        ),
        (
            {"expert_map": torch.tensor([0, -1, 2, -1], dtype=torch.int32)},
            {"expert_map": torch.tensor([0, -1, 2, -1], dtype=torch.int32)},
        ),
    ],
)
def test_layer_computes_what_its_fields_say(fields, options):
    assert torch.equal(computed(**fields), wanted(**options))
    if options:
        assert not torch.equal(computed(**fields), wanted()), "the field would not be noticed"


def test_activation_that_no_kernel_computes_is_refused_with_the_layers_name():
    with pytest.raises(ValueError, match=r"layer layers\.5\.experts: activation 'tanh' is not supported.*silu"):
        experts_layer("reference", activation="tanh")


@pytest.mark.parametrize(
    ("option", "variable", "expected"), [(False, "0", False), (True, "0", True), (False, "1", True)]
)
def test_batch_invariance_is_asked_for_by_our_option_or_by_vllms_variable(monkeypatch, option, variable, expected):
    """A request that is answered differently in company is what the mode is there to rule out."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    layer = experts_layer("reference", options={"batch_invariant": option})
    assert json.loads(layer.quant_method.meta)["options"]["batch_invariant"] is expected


def test_experts_that_may_move_are_not_joined_into_one_matrix():
    """The CPU joins experts when a token uses nearly all of them; EPLB moves each by itself."""
    shapes = {
        eplb: {tuple(parameter.shape) for parameter in experts_layer("cpu", eplb=eplb, top_k=EXPERTS).parameters()}
        for eplb in (False, True)
    }
    assert all(shape[0] == EXPERTS for shape in shapes[True])
    assert not all(shape[0] == EXPERTS for shape in shapes[False]), "the CPU joins nothing here"
