"""Packing for the CPU kernels: where columns stand, both packings, and how our kernel is built or done without."""

from __future__ import annotations

import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ops.moe import cpu_int4, cpu_native
from vllm_ext.ops.moe.cpu_int4 import Columns, dequantize, matmul, pack
from vllm_ext.quantization import quantize_weight


@given(count=st.integers(1, 700), group=st.integers(1, 40).map(lambda n: 8 * n), multiple=st.sampled_from([32, 64]))
def test_plan_meets_the_kernels_conditions_and_keeps_every_column_in_its_group(count, group, multiple) -> None:
    plan = Columns.plan(count, group, multiple)
    assert plan.kernel_group in (32, 64, 128, 256)
    assert plan.width % plan.kernel_group == 0
    assert plan.width % multiple == 0
    spread = plan.spread(torch.arange(1, count + 1)[None])[0]
    assert spread.shape[0] == plan.width
    assert spread[spread > 0].tolist() == list(range(1, count + 1))
    groups = plan.spread_groups(torch.arange(-(-count // group)))
    at = groups.repeat_interleave(plan.kernel_group)
    assert torch.equal(at[spread > 0], torch.arange(count) // group)


@pytest.mark.parametrize(("count", "group", "width", "kernel_group"), [(576, 128, 576, 64), (2048, 128, 2048, 128)])
def test_sizes_of_real_models_are_not_padded(count: int, group: int, width: int, kernel_group: int) -> None:
    plan = Columns.plan(count, group)
    assert (plan.width, plan.kernel_group) == (width, kernel_group)


def _pytorch_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_native, "load", lambda: (None, "left out by the test"))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=st.integers(1, 130), columns=st.integers(1, 200), group=st.sampled_from([8, 32, 40, 128]))
def test_pytorchs_packing_is_read_back_exactly(rows: int, columns: int, group: int) -> None:
    """Its order is not documented; a PyTorch that changes it must be noticed here and by `packed_block`."""
    weight = quantize_weight(torch.randn(rows, columns), group, method="minmax")
    plan = Columns.plan(columns, group)
    with pytest.MonkeyPatch.context() as patch:
        _pytorch_only(patch)
        packed, both = pack(weight, None, plan, torch.float32)
    got = dequantize(packed, both, plan.kernel_group, torch.float32)
    expected = plan.spread(weight.dequantize(torch.float32)).T
    kept = plan.spread(torch.ones(1, columns))[0] > 0
    torch.testing.assert_close(got[kept, :rows], expected[kept], rtol=1e-5, atol=1e-5)
    assert got[:, rows:].count_nonzero() == 0


def test_an_unknown_packing_makes_the_backend_unusable(monkeypatch) -> None:
    from vllm_ext.ops.moe import cpu

    monkeypatch.setattr(cpu, "packed_block", lambda: None)
    usable, reason = cpu.usable(torch.device("cpu"))
    assert not usable
    assert "order this version does not know" in reason


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 11, 64, 192, 200])
@pytest.mark.parametrize("kernel_group", [32, 64, 256])
def test_our_kernel_multiplies_to_fp32_accuracy(rows: int, kernel_group: int) -> None:
    """BF16 products are exact in FP32 and the codes are exact in BF16, so only FP32 sums round."""
    if cpu_native.load()[0] is None:
        pytest.skip(cpu_native.load()[1])
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (192, 512), generator=generator)
    both = torch.randn(512 // kernel_group, 192, 2, generator=generator).bfloat16()
    x = torch.randn(rows, 512, generator=generator).bfloat16()
    got = matmul(x, cpu_native.pack_codes(codes.to(torch.uint8)), both, kernel_group, False)
    scale, zero = (part.double().T.repeat_interleave(kernel_group, 1) for part in both.unbind(-1))
    expected = x.double() @ ((codes - 8) * scale + zero).T
    assert float((got - expected).norm() / expected.norm()) < 1e-6


def test_special_values_stay_in_their_row() -> None:
    if cpu_native.load()[0] is None:
        pytest.skip(cpu_native.load()[1])
    codes = torch.randint(0, 16, (64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    both = torch.ones(2, 64, 2, dtype=torch.bfloat16)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    got = matmul(x, cpu_native.pack_codes(codes), both, 32, False)
    assert torch.isnan(got[1]).all()
    assert not torch.isfinite(got[2]).any()
    assert torch.isfinite(got[[0, 3]]).all()


@pytest.fixture
def fresh_build(monkeypatch, tmp_path):
    """An empty cache folder and a loader that remembers nothing, on a machine that could run the kernel."""
    if not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("needs a CPU with AVX-512 BF16")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cpu_native.load.__wrapped__


def test_the_kernel_is_built_once_into_the_cache(fresh_build, tmp_path) -> None:
    kernel, about = fresh_build()
    if kernel is None:
        pytest.skip(about)
    files = list((tmp_path / "vllm_ext").iterdir())
    assert [file.suffix for file in files] == [".so"]
    built = files[0].stat().st_mtime_ns
    assert fresh_build()[0] is not None
    assert files[0].stat().st_mtime_ns == built


def test_no_compiler_is_a_reason_not_an_error(fresh_build, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernel, reason = fresh_build()
    assert kernel is None
    assert "no C compiler" in reason


def test_a_failing_compiler_is_a_reason_with_its_message(fresh_build, monkeypatch, tmp_path) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\necho 'unknown option -mavx512bf16' >&2\nexit 1\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(script))
    kernel, reason = fresh_build()
    assert kernel is None
    assert "unknown option -mavx512bf16" in reason
    assert [path for path in (tmp_path / "vllm_ext").iterdir() if path.suffix == ".so"] == []


def test_a_cache_folder_that_cannot_be_made_is_replaced(fresh_build, monkeypatch, tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    kernel, about = fresh_build()
    if "compiler" in about:
        pytest.skip(about)
    assert kernel is not None


def test_a_damaged_cache_file_is_a_reason_and_is_removed(fresh_build, monkeypatch, tmp_path) -> None:
    """A disk that lost its data must not keep the kernel away for ever."""
    try:
        built = cpu_native._build(cpu_native._compiler())
    except cpu_native.Unavailable as error:
        pytest.skip(str(error))
    built.write_bytes(b"")
    kernel, reason = fresh_build()
    assert kernel is None
    assert str(built) in reason
    assert fresh_build()[0] is not None


def test_fp16_does_not_use_our_bf16_kernel() -> None:
    weight = quantize_weight(torch.randn(64, 64), 32, method="minmax")
    packed, _ = pack(weight, None, Columns.plan(64, 32), torch.float16)
    assert packed.dtype == torch.uint8
    assert cpu_int4.block_rows(packed) in (16, 32, 64)
