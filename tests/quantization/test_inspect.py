"""`vllm-ext inspect`: what it says of a checkpoint is what is in it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.cli import inspect_main
from vllm_ext.quantization.inspection import inspect_checkpoint
from vllm_ext.quantization.layouts import find_experts
from vllm_ext.quantization.pack import pack_checkpoint
from vllm_ext.quantization.packed_source import find_packed
from vllm_ext.quantization.tensor_file import CheckpointError


@pytest.fixture
def pair(checkpoint, tmp_path):
    """A 16-bit checkpoint whose last layer is left out of packing, and the packed one."""
    source, packed = checkpoint("fused", layers=3), tmp_path / "packed"
    pack_checkpoint(source, packed, Scheme(32, 16, ignore=("layers.2",)), progress=False)
    return source, packed


def test_layers_shapes_groups_and_bytes(pair):
    reports = inspect_checkpoint(pair[1])
    assert [report.name for report in reports] == [f"model.layers.{i}.experts" for i in range(3)]
    first, last = reports[0], reports[2]
    assert first.experts == 3
    assert first.projections == {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    assert first.group_sizes == {"gate_proj": 32, "up_proj": 32, "down_proj": 16}
    assert (first.bits, first.zero_point) == (4, "float")
    stored = load_file(pair[1] / "model-00001-of-00003.safetensors")
    assert first.nbytes == sum(value.nbytes for name, value in stored.items() if ".experts." in name)
    assert first.weights == 3 * 3 * 48 * 64
    assert first.bits_per_weight == pytest.approx(8 * first.nbytes / first.weights)
    assert (last.bits, last.zero_point, last.bits_per_weight) == (16, "-", 16)


def test_the_error_is_that_of_the_weights(pair):
    """Relative RMS over a projection of all experts; zero where the layer was left as it was."""
    source, packed = pair
    reports = inspect_checkpoint(packed, source)
    original = find_experts(Checkpoint.open(source)).layers["model.layers.1.experts"]
    error = norm = 0.0
    kept = {
        p.module: p.read().dequantize(torch.float64) for p in find_packed(Checkpoint.open(packed))[original[0].layer]
    }
    for projection in original:
        if projection.name == "down_proj":
            weight = projection.read().double()
            error += float((kept[projection.module] - weight).square().sum())
            norm += float(weight.square().sum())
    assert reports[1].errors["down_proj"] == pytest.approx((error / norm) ** 0.5, rel=1e-4)
    assert set(reports[2].errors.values()) == {0.0}


def test_layers_are_in_their_own_order_whatever_they_are_stored_in(checkpoint, tmp_path):
    source, packed = checkpoint("fused", layers=3), tmp_path / "packed"
    pack_checkpoint(source, packed, Scheme(32, 16, ignore=("layers.1",)), progress=False)
    reports = inspect_checkpoint(packed, source)
    assert [(report.name, report.bits) for report in reports] == [
        (f"model.layers.{i}.experts", bits) for i, bits in enumerate((4, 16, 4))
    ]


@pytest.mark.parametrize(("changed", "message"), [(0, "has no"), (1, "lacks 9 projections")])
def test_experts_that_one_checkpoint_lacks_are_named(pair, changed, message):
    """A layer that packing lost would otherwise be a shorter table."""
    shard = pair[changed] / "model-00003-of-00003.safetensors"
    index = pair[changed] / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    left = {name: value for name, value in load_file(shard).items() if ".experts." not in name}
    save_file({**left, "kept": torch.zeros(1)}, shard)
    content["weight_map"] = {
        name: file for name, file in content["weight_map"].items() if file != shard.name or name in left
    }
    content["weight_map"]["kept"] = shard.name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{message}.*model\.layers\.2\.experts\.0"):
        inspect_checkpoint(pair[1], pair[0])


def test_the_command_prints_a_table_and_draws(pair, tmp_path, capsys):
    source, packed = pair
    picture = tmp_path / "error.png"
    assert inspect_main([str(packed), "--against", str(source), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    for text in ("model.layers.0.experts", "gate_proj 48x64", "32/16", "float", "3 layers", "9"):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert inspect_main([str(source)]) == 0
    assert "16.00" in capsys.readouterr().out


def test_errors_are_told(pair, tmp_path, capsys):
    source, packed = pair
    assert inspect_main([str(packed), "--plot", str(tmp_path / "x.png")]) == 1
    assert "--against" in capsys.readouterr().err
    for name, told in (("x.xyz", "draws .png"), ("nowhere/x.png", "no such folder")):
        assert inspect_main([str(packed), "--against", str(source), "--plot", str(tmp_path / name)]) == 1
        output = capsys.readouterr()
        assert told in output.err
        assert output.out == ""
    assert inspect_main([str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().err
    assert inspect_main([str(source), "--against", str(source / "extra")]) == 1
    capsys.readouterr()

    shard = packed / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    name = "model.layers.0.experts.1.up_proj.weight_scale"
    save_file({**tensors, name: tensors[name][:, :1].clone()}, shard)
    assert inspect_main([str(packed)]) == 1
    assert "1 groups a row, expected 2" in capsys.readouterr().err
    index = packed / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][name], tensors[name]
    index.write_text(json.dumps(content))
    save_file(tensors, shard)
    assert inspect_main([str(packed)]) == 1
    assert "model.layers.0.experts.1.up_proj: weight_scale is missing" in capsys.readouterr().err
