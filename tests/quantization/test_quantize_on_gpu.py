"""`quantize_weight` in the form it takes on a GPU, run on the CPU where there is none."""

from __future__ import annotations

import pytest
import torch
from quantize_samples import KINDS, error, weights

from vllm_ext.quantization import fit, quantize_weight


@pytest.mark.parametrize("columns", [256, 300])
@pytest.mark.parametrize("method", ["minmax", "hqq"])
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_the_form_for_gpus_finds_the_same_codes(zero_point, symmetric, method, columns, monkeypatch):
    """Codes are FP32 there, sums products with ones. Groups whose gain lies within rounding may keep another fit."""
    weight = weights(64, columns)
    options = {"zero_point": zero_point, "symmetric": symmetric, "method": method}
    here = quantize_weight(weight, 64, **options)
    monkeypatch.setattr(fit, "on_gpu", lambda values: True)
    there = quantize_weight(weight, 64, **options)
    same = (here.codes() == there.codes()).float().mean()
    assert same == 1 if method == "minmax" else same > 0.999
    torch.testing.assert_close(
        error(here, weight).square().sum(), error(there, weight).square().sum(), rtol=1e-3, atol=0.0
    )


@pytest.mark.parametrize("gpu", [False, True])
def test_the_default_dtype_does_not_matter(gpu, monkeypatch):
    """vLLM quantises at load while torch's default dtype is the model's."""
    monkeypatch.setattr(fit, "on_gpu", lambda values: gpu)
    weight = weights(16, 128)
    expected = [quantize_weight(weight, 64, zero_point=kind, symmetric=symmetric) for kind, symmetric in KINDS]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [quantize_weight(weight, 64, zero_point=kind, symmetric=symmetric) for kind, symmetric in KINDS]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.packed, other.packed)
        assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_nothing_is_kept_from_one_call_to_the_next(zero_point, symmetric, monkeypatch):
    """What is allocated while vLLM loads lies in the pool whose contents a sleep of level 2 throws away; weights that
    are loaded again afterwards were summed with what had become of a vector of ones."""
    monkeypatch.setattr(fit, "on_gpu", lambda values: True)
    weight = weights(16, 128)
    made = []
    product = torch.mv

    def remembering(rows, vector):
        made.append(vector)
        return product(rows, vector)

    monkeypatch.setattr(torch, "mv", remembering)
    expected = quantize_weight(weight, 64, zero_point=zero_point, symmetric=symmetric)
    assert made
    for vector in made:
        vector.fill_(torch.nan)
    found = quantize_weight(weight, 64, zero_point=zero_point, symmetric=symmetric)
    assert torch.equal(found.packed, expected.packed)
    assert torch.equal(found.scale, expected.scale)


def test_sums_stay_in_fp32_under_autocast(monkeypatch):
    """CUDA's autocast takes `mv` in 16 bits; the CPU's does not, so what is seen here is that it is off."""
    monkeypatch.setattr(fit, "on_gpu", lambda values: True)
    seen = []
    product = torch.mv

    def looking(rows, vector):
        seen.append(torch.is_autocast_enabled("cpu"))
        return product(rows, vector)

    monkeypatch.setattr(torch, "mv", looking)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quantize_weight(weights(16, 128), 64)
    assert seen
    assert not any(seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_and_cpu_agree():
    """Same grid and codes, up to ties: the GPU's sums are ordered differently."""
    weight = weights(4, 256, 704)
    cpu, gpu = quantize_weight(weight, 64), quantize_weight(weight.cuda(), 64)
    assert (cpu.codes() != gpu.to("cpu").codes()).float().mean() < 1e-3
    torch.testing.assert_close(
        gpu.to("cpu").dequantize(torch.float32), cpu.dequantize(torch.float32), rtol=0, atol=0.02
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_a_gpu_stores_the_same_bytes_however_experts_are_batched(zero_point, symmetric, group):
    """Sums there are matrix-vector products. For 4,400 to 31,000 rows of 64, cuBLAS took another kernel than for more
    or fewer, and 13 bytes of an expert differed; nor may it matter whether TF32 is allowed."""
    weight = weights(16, 512, 1024).cuda()
    options = {"zero_point": zero_point, "symmetric": symmetric}
    whole = quantize_weight(weight, group, **options)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        parts = [quantize_weight(expert, group, **options) for expert in weight]
        rows = quantize_weight(weight[3, :8], group, **options)
    finally:
        torch.set_float32_matmul_precision(precision)
    for expert, part in enumerate(parts):
        assert torch.equal(whole.packed[expert], part.packed)
        assert torch.equal(whole.scale[expert], part.scale)
    assert torch.equal(whole.packed[3, :8], rows.packed)
