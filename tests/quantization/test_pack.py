"""`vllm-ext quantize`: what is written, whatever the layout and the parallelism, and in how much memory."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest
import tiny_checkpoints as made
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents, quantize, tensors_of

from vllm_ext.quantization import Scheme, join_quantized, pack_shard, progress, quantize_weight
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.cli import quantize_main
from vllm_ext.quantization.pack import MANIFEST
from vllm_ext.quantization.packed_source import find_packed

ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@pytest.mark.parametrize("kind", made.LAYOUTS)
def test_packed_experts_are_what_quantising_at_load_gives(checkpoint, tmp_path, kind):
    """Packed and at-load serving must give the same logits: same codes, scales and zero points for every expert."""
    source, packed = checkpoint(kind), tmp_path / "packed"
    before = contents(source)
    assert quantize(source, packed) == 0
    assert contents(source) == before
    assert not (tmp_path / "packed.partial").exists()
    names = made.PROJECTIONS.get(kind, ("gate_proj", "up_proj", "down_proj"))
    layers = find_packed(Checkpoint.open(packed))
    assert len(layers) == 2
    for number, projections in enumerate(layers.values()):
        weights = made.expert_weights(number)
        assert {p.name for p in projections} == set(names)
        for name in names:
            group = 16 if ROLE[name] == "down" else 32
            expected = quantize_weight(weights[ROLE[name]], group)
            experts = sorted((p for p in projections if p.name == name), key=lambda p: p.expert)
            got = join_quantized([p.read() for p in experts], stack=True)
            assert torch.equal(got.packed, expected.packed)
            assert torch.equal(got.scale, expected.scale)
            assert torch.equal(got.zero_point, expected.zero_point)


@pytest.mark.parametrize("kind", ["per_expert", "gpt_oss"])
def test_everything_else_is_copied_and_indexed(checkpoint, tmp_path, kind):
    """C06: routers, gates and shared experts byte for byte; companions beside them; config.json extended."""
    source, packed = checkpoint(kind), tmp_path / "packed"
    assert quantize(source, packed) == 0
    before, after = tensors_of(source), tensors_of(packed)
    experts = {name for name in before if ".experts." in name and not name.endswith("_bias")}
    for name in before.keys() - experts:
        assert torch.equal(before[name], after[name])
    assert not experts & after.keys()
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    for name, file in index["weight_map"].items():
        assert name in load_file(packed / file)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in after.values())
    config = json.loads((packed / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert Scheme.from_dict(quantization) == Scheme(32, 16)
    assert (packed / "extra" / "template.jinja").read_bytes() == (source / "extra" / "template.jinja").read_bytes()
    assert (packed / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_second_copy_of_the_weights_is_left_out(checkpoint, tmp_path, capsys):
    """Repositories that also hold the weights in their first form would be packed and fetched at twice the size."""
    source = checkpoint()
    save_file({"x": torch.zeros(2)}, source / "consolidated.safetensors")
    for name in ("original/params.json", ".git/config", "pytorch_model.bin", "flax_model.msgpack"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    assert quantize(source, tmp_path / "packed") == 0
    assert "consolidated.safetensors: not in the index, left out" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "packed").rglob("*") if path.is_file()} == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "template.jinja",
        "tokenizer.json",
        MANIFEST,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_packed(checkpoint, tmp_path, dtype):
    source = checkpoint("fused", dtype=dtype)
    assert quantize(source, tmp_path / "packed") == 0
    projection = next(iter(find_packed(Checkpoint.open(tmp_path / "packed")).values()))[0]
    assert projection.read().scale.dtype == (torch.float16 if dtype == torch.float16 else torch.bfloat16)


def test_ignored_layers_stay_as_they_are_and_unmatched_patterns_warn(checkpoint, tmp_path, capsys):
    """C23"""
    source = checkpoint("per_expert", layers=12)
    arguments = ("--ignore", "layers.1", "--ignore", "re:.*layers\\.3\\.", "--ignore", "mlp.gat", "--ignore", "lm_head")
    assert quantize(source, tmp_path / "packed", *arguments) == 0
    captured = capsys.readouterr()
    assert "ignore pattern 'mlp.gat' matches nothing" in captured.err
    assert captured.err.count("matches nothing") == 1
    assert "10 layers, 30 experts" in captured.out
    packed = {name for name in tensors_of(tmp_path / "packed") if name.endswith("weight_packed")}
    assert {name.split(".")[2] for name in packed} == {str(i) for i in range(12)} - {"1", "3"}
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["layers.1", "re:.*layers\\.3\\.", "mlp.gat", "lm_head"]


def test_the_bytes_do_not_depend_on_the_parallelism(checkpoint, tmp_path):
    source = checkpoint("fused", layers=4)
    assert quantize(source, tmp_path / "one") == 0
    assert quantize(source, tmp_path / "two", "--jobs", "2") == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_bar_moves_while_a_file_is_packed(checkpoint, tmp_path, monkeypatch, capsys, jobs):
    """Files have gigabytes: a bar that moved once a file would stand still for minutes."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(pack_shard, "REPORT_SECONDS", 0.0)
    options = ["--group-size-w13", "32", "--group-size-w2", "16", "--jobs", jobs]
    assert quantize_main([str(checkpoint("per_expert")), str(tmp_path / "packed"), *options]) == 0
    shares = [int(share) for share in re.findall(r"(\d+)%", capsys.readouterr().err)]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    if jobs == "1":
        assert len(set(shares)) > 10


def test_a_single_file_without_an_index_is_packed(tmp_path):
    tensors = made.fused("model.layers.0", made.expert_weights(0))
    source = made.write_checkpoint(tmp_path / "src", {}, [tensors], index=False)
    assert quantize(source, tmp_path / "packed") == 0
    assert [p.name for p in (tmp_path / "packed").glob("*.safetensors*")] == ["model.safetensors"]


def test_tied_experts_are_stored_once(tmp_path, capsys):
    weights = made.expert_weights(0)
    prefixes = ("model.decoder.layers.0", "model.encoder.language_model.layers.0")
    tensors = {name: value for prefix in prefixes for name, value in made.fused(prefix, weights).items()}
    source = made.write_checkpoint(tmp_path / "src", {}, [tensors])
    assert quantize(source, tmp_path / "packed") == 0
    assert "stored once" in capsys.readouterr().err
    assert all(name.startswith("model.decoder.") for name in tensors_of(tmp_path / "packed"))


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    """The promise is twice the largest tensor and 1 GiB; a fraction of the tensor is what it takes."""
    experts, rows, columns = 64, 1536, 1024  # 192 MiB in one tensor
    gate_up = torch.randn(1, rows, columns).bfloat16().expand(experts, -1, -1).contiguous()
    down = torch.randn(1, columns, rows // 2).bfloat16().expand(experts, -1, -1).contiguous()
    tensors = {"model.layers.0.experts.gate_up_proj": gate_up, "model.layers.0.experts.down_proj": down}
    source = made.write_checkpoint(tmp_path / "src", {}, [tensors])
    largest = gate_up.nbytes
    del gate_up, down, tensors

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def packing_stays_small() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
        before = peak()
        status = quantize_main([str(source), str(tmp_path / "packed"), "--quiet", "--method", "minmax"])
        return status if peak() - before < largest / 2 else 9

    assert made.exit_status(made.forked(packing_stays_small)) == 0
