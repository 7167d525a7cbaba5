"""Routed experts are found in every layout, and nothing else is."""

from __future__ import annotations

import json

import pytest
import tiny_checkpoints as made
import torch
from safetensors.torch import save_file

from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import find_experts
from vllm_ext.quantization.tensor_file import CheckpointError

ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@pytest.mark.parametrize("kind", made.LAYOUTS)
def test_every_layout_gives_the_same_matrices(checkpoint, kind):
    """C07, C17: fused experts have been left in 16 bits silently, nested prefixes missed."""
    experts = find_experts(Checkpoint.open(checkpoint(kind)))
    assert len(experts.layers) == 2
    assert not experts.unknown
    for number, projections in enumerate(experts.layers.values()):
        weights = made.expert_weights(number)
        assert len(projections) == 3 * made.EXPERTS
        for projection in projections:
            role = ROLE[projection.name]
            assert torch.equal(projection.read(), weights[role][projection.expert])
            assert projection.shape == weights[role].shape[1:]
            assert projection.shard == ("w2" if role == "down" else "w13")
            assert projection.nbytes == weights[role][0].nbytes


def test_routers_shared_experts_and_their_gates_are_no_experts(checkpoint):
    """C06"""
    names = {p.module for found in find_experts(Checkpoint.open(checkpoint())).layers.values() for p in found}
    assert not [name for name in names if "shared" in name or name.endswith("gate")]


def one_file(folder, tensors, **config):
    return Checkpoint.open(made.write_checkpoint(folder / "src", config, [tensors]))


def test_experts_without_a_gate_are_found(tmp_path):
    weights = made.expert_weights(0)
    tensors = {}
    for e in range(made.EXPERTS):
        tensors[f"backbone.layers.0.mixer.experts.{e}.up_proj.weight"] = weights["up"][e].clone()
        tensors[f"backbone.layers.0.mixer.experts.{e}.down_proj.weight"] = weights["down"][e].clone()
    tensors["backbone.layers.1.mixer.experts.up_proj"] = weights["up"]
    tensors["backbone.layers.1.mixer.experts.down_proj"] = weights["down"].clone()
    for projections in find_experts(one_file(tmp_path, tensors)).layers.values():
        assert {p.name for p in projections} == {"up_proj", "down_proj"}
        for projection in projections:
            assert torch.equal(projection.read(), weights[ROLE[projection.name]][projection.expert])


def test_square_experts_without_a_gate_are_oriented_by_the_hidden_size(tmp_path):
    """[E, 64, 48] may be [E, I, H] or [E, H, I]; only config.json can tell."""
    weights = made.expert_weights(0)
    tensors = {
        "layers.0.experts.up_proj": weights["up"].transpose(1, 2).contiguous(),
        "layers.0.experts.down_proj": weights["down"].transpose(1, 2).contiguous(),
    }
    for projection in find_experts(one_file(tmp_path, tensors)).layers["layers.0.experts"]:
        assert torch.equal(projection.read(), weights[ROLE[projection.name]][projection.expert])


@pytest.mark.parametrize("known_by", ["model type", "biases"])
def test_interleaved_experts_are_known_by_either_sign(tmp_path, known_by):
    """Fine-tuned models rename their type, and converters drop biases that are zero."""
    weights = made.expert_weights(0)
    tensors = made.interleaved("model.layers.0.mlp", weights)
    config = {}
    if known_by == "model type":
        tensors = {name: value for name, value in tensors.items() if not name.endswith("_bias")}
        config = {"model_type": "gpt_oss"}
    for projection in find_experts(one_file(tmp_path, tensors, **config)).layers["model.layers.0.mlp.experts"]:
        assert torch.equal(projection.read(), weights[ROLE[projection.name]][projection.expert])


def test_gate_and_up_in_one_matrix_an_expert_are_split(tmp_path):
    weights = made.expert_weights(0)
    tensors = {}
    for e in range(made.EXPERTS):
        both = torch.cat((weights["gate"][e], weights["up"][e]))
        tensors[f"model.layers.0.mlp.experts.{e}.gate_up_proj.weight"] = both
        tensors[f"model.layers.0.mlp.experts.{e}.down_proj.weight"] = weights["down"][e].clone()
    for projection in find_experts(one_file(tmp_path, tensors)).layers["model.layers.0.mlp.experts"]:
        assert torch.equal(projection.read(), weights[ROLE[projection.name]][projection.expert])


def test_tied_experts_are_found_once(tmp_path):
    """DiffusionGemma's encoder repeats its decoder's experts; counted twice they are 85 GiB instead of 42."""
    weights = made.expert_weights(0)
    decoder = made.fused("model.decoder.layers.0", weights)
    encoder = made.fused("model.encoder.language_model.layers.0", weights)
    experts = find_experts(one_file(tmp_path / "a", {**decoder, **encoder}))
    assert list(experts.layers) == ["model.decoder.layers.0.experts"]
    assert experts.tied == ("model.encoder.language_model.layers.0.experts",)
    encoder["model.encoder.language_model.layers.0.experts.down_proj"][2, 3, 4] += 1
    assert len(find_experts(one_file(tmp_path / "b", {**decoder, **encoder})).layers) == 2


def test_contradictions_are_errors_that_name_the_layer(tmp_path):
    weights = made.expert_weights(0)
    per_expert = made.per_expert("layers.0.mlp", weights, ("gate_proj", "up_proj", "down_proj"))
    fused = made.fused("layers.0.mlp", weights)
    name = "layers.0.mlp.experts.1.up_proj.weight"
    square = {**fused, "layers.0.mlp.experts.down_proj": fused["layers.0.mlp.experts.gate_up_proj"].clone()}
    cases = {
        "experts \\[1\\] are missing": {k: v for k, v in per_expert.items() if ".1." not in k},
        "lacks \\['up_proj'\\]": {k: v for k, v in per_expert.items() if k != name},
        "differs from the other experts'": {**per_expert, name: per_expert[name][:8].clone()},
        "are no gate/up and down": square,
        "got only \\['gate_up_proj'\\]": {k: v for k, v in fused.items() if "down" not in k},
        "stored twice": {**per_expert, **fused},
        "has tensors of no experts": {k: v[:0].contiguous() for k, v in fused.items()},
        "is empty": {k: v[:, :0].contiguous() for k, v in per_expert.items()},
        "is I8; only FP16": {k: v.to(torch.int8) for k, v in per_expert.items()},
    }
    for number, (message, tensors) in enumerate(cases.items()):
        with pytest.raises(CheckpointError, match=rf"layers\.0\.mlp.*{message}"):
            find_experts(one_file(tmp_path / str(number), tensors))


def test_experts_in_an_unknown_layout_are_reported(tmp_path):
    """Left in 16 bits, but never silently."""
    weights = made.per_expert("layers.0.mlp", made.expert_weights(0), ("gate_proj", "up_proj", "down_proj"))
    strange = {
        "layers.1.block_sparse_moe.input_linear.weight": torch.zeros(3, 8, 8),
        "layers.2.mlp.experts.0.linear_fc1.weight": torch.zeros(8, 8),
    }
    assert set(find_experts(one_file(tmp_path, {**weights, **strange})).unknown) == set(strange)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncate", "truncated.*download it again"),
        ("cut header", "truncated"),
        ("empty", "truncated"),
        ("text", "no safetensors file"),
        ("json", "header is damaged"),
        ("extra bytes", "damaged"),
        ("directory", "cannot be read"),
        ("absent", "missing, although"),
        ("no entry", "has no entry for lm_head.weight"),
        ("ghost entry", "ghost.weight is listed"),
        ("moved entry", "is listed in"),
        ("outside", "no plain file name"),
        ("empty map", "has no weight_map"),
        ("no index", "2 safetensors files but no"),
        ("no config", "config.json"),
        ("config is a list", "must be a JSON object"),
        ("config is no JSON", "is no JSON"),
    ],
)
def test_damaged_checkpoints_are_refused_by_name(checkpoint, damage, message):
    """Found from headers, before hours of work, and said so that the file can be fetched again."""
    folder = checkpoint()
    shard = folder / "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    weight_map = content["weight_map"]
    data = shard.read_bytes()
    if damage == "truncate":
        shard.write_bytes(data[:-100])
    elif damage == "cut header":
        shard.write_bytes(data[:60])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "text":
        shard.write_bytes(b"<html>404 not found</html>" * 10)
    elif damage == "json":
        shard.write_bytes(data[:8] + b"\xff" + data[9:])
    elif damage == "extra bytes":
        shard.write_bytes(data + b"more")
    elif damage in ("directory", "absent"):
        shard.unlink()
        if damage == "directory":
            shard.mkdir()
    elif damage == "no entry":
        del weight_map["lm_head.weight"]
    elif damage == "ghost entry":
        weight_map["ghost.weight"] = shard.name
    elif damage == "moved entry":
        weight_map["lm_head.weight"] = "model-00001-of-00002.safetensors"
    elif damage == "outside":
        weight_map["lm_head.weight"] = "../other.safetensors"
    elif damage == "empty map":
        weight_map.clear()
    index.write_text(json.dumps(content))
    if damage == "no index":
        index.unlink()
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "config is a list":
        (folder / "config.json").write_text("[]")
    elif damage == "config is no JSON":
        (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_pickled_weights_are_never_opened(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no safetensors"):
        Checkpoint.open(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="pickle"):
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(tmp_path / "nowhere")


def test_files_outside_the_index_are_left_out(checkpoint):
    """Some repositories also hold one consolidated file with the same weights."""
    folder = checkpoint()
    save_file({"x": torch.zeros(2)}, folder / "consolidated.safetensors")
    opened = Checkpoint.open(folder)
    assert "x" not in opened.tensors
    assert [path.name for path in opened.stray] == ["consolidated.safetensors"]
