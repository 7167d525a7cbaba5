"""Packs a checkpoint folder: resumable, atomic, and the same bytes whatever the parallelism.

DST.partial holds the work: `out` with finished files and `state` with a record (checksum, sources) of each. When all
is there, `out` is renamed to DST in one step. A run killed at any moment leaves no DST, or a complete one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ext.quantization.checkpoint import CONFIG, INDEX, PICKLED, Checkpoint, read_json
from vllm_ext.quantization.pack_shard import (
    PackError,
    ShardRecord,
    Workplace,
    file_sha256,
    sources_of,
    write_atomically,
    writing,
)
from vllm_ext.quantization.plan import Plan, Shard, make_plan
from vllm_ext.quantization.progress import Progress
from vllm_ext.quantization.runners import run_here, run_processes, run_ray
from vllm_ext.quantization.scheme import Scheme
from vllm_ext.quantization.tensor_file import reading

MANIFEST = "vllm_ext_manifest.json"
WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", *PICKLED)
SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Result:
    """What a run did. `added_error` is the relative RMS error that re-rounding float zero points added, or None."""

    plan: Plan
    source_bytes: int
    packed_bytes: int
    reused: int
    added_error: float | None
    complete_before: bool = False


def pack_checkpoint(
    source: Path,
    destination: Path,
    scheme: Scheme | None = None,
    *,
    format_name: str = "w4a16-grouped",
    jobs: int = 1,
    ray_address: str | None = None,
    resume: bool = False,
    device: str = "auto",
    progress: bool = True,
    warn: Callable[[str], None] = warnings.warn,
) -> Result:
    """Pack the checkpoint folder `source` into the new folder `destination`.

    jobs          processes, each packing one shard at a time
    ray_address   spread shards over a Ray cluster instead; `destination` must be on storage its nodes share
    resume        go on where a killed run stopped: finished shards are verified by checksum and kept
    warn          told of patterns that match nothing and weights left as they are
    device        "auto" (CUDA when there is one), "cpu" or "cuda"; part of what a resumed run must repeat

    Raises CheckpointError (a ValueError) on a source that cannot be packed, PackError when writing fails or the
    destination is in the way, ValueError on bad options or weights.
    """
    if jobs < 1:
        raise ValueError(f"quantize: jobs must be at least 1, got {jobs}")
    if jobs > 1 and ray_address is not None:
        raise ValueError("quantize: --jobs and --ray exclude each other")
    source, destination = source.resolve(), Path(os.path.abspath(destination))
    # Links in the way to the destination may lead into the source; a link in its place is found to exist, below.
    destination = destination.parent.resolve() / destination.name
    workplace = Workplace(destination.with_name(destination.name + ".partial"))
    device = _device(device)
    if destination == source or source in destination.parents:
        raise ValueError(f"quantize: {destination} lies inside the source, which is never touched")
    if workplace.root.resolve() in (source, *source.parents):
        raise ValueError(f"quantize: {workplace.root} is where the work would be done, and holds the source: rename it")
    plan = make_plan(Checkpoint.open(source), scheme or Scheme(), format_name)
    for text in plan.warnings:
        warn(text)
    if destination.exists() or destination.is_symlink():
        return _already_there(plan, destination, workplace, resume)
    options = _options(plan, device)
    with _prepared(workplace, options, resume):
        finished = _finished(plan, workplace) if resume else {}
        missing = [shard for shard in plan.shards if shard.name not in finished]
        _check_space(plan, missing, workplace.root)
        bar = Progress("quantize", sum(shard.source_bytes for shard in plan.shards), enabled=progress)
        reused = len(finished)
        records = dict(finished)

        def tick() -> None:
            if bar.due():
                bar.update(_bytes_done(plan, records, workplace))

        tick()
        for record in _run(missing, plan.scheme, workplace, device, tick, jobs, ray_address):
            records[record.name] = record
            tick()
        _finish(plan, records, workplace, destination)
        bar.finish(bar.total)
    shutil.rmtree(workplace.root, ignore_errors=True)
    norm = sum(record.norm for record in records.values())
    added = sum(record.added for record in records.values())
    return Result(
        plan,
        sum(shard.source_bytes for shard in plan.shards),
        sum(record.size for record in records.values()),
        reused,
        (added / norm) ** 0.5 if norm else None,
    )


def _run(
    shards: list[Shard], scheme: Scheme, workplace: Workplace, device: str, tick: Any, jobs: int, address: str | None
) -> Iterator[ShardRecord]:
    if address is not None:
        return run_ray(shards, scheme, workplace, device, tick, address)
    if jobs > 1 and len(shards) > 1:
        return run_processes(shards, scheme, workplace, device, tick, min(jobs, len(shards)))
    return run_here(shards, scheme, workplace, device, tick)


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"quantize: device must be auto, cpu or cuda, got {device!r}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RuntimeError("quantize: --device cuda, but torch finds no CUDA device; use --device cpu")
    return "cuda" if available and device != "cpu" else "cpu"


def _options(plan: Plan, device: str) -> dict[str, Any]:
    """What must be the same for a run to be resumed. GPU and CPU sum in another order: ties may round otherwise."""
    return {"format": plan.format, "scheme": plan.scheme.to_dict(), "device": device, "writer": 1}


def _already_there(plan: Plan, destination: Path, workplace: Workplace, resume: bool) -> Result:
    manifest = destination / MANIFEST
    if not (resume and manifest.is_file()):
        raise PackError(f"{destination}: exists; choose another destination or remove it")
    files = read_json(manifest).get("files", {})
    if set(files) != {shard.name for shard in plan.shards}:
        raise PackError(f"{destination}: exists and was packed from another checkpoint; choose another destination")
    if read_json(destination / CONFIG).get("quantization_config") != plan.config["quantization_config"]:
        raise PackError(
            f"{destination}: exists and was packed with other options; repeat them, or choose another destination"
        )
    for name, entry in files.items():
        path = destination / name
        if not path.is_file() or path.stat().st_size != entry["size"] or file_sha256(path) != entry["sha256"]:
            raise PackError(f"{path}: damaged since it was written; remove {destination} and pack again")
    if not workplace.foreign():
        shutil.rmtree(workplace.root, ignore_errors=True)
    total = sum(entry["size"] for entry in files.values())
    return Result(plan, sum(s.source_bytes for s in plan.shards), total, len(files), None, complete_before=True)


@contextmanager
def _prepared(workplace: Workplace, options: dict[str, Any], resume: bool) -> Iterator[None]:
    """The work folders, made or taken over, and held against a second run."""
    root, saved = workplace.root, workplace.state / "options.json"
    if root.exists() and not resume:
        raise PackError(f"{root}: left by a run that did not finish; go on with --resume, or remove it")
    if foreign := workplace.foreign():
        raise PackError(f"{root}: is not the work of `vllm-ext quantize`, it holds {foreign[0]}; move it away")
    with writing(root):
        workplace.out.mkdir(parents=True, exist_ok=True)
        workplace.state.mkdir(exist_ok=True)
        lock = open(workplace.state / "lock", "w")  # noqa: SIM115  held until the end of the run
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackError(f"{root}: another run is packing there; wait for it, or end it") from None
        if saved.exists():
            before = read_json(saved)
            if before != options:
                changed = [key for key in options if before.get(key) != options[key]]
                raise PackError(
                    f"{root}: begun with other options ({', '.join(f'{k}: {before.get(k)}' for k in changed)}); repeat "
                    "them to resume, or remove the folder"
                )
        else:
            write_atomically(saved, json.dumps(options).encode())
        for stale in root.rglob("*.tmp-*"):
            stale.unlink(missing_ok=True)
        yield
    finally:
        lock.close()


def _finished(plan: Plan, workplace: Workplace) -> dict[str, ShardRecord]:
    """Records of the shards that need no work: their sources are unchanged and their bytes hash to what was written."""
    good = {}
    for shard in plan.shards:
        record = ShardRecord.load(workplace.record(shard.name))
        path = workplace.out / shard.name
        if (
            record is not None
            and path.is_file()
            and path.stat().st_size == record.size
            and sources_of(shard) == record.sources
            and file_sha256(path) == record.sha256
        ):
            good[shard.name] = record
    return good


def _bytes_done(plan: Plan, records: dict[str, ShardRecord], workplace: Workplace) -> int:
    done = 0
    for shard in plan.shards:
        if shard.name in records:
            done += shard.source_bytes
        else:
            try:
                done += int(workplace.counter(shard.name).read_text() or 0)
            except (OSError, ValueError):
                continue
    return done


def _check_space(plan: Plan, missing: list[Shard], folder: Path) -> None:
    needed = sum(spec.nbytes for shard in missing for spec in shard.specs()) + SPARE_BYTES * bool(missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PackError(
            f"{folder}: packing needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; make room, then run "
            "again with --resume"
        )


def _finish(plan: Plan, records: dict[str, ShardRecord], workplace: Workplace, destination: Path) -> None:
    """Everything beside the shards, then the one step that makes the destination appear."""
    for path in workplace.out.iterdir():
        if path.is_file() and path.suffix == ".safetensors" and path.name not in records:
            path.unlink()
    _copy_companions(plan.source, workplace.out)
    weight_map = {spec.name: shard.name for shard in plan.shards for spec in shard.specs()}
    if plan.indexed or len(plan.shards) > 1:
        total = sum(spec.nbytes for shard in plan.shards for spec in shard.specs())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_atomically(workplace.out / INDEX, json.dumps(index, indent=1).encode())
    write_atomically(workplace.out / CONFIG, json.dumps(plan.config, indent=2, ensure_ascii=False).encode())
    files = {name: {"size": records[name].size, "sha256": records[name].sha256} for name in sorted(records)}
    manifest = {"format": plan.format, "files": files}
    write_atomically(workplace.out / MANIFEST, json.dumps(manifest, indent=1).encode())
    with writing(destination):
        _sync(workplace.out)
        os.rename(workplace.out, destination)
        _sync(destination.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_companions(source: Path, out: Path) -> None:
    """Tokenizer, templates, remote code and the like: every file that is neither weights nor an index of them."""
    for folder, names, files in os.walk(source):
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "original")
        here = out / Path(folder).relative_to(source)
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix in WEIGHTS or name.endswith(".index.json") or name.startswith(".") or name == MANIFEST:
                continue
            if Path(folder) == source and name == CONFIG:
                continue
            with reading(path):
                stream = open(path, "rb")  # noqa: SIM115  closed below, under another handler
            with stream, writing(here / name):
                here.mkdir(parents=True, exist_ok=True)
                temporary = here / f"{name}.tmp-{os.getpid()}"
                with open(temporary, "wb") as copy:
                    shutil.copyfileobj(stream, copy)
                os.replace(temporary, here / name)
