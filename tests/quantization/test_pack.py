"""`vllm-ext quantize`: what is written, whatever the layout and the parallelism, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from pathlib import Path

import pytest
import tiny_checkpoints as made
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents

from vllm_ext.quantization import Scheme, join_quantized, quantize_weight
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.cli import quantize_main
from vllm_ext.quantization.pack import MANIFEST, pack_checkpoint
from vllm_ext.quantization.pack_shard import PackError
from vllm_ext.quantization.packed_source import find_packed

SMALL = ["--group-size-w13", "32", "--group-size-w2", "16", "--quiet"]
ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged.update(load_file(path))
    return merged


def quantize(*arguments: object) -> int:
    return quantize_main([*map(str, arguments), *SMALL])


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


def test_float_zero_points_are_rerounded_for_compressed_tensors_and_it_says_so(checkpoint, tmp_path, capsys):
    source = checkpoint()
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
    assert quantize(source, tmp_path / "x", "--format", "compressed-tensors", "--zero-point", "float") == 1


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


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda src, dst: (src / "model-00002-of-00002.safetensors").write_bytes(b"x" * 100), "no safetensors file"),
        (lambda src, dst: (src / "model-00002-of-00002.safetensors").unlink(), "missing, although"),
        (lambda src, dst: dst.mkdir(), "exists; choose another"),
        (lambda src, dst: dst.write_text("x"), "exists; choose another"),
        (lambda src, dst: dst.symlink_to(src / "nowhere"), "exists; choose another"),
        (lambda src, dst: dst.with_name("packed.partial").mkdir(), "left by a run that did not finish.*--resume"),
        (
            lambda src, dst: (src / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}'),
            "'fp8'",
        ),
    ],
)
def test_errors_name_the_cause_and_leave_nothing(checkpoint, tmp_path, capsys, prepare, message):
    source, destination = checkpoint(), tmp_path / "packed"
    prepare(source, destination)
    there = sorted(path.name for path in tmp_path.iterdir())
    assert quantize(source, destination) == 1
    error = capsys.readouterr().err
    assert "vllm-ext quantize: error: " in error
    assert re.search(message, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_models_without_experts_are_an_error(tmp_path, capsys):
    """C07: nothing matched is no success."""
    source = made.write_checkpoint(tmp_path / "src", {}, [made.dense(0)])
    assert quantize(source, tmp_path / "packed") == 1
    assert "no routed experts found" in capsys.readouterr().err
    source = made.write_checkpoint(tmp_path / "moe", {}, [made.fused("layers.0", made.expert_weights(0))])
    assert quantize(source, tmp_path / "packed", "--ignore", "experts") == 1
    assert "ignored by pattern" in capsys.readouterr().err


@pytest.mark.parametrize("format_name", ["w4a16-grouped", "compressed-tensors"])
def test_sizes_the_format_cannot_store_are_told_before_anything_is_written(tmp_path, capsys, format_name):
    weights = {
        f"l.experts.{e}.{name}.weight": torch.randn((64, 7) if name == "down_proj" else (7, 64))
        for e in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    source = made.write_checkpoint(tmp_path / "src", {}, [weights])
    assert quantize(source, tmp_path / "packed", "--format", format_name) == 1
    assert re.search(r"even number of columns, got 7|no multiple of 8 divides .* \[7, 64\]", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_options_that_cannot_be_are_errors(checkpoint, tmp_path, capsys):
    source = checkpoint()
    for arguments, message in (
        (["--jobs", "0"], "jobs must be at least 1"),
        (["--ignore", "re:("], "no regular expression"),
        (["--device", "cuda"], "no CUDA device" if not torch.cuda.is_available() else ""),
    ):
        if message:
            assert quantize(source, tmp_path / "packed", *arguments) == 1
            assert message in capsys.readouterr().err
    assert quantize_main([str(source), str(tmp_path / "packed"), "--group-size-w13", "12"]) == 1
    assert "group_size_w13" in capsys.readouterr().err
    assert quantize(source, source / "packed") == 1
    assert "inside the source" in capsys.readouterr().err
    assert quantize(tmp_path / "nowhere", tmp_path / "packed") == 1
    with pytest.raises(SystemExit):
        quantize(source, tmp_path / "packed", "--format", "gguf")
    assert not (tmp_path / "packed").exists()


def test_weights_that_are_not_finite_stop_the_run_with_their_name(checkpoint, tmp_path, capsys):
    """After the file is repaired, --resume keeps what was finished."""
    source, packed = checkpoint("per_expert"), tmp_path / "packed"
    shard = source / "model-00002-of-00002.safetensors"
    good = shard.read_bytes()
    tensors = load_file(shard)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, shard)
    assert quantize(source, packed) == 1
    error = capsys.readouterr().err
    assert "model.layers.1.mlp.experts.2.up_proj" in error
    assert "1 NaN" in error
    assert not packed.exists()
    shard.write_bytes(good)
    assert quantize(source, packed, "--resume") == 0
    assert "1 of 2 files kept" in capsys.readouterr().out


def test_resuming_redoes_what_was_damaged_or_changed_and_keeps_the_rest(checkpoint, tmp_path):
    source = checkpoint("per_expert", layers=3)
    scheme = Scheme(32, 16)
    expected = pack_checkpoint(source, tmp_path / "whole", scheme, progress=False)
    assert expected.reused == 0
    whole = contents(tmp_path / "whole")

    blocker = tmp_path / "src" / "model-00003-of-00003.safetensors"
    hidden = blocker.read_bytes()
    stat = blocker.stat()
    tensors = load_file(blocker)
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, blocker)
    with pytest.raises(ValueError, match="1 infinite"):
        pack_checkpoint(source, tmp_path / "packed", scheme, progress=False)
    blocker.write_bytes(hidden)
    os.utime(blocker, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    finished = tmp_path / "packed.partial" / "out" / "model-00001-of-00003.safetensors"
    data = bytearray(finished.read_bytes())
    data[-1] ^= 1
    finished.write_bytes(data)
    (finished.parent / ".model-00003-of-00003.safetensors.tmp-host-1").write_bytes(b"left by a killed run")
    result = pack_checkpoint(source, tmp_path / "packed", scheme, progress=False, resume=True)
    assert result.reused == 1
    assert contents(tmp_path / "packed") == whole


def test_resuming_with_other_options_is_refused(checkpoint, tmp_path):
    source = checkpoint("per_expert")
    (tmp_path / "packed.partial" / "state").mkdir(parents=True)
    first = {"format": "w4a16-grouped", "scheme": Scheme(64, 16).to_dict(), "device": "cpu", "writer": 1}
    (tmp_path / "packed.partial" / "state" / "options.json").write_text(json.dumps(first))
    with pytest.raises(PackError, match=r"begun with other options \(scheme: .*'group_size_w13': 64"):
        pack_checkpoint(source, tmp_path / "packed", Scheme(32, 16), resume=True, device="cpu", progress=False)


def test_resuming_a_complete_run_verifies_it(checkpoint, tmp_path, capsys):
    source, packed = checkpoint("per_expert"), tmp_path / "packed"
    assert quantize(source, packed, "--resume") == 0
    assert quantize(source, packed, "--resume") == 0
    assert "already complete, 2 files verified" in capsys.readouterr().out
    shard = packed / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert quantize(source, packed, "--resume") == 1
    assert "damaged since it was written" in capsys.readouterr().err
    assert json.loads((packed / MANIFEST).read_text())["format"] == "w4a16-grouped"


@pytest.mark.parametrize("changed", [("--symmetric",), ("--format", "compressed-tensors")])
def test_resuming_a_complete_run_with_other_options_is_refused(checkpoint, tmp_path, capsys, changed):
    """It said "already complete" and left the other packing in place."""
    source, packed = checkpoint("per_expert"), tmp_path / "packed"
    assert quantize(source, packed) == 0
    assert quantize(source, packed, "--resume", *changed) == 1
    assert "packed with other options" in capsys.readouterr().err


def test_a_link_does_not_lead_into_the_source(checkpoint, tmp_path, capsys):
    source, link = checkpoint("per_expert"), tmp_path / "link"
    link.symlink_to(source)
    before = contents(source)
    assert quantize(source, link / "packed") == 1
    assert "lies inside the source" in capsys.readouterr().err
    assert contents(source) == before


def test_a_source_in_the_place_of_the_work_is_not_taken_over(checkpoint, tmp_path, capsys):
    """`DST.partial` is removed at the end of a run: it must not be the checkpoint itself."""
    source = checkpoint("per_expert").rename(tmp_path / "model.partial")
    before = contents(source)
    assert quantize(source, tmp_path / "model", "--resume") == 1
    assert "holds the source" in capsys.readouterr().err
    assert contents(source) == before


@pytest.mark.parametrize("complete", [False, True])
def test_a_folder_of_somebody_else_is_neither_used_nor_removed(checkpoint, tmp_path, capsys, complete):
    source, packed = checkpoint("per_expert"), tmp_path / "packed"
    if complete:
        assert quantize(source, packed) == 0
    precious = tmp_path / "packed.partial" / "notes"
    precious.parent.mkdir()
    precious.write_text("mine")
    assert quantize(source, packed, "--resume") == (0 if complete else 1)
    if not complete:
        assert "holds notes; move it away" in capsys.readouterr().err
    assert precious.read_text() == "mine"


def test_two_runs_cannot_pack_the_same_destination(checkpoint, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    source = checkpoint()
    state = tmp_path / "packed.partial" / "state"
    state.mkdir(parents=True)
    with open(state / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PackError, match="another run is packing there"):
            pack_checkpoint(source, tmp_path / "packed", Scheme(32, 16), resume=True, progress=False)


def test_a_full_disk_is_told_and_resumed(checkpoint, tmp_path, capfd):
    """The file size limit stands in for a full disk: the kernel refuses the bytes in the same place."""
    source, packed = checkpoint("per_expert"), tmp_path / "packed"

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        return quantize(source, packed)

    assert made.exit_status(made.forked(limited)) == 1
    error = capfd.readouterr().err
    assert "cannot be written: " + os.strerror(errno.EFBIG) in error
    assert "raise the limit, then run with --resume" in error
    assert not packed.exists()
    assert quantize(source, packed, "--resume") == 0


def test_a_disk_that_fills_meanwhile_says_to_make_room(checkpoint, tmp_path, monkeypatch, capsys):
    source, packed = checkpoint("per_expert"), tmp_path / "packed"

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert quantize(source, packed) == 1
    error = capsys.readouterr().err
    assert os.strerror(errno.ENOSPC) in error
    assert "make room, then run again with --resume" in error
    assert not packed.exists()
    assert quantize(source, packed, "--resume") == 0


def test_too_little_space_is_told_before_the_work(checkpoint, tmp_path, monkeypatch):
    source = checkpoint()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("vllm_ext.quantization.pack.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(PackError, match=r"packing needs .* GB and 0\.00 GB are free"):
        pack_checkpoint(source, tmp_path / "packed", Scheme(32, 16), progress=False)


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
