"""What a packed checkpoint may be read from, and what of it fits a layer."""

from __future__ import annotations

import types

import pytest
import torch

from vllm_ext.model_executor.packed_experts import PackedExpertsLoader, PackedFormat
from vllm_ext.quantization import Scheme, packed, quantize_weight

HIDDEN, INTER = 64, 48


def loader(tp_rank: int, tp_size: int) -> PackedExpertsLoader:
    parallel = types.SimpleNamespace(tp_rank=tp_rank, tp_size=tp_size)
    layer = torch.nn.Module()
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=parallel)
    layer._map_global_expert_id_to_local_expert_id = lambda expert: expert
    made = PackedExpertsLoader(
        layer=layer,
        prefix="layers.3.mlp.experts",
        packed=PackedFormat.from_config(Scheme(32, 32).to_dict()),
        num_experts=1,
        hidden_size=HIDDEN,
        intermediate_size=INTER // tp_size,
        gated=True,
        dtype=torch.bfloat16,
    )
    for shard, (rows, columns, group) in {
        "w13": (2 * INTER // tp_size, HIDDEN, made.group_w13),
        "w2": (HIDDEN, INTER // tp_size, made.group_w2),
    }.items():
        groups = -(-columns // group)
        for role, width, dtype in (
            (packed.CODES, columns // 2, torch.uint8),
            (packed.SCALE, groups, torch.bfloat16),
            (packed.ZERO_POINT, groups, torch.bfloat16),
        ):
            tensor = torch.empty(1, rows, width, dtype=dtype)
            layer.register_parameter(f"{shard}_{role}", torch.nn.Parameter(tensor, requires_grad=False))
    return made


def arrive(made: PackedExpertsLoader, shard: str, weight: torch.Tensor) -> None:
    for name, tensor in packed.to_tensors("m", quantize_weight(weight, 32)).items():
        made.load(torch.nn.Parameter(torch.empty(0)), tensor, name, shard, 0)


def projections() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (INTER, HIDDEN), "w3": (INTER, HIDDEN), "w2": (HIDDEN, INTER)}
    return {shard: torch.randn(shape, generator=generator).bfloat16() for shard, shape in shapes.items()}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_each_rank_dequantises_what_one_rank_would(tp_size):
    """48 columns in groups of 32 over two ranks: the second rank begins inside the first group."""
    weights = projections()
    exact = {shard: quantize_weight(weight, 32).dequantize(torch.float32) for shard, weight in weights.items()}
    local = INTER // tp_size
    for rank in range(tp_size):
        made = loader(rank, tp_size)
        for shard, weight in weights.items():
            arrive(made, shard, weight)
        w13, w2 = (weight.dequantize(torch.float32)[0] for weight in made.take())
        mine = slice(rank * local, (rank + 1) * local)
        assert torch.equal(w13, torch.cat((exact["w1"][mine], exact["w3"][mine])))
        assert torch.equal(w2, exact["w2"][:, mine])
        assert not list(made.layer.parameters()), "the loaded tensors would stay beside those in the kernels' order"


@pytest.mark.parametrize(("shard", "shape"), [("w2", (HIDDEN, 96)), ("w1", (96, HIDDEN)), ("w3", (INTER, 128))])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_projections_of_another_size_are_refused(shard, shape, tp_size):
    """A checkpoint wider than config.json says lost its last columns without a word."""
    with pytest.raises(ValueError, match=rf"layers\.3\.mlp\.experts\.0\.{shard}.*{shape[0]}, {shape[1]}.*config\.json"):
        arrive(loader(tp_size - 1, tp_size), shard, torch.ones(shape, dtype=torch.bfloat16))


def test_another_ranks_expert_is_declined_and_leaves_nothing():
    """vLLM asks each rank to load every expert; one it does not hold must not land in one that it does."""
    made = loader(0, 1)
    made.layer._map_global_expert_id_to_local_expert_id = {0: -1, 7: 0}.get
    weights = projections()
    for name, tensor in packed.to_tensors("m", quantize_weight(weights["w1"], 32)).items():
        assert made.load(None, tensor, name, "w1", 0) is None
        assert made.load(None, tensor, name, "w1", 0, return_success=True) is False
    assert len(made.missing()) == 3
    for shard, weight in weights.items():
        for name, tensor in packed.to_tensors("m", quantize_weight(weight, 32)).items():
            assert made.load(None, tensor, name, shard, 7, return_success=True) is True
    w13, _ = made.take()
    assert torch.equal(
        w13.dequantize(torch.float32)[0, :INTER], quantize_weight(weights["w1"], 32).dequantize(torch.float32)
    )


@pytest.mark.parametrize("role", packed.ROLES)
def test_projection_that_lacks_a_tensor_is_named_unless_vllm_draws_it(role):
    made = loader(0, 1)
    for shard, weight in projections().items():
        for name, tensor in packed.to_tensors("m", quantize_weight(weight, 32)).items():
            if not (shard == "w2" and name.endswith(role)):
                made.load(None, tensor, name, shard, 0)
    with pytest.raises(ValueError, match=rf"1 projections .* did not arrive, first local expert 0 w2: {role};"):
        made.take()
    made.take(whole=False)


def test_zero_points_of_another_kind_than_config_json_says_are_refused():
    """Float zero points read as integers were cut off at the point, and the model answered, wrongly."""
    format = PackedFormat.from_config(Scheme(32, 32, zero_point="int").to_dict())
    tensors = {
        name.removeprefix("m."): tensor
        for name, tensor in packed.to_tensors("m", quantize_weight(projections()["w1"], 32)).items()
    }
    with pytest.raises(ValueError, match=r"m: config.json says zero_point 'int', the checkpoint holds 'float' ones"):
        format.read("m", tensors, "w1")


def test_groups_of_another_size_than_config_json_says_are_refused_with_both_and_a_remedy():
    weight = quantize_weight(projections()["w1"], 16)
    tensors = {name.removeprefix("m."): tensor for name, tensor in packed.to_tensors("m", weight).items()}
    said = r"m: .*\(48, 64\) in groups of 32 must be \(48, 2\), got \(48, 4\); config\.json says groups of 32: restore"
    with pytest.raises(ValueError, match=said):
        loader(0, 1).packed.read("m", tensors, "w1")


@pytest.mark.parametrize("role", [packed.SCALE, packed.ZERO_POINT])
def test_scales_that_are_not_finite_are_refused_with_layer_and_expert(role):
    """A damaged packed checkpoint was served, and answered NaN."""
    made = loader(0, 1)
    for shard, weight in projections().items():
        for name, tensor in packed.to_tensors("m", quantize_weight(weight, 32)).items():
            broken = torch.full_like(tensor, torch.nan) if name.endswith(role) and shard == "w3" else tensor
            made.load(None, broken, name, shard, 0)
    with pytest.raises(ValueError, match=rf"layer layers\.3\.mlp\.experts: w13 {role} of local expert 0 holds NaN"):
        made.take()


def test_tensor_that_no_packed_projection_has_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.experts: unexpected tensor m\.weight_g_idx; expected are"):
        loader(0, 1).load(None, torch.zeros(1), "m.weight_g_idx", "w1", 0)


@pytest.mark.vllm
def test_packed_checkpoints_are_never_unpickled():
    """vLLM reads `*.bin` where a folder has no safetensors, and a pickle runs code."""
    from vllm_ext.model_executor.hooks import before_load
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig

    def formats(packed_config: bool, asked: str) -> tuple[str, str]:
        given = types.SimpleNamespace(load_format=asked)
        config = W4A16GroupedConfig(PackedFormat.from_config(Scheme().to_dict()) if packed_config else None)
        used = before_load(types.SimpleNamespace(quant_config=config), given)
        return used.load_format, given.load_format

    assert formats(True, "auto") == ("safetensors", "auto")
    assert formats(True, "fastsafetensors") == ("fastsafetensors", "fastsafetensors")
    assert formats(False, "auto") == ("auto", "auto")
    for asked in ("pt", "npcache"):
        with pytest.raises(ValueError, match=f"'{asked}' reads pickles"):
            formats(True, asked)
