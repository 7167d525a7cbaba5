"""What the two methods ask of a layer, and when they leave one alone, without an engine."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from experts_layer import experts_layer, random_experts

from vllm_ext.options import Options
from vllm_ext.quantization import Scheme, compressed_tensors

pytestmark = pytest.mark.vllm
HIDDEN, INTER = 64, 32


@pytest.fixture(autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm")


def packed_layer(config: dict[str, Any], *, gated: bool = True, has_bias: bool = False) -> Any:
    """A layer into which a packed checkpoint of one expert is to be loaded."""
    from vllm_ext.model_executor.moe_method import PackedMoEMethod
    from vllm_ext.model_executor.packed_experts import PackedFormat

    layer: Any = torch.nn.Module()
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(tp_rank=0, tp_size=1))
    layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
    layer.quant_method = PackedMoEMethod.__new__(PackedMoEMethod)
    layer.quant_method.packed, layer.quant_method.prefix = PackedFormat.from_config(config), "layers.4.experts"
    layer.quant_method.moe = types.SimpleNamespace(is_act_and_mul=gated, has_bias=has_bias)
    layer.quant_method.create_weights(layer, 1, HIDDEN, INTER, torch.bfloat16, note="vLLM's")
    return layer


def test_packed_experts_without_a_gate_are_half_as_high_and_wait_for_no_gate() -> None:
    """Nemotron-H's experts have an up and a down projection only."""
    gated, plain = (packed_layer(Scheme(32, 32).to_dict(), gated=gated) for gated in (True, False))
    assert gated.w13_weight_packed.shape == (1, 2 * INTER, HIDDEN // 2)
    assert plain.w13_weight_packed.shape == (1, INTER, HIDDEN // 2)
    missing = [line.split(":")[0] for line in plain.quant_method.loader.missing()]
    assert missing == ["expert 0 w1", "expert 0 w2"]
    assert len(gated.quant_method.loader.missing()) == 3


def test_biases_of_packed_experts_load_as_vllms_own_do() -> None:
    """gpt-oss has them in 16 bits beside its packed experts."""
    layer = packed_layer(Scheme(32, 32).to_dict(), has_bias=True)
    assert layer.w13_bias.shape == (1, 2 * INTER)
    assert layer.w2_bias.shape == (1, HIDDEN)
    assert layer.w2_bias.note == "vLLM's"
    assert not hasattr(packed_layer(Scheme(32, 32).to_dict()), "w13_bias")


@pytest.mark.parametrize(("kind", "dtype"), [("int", torch.uint8), ("float", torch.bfloat16)])
def test_zero_points_are_kept_as_the_checkpoint_has_them(kind: str, dtype: torch.dtype) -> None:
    layer = packed_layer(Scheme(32, 32, zero_point=kind).to_dict())
    assert layer.w2_weight_zero_point.dtype == dtype


def test_symmetric_compressed_tensors_come_without_zero_points() -> None:
    """C15: vLLM's loaders look the parameter up where a symmetric file holds zero points all the same."""
    layer = packed_layer(compressed_tensors.make_config(32, symmetric=True, ignore=()))
    assert hasattr(layer, "w13_weight_zero_point")
    w13, w2 = layer.quant_method.loader.take(whole=False)
    assert w13.zero_point is None
    assert w2.zero_point is None


def test_packed_experts_are_counted_by_what_they_would_take_in_16_bits() -> None:
    layer = packed_layer(Scheme(32, 32).to_dict())
    counted: list[int] = []
    layer.quant_method.without_checkpoint = True
    layer.quant_method._finish = lambda layer, w13, w2, dtype, before: counted.append(before)
    layer.quant_method.process_weights_after_loading(layer)
    assert counted == [2 * 3 * INTER * HIDDEN]


@pytest.fixture
def methods_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """methods_of(config, options, prefix): what the configuration gives to routed experts."""
    from vllm_ext import compat
    from vllm_ext.model_executor import moe_method, quantization

    def get(config: Any, options: dict[str, Any], prefix: str) -> Any:
        monkeypatch.setattr(quantization, "current_options", lambda: Options(options))
        monkeypatch.setattr(moe_method, "PackedMoEMethod", lambda layer, *given: ("packed", *given[:2]))
        monkeypatch.setattr(moe_method, "AtLoadMoEMethod", lambda layer, *given: ("at load", *given[:2]))
        kind = compat.routed_experts_class()
        return config.get_quant_method(kind.__new__(kind), prefix)

    return get


def test_ignored_layers_are_the_checkpoints_own_where_it_is_packed(methods_of: Any) -> None:
    """What a packed checkpoint left in 16 bits its config.json says; at load, the user."""
    from vllm_ext.model_executor.packed_experts import PackedFormat
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig

    packed = PackedFormat.from_config(Scheme(ignore=("layers.0",)).to_dict())
    config = W4A16GroupedConfig(packed)
    assert methods_of(config, {}, "model.layers.0.mlp.experts") is None
    assert methods_of(config, {}, "model.layers.1.mlp.experts") == ("packed", "model.layers.1.mlp.experts", packed)
    assert (config.report.ignored, config.report.expected) == (
        {"model.layers.0.mlp.experts"},
        {"model.layers.1.mlp.experts"},
    )
    with pytest.raises(ValueError, match=r"options \['group_size_w2'\] are for quantising at load"):
        methods_of(config, {"group_size_w2": 32}, "model.layers.1.mlp.experts")
    at_load = W4A16GroupedConfig()
    assert methods_of(at_load, {"ignore": ["layers.1"]}, "model.layers.1.mlp.experts") is None
    kind, prefix, scheme = methods_of(at_load, {"ignore": ["layers.1"]}, "model.layers.0.mlp.experts")
    assert (kind, prefix, scheme.ignore) == ("at load", "model.layers.0.mlp.experts", ("layers.1",))


@pytest.mark.parametrize("kind", ["AtLoadMoEMethod", "PackedMoEMethod"])
@pytest.mark.parametrize("name", ["experts", "experts.routed_experts"])
def test_adapters_are_kept_from_4_bit_experts_and_from_nothing_else(kind: str, name: str) -> None:
    """vLLM 0.32 puts routed experts one level below the name that its LoRA manager lists."""
    from vllm_ext.model_executor import lora, moe_method

    method = getattr(moe_method, kind)
    parts = {"q_proj": torch.nn.Linear(2, 2), **{part: torch.nn.Module() for part in name.split(".")}}
    model = torch.nn.Module()
    model.q_proj = parts["q_proj"]
    place = model
    for part in name.split("."):
        place.add_module(part, parts[part])
        place = parts[part]
    manager = types.SimpleNamespace(get_supported_lora_modules=lambda model: ["q_proj", "experts", "gate"])
    lora.leave_experts_out(manager)
    assert manager.get_supported_lora_modules(model) == ["q_proj", "experts", "gate"], "experts in 16 bits"
    place.quant_method = method.__new__(method)
    assert manager.get_supported_lora_modules(model) == ["q_proj", "gate"]


def test_layer_that_is_finished_is_left_alone() -> None:
    """vLLM's loaders ask for it once a layer is whole, and again for all layers at the end."""
    from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod

    for method in (AtLoadMoEMethod, PackedMoEMethod):
        layer = experts_layer("reference")
        before = dict(layer.named_parameters())
        method.__new__(method).process_weights_after_loading(layer)
        after = dict(layer.named_parameters())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("rank", "ranks", "level", "end"),
    [
        (0, 1, logging.INFO, "backend reference"),
        (0, 2, logging.INFO, "on rank 0 of 2"),
        (1, 2, logging.DEBUG, "on rank 1 of 2"),
    ],
)
def test_count_is_told_once_and_aloud_by_the_first_rank_only(
    rank: int, ranks: int, level: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C07: the line by which a user sees that all experts are in 4 bits."""
    from vllm_ext import compat
    from vllm_ext.model_executor import moe_method

    told: list[tuple[int, str]] = []
    log = types.SimpleNamespace(log=lambda level, form, *values: told.append((level, form % values)))
    monkeypatch.setattr(moe_method, "logger", log)
    monkeypatch.setattr(compat, "world_rank_and_size", lambda: (rank, ranks))
    layer = experts_layer("reference")
    layer.quant_method.report.expected = {"layers.5.experts"}
    for _ in range(2):
        layer.quant_method._finish(layer, *random_experts(), torch.bfloat16, 1 << 20)
    ((said_at, line),) = told
    assert said_at == level
    assert "4 routed experts in 1 layers, 1.0 MiB in 16 bits" in line
    assert line.endswith(end)
    layer.quant_method.report.expected.add("mtp.layers.0.mlp.experts")  # a draft's, loaded after the model
    layer.quant_method.prefix = "mtp.layers.0.mlp.experts"
    layer.quant_method._finish(layer, *random_experts(), torch.bfloat16, 1 << 20)
    assert [line.split(",")[0] for _, line in told[1:]] == ["w4a16-grouped: 8 routed experts in 2 layers"]


def test_backend_that_was_asked_for_and_cannot_run_names_the_layer_and_the_option() -> None:
    said = r"layer layers\.5\.experts: prepare_experts: backend 'npu' is not usable.*moe_backend asks for it; leave"
    with pytest.raises(RuntimeError, match=said):
        experts_layer("npu")


def test_rank_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its groups are set up, as in a test or a tool, there is one rank."""
    from vllm import distributed

    from vllm_ext import compat

    assert compat.world_rank_and_size() == (0, 1)
    monkeypatch.setattr(distributed, "get_world_group", lambda: types.SimpleNamespace(rank_in_group=1, world_size=2))
    assert compat.world_rank_and_size() == (1, 2)
