"""What `vllm-ext quantize --format compressed-tensors` writes is read by vLLM's own loader, without this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.cli import quantize_main

pytestmark = pytest.mark.vllm

GROUP = 32
SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 4}
ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
KINDS = {"integer zero points": {"zero_point": "int"}, "symmetric": {"symmetric": True}}


def unpacked(tensors, shard):
    """A layer's weight [E, rows, columns] from the tensors vLLM holds, by compressed-tensors' own functions."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    packed, scale = tensors[f"{shard}_weight_packed"], tensors[f"{shard}_weight_scale"].float()
    experts, rows, words = packed.shape
    weights = []
    for expert in range(experts):
        codes = helpers.unpack_from_int32(packed[expert], 4, torch.Size((rows, words * 8))).float()
        if f"{shard}_weight_zero_point" in tensors:
            zero = tensors[f"{shard}_weight_zero_point"][expert]
            points = helpers.unpack_from_int32(zero, 4, torch.Size(scale[expert].shape), packed_dim=0)
            codes = codes - points.float().repeat_interleave(GROUP, 1)
        weights.append(codes * scale[expert].repeat_interleave(GROUP, 1))
    return torch.stack(weights).bfloat16()


def expected(folder, scheme, layer):
    """Gate and up over each other, and down, of every expert [E, rows, columns], quantised and dequantised here."""
    (file,) = Path(folder).glob("*.safetensors")

    def projection(expert, name, shard):
        weight = source.get_tensor(f"{layer}.{expert}.{name}_proj.weight")
        return scheme.quantize(weight, shard).dequantize(torch.float32)

    with safe_open(file, "pt") as source:
        w13 = [
            torch.cat([projection(expert, name, "w13") for name in ("gate", "up")])
            for expert in range(SIZES["num_experts"])
        ]
        w2 = [projection(expert, "down", "w2") for expert in range(SIZES["num_experts"])]
    return torch.stack(w13).bfloat16(), torch.stack(w2).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_stock_vllm_loads_an_export_as_the_weights_that_were_quantised(kind, tiny_model, tmp_path):
    """Names, shapes, order of gate and up, packing and zero points: every one is vLLM's reading, not ours."""
    pytest.importorskip("vllm")
    source, exported, result = tiny_model("qwen3-moe", **SIZES), tmp_path / "exported", tmp_path / "loaded.pt"
    flags = ["--symmetric"] if kind == "symmetric" else ["--zero-point", "int"]
    groups = ["--group-size-w13", str(GROUP), "--group-size-w2", str(GROUP)]
    assert (
        quantize_main([str(source), str(exported), "--quiet", "--format", "compressed-tensors", *flags, *groups]) == 0
    )
    runner = Path(__file__).with_name("stock_export_runner.py")
    done = subprocess.run(
        [sys.executable, str(runner), str(exported), str(result)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.exists(), done.stdout[-6000:]
    loaded = torch.load(result, weights_only=True)
    assert len(loaded) > 1
    scheme = Scheme(**KINDS[kind], group_size_w13=GROUP, group_size_w2=GROUP)
    for layer, tensors in loaded.items():
        w13, w2 = expected(source, scheme, layer)
        assert torch.equal(unpacked(tensors, "w13"), w13), layer
        assert torch.equal(unpacked(tensors, "w2"), w2), layer
