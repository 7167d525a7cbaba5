"""A rank's part of a packed weight must dequantise to exactly what one rank would hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.quantization import (
    QuantizedWeight,
    join_quantized,
    local_group_size,
    quantize_weight,
    regroup,
    slice_quantized,
)

KINDS = [("float", False), ("int", False), ("int", True)]


def quantized(*shape: int, group: int = 32, kind: tuple[str, bool] = ("float", False)) -> QuantizedWeight:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return quantize_weight(weight, group, zero_point=kind[0], symmetric=kind[1])


@pytest.mark.parametrize(
    ("columns", "ranks", "expected"),
    [(704, 2, 32), (704, 4, 16), (704, 8, 8), (768, 8, 32), (640, 2, 64), (1408, 4, 32), (2880, 1, 64), (1856, 8, 8)],
)
def test_largest_group_that_divides_a_ranks_share(columns, ranks, expected):
    """C01, C02: sizes of published models under tensor parallelism; a bare assertion used to end these runs."""
    assert local_group_size(columns // ranks, 128) == expected


def test_shares_no_multiple_of_8_divides_keep_their_group():
    assert local_group_size(100, 64) == 64
    with pytest.raises(ValueError, match="positive"):
        local_group_size(0, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "group", "ranks"),
    [(704, 64, 2), (704, 64, 8), (768, 64, 8), (640, 128, 2), (1856, 64, 8), (704, 128, 4)],
)
def test_rank_slices_dequantise_what_one_rank_would(columns, group, ranks, kind):
    """C03: 704 columns over two ranks cut the sixth group of 64 in half."""
    whole = quantized(2, 3, columns, group=group, kind=kind)
    share = columns // ranks
    parts = [slice_quantized(whole, -1, rank * share, share) for rank in range(ranks)]
    joined = torch.cat([part.dequantize(torch.float64) for part in parts], -1)
    assert torch.equal(joined, whole.dequantize(torch.float64))
    assert parts[0].group_size == group


@settings(max_examples=60, deadline=None)
@given(data=st.data(), columns=st.integers(9, 150), kind=st.sampled_from(KINDS), group=st.sampled_from([8, 16, 24, 64]))
def test_any_slice_that_can_be_expressed_is_exact(data, columns, kind, group):
    whole = quantized(2, 4, columns, group=group, kind=kind)
    start = data.draw(st.integers(0, (columns - 1) // 8)) * 8
    length = data.draw(st.integers(1, columns - start))
    part = slice_quantized(whole, 2, start, length)
    assert torch.equal(part.dequantize(torch.float64), whole.dequantize(torch.float64)[..., start : start + length])
    if length % 2:
        assert (part.packed[..., -1] >> 4 == 0).all()


def test_rows_and_experts_are_sliced_with_their_groups():
    whole = quantized(4, 6, 40)
    reference = whole.dequantize(torch.float32)
    assert torch.equal(slice_quantized(whole, -2, 3, 2).dequantize(torch.float32), reference[:, 3:5])
    assert torch.equal(slice_quantized(whole, 0, 1, 3).dequantize(torch.float32), reference[1:])
    assert slice_quantized(whole, 0, 2, 0).shape == (0, 6, 40)


def test_slices_that_cannot_be_expressed_are_refused_with_the_numbers():
    whole = quantized(4, 100, group=32)
    with pytest.raises(ValueError, match=r"\[50, 100\) of 100 begin 18 columns inside a group of 32.*multiple of 8"):
        slice_quantized(whole, -1, 50, 50)
    for start, length in ((-1, 2), (0, 101), (99, 2), (3, 0)):
        with pytest.raises(ValueError, match="is not a part of dimension"):
            slice_quantized(whole, -1, start, length)
    with pytest.raises(ValueError, match="dim must be"):
        slice_quantized(whole, 2, 0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_regroup_and_join_are_exact(kind):
    first, second = quantized(3, 96, group=32, kind=kind), quantized(5, 96, group=24, kind=kind)
    finer = regroup(first, 8)
    assert finer.scale.shape == (3, 12)
    assert torch.equal(finer.dequantize(torch.float64), first.dequantize(torch.float64))
    joined = join_quantized([first, second])
    assert joined.group_size == 8
    expected = torch.cat([first.dequantize(torch.float64), second.dequantize(torch.float64)])
    assert torch.equal(joined.dequantize(torch.float64), expected)
    stacked = join_quantized([first, first], stack=True)
    assert stacked.shape == (2, 3, 96)
    assert torch.equal(stacked.dequantize(torch.float64)[1], first.dequantize(torch.float64))


def test_what_cannot_be_joined_is_refused():
    with pytest.raises(ValueError, match="cut evenly"):
        regroup(quantized(3, 96, group=32), 24)
    with pytest.raises(ValueError, match="span two weights"):
        join_quantized([quantized(3, 96), quantized(3, 96)], dim=-1)
    with pytest.raises(ValueError, match="differ"):
        join_quantized([quantized(3, 96), quantized(3, 96, kind=("int", False))])
    with pytest.raises(ValueError, match="nothing to join"):
        join_quantized([])
