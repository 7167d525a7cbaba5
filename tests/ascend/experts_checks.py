"""Checks of experts in 4 bits for NPUs: the layout, and every call of torch_npu under its real schema, emulated on CPU.

The chip is what the stub calls itself; products are `npu_emulation`'s, so what is checked is that the layout and the
calls mean the layer that the FP64 reference computes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import npu_emulation
import pytest
import torch
import torch_npu  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops" / "moe"))

from moe_samples import TOLERANCE, Layer, assert_close, make_layer

from vllm_ext.ops.moe import PreparedExperts, npu, prepare_experts
from vllm_ext.ops.moe.npu.layout import antiquant, expert_sizes

torch.set_num_threads(1)
npu_emulation.register()
ON_310P = os.environ["STUB_SOC_NAME"].startswith("Ascend310P")
DTYPES = (torch.float16,) if ON_310P else (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
# 8 - zero_point in BF16 is rounded for zero points below 4: at most a 64th of a step, beside a step's own 0.29 rms.
OFFSET_ERROR = {torch.bfloat16: 4e-3, torch.float16: 4e-4}

npu.usable = lambda device: (True, "")  # CPU tensors stand for the NPU's
npu.npu_device.takes_antiquant = lambda device: not ON_310P


def prepare(layer: Layer) -> PreparedExperts:
    """The experts as the NPU backend lays them out."""
    return layer.prepare(backend="npu")


def check_layers_equal_the_reference() -> None:
    """Gated and not, all zero points, biases, ragged groups: within the dtype's tolerance of FP64."""
    for dtype in DTYPES:
        for options in (
            {},
            {"zero_point": None},
            {"zero_point": "int"},
            {"gated": False},
            {"bias": True},
            {"hidden": 576, "intermediate": 704, "groups": (128, 128)},
            {"intermediate": 176, "groups": (64, 64)},
            {"intermediate": 96, "groups": (64, 64), "bias": True},
            {"tokens": 33, "top_k": 3, "experts": 5},
        ):
            layer = make_layer(dtype=dtype, **options)  # type: ignore[arg-type]
            activation = "silu" if options.get("gated", True) else "relu2"
            got = layer.run(prepare(layer), activation=activation)
            tolerance = TOLERANCE[dtype] + OFFSET_ERROR[dtype]
            assert_close(f"{dtype} {options}", got, layer.expected(activation=activation), tolerance)


def check_activations_equal_the_reference() -> None:
    """SwiGLU through torch_npu's operator, the others through torch."""
    for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        layer = make_layer(dtype=torch.float16)
        got = layer.run(prepare(layer), activation=activation)
        assert_close(activation, got, layer.expected(activation=activation), TOLERANCE[torch.float16] + 4e-4)


def check_codes_are_exact_and_offsets_within_the_stated_error() -> None:
    """What the operator reconstructs against what we store, weight by weight."""
    for dtype in DTYPES:
        for kind, allowed in (("int", 0.0), ("float", 1 / 64 if dtype == torch.bfloat16 else 1 / 512)):
            layer = make_layer(dtype=dtype, zero_point=kind)
            hidden, intermediate = layer.w13.shape[2], layer.w2.shape[2]
            sizes = expert_sizes(hidden, intermediate, layer.w13.group_size, layer.w2.group_size)
            for weight, group, rows, columns, halves in (
                (layer.w13, sizes.group_w13, sizes.intermediate, hidden, 2),
                (layer.w2, sizes.group_w2, hidden, sizes.intermediate, 1),
            ):
                made = antiquant(
                    weight, group, rows, columns, halves=halves, dtype=dtype,
                    pack=npu_emulation.convert_weight_to_int4pack,
                )  # fmt: skip
                codes = npu_emulation.unpack_int4(made.weight).transpose(1, 2)
                assert torch.equal(codes[:, : weight.shape[1], : weight.shape[2]] + 8, weight.codes().float())
                scale = made.scale.float().repeat_interleave(group, dim=1).transpose(1, 2)
                offset = made.offset.float().repeat_interleave(group, dim=1).transpose(1, 2)
                error = ((codes + offset) * scale - weight.dequantize(torch.float32)).abs()
                assert bool((error <= allowed * scale.abs() + 1e-6).all()), (dtype, kind, float((error / scale).max()))


def check_padding_ids_give_zero_rows_and_change_no_other() -> None:
    """C08: -1 ids, also of whole rows and of all rows; other rows keep their bits, and nothing is written to."""
    layer = make_layer(dtype=torch.float16, tokens=16)
    experts = prepare(layer)
    alone = layer.run(experts)
    ids = layer.ids.clone()
    ids[::2] = -1
    ids[1, 1] = -1
    padded = replace(layer, ids=ids)
    before = (ids.clone(), layer.weights.clone())
    got = padded.run(experts)
    assert torch.equal(ids, before[0])
    assert torch.equal(layer.weights, before[1])
    assert not got[::2].any()
    assert torch.equal(got[3::2], alone[3::2])
    assert_close("a slot of -1", got[1], padded.expected()[1], TOLERANCE[torch.float16] + 4e-4)
    assert not replace(layer, ids=torch.full_like(ids, -1)).run(experts).any()


def check_expert_parallel_ranks_sum_to_the_whole_layer() -> None:
    """Each rank has half of the experts and an expert_map; foreign slots are left out of its sum."""
    layer = make_layer(dtype=torch.float16, experts=8, tokens=9)
    whole = layer.expected()
    total = torch.zeros_like(whole)
    for rank in range(2):
        part = slice(4 * rank, 4 * rank + 4)
        mine = replace(layer, w13=_experts(layer.w13, part), w2=_experts(layer.w2, part))
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[part] = torch.arange(4, dtype=torch.int32)
        total += mine.run(prepare(mine), expert_map=expert_map).float()
    assert_close("two ranks", total, whole, 2 * TOLERANCE[torch.float16])


def _experts(weight: Any, part: slice) -> Any:
    from vllm_ext.quantization import slice_quantized

    return slice_quantized(weight, 0, part.start, part.stop - part.start)


def check_counts_add_up_to_the_rows() -> None:
    """The operator's documentation asks for it: the group list's sum is the number of rows of x, padding or not."""
    if ON_310P:
        pytest.skip("a 310P has no such product")
    layer = make_layer(dtype=torch.float16, tokens=7, distinct=False)
    npu_emulation.calls.clear()
    layer.run(prepare(layer))
    assert len(npu_emulation.calls) == 2
    for call in npu_emulation.calls:
        assert call["counted"] == call["rows"] == 14, call
        assert call["antiquant"]
        assert call["group_list_type"] == 1


def check_four_bit_experts_stay_in_four_bits() -> None:
    """Bytes held: half a byte a weight and its metadata, on every chip."""
    layer = make_layer(dtype=torch.float16, experts=8, hidden=512, intermediate=256)
    weights = layer.w13.shape.numel() + layer.w2.shape.numel()
    metadata = 2 * 2 * (layer.w13.scale.numel() + layer.w2.scale.numel())
    assert prepare(layer).nbytes == weights // 2 + metadata


def check_sizes_are_cut_padded_or_refused() -> None:
    """Even groups by cutting, by filling I up, or an error with the rule, the numbers and the remedy."""
    assert expert_sizes(576, 704, 128, 128) == expert_sizes(576, 704, 64, 64)
    assert (expert_sizes(576, 704, 128, 128).group_w13, expert_sizes(576, 704, 128, 128).group_w2) == (64, 64)
    padded = expert_sizes(2048, 176, 128, 64)
    assert (padded.group_w2, padded.intermediate) == (64, 192)
    assert expert_sizes(2048, 96, 128, 64).intermediate == 96
    assert expert_sizes(2048, 48, 128, 64).intermediate == 64
    for arguments, message in (
        ((100, 64, 64, 64), "multiple of 8"),
        ((2048, 64, 36, 64), "leaves only groups of 4; choose group_size_w13"),
        ((2048, 40000, 128, 64), "tensor-parallel"),
    ):
        with pytest.raises(ValueError, match=message):
            expert_sizes(*arguments)


def check_the_smoke_scripts_layers_are_right_where_the_operators_are() -> None:
    """The rows of experts that `make ascend-check` prints: within its tolerance of FP64, and timed."""
    import ascend_smoke

    rows = [ascend_smoke.attempt(case, "experts", ascend_smoke.experts_row, CPU) for case in ascend_smoke.EXPERTS]
    assert [row.status for row in rows] == ["ok"] * 2, ascend_smoke.table(rows)
    assert all(row.error is not None and 0 < row.error <= ascend_smoke.EXPERTS_TOLERANCE for row in rows)
    assert all(row.milliseconds is not None and row.milliseconds > 0 for row in rows)


def check_dtypes_a_chip_lacks_are_refused_with_the_remedy() -> None:
    """BF16 on a 310P, FP32 anywhere, and a promise of batch invariance nobody has checked."""
    layer = make_layer(dtype=torch.bfloat16)
    if ON_310P:
        with pytest.raises(ValueError, match="--dtype float16"):
            prepare(layer)
    with pytest.raises(ValueError, match="--dtype"):
        prepare_experts(layer.w13, layer.w2, backend="npu", dtype=torch.float32)
    half = make_layer(dtype=torch.float16)
    with pytest.raises(ValueError, match="batch-invariant"):
        half.run(prepare(half), batch_invariant=True)
