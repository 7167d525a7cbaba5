"""safetensors files, written piecewise and read by the field's own library."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_ext.quantization.tensor_file import FORMAT_NAMES, TensorFileWriter, TensorSpec, read_header

TENSORS = {
    "b.bytes": torch.arange(7, dtype=torch.uint8),
    "a.bf16": torch.randn(3, 5).bfloat16(),
    "c.long": torch.tensor([[2**40, -1]]),
    "d.empty": torch.empty(0, 4, dtype=torch.int32),
    "e.strided": torch.randn(4, 6).half().t()[:, 1:2],
    "f.one": torch.zeros(4, 4)[:1, 1:2],
    "g.scalar": torch.tensor(2.5, dtype=torch.float64),
    "h.é": torch.tensor([1, 2], dtype=torch.int8),
}


def test_files_are_what_the_safetensors_library_reads(tmp_path):
    """Tensors come in any order; all are aligned, or reading them back as their dtype would fail."""
    path = tmp_path / "x.safetensors"
    writer = TensorFileWriter(path, [TensorSpec(k, FORMAT_NAMES[v.dtype], tuple(v.shape)) for k, v in TENSORS.items()])
    for name, value in reversed(TENSORS.items()):
        writer.write(name, value)
    writer.close()
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(loaded[name], value)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert path.stat().st_size == writer.size


def test_pieces_are_read_without_the_rest(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({k: v.contiguous() for k, v in TENSORS.items()}, path)
    refs = read_header(path)
    for name, value in TENSORS.items():
        assert refs[name].shape == tuple(value.shape)
        assert torch.equal(refs[name].read(), value)
        assert b"".join(data for _, data in refs[name].chunks()) == bytes(
            value.contiguous().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()
        )
    assert torch.equal(refs["a.bf16"].read_rows(1, 2), TENSORS["a.bf16"][1:])


def test_incomplete_and_oversized_writes_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    writer = TensorFileWriter(path, [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))])
    writer.write("a", torch.zeros(2))
    with pytest.raises(ValueError, match="b has 8 bytes, not 12"):
        writer.write("b", torch.zeros(3))
    with pytest.raises(ValueError, match="1 tensors are incomplete, first b"):
        writer.close()
    writer.abort()
    assert not path.exists()
    with pytest.raises(ValueError, match="two tensors are called a"):
        TensorFileWriter(path, [TensorSpec("a", "F32", (2,)), TensorSpec("a", "F32", (2,))])
