"""One flag, every device: the planner's tiers on ten matrix cores and on 132 multiprocessors."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE
from vllm_ext.model_executor import linear_attention_mapping as mapping
from vllm_ext.ops.linear_attention.problem import Problem


def problem(device, **changes):
    sizes = {"num_heads": 16, "num_value_heads": 16, "key_dim": 128, "value_dim": 128, **changes}
    return Problem(
        op="gdn",
        batch=1,
        num_tokens=0,
        **sizes,
        num_sequences=0,
        varlen=True,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        device=torch.device(device),
    )


def test_the_paper_s_sixteen_heads_on_ten_npu_cores():
    """Section 4: ten heads whole, five cut in two by columns, the last chunk by chunk."""
    chip = mapping.npu_chip("Ascend310P1")
    assert chip is not None
    tiers = mapping.head_mapping("gdn", chip.chip.name, chip.chip.cores, 16, 128, (2048,)).tiers
    assert [len(tiers[tier]) for tier in (WHOLE, COLUMNS, CHUNKS)] == [10, 5, 1]
    assert tiers == make_plan("gdn", chip="310p1", num_heads=16, num_tokens=2048).mapping.tiers


@pytest.mark.parametrize("cores", [132, 108, 80])
def test_a_gpu_is_mapped_with_the_multiprocessors_it_reports(cores):
    chip = mapping.gpu_chip("some GPU", cores).chip
    assert chip.cores == cores
    result = mapping.head_mapping("kda", chip.name, cores, 32, 128, (4096,))
    assert result.cores == cores
    assert {piece.core for piece in result.pieces} <= set(range(cores))
    assert result.makespan < result.head_only_makespan, "32 heads leave most cores idle unless they are cut"
    many = mapping.head_mapping("kda", chip.name, cores, cores, 128, (4096,))
    assert len(many.tiers[WHOLE]) == cores


def test_an_unknown_npu_is_not_guessed():
    assert mapping.npu_chip("Ascend9999") is None


def test_the_user_s_word_for_an_npu_s_chip_counts_for_the_mapping_as_it_does_for_the_kernels(monkeypatch):
    named = types.SimpleNamespace(get_device_name=lambda device: "Ascend9999")
    monkeypatch.setattr(torch, "npu", named, raising=False)
    npu = types.SimpleNamespace(type="npu")
    assert mapping.device_chip(npu) is None
    monkeypatch.setenv("VLLM_EXT_ASCEND_CHIP", "310p3")
    assert mapping.device_chip(npu).chip.name == "310p3"


@pytest.fixture
def h200(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_description_names_device_cores_and_tiers(h200):
    text = mapping.describe_mapping(problem("cuda", num_value_heads=32), 2048, "cpu")
    assert text.startswith("NVIDIA H200, 132 cores: one prompt of 2048 tokens: of the heads 32 by columns")
    assert "idle" in text


def test_description_of_a_kernel_with_a_plan_of_its_own_says_what_that_does(h200, monkeypatch):
    """It once took every call for GDN on the portable kernels: of other segments than ran, or of columns for heads."""
    pytest.importorskip("triton")
    from vllm_ext.ops.linear_attention.triton import backend

    widest = types.SimpleNamespace(WIDEST_BLOCK=128)
    monkeypatch.setattr(backend, "hopper_launches", lambda *_: None)
    text = mapping.describe_mapping(problem("cuda", num_value_heads=32), 2048, "triton")
    assert "32 heads in 2 parts by columns of the state; the planner's model: of the heads 32 by columns" in text
    assert "in segments of" in mapping.describe_mapping(problem("cuda", num_value_heads=4), 32768, "triton")
    assert "256 heads in 2 parts" in mapping.describe_mapping(problem("cuda", num_value_heads=256), 2048, "triton")
    monkeypatch.setattr(backend, "hopper_launches", lambda *_: widest)
    assert "256 heads whole" in mapping.describe_mapping(problem("cuda", num_value_heads=256), 2048, "triton")
    assert "segments of 384" in mapping.describe_mapping(problem("cuda", num_value_heads=32), 32768, "triton")
    kda = replace(problem("cuda", num_value_heads=16), op="kda")
    assert "segments of 171" in mapping.describe_mapping(kda, 32768, "triton")


def test_description_says_what_is_not_mapped(h200):
    assert "no cores to schedule" in mapping.describe_mapping(problem("cpu"), 2048, "cpu")
    assert "128 x 256" in mapping.describe_mapping(problem("cuda", value_dim=256), 2048, "cpu")
    assert "multiple of 16, and this is 40 x 40" in mapping.describe_mapping(
        problem("cuda", key_dim=40, value_dim=40), 2048, "cpu"
    )


def test_description_of_heads_that_the_triton_kernels_pad_says_so(h200, monkeypatch):
    pytest.importorskip("triton")
    from vllm_ext.ops.linear_attention.triton import backend

    monkeypatch.setattr(backend, "hopper_launches", lambda *_: None)
    text = mapping.describe_mapping(problem("cuda", num_value_heads=30, key_dim=96, value_dim=192), 2048, "triton")
    assert "30 heads (padded to 128 x 192) in 3 parts by columns of the state" in text
    assert "padded" not in mapping.describe_mapping(problem("cuda"), 2048, "triton")
