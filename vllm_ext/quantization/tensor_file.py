"""safetensors files read and written piecewise, so that no more than one piece is ever in memory.

The `safetensors` package maps whole files and writes whole dictionaries; packing needs parts of tensors larger than the
memory it may use, and outputs whose place is known before their content. The format: eight bytes of header length
(little endian), a JSON header {name: {dtype, shape, data_offsets}}, then the data without gaps.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
FORMAT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
HEADER_LIMIT = 1 << 30
COPY_BYTES = 1 << 24


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not hold what is needed; the message names the file and the remedy."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file: `start` is the absolute position of its data."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.spec.nbytes

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        return self.read_rows(0, math.prod(self.shape[:-1])).reshape(self.shape)

    def read_rows(self, first: int, count: int) -> torch.Tensor:
        """Rows `first` to `first + count` of the tensor seen as [rows, last dimension], in its own dtype.

        Raises CheckpointError when the file is shorter than its header says or cannot be read.
        """
        if self.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{self.file}: {self.name} has dtype {self.dtype}, which cannot be quantised")
        width = self.shape[-1] if self.shape else 1
        size = width * ITEM_SIZES[self.dtype]
        if count * size == 0:
            return torch.empty(count, width, dtype=TORCH_DTYPES[self.dtype])
        data = read_exactly(self.file, self.start + first * size, count * size, self.name)
        return torch.frombuffer(data, dtype=TORCH_DTYPES[self.dtype]).reshape(count, width)

    def chunks(self) -> Iterator[tuple[int, bytearray]]:
        """The raw data in pieces: (position within the tensor, bytes)."""
        for position in range(0, self.nbytes, COPY_BYTES):
            length = min(COPY_BYTES, self.nbytes - position)
            yield position, read_exactly(self.file, self.start + position, length, self.name)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn an OSError met while reading `file` into a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def read_exactly(file: Path, position: int, length: int, what: str) -> bytearray:
    """`length` bytes of `file` from `position`. Raises CheckpointError when there are fewer."""
    data = bytearray(length)
    view = memoryview(data)
    done = 0
    with reading(file), open(file, "rb", buffering=0) as stream:
        stream.seek(position)
        while done < length:
            count = stream.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    f"{file}: truncated: {what} ends at byte {position + length}, the file at {position + done}; "
                    "download it again"
                )
            done += count
    return data


def read_header(file: Path) -> dict[str, TensorRef]:
    """Where each tensor of a safetensors file is. Raises CheckpointError unless header and length agree."""
    with reading(file):
        size = file.stat().st_size
    if size < 8:
        raise CheckpointError(f"{file}: truncated: {size} bytes cannot hold a safetensors header; download it again")
    length = int.from_bytes(read_exactly(file, 0, 8, "the header's length"), "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise CheckpointError(
            f"{file}: no safetensors file, or truncated: its header claims {length} bytes of {size}; download it again"
        )
    try:
        header = json.loads(bytes(read_exactly(file, 8, length, "the header")))
        refs = {name: _ref(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: its safetensors header is damaged: {error!r}; download it again") from error
    end = 8 + length
    for ref in sorted(refs.values(), key=lambda ref: (ref.start, ref.nbytes)):
        if ref.start != end:
            raise CheckpointError(f"{file}: its safetensors header is damaged: {ref.name} does not start at byte {end}")
        end += ref.nbytes
    if end != size:
        state = "truncated" if size < end else "damaged"
        raise CheckpointError(
            f"{file}: {state}: its header describes {end} bytes, the file has {size}; download it again"
        )
    return refs


def _ref(file: Path, name: str, entry: Mapping[str, Any], data: int) -> TensorRef:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype!r}")
    ref = TensorRef(file, name, dtype, shape, data + first)
    if last - first != ref.nbytes:
        raise CheckpointError(
            f"{file}: its header is damaged: {name} {dtype} {shape} needs {ref.nbytes} bytes, its offsets span "
            f"{last - first}"
        )
    return ref


def _reserve(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)


class TensorFileWriter:
    """Writes a safetensors file whose tensors are known from the start and arrive in any order.

    The bytes depend only on the specs and the data: wider dtypes come first, then names in order, so that every tensor
    is aligned to its dtype.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self.path = path
        self._offsets: dict[str, tuple[int, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for spec in sorted(specs, key=lambda spec: (-ITEM_SIZES[spec.dtype], spec.name)):
            if spec.name in self._offsets:
                raise ValueError(f"{path}: two tensors are called {spec.name}")
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.nbytes],
            }
            self._offsets[spec.name] = (end, spec.nbytes)
            end += spec.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self.size = self._data + end
        self._missing = {name: nbytes for name, (_, nbytes) in self._offsets.items() if nbytes}
        self._stream = open(path, "wb", buffering=0)  # noqa: SIM115  closed by close()
        try:
            if end:
                # Asked for at once: a full disk is found before the work, not after it.
                _reserve(self._stream.fileno(), self.size)
            self._write(0, len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._stream.close()
            raise

    def _write(self, position: int, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            count = os.pwrite(self._stream.fileno(), view, position)
            view, position = view[count:], position + count

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the whole tensor `name`."""
        # A fresh copy: a dimension of size one may keep a stride that a view as bytes refuses.
        data = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        self.write_bytes(name, 0, data.numpy().data)

    def write_bytes(self, name: str, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write a piece of the tensor `name`, `position` bytes from its start."""
        offset, nbytes = self._offsets[name]
        if position + len(data) > nbytes:
            raise ValueError(f"{self.path}: {name} has {nbytes} bytes, not {position + len(data)}")
        if len(data):
            self._write(self._data + offset + position, data)
            self._missing[name] -= len(data)

    def close(self) -> None:
        """Flush to the disk. Raises ValueError when a tensor was not fully written."""
        incomplete = [name for name, left in self._missing.items() if left]
        os.fsync(self._stream.fileno())
        self._stream.close()
        if incomplete:
            raise ValueError(f"{self.path}: {len(incomplete)} tensors are incomplete, first {incomplete[0]}")

    def abort(self) -> None:
        """Close and remove the file."""
        self._stream.close()
        self.path.unlink(missing_ok=True)
