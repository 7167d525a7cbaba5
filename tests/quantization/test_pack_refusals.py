"""What `vllm-ext quantize` refuses before it writes anything, and what it never touches."""

from __future__ import annotations

import re

import pytest
import tiny_checkpoints as made
import torch
from tiny_checkpoints import contents, quantize

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.cli import quantize_main
from vllm_ext.quantization.pack import pack_checkpoint
from vllm_ext.quantization.pack_shard import PackError


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


def test_a_destination_that_cannot_be_written_is_told_before_the_work(checkpoint, tmp_path, capsys):
    """Nothing was begun there, so `--resume` would be no remedy."""
    (tmp_path / "file").write_text("x")
    assert quantize(checkpoint(), tmp_path / "file" / "packed") == 1
    error = capsys.readouterr().err
    assert "packed.partial: cannot be written: " in error
    assert error.endswith("choose a destination where you may write\n")


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


def test_too_little_space_is_told_before_the_work(checkpoint, tmp_path, monkeypatch):
    source = checkpoint()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("vllm_ext.quantization.pack.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(PackError, match=r"packing needs .* GB and 0\.00 GB are free"):
        pack_checkpoint(source, tmp_path / "packed", Scheme(32, 16), progress=False)
