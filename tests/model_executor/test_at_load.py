"""Quantising a layer's 16-bit experts once all have arrived, without an engine."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from experts_layer import EXPERTS, HIDDEN, INTER

from vllm_ext import compat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
from vllm_ext.options import Options
from vllm_ext.quantization import Scheme

pytestmark = pytest.mark.vllm
SCHEME = Scheme(32, 32)
SHAPES = {"w13_weight": (EXPERTS, 2 * INTER, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, INTER)}


@pytest.fixture(autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm")


def loaded_layer(
    monkeypatch: pytest.MonkeyPatch, *, activation: str = "silu", missing: int = 0, drawn: bool = False
) -> Any:
    """A layer as vLLM hands it over to be finished; `missing` elements of its experts have not arrived."""
    from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, FilledByCopy

    generator = torch.Generator().manual_seed(0)
    layer: Any = torch.nn.Module()
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(enable_eplb=False))
    said = {"activation": activation, "top_k": 2, "apply_router_weight_on_input": False, "expert_map": None}
    for field, value in said.items():
        setattr(layer, field, value)
    for name, shape in SHAPES.items():
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16() * 0.2, requires_grad=False)
        parameter.__class__ = FilledByCopy
        parameter.expert_loader = f"vLLM's loader of {name}"
        layer.register_parameter(name, parameter)
    for name, width in (("w13_bias", 2 * INTER), ("w2_bias", HIDDEN)):
        setattr(layer, name, torch.nn.Parameter(torch.randn(EXPERTS, width, generator=generator).bfloat16()))
    arrived = sum(getattr(layer, name).numel() for name in SHAPES) - missing
    monkeypatch.setattr(compat, "elements_loaded", lambda layer: arrived)
    layer.quant_method = AtLoadMoEMethod.__new__(AtLoadMoEMethod)
    layer.quant_method._set_up("layers.5.experts", Options(moe_backend="reference"), QuantizationReport())
    layer.quant_method.scheme, layer.quant_method.without_checkpoint = SCHEME, drawn
    return layer


@pytest.mark.parametrize(
    ("activation", "ours", "apart"),
    [("silu", "silu", False), ("swigluoai", "swigluoai", True), ("swigluoai_uninterleave", "swigluoai", False)],
)
def test_layer_computes_what_its_weights_and_biases_say(
    monkeypatch: pytest.MonkeyPatch, activation: str, ours: str, apart: bool
) -> None:
    """gpt-oss stores the rows of gate and up in turns, of the biases too; the operator wants all gates first."""
    layer = loaded_layer(monkeypatch, activation=activation)
    weights = {name: getattr(layer, name).data.clone() for name in (*SHAPES, "w13_bias", "w2_bias")}
    if apart:
        for name in ("w13_weight", "w13_bias"):
            weights[name] = torch.cat((weights[name][:, 0::2], weights[name][:, 1::2]), 1)
    experts = prepare_experts(
        SCHEME.quantize(weights["w13_weight"], "w13"),
        SCHEME.quantize(weights["w2_weight"], "w2"),
        w13_bias=weights["w13_bias"],
        w2_bias=weights["w2_bias"],
        backend="reference",
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16()
    call = torch.rand(5, 2, generator=generator), torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]]).int()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.quant_method.apply(layer, x, *call), fused_moe_w4a16(x, experts, *call, activation=ours))


def test_experts_of_other_ranks_may_arrive_after_a_layer_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under expert parallelism vLLM's loader is still looked up, by the weight's name, and declines them."""
    layer = loaded_layer(monkeypatch)
    layer.quant_method.process_weights_after_loading(layer)
    assert [getattr(layer, name).weight_loader for name in SHAPES] == [f"vLLM's loader of {name}" for name in SHAPES]


def test_layer_that_lacks_weights_is_refused_unless_vllm_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = loaded_layer(monkeypatch, missing=7)
    with pytest.raises(ValueError, match=r"layer layers\.5\.experts: \d+ of \d+ elements of its experts arrived"):
        layer.quant_method.process_weights_after_loading(layer)
    drawn = loaded_layer(monkeypatch, missing=7, drawn=True)
    drawn.quant_method.process_weights_after_loading(drawn)
    assert drawn._already_called_process_weights_after_loading


def test_what_a_model_copies_into_a_parameter_without_memory_is_loaded() -> None:
    """gpt-oss's loader copies; on the meta device that did nothing, and nothing said so."""
    from vllm_ext.model_executor.moe_method import FilledByCopy, load_part_or_whole

    given = torch.ones(2, 3)
    on_meta: Any = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    on_meta.__class__ = FilledByCopy
    seen: list[Any] = []
    on_meta.weight_loader = lambda parameter, tensor: seen.append((parameter is on_meta, tensor is given))
    assert on_meta.copy_(given) is on_meta
    assert seen == [(True, True)]
    here: Any = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    here.expert_loader = lambda parameter, tensor, *which: which
    assert load_part_or_whole(here, given, "w1", 3) == ("w1", 3)
    assert torch.equal(here, torch.zeros(2, 3))
    load_part_or_whole(here, given)
    assert torch.equal(here, given)
