"""Fills one output file: what a worker does, in this process, in another, or on another machine."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vllm_ext.quantization import compressed_tensors, packed
from vllm_ext.quantization.layouts import Projection
from vllm_ext.quantization.packed_source import added_error
from vllm_ext.quantization.plan import Copy, Quantize, Shard
from vllm_ext.quantization.quantize import quantize_weight
from vllm_ext.quantization.scheme import QUANT_METHOD, Scheme
from vllm_ext.quantization.slicing import regroup
from vllm_ext.quantization.tensor_file import TensorFileWriter
from vllm_ext.quantization.weight import QuantizedWeight

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
HASH_BYTES = 1 << 20
REPORT_SECONDS = 0.2


class PackError(RuntimeError):
    """Packing could not go on; what is finished is kept, and the message says how to continue."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished file: what it is made of, what it must hash to, and the squared error re-rounding added."""

    name: str
    size: int
    sha256: str
    sources: tuple[tuple[str, int, int], ...]
    added: float
    norm: float

    def save(self, path: Path) -> None:
        """Write to `path` atomically."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> ShardRecord | None:
        """The record at `path`, None when it is absent or unusable (its shard is then packed again)."""
        try:
            fields = json.loads(path.read_bytes())
            fields["sources"] = tuple((str(name), int(size), int(when)) for name, size, when in fields["sources"])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError met while writing `path` into a PackError that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = "run again with --resume"
        if error.errno in FULL:
            free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
            remedy = f"{free / 1e9:.2f} GB are free: make room, then run again with --resume"
        elif error.errno in FORBIDDEN:
            remedy = "choose a destination where you may write"
        elif error.errno == errno.EFBIG:
            remedy = "the file system or `ulimit -f` allows no file as large: raise the limit, then run with --resume"
        raise PackError(f"{path}: cannot be written: {error.strerror or error}; {remedy}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is there entirely or not at all."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with writing(path):
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()


def sources_of(shard: Shard) -> tuple[tuple[str, int, int], ...]:
    """(name, size, modification time) of the files a shard is made from: whether a finished shard is still good."""
    files = set()
    for item in shard.work:
        if isinstance(item, Copy):
            files.add(item.ref.file)
        elif isinstance(item.projection, Projection):
            files.add(item.projection.ref.file)
        else:
            files |= {ref.file for ref in item.projection.refs.values()}
    stats = {path: path.stat() for path in files}
    return tuple((path.name, stats[path].st_size, stats[path].st_mtime_ns) for path in sorted(files))


@dataclass(frozen=True)
class Workplace:
    """Folders of a run: finished files in `out`, records and progress in `state`."""

    root: Path

    @property
    def out(self) -> Path:
        """What becomes the destination."""
        return self.root / "out"

    @property
    def state(self) -> Path:
        """Records of finished shards and bytes done."""
        return self.root / "state"

    def record(self, shard: str) -> Path:
        """Where a finished shard's record is."""
        return self.state / f"{shard}.json"

    def counter(self, shard: str) -> Path:
        """Where a worker says how many source bytes it has read."""
        return self.state / f"{shard}.bytes"

    def foreign(self) -> list[str]:
        """Names in an existing `root` that no run puts there: the folder is somebody else's."""
        if not self.root.is_dir():
            return [self.root.name] if self.root.exists() else []
        return sorted({path.name for path in self.root.iterdir()} - {self.out.name, self.state.name})


def pack_shard(
    shard: Shard,
    scheme: Scheme,
    workplace: Workplace,
    device: str = "cpu",
    threads: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> ShardRecord:
    """Write `shard`, check it into `workplace` with its checksum, and return its record.

    `tick` is called between tensors. Raises CheckpointError on a source that cannot be read, PackError on a file that
    cannot be written, ValueError on weights that cannot be quantised.
    """
    if not workplace.state.is_dir():
        raise PackError(f"{workplace.root}: not visible on {os.uname().nodename}; use a folder all nodes share")
    if threads is not None:
        torch.set_num_threads(threads)
    target = workplace.out / shard.name
    temporary = workplace.out / f".{shard.name}.tmp-{os.uname().nodename}-{os.getpid()}"
    sources = sources_of(shard)
    done, reported = 0, 0.0
    added = norm = 0.0
    with writing(target):
        writer = TensorFileWriter(temporary, shard.specs())
        try:
            for item in shard.work:
                tick()
                if isinstance(item, Copy):
                    for position, data in item.ref.chunks():
                        writer.write_bytes(item.ref.name, position, data)
                    done += item.ref.nbytes
                else:
                    more, total = _pack_projection(item, scheme, writer, device)
                    added, norm = added + more, norm + total
                    done += item.projection.nbytes
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    workplace.counter(shard.name).write_text(str(done))
            writer.close()
        except BaseException:
            writer.abort()
            raise
        record = ShardRecord(shard.name, writer.size, file_sha256(temporary), sources, added, norm)
        os.replace(temporary, target)
    record.save(workplace.record(shard.name))
    workplace.counter(shard.name).unlink(missing_ok=True)
    return record


def _pack_projection(item: Quantize, scheme: Scheme, writer: TensorFileWriter, device: str) -> tuple[float, float]:
    """Write one projection; returns the squared error that storing it in another form added, and its square."""
    source, target = item.projection, item.target
    added = (0.0, 0.0)
    value = source.read()
    if isinstance(value, QuantizedWeight):
        weight = value
        if value.group_size != target.group_size:
            # Groups are regular: a shorter last one needs no cut, a size that does not divide does not occur.
            weight = regroup(value, target.group_size)
        if weight.zero_point_kind != target.kind:
            # FP16 stays FP16, so that scales are of the dtype the file's header gives them.
            dtype = torch.float16 if value.scale.dtype == torch.float16 else torch.float32
            weight = quantize_weight(value.dequantize(dtype), target.group_size, zero_point="int", method=scheme.method)
            added = added_error(value, weight)
    else:
        weight = quantize_weight(
            value.to(device),
            target.group_size,
            symmetric=target.kind is None,
            zero_point=target.kind or "float",
            method=scheme.method,
            name=f"{source.module} ({item.position[0]})",
        )
    maker = packed.to_tensors if target.format == QUANT_METHOD else compressed_tensors.to_tensors
    for name, tensor in maker(source.module, weight).items():
        writer.write(name, tensor)
    return added
