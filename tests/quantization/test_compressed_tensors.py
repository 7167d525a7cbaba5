"""The compressed-tensors format: exact round trips, the field's own packing, and checkpoints others wrote."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.quantization import QuantizedWeight, quantize_weight
from vllm_ext.quantization.compressed_tensors import (
    CODES,
    SCALE,
    SHAPE,
    ZERO_POINT,
    from_tensors,
    make_config,
    parse_config,
    specs,
    to_tensors,
)
from vllm_ext.quantization.tensor_file import FORMAT_NAMES, CheckpointError


def weight(*shape: int, skew: float = 0.0) -> torch.Tensor:
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return (value.abs() ** 1.5 * skew + value * (1 - skew)).bfloat16()


def same(first: QuantizedWeight, second: QuantizedWeight) -> bool:
    if (first.zero_point is None) != (second.zero_point is None) or first.shape != second.shape:
        return False
    zero = first.zero_point is None or torch.equal(first.zero_point, second.zero_point)
    return zero and torch.equal(first.packed, second.packed) and torch.equal(first.scale, second.scale)


def roles(tensors: dict[str, torch.Tensor], module: str = "m") -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{module}."): value for name, value in tensors.items()}


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("shape", "group"), [((24, 64), 32), ((5, 96), 32), ((3, 16, 128), 64), ((13, 24), 8)])
def test_codes_scales_and_zero_points_come_back_exactly(shape, group, symmetric):
    """C18: zero points are packed along the rows; 5 and 13 rows do not fill the last word."""
    before = quantize_weight(weight(*shape), group, symmetric=symmetric, zero_point="int")
    tensors = to_tensors("m", before)
    if len(shape) == 2:
        expected = {s.name: (s.dtype, s.shape) for s in specs("m", shape, group, None if symmetric else "int", "BF16")}
        assert {k: (FORMAT_NAMES[v.dtype], tuple(v.shape)) for k, v in tensors.items()} == expected
    assert same(before, from_tensors("m", roles(tensors), group, symmetric=symmetric))


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_compressed_tensors_package_reads_and_writes_the_same(symmetric):
    """Its own functions pack our codes into our words, and unpack our words into our weight."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    before = quantize_weight(weight(16, 64), 32, symmetric=symmetric, zero_point="int")
    tensors = roles(to_tensors("m", before))
    signed = before.codes().to(torch.int8) - 8
    assert torch.equal(helpers.pack_to_int32(signed, 4), tensors[CODES])
    unpacked = helpers.unpack_from_int32(tensors[CODES], 4, torch.Size(tensors[SHAPE].tolist()))
    assert torch.equal(unpacked, signed)
    zero = torch.zeros(16, 2, dtype=torch.int8)
    if not symmetric:
        zero = before.zero_point.to(torch.int8) - 8
        assert torch.equal(helpers.pack_to_int32(zero, 4, packed_dim=0), tensors[ZERO_POINT])
        assert torch.equal(helpers.unpack_from_int32(tensors[ZERO_POINT], 4, zero.shape, packed_dim=0), zero)
    value = (unpacked.float() - zero.repeat_interleave(32, 1)) * tensors[SCALE].float().repeat_interleave(32, 1)
    assert torch.equal(value, before.dequantize(torch.float32))


def test_symmetric_checkpoints_ignore_zero_points_that_are_there():
    """C15: some writers store dummy zero points beside a symmetric flag."""
    before = quantize_weight(weight(16, 64), 32, symmetric=True)
    tensors = roles(to_tensors("m", before))
    tensors[ZERO_POINT] = torch.full((2, 2), 7, dtype=torch.int32)
    assert same(before, from_tensors("m", tensors, 32, symmetric=True))


def test_zero_points_lower_the_error_on_skewed_weights():
    """C05: an asymmetric checkpoint must load, and be worth it."""
    original = weight(32, 128, skew=1.0)
    errors = []
    for symmetric in (False, True):
        stored = roles(to_tensors("m", quantize_weight(original, 32, symmetric=symmetric, zero_point="int")))
        loaded = from_tensors("m", stored, 32, symmetric=symmetric).dequantize(torch.float32)
        errors.append((loaded - original.float()).square().sum())
    assert errors[0] < errors[1] * 0.7


def test_one_group_a_row_is_read():
    before = quantize_weight(weight(8, 64), 64, zero_point="int")
    assert same(before, from_tensors("m", roles(to_tensors("m", before)), None, symmetric=False))


def test_what_does_not_fit_is_refused_by_name():
    floating = quantize_weight(weight(8, 64), 32)
    with pytest.raises(ValueError, match=r"m: .*integer zero points only"):
        to_tensors("m", floating)
    with pytest.raises(ValueError, match="integer zero points only"):
        specs("m", (8, 64), 32, "float", "BF16")
    with pytest.raises(ValueError, match="must divide the columns"):
        specs("m", (8, 72), 32, "int", "BF16")
    tensors = roles(to_tensors("m", quantize_weight(weight(16, 64), 32, zero_point="int")))
    for role in (CODES, SCALE, ZERO_POINT):
        with pytest.raises(CheckpointError, match=f"m: lacks {role}"):
            from_tensors("m", {k: v for k, v in tensors.items() if k != role}, 32, symmetric=False)
    with pytest.raises(CheckpointError, match=r"weight_zero_point must be int32 \(2, 2\).*got torch.uint8"):
        from_tensors("m", {**tensors, ZERO_POINT: torch.zeros(16, 2, dtype=torch.uint8)}, 32, symmetric=False)
    with pytest.raises(CheckpointError, match=r"m: .*scale of a weight"):
        from_tensors("m", {**tensors, SCALE: tensors[SCALE][:, :1]}, 32, symmetric=False)
    with pytest.raises(CheckpointError, match="weight_packed must be int32"):
        from_tensors("m", {**tensors, CODES: tensors[CODES][:, 1:]}, 32, symmetric=False)


def test_configuration_round_trips():
    options = parse_config(make_config(64, symmetric=False, ignore=["lm_head"]))
    assert (options.group_size, options.symmetric, options.ignore) == (64, False, ("lm_head",))


def test_the_compressed_tensors_package_accepts_the_configuration():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = quantization.QuantizationConfig.model_validate(make_config(64, symmetric=False, ignore=["lm_head"]))
    args = config.config_groups["group_0"].weights
    assert (args.num_bits, args.group_size, args.symmetric, args.strategy) == (4, 64, False, "group")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "float-quantized"}, "only format 'pack-quantized'"),
        ({"config_groups": {}}, "only format"),
        ({"weights": {"num_bits": 8}}, "not weight-only 4-bit"),
        ({"weights": {"type": "float"}}, "not weight-only 4-bit"),
        ({"weights": {"actorder": "group"}}, "orders columns by activation"),
        ({"weights": {"strategy": "block"}}, "strategy must be group or channel"),
    ],
)
def test_other_formats_are_refused(change, message):
    config = make_config(64, symmetric=True, ignore=[])
    if "weights" in change:
        config["config_groups"]["group_0"]["weights"].update(change["weights"])
    else:
        config.update(change)
    with pytest.raises(CheckpointError, match=message):
        parse_config(config)
