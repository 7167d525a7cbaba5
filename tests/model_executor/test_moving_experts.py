"""EPLB moves experts between ranks as rows of every parameter of the layer, while the model serves."""

from __future__ import annotations

import pytest
import torch
from experts_layer import EXPERTS, HIDDEN, experts_layer

pytestmark = pytest.mark.vllm
NCCL_TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}


@pytest.fixture(params=["cpu", "reference"])
def layer(request):
    """A layer with 4-bit experts whose rank may give experts away."""
    pytest.importorskip("vllm")
    return experts_layer(request.param, eplb=True)


def test_rows_of_all_parameters_are_the_experts(layer):
    """vLLM views each parameter as [experts, -1] and sends rows: one tensor that is not so would stay behind."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(5, 2, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]], dtype=torch.int32)
    before = layer.quant_method.apply(layer, x, weights, ids)
    moved = torch.tensor([2, 0, 3, 1])  # the expert that is now at each place
    for parameter in layer.parameters():
        rows = parameter.data.view(EXPERTS, -1)
        rows.copy_(rows[moved].clone())
    after = layer.quant_method.apply(layer, x, weights, moved.argsort()[ids.long()].int())
    assert torch.equal(before, after)
    assert not torch.equal(before, layer.quant_method.apply(layer, x, weights, ids))


def test_every_parameter_is_one_of_ours(layer):
    """What a backend does not keep under the 16-bit weights' names would stay there, in 16 bits."""
    assert all(parameter.numel() for parameter in layer.parameters())
    assert layer.quant_method.supports_eplb


def test_nccl_can_send_every_parameter(layer):
    """It has no 16-bit integers, in which the kernels keep their codes."""
    assert {parameter.dtype for parameter in layer.parameters()} <= NCCL_TYPES
