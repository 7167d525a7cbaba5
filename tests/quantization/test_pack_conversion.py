"""Packed checkpoints converted to compressed-tensors and back: exact where the format can hold it, told where not."""

from __future__ import annotations

import json
import re

import pytest
import tiny_checkpoints as made
import torch
from tiny_checkpoints import quantize, tensors_of

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.cli import quantize_main
from vllm_ext.quantization.packed_source import find_packed

MODULE = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize("symmetric", [False, True])
def test_conversion_through_compressed_tensors_and_back_is_exact(checkpoint, tmp_path, symmetric):
    """Codes, scales and zero points, regrouped to the one group size that format allows."""
    source = checkpoint("fused")
    options = ["--symmetric"] if symmetric else ["--zero-point", "int"]
    assert quantize(source, tmp_path / "ours", *options) == 0
    assert quantize(tmp_path / "ours", tmp_path / "theirs", "--format", "compressed-tensors") == 0
    assert quantize(tmp_path / "theirs", tmp_path / "back") == 0
    ours, back = (find_packed(Checkpoint.open(tmp_path / name)) for name in ("ours", "back"))
    assert ours.keys() == back.keys()
    for layer, projections in ours.items():
        others = {p.module: p.read() for p in back[layer]}
        for projection in projections:
            first, second = projection.read(), others[projection.module]
            assert torch.equal(first.packed, second.packed)
            assert second.group_size == 16
            repeat = first.group_size // 16
            assert torch.equal(first.scale.repeat_interleave(repeat, -1), second.scale)
            if symmetric:
                assert second.zero_point is None
            else:
                assert torch.equal(first.zero_point.repeat_interleave(repeat, -1), second.zero_point)
    assert tensors_of(tmp_path / "theirs")["lm_head.weight"].dtype == torch.bfloat16
    ignore = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"} <= set(ignore)
    assert not [name for name in ignore if ".experts." in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_zero_points_are_rerounded_for_compressed_tensors_and_it_says_so(checkpoint, tmp_path, capsys, dtype):
    """The method asked for re-rounds them, and scales keep their dtype: BF16's bytes are FP16 numbers too."""
    source = checkpoint(dtype=dtype)
    assert quantize(source, tmp_path / "ours") == 0
    assert quantize(tmp_path / "ours", tmp_path / "theirs", "--format", "compressed-tensors") == 0
    printed = capsys.readouterr().out
    assert "re-rounded to integers, which adds a relative RMS error of 0.0" in printed
    stated = float(printed.rsplit(" ", 1)[1])
    ours, theirs = (find_packed(Checkpoint.open(tmp_path / name)) for name in ("ours", "theirs"))
    error = norm = 0.0
    for layer, projections in ours.items():
        others = {p.module: p.read().dequantize(torch.float64) for p in theirs[layer]}
        for projection in projections:
            exact = projection.read().dequantize(torch.float64)
            error += float((others[projection.module] - exact).square().sum())
            norm += float(exact.square().sum())
    assert stated == pytest.approx((error / norm) ** 0.5, abs=1e-4)
    plain = ["--format", "compressed-tensors", "--method", "minmax"]
    assert quantize(tmp_path / "ours", tmp_path / "plain", *plain) == 0
    assert float(capsys.readouterr().out.rsplit(" ", 1)[1]) > stated
    assert quantize(source, tmp_path / "x", "--format", "compressed-tensors", "--zero-point", "float") == 1


def test_groups_stock_vllm_does_not_serve_are_cut_to_ones_it_does(tmp_path, capsys):
    """192 columns in groups of 192 become groups of 64, the largest of 128, 64 and 32 that divides them."""
    weights = {f"l.experts.0.{name}_proj.weight": torch.randn(192, 192) for name in ("gate", "up", "down")}
    source = made.write_checkpoint(tmp_path / "src", {}, [weights])
    options = ["--format", "compressed-tensors", "--group-size-w13", "192", "--group-size-w2", "192", "--quiet"]
    assert quantize_main([str(source), str(tmp_path / "packed"), *options]) == 0
    assert "stock vLLM serves" not in capsys.readouterr().err
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_fused_packed_experts_of_others_are_read(checkpoint, tmp_path):
    """C04: `experts.gate_up_proj` packed as one [E, 2I, H/8] tensor is the same as per-expert names."""
    assert quantize(checkpoint("fused"), tmp_path / "theirs", "--format", "compressed-tensors") == 0
    before = tensors_of(tmp_path / "theirs")
    merged = {name: value for name, value in before.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.experts"
        for role in ("packed", "scale", "zero_point"):

            def experts(projection: str, prefix: str = prefix, role: str = role) -> torch.Tensor:
                names = [f"{prefix}.{e}.{projection}.weight_{role}" for e in range(made.EXPERTS)]
                return torch.stack([before[name] for name in names])

            both = torch.cat((experts("gate_proj"), experts("up_proj")), 1)
            merged[f"{prefix}.gate_up_proj.weight_{role}" if layer else f"{prefix}.gate_up_proj_{role}"] = both
            merged[f"{prefix}.down_proj.weight_{role}" if layer else f"{prefix}.down_proj_{role}"] = experts(
                "down_proj"
            )
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    made.write_checkpoint(tmp_path / "fused", config, [merged])
    assert quantize(tmp_path / "theirs", tmp_path / "first") == 0
    assert quantize(tmp_path / "fused", tmp_path / "second") == 0
    first, second = tensors_of(tmp_path / "first"), tensors_of(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {**t, f"{MODULE}.weight_g_idx": torch.zeros(made.HIDDEN, dtype=torch.int32)},
            "up_proj.weight_g_idx: columns ordered by activation are not read",
        ),
        (
            lambda t: {k: v.float() if k == f"{MODULE}.weight_scale" else v for k, v in t.items()},
            "up_proj.weight_scale: is F32; only FP16 and BF16 scales are read",
        ),
        (lambda t: {k: v for k, v in t.items() if not k.startswith(MODULE)}, r"experts.2: lacks \['up_proj'\]"),
        (lambda t: {k: v for k, v in t.items() if ".1.mlp.experts.0." not in k}, r"experts \[0\] are missing of 3"),
    ],
)
def test_packed_experts_that_cannot_be_read_whole_are_refused(checkpoint, tmp_path, capsys, change, message):
    """A checkpoint that lacked an expert was once converted to another that lacked it, and called well."""
    assert quantize(checkpoint(), tmp_path / "theirs", "--format", "compressed-tensors") == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    made.write_checkpoint(tmp_path / "changed", config, [change(tensors_of(tmp_path / "theirs"))])
    assert quantize(tmp_path / "changed", tmp_path / "packed") == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "packed.partial").exists()


def test_layers_left_in_16_bits_stay_so_through_both_formats(checkpoint, tmp_path):
    """What one format lists module by module the other names by layer; a lost entry would fail at load."""
    source = checkpoint("fused")
    assert quantize(source, tmp_path / "theirs", "--format", "compressed-tensors", "--ignore", "layers.1") == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.experts.2.down_proj" in config["ignore"]
    assert quantize(tmp_path / "theirs", tmp_path / "back") == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["model.layers.1.experts"]
    name = "model.layers.1.experts.gate_up_proj"
    assert torch.equal(tensors_of(tmp_path / "back")[name], tensors_of(source)[name])


def test_checkpoints_with_one_group_a_row_are_converted(checkpoint, tmp_path):
    """compressed-tensors' "channel" strategy: one scale a row is a group as wide as the row."""
    source = tmp_path / "channel"
    assert quantize(checkpoint(), tmp_path / "theirs", "--format", "compressed-tensors", "--symmetric") == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    group["strategy"], group["group_size"] = "channel", None
    tensors = tensors_of(tmp_path / "theirs")
    tensors = {k: v[:, :1].clone() if k.endswith("weight_scale") else v for k, v in tensors.items()}
    made.write_checkpoint(source, config, [tensors])
    assert quantize(source, tmp_path / "back") == 0
    scheme = Scheme.from_dict(json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"])
    assert (scheme.group_size_w13, scheme.group_size_w2, scheme.symmetric) == (made.HIDDEN, made.INTER, True)
    projection = next(iter(find_packed(Checkpoint.open(tmp_path / "back")).values()))[0].read()
    assert projection.scale.shape[-1] == 1


def test_what_cannot_be_had_is_warned_of(checkpoint, tmp_path, capsys):
    """Packed weights keep their groups whatever is asked for; stock vLLM has no loader for gpt-oss in this format."""
    assert quantize(checkpoint("gpt_oss"), tmp_path / "ours") == 0
    options = ["--format", "compressed-tensors", "--symmetric"]
    assert quantize(tmp_path / "ours", tmp_path / "theirs", *options) == 0
    error = capsys.readouterr().err
    assert "it keeps its own groups and zero points" in error
    assert "stock vLLM does not load interleaved experts" in error
    assert quantize(checkpoint("gpt_oss", name="again"), tmp_path / "direct", *options) == 0
    assert "stock vLLM does not load interleaved experts" in capsys.readouterr().err


def test_four_bit_modules_beside_the_experts_are_refused(checkpoint, tmp_path, capsys):
    """This format holds experts only; attention in 4 bits would be served as garbage."""
    assert quantize(checkpoint(), tmp_path / "theirs", "--format", "compressed-tensors") == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    tensors = tensors_of(tmp_path / "theirs")
    tensors["model.layers.0.self_attn.k_proj.weight_packed"] = torch.zeros(8, 8, dtype=torch.int32)
    made.write_checkpoint(tmp_path / "dense", config, [tensors])
    assert quantize(tmp_path / "dense", tmp_path / "packed") == 1
    assert "1 modules that are no routed experts are in 4 bits too" in capsys.readouterr().err
    assert quantize(tmp_path / "theirs", tmp_path / "packed", "--ignore", "layers.0") == 1
    assert "cannot bring its 16-bit experts back" in capsys.readouterr().err
    assert quantize(tmp_path / "theirs", tmp_path / "packed", "--format", "compressed-tensors") == 1
    assert "already packed as compressed-tensors" in capsys.readouterr().err
