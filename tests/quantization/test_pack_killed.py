"""Killed at any moment, the destination is absent or complete, and --resume gives the bytes of a run left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiny_checkpoints as made
import torch
from tiny_checkpoints import contents

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.pack import pack_checkpoint

KILLS = 20
SCHEME = Scheme(32, 16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Six shards of 3 MB each: long enough that random moments fall into every phase of a run."""
    shards = []
    for layer in range(6):
        generator = torch.Generator().manual_seed(layer)
        gate_up = torch.randn(16, 256, 256, generator=generator).bfloat16()
        down = torch.randn(16, 256, 128, generator=generator).bfloat16()
        shards.append({f"layers.{layer}.experts.gate_up_proj": gate_up, f"layers.{layer}.experts.down_proj": down})
    return made.write_checkpoint(tmp_path / "src", {"hidden_size": 256}, shards)


def test_twenty_kills_at_random_moments_leave_no_trace(source, tmp_path):
    """kill -9 of a packing process, again and again on the same destination, each time resumed by the next one."""
    before = contents(source)
    start = time.monotonic()
    child = made.forked(lambda: run(source, tmp_path / "whole"))
    assert made.exit_status(child) == 0
    duration = time.monotonic() - start
    whole = contents(tmp_path / "whole")

    packed, partial = tmp_path / "packed", tmp_path / "packed.partial"
    moments = random.Random(0)
    killed = 0
    while killed < KILLS:
        child = made.forked(lambda: run(source, packed))
        time.sleep(moments.uniform(0, duration / 3))
        os.kill(child, signal.SIGKILL)
        killed += made.exit_status(child) == -signal.SIGKILL
        if packed.exists():
            assert contents(packed) == whole
            made.exit_status(made.forked(lambda: run(source, packed)))
            assert not partial.exists()
            for path in sorted(packed.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            packed.rmdir()
    assert made.exit_status(made.forked(lambda: run(source, packed))) == 0
    assert contents(packed) == whole
    assert not partial.exists()
    assert contents(source) == before


def run(source: Path, destination: Path) -> int:
    pack_checkpoint(source, destination, SCHEME, resume=True, device="cpu", progress=False)
    return 0


def test_workers_end_with_their_parent(source, tmp_path):
    """An orphaned worker would go on writing beside the run that resumes."""
    child = made.forked(lambda: parallel(source, tmp_path / "packed"))
    workers = children_of(child, 2)
    os.kill(child, signal.SIGKILL)
    made.exit_status(child)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.1)
    assert run(source, tmp_path / "packed") == 0


def test_a_killed_worker_ends_the_run_with_what_to_do(source, tmp_path, capfd):
    """As the kernel kills one that takes too much memory; the others end, and what is finished is kept."""
    packed = tmp_path / "packed"
    child = made.forked(lambda: made.quantize(source, packed, "--jobs", "2"))
    workers = children_of(child, 2)
    os.kill(workers[0], signal.SIGKILL)
    assert made.exit_status(child) == 1
    assert "a worker process was killed" in capfd.readouterr().err
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert made.quantize(source, packed, "--resume") == 0


def parallel(source: Path, destination: Path) -> int:
    pack_checkpoint(source, destination, SCHEME, jobs=2, device="cpu", progress=False)
    return 0


def children_of(parent: int, count: int) -> list[int]:
    """Process ids of the `count` spawned workers of `parent`, waited for."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = Path(f"/proc/{parent}/task/{parent}/children")
        found = [int(pid) for pid in listed.read_text().split()] if listed.exists() else []
        workers = [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if len(workers) >= count:
            return workers
        time.sleep(0.05)
    raise AssertionError("the workers did not start")
