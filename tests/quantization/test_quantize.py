"""`quantize_weight`: what a 4-bit weight promises, whatever the shape, dtype, zero points and method."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize_samples import KINDS, error, weights

from vllm_ext.quantization import QuantizedWeight, pack_nibbles, quantize_weight, unpack_nibbles

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def expand(per_group: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return per_group.double().repeat_interleave(weight.group_size, -1)[..., : weight.shape[-1]]


@settings(max_examples=60, deadline=None)
@given(
    lead=st.sampled_from([(), (3,), (2, 3)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 200),
    group=st.sampled_from([8, 32, 40, 128]),
    kind=st.sampled_from(KINDS),
    method=st.sampled_from(["minmax", "hqq"]),
    dtype=st.sampled_from(DTYPES),
)
def test_fields_have_the_documented_shapes_dtypes_and_value(lead, rows, columns, group, kind, method, dtype):
    """scale * (code - zero_point), low nibble first; any K, odd and shorter than a group included."""
    zero_point, symmetric = kind
    weight = weights(*lead, rows, columns, dtype=dtype)
    got = quantize_weight(weight, group, symmetric=symmetric, zero_point=zero_point, method=method)
    groups = -(-columns // group)
    store = torch.bfloat16 if dtype == torch.float32 else dtype
    assert got.packed.dtype == torch.uint8
    assert got.packed.shape == (*lead, rows, -(-columns // 2))
    assert got.scale.shape == (*lead, rows, groups)
    assert got.scale.dtype == store
    assert got.scale.min() > 0
    if symmetric:
        assert got.zero_point is None
        zero = torch.full_like(got.scale, 8)
    else:
        zero = got.zero_point
        assert zero.shape == got.scale.shape
        assert zero.dtype == (torch.uint8 if zero_point == "int" else store)
    codes = torch.stack((got.packed & 15, got.packed >> 4), -1).flatten(-2)[..., :columns]
    assert codes.max() <= 15
    expected = expand(got.scale, got) * (codes.double() - expand(zero, got))
    assert torch.equal(got.dequantize(torch.float64), expected)
    assert got.shape == weight.shape
    assert got.group_size == group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
@pytest.mark.parametrize("columns", [64, 576, 704, 101])
def test_minmax_error_is_within_half_a_step(zero_point, symmetric, dtype, columns):
    """Half a step, plus what rounding 15 scales (relative 2^-9 in BF16) and a zero point up to 16 (2^-5) may add."""
    weight = weights(4, 16, columns, dtype=dtype)
    got = quantize_weight(weight, 64, symmetric=symmetric, zero_point=zero_point, method="minmax")
    bound = expand(got.scale, got) * (0.5 + 15 * 2**-9 + 2**-5)
    if zero_point == "int" and not symmetric:
        bound = bound + expand(got.scale, got) * 0.5  # an integer zero shifts the range by up to half a step
    assert (error(got, weight).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    "kind", ["normal", "heavy", "uniform", "skewed", "offset", "far", "outlier", "sparse", "two_values", "tiny"]
)
def test_hqq_squared_error_is_never_above_minmax(kind, group, zero_point, symmetric, dtype):
    """The search may only improve; also where sums cancel (a zero point of tens of thousands clips a whole FP32 group:
    it once got a scale a million times too large) and where nothing but the outlier counts."""
    torch.manual_seed(1)
    weight = {
        "normal": torch.randn(64, 320) * 0.02,
        "heavy": torch.distributions.StudentT(2.5).sample((64, 320)) * 0.02,
        "uniform": torch.rand(64, 320) - 0.5,
        "skewed": torch.rand(64, 320) ** 4,
        "offset": 1 + 0.01 * torch.randn(64, 320),
        "far": 1e4 + torch.randn(64, 320),
        "outlier": 1e-3 + 6e4 * (torch.arange(320) % 32 == 5).expand(64, 320),
        "sparse": torch.randn(64, 320) * (torch.rand(64, 320) < 0.02),
        "two_values": (torch.rand(64, 320) < 0.1) * 0.7 - 0.2,
        "tiny": torch.randn(64, 320) * 1e-7,
    }[kind].to(dtype)
    options = {"symmetric": symmetric, "zero_point": zero_point}
    minmax = error(quantize_weight(weight, group, method="minmax", **options), weight).square()
    hqq = error(quantize_weight(weight, group, method="hqq", **options), weight).square()
    # Groups are decided in FP32 sums; a tie there may differ by its rounding in FP64.
    assert hqq.sum() <= minmax.sum() * (1 + 1e-6)
    if kind in ("normal", "heavy", "skewed") and dtype != torch.float16:
        assert hqq.sum() < minmax.sum() * 0.99


@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_the_search_is_worth_what_is_documented(zero_point, symmetric):
    """7 to 8.5 percent of the squared error at groups of 128; without narrowing the range half of that is lost."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    options = {"zero_point": zero_point, "symmetric": symmetric}
    plain, found = (error(quantize_weight(weight, 128, method=m, **options), weight) for m in ("minmax", "hqq"))
    assert found.square().sum() < plain.square().sum() * 0.95


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("method", ["minmax", "hqq"])
def test_integer_zero_points_serve_groups_that_leave_zero_out(method, sign):
    """The zero is one of the codes, so the range reaches from it to the far end; else such groups would be clipped."""
    weight = sign * (1 + torch.rand(32, 128, generator=torch.Generator().manual_seed(0)))
    got = quantize_weight(weight, 64, zero_point="int", method=method)
    assert (got.zero_point == (0 if sign > 0 else 15)).all()
    assert (error(got, weight).abs() <= expand(got.scale, got) * (0.5 if method == "minmax" else 1) + 2 * 2**-8).all()


def test_float_zero_points_keep_the_mean_of_each_group():
    """A coherent shift of a whole group hurts the loss more than its share of squared error says."""
    weight = weights(64, 512, dtype=torch.float16)
    got = quantize_weight(weight, 128, method="hqq")
    shift = error(got, weight).unflatten(-1, (-1, 128)).mean(-1).abs()
    assert (shift <= got.scale.double() * 2**-7).all()  # half a unit in the last place of an FP16 zero below 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
@pytest.mark.parametrize("method", ["minmax", "hqq"])
def test_constant_and_zero_groups_are_exact(method, zero_point, symmetric, dtype):
    """Dead experts are all zero, and some rows are constant: neither may divide by a range of zero."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.25, -3.5, 0.1, -0.3, 65504.0, -65504.0, 2**-14, -(2**-14)])
    values = torch.cat((values, torch.randn(100, generator=torch.Generator().manual_seed(0))))
    if dtype == torch.bfloat16:
        values = values.to(dtype).float()
    weight = values[:, None].expand(-1, 96).contiguous().to(dtype)
    if dtype == torch.float32:
        weight = weight.bfloat16().float()  # what the stored scale can hold
    got = quantize_weight(weight, 32, symmetric=symmetric, zero_point=zero_point, method=method)
    assert torch.equal(got.dequantize(torch.float64), weight.double())
    assert torch.isfinite(got.scale).all()


@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
@pytest.mark.parametrize("method", ["minmax", "hqq"])
def test_constant_groups_no_stored_number_equals_stay_near(method, zero_point, symmetric):
    """0.1 in FP32 is between two BF16 numbers: once a scale of 1e-38 and a zero point of 1e37."""
    weight = torch.tensor([[0.1], [-0.2], [1e-39], [3.4e38]]).expand(-1, 64).contiguous()
    got = quantize_weight(weight, 64, symmetric=symmetric, zero_point=zero_point, method=method)
    assert (error(got, weight).abs() <= weight.abs().double() * 2**-8 + 2e-38).all()
    assert symmetric or got.zero_point.float().abs().max() <= 15
    assert torch.isfinite(got.scale).all()


@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_zero_points_reach_both_ends(zero_point, symmetric):
    """All-positive and all-negative groups put the zero at code 0 and code 15."""
    ramp = torch.linspace(0, 1, 32)
    weight = torch.stack((ramp, -ramp)).bfloat16()
    got = quantize_weight(weight, 32, symmetric=symmetric, zero_point=zero_point, method="minmax")
    if not symmetric:
        assert got.zero_point.float().flatten().tolist() == pytest.approx([0, 15], rel=2**-7)
    assert error(got, weight).abs().max() <= got.scale.float().max() * 0.55


@pytest.mark.parametrize("method", ["minmax", "hqq"])
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
def test_float16_extremes_do_not_overflow(zero_point, symmetric, method):
    """Scales, zero points and the weights that come back stay finite at FP16's largest values and offsets."""
    weight = torch.tensor([[-65504.0, 65504.0] * 16, [65504.0, 65472.0] * 16, [1.0, 1.0009765625] * 16]).half()
    got = quantize_weight(weight, 32, symmetric=symmetric, zero_point=zero_point, method=method)
    assert torch.isfinite(got.scale).all()
    assert symmetric or torch.isfinite(got.zero_point.float()).all()
    assert torch.isfinite(got.dequantize(torch.float16)).all()
    if zero_point == "float":
        assert (error(got, weight).abs() <= weight.double().abs() * 2**-10 + got.scale.double() / 2 * 1.01).all()


@pytest.mark.parametrize("method", ["minmax", "hqq"])
@pytest.mark.parametrize(("zero_point", "symmetric"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_denormals_keep_their_error_within_a_step(dtype, zero_point, symmetric, method):
    """Scales below the smallest normal number: FP16 rounds them up, BF16 stops at the smallest normal."""
    info = torch.finfo(dtype)
    step = info.smallest_normal * info.eps
    half = torch.tensor([[3], [7], [10], [12], [17], [20]])  # scales of 0.3 to 2.6 times the smallest number
    weight = ((torch.arange(40) % (2 * half) - half) * step).to(dtype)
    got = quantize_weight(weight, 40, symmetric=symmetric, zero_point=zero_point, method=method)
    assert got.scale.min() > 0
    assert (error(got, weight).abs() <= got.scale.double()).all()


def test_float32_range_that_overflows_is_still_finite():
    """high - low of FP32's extremes is infinite; the scale is not."""
    weight = torch.tensor([[-3.3e38, 3.3e38] * 8])
    for method in ("minmax", "hqq"):
        got = quantize_weight(weight, 16, method=method)
        assert torch.isfinite(got.dequantize(torch.float64)).all()
        assert (error(got, weight).abs() <= got.scale.double() * 0.55).all()


@pytest.mark.parametrize(("bad", "message"), [(float("nan"), "3 NaN and 0 inf"), (float("-inf"), "0 NaN and 3 inf")])
@pytest.mark.parametrize("columns", [64, 70])
def test_not_finite_values_are_refused_with_name_and_count(bad, message, columns):
    """A NaN would silently become a code; the error must say which tensor of the thousands it is, and how many."""
    weight = weights(8, columns)
    weight[1, 3] = weight[4, 2] = weight[7, columns - 1] = bad
    with pytest.raises(ValueError, match=rf"layers\.3\.experts.*{message}.*of {8 * columns}"):
        quantize_weight(weight, 64, name="layers.3.experts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "multiple of 8"),
        ({"group_size": 12}, "multiple of 8"),
        ({"group_size": True}, "multiple of 8"),
        ({"group_size": 32.0}, "multiple of 8"),
        ({"group_size": 32, "zero_point": "none"}, "zero_point"),
        ({"group_size": 32, "method": "gptq"}, "method"),
        ({"group_size": 32, "symmetric": "false"}, "symmetric must be True or False"),
    ],
)
def test_bad_options_are_value_errors(options, message):
    with pytest.raises(ValueError, match=message):
        quantize_weight(weights(4, 64), options.pop("group_size"), **options)


def test_bad_tensors_are_value_errors_and_unknown_keywords_type_errors():
    for bad in (torch.zeros(4, 64, dtype=torch.int8), torch.zeros(64), torch.zeros(4, 0)):
        with pytest.raises(ValueError, match="quantize_weight: weight must be"):
            quantize_weight(bad, 32)
    with pytest.raises(TypeError):
        quantize_weight(weights(4, 64), 32, groupsize=32)


def test_result_does_not_depend_on_how_experts_are_batched():
    """At load a layer comes expert by expert, offline by tensor: both must store the same bytes."""
    weight = weights(6, 40, 576)
    whole = quantize_weight(weight, 128)
    for expert in range(6):
        part = quantize_weight(weight[expert], 128)
        assert torch.equal(whole.packed[expert], part.packed)
        assert torch.equal(whole.scale[expert], part.scale)
        assert torch.equal(whole.zero_point[expert], part.zero_point)


def test_more_rows_than_a_block_and_strided_input_are_the_same():
    weight = weights(3000, 128)
    whole = quantize_weight(weight, 32)
    tail = quantize_weight(weight[2990:], 32)
    assert torch.equal(whole.packed[2990:], tail.packed)
    strided = quantize_weight(weight.t().contiguous().t(), 32)
    assert torch.equal(strided.packed, whole.packed)


def test_no_experts_on_this_rank_gives_an_empty_weight():
    got = quantize_weight(torch.zeros(0, 8, 64, dtype=torch.bfloat16), 32)
    assert got.packed.shape == (0, 8, 32)
    assert got.dequantize(torch.bfloat16).shape == (0, 8, 64)


def test_requantising_a_dequantised_weight_is_a_fixed_point():
    """Weights that already lie on a 16-level grid come back to the same values (Q4_1 checkpoints are such)."""
    scale = 2.0 ** torch.randint(-8, -4, (32, 4), generator=torch.Generator().manual_seed(0)).float()
    codes = torch.randint(0, 16, (32, 128), generator=torch.Generator().manual_seed(1))
    codes[:, 0::32], codes[:, 1::32] = 0, 15
    weight = (scale.repeat_interleave(32, -1) * (codes - 5)).bfloat16()
    for zero_point in ("float", "int"):
        for method in ("minmax", "hqq"):
            got = quantize_weight(weight, 32, zero_point=zero_point, method=method)
            assert torch.equal(got.dequantize(torch.bfloat16), weight)


@given(columns=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_nibbles_round_trip(columns):
    codes = torch.randint(0, 16, (2, 3, columns), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape[-1] == -(-columns // 2)
    assert torch.equal(unpack_nibbles(packed, columns), codes)
    assert torch.equal(packed[..., 0] & 15, codes[..., 0])


def test_quantized_weight_pickles_and_checks_its_shapes():
    got = quantize_weight(weights(4, 64), 32)
    again = pickle.loads(pickle.dumps(got))
    assert torch.equal(again.packed, got.packed)
    assert again.shape == got.shape
    with pytest.raises(ValueError, match=r"scale of a weight \(4, 64\)"):
        QuantizedWeight(got.packed, got.scale[:, :1], got.zero_point, 32, got.shape)
    with pytest.raises(ValueError, match="packed"):
        QuantizedWeight(got.packed.int(), got.scale, got.zero_point, 32, got.shape)


def test_the_weight_is_not_written_to():
    """The search works in place, on a copy; FP32 weights need none for their dtype."""
    weight = weights(8, 100, dtype=torch.float32)
    before = weight.clone()
    for method in ("minmax", "hqq"):
        for zero_point, symmetric in KINDS:
            quantize_weight(weight, 32, zero_point=zero_point, symmetric=symmetric, method=method)
            assert torch.equal(weight, before)
