"""EPLB moves experts between ranks as rows of every parameter of the layer, while the model serves."""

from __future__ import annotations

import types

import pytest
import torch

from vllm_ext.options import Options
from vllm_ext.quantization import quantize_weight

pytestmark = pytest.mark.vllm
EXPERTS, HIDDEN, INTER = 4, 64, 32
NCCL_TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}


@pytest.fixture(params=["cpu", "reference"])
def layer(request):
    """A layer with 4-bit experts whose rank may give experts away."""
    from vllm_ext.model_executor.moe_method import _RunsW4A16
    from vllm_ext.model_executor.report import QuantizationReport

    parallel = types.SimpleNamespace(enable_eplb=True)
    layer = torch.nn.Module()
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=parallel)
    layer.activation, layer.top_k, layer.apply_router_weight_on_input, layer.expert_map = "silu", 2, False, None
    for name in ("w13_weight", "w2_weight"):
        layer.register_parameter(name, torch.nn.Parameter(torch.empty(0), requires_grad=False))
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (
        quantize_weight(torch.randn(shape, generator=generator).bfloat16() * 0.2, 32)
        for shape in ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    )
    layer.quant_method = _RunsW4A16()
    layer.quant_method._set_up("experts", Options(moe_backend=request.param), QuantizationReport())
    layer.quant_method._finish(layer, w13, w2, torch.bfloat16, 0)
    return layer


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


def test_nccl_can_send_every_parameter(layer):
    """It has no 16-bit integers, in which the kernels keep their codes."""
    assert {parameter.dtype for parameter in layer.parameters()} <= NCCL_TYPES
