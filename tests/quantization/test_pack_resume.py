"""Packing stopped half-way, by a bad weight or a full disk, goes on with `--resume` and ends in the same bytes."""

from __future__ import annotations

import errno
import json
import os
import resource

import pytest
import tiny_checkpoints as made
from safetensors.torch import load_file, save_file
from tiny_checkpoints import contents, quantize

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.pack import MANIFEST, pack_checkpoint
from vllm_ext.quantization.pack_shard import PackError


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


def test_resuming_packs_again_what_its_source_no_longer_is(checkpoint, tmp_path):
    """A checkpoint downloaded anew meanwhile: neither its old weights nor a file it no longer has may be left."""
    source, packed = checkpoint("per_expert"), tmp_path / "packed"
    first, second = (source / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    good, tensors = second.read_bytes(), load_file(second)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, second)
    assert quantize(source, packed) == 1
    out = tmp_path / "packed.partial" / "out"
    assert [path.name for path in out.iterdir() if "safetensors" in path.name] == [first.name], "no half of a file"
    (out / "model-00001-of-00001.safetensors").write_bytes(b"of the source's former index")
    second.write_bytes(good)
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # as long as before
    assert quantize(source, packed, "--resume") == 0
    assert quantize(source, tmp_path / "whole") == 0
    assert contents(packed) == contents(tmp_path / "whole")


def test_the_destination_appears_in_one_step_or_not_at_all(checkpoint, tmp_path, monkeypatch, capsys):
    """Copied there file by file, it could be found half complete, and be served."""
    source, packed = checkpoint("per_expert"), tmp_path / "packed"

    def refused(old: str, new: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        assert quantize(source, packed) == 1
    assert "packed: cannot be written" in capsys.readouterr().err
    assert not packed.exists()
    assert quantize(source, packed, "--resume") == 0
    assert "2 of 2 files kept" in capsys.readouterr().out


def test_an_interrupted_run_says_how_to_go_on(checkpoint, tmp_path, monkeypatch, capsys):
    source, packed = checkpoint("per_expert"), tmp_path / "packed"

    def interrupted(old: str, new: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", interrupted)
        assert quantize(source, packed) == 130
    assert "interrupted; what is finished is kept: run again with --resume" in capsys.readouterr().err
    assert quantize(source, packed, "--resume") == 0


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


def test_resuming_a_complete_run_of_another_checkpoint_is_refused(checkpoint, tmp_path, capsys):
    packed = tmp_path / "packed"
    assert quantize(checkpoint("per_expert"), packed) == 0
    assert quantize(checkpoint("per_expert", layers=3, name="other"), packed, "--resume") == 1
    assert "packed from another checkpoint" in capsys.readouterr().err


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
