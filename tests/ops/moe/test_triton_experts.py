"""The Triton experts against FP64, on small shapes through Triton's interpreter; test_triton_experts_gpu.py has the
full sizes.

Triton decides at its import whether it interprets, so these tests run in a process of their own, which
test_triton_interpreted.py starts. The interpreter truncates where hardware rounds to BF16: BF16 has a wider tolerance
here, FP16 and FP32 do not.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_samples import TOLERANCE, Layer, assert_close, make_layer

from vllm_ext.ops.moe import CallOptions
from vllm_ext.ops.moe.activation import apply_activation
from vllm_ext.quantization.weight import unpack_nibbles

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1: test_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

PACKAGE = "vllm_ext.ops.moe.triton"
INTERPRETED = {**TOLERANCE, torch.bfloat16: 2.5e-2}


def run(backend: ModuleType, layer: Layer, expert_map: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """The layer's output from the interpreted backend."""
    biases = (layer.biases.get("w13_bias"), layer.biases.get("w2_bias"))
    experts = backend.prepare(layer.w13, layer.w2, *biases, torch.device("cpu"), layer.x.dtype)
    return backend.apply(layer.x, experts, layer.weights, layer.ids, expert_map, CallOptions(**options))


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, dict[str, Any]]:
    """A small layer and the options of a call."""
    gated = draw(st.booleans())
    activations = ["silu", "gelu", "gelu_tanh", "relu2", *(["swigluoai"] if gated else [])]
    layer = make_layer(
        experts=draw(st.integers(1, 6)),
        hidden=8 * draw(st.integers(2, 20)),
        intermediate=8 * draw(st.integers(1, 12)),
        top_k=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 12)),
        groups=(draw(st.sampled_from([8, 24, 32, 64, 128])), draw(st.sampled_from([8, 16, 32, 64, 128]))),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        gated=gated,
        zero_point=draw(st.sampled_from(["float", "int", None])),
        bias=draw(st.booleans()),
        distinct=False,
        seed=draw(st.integers(0, 1000)),
    )
    options = {
        "activation": draw(st.sampled_from(activations)),
        "apply_router_weight_on_input": draw(st.booleans()),
        "batch_invariant": draw(st.booleans()),
    }
    return layer, options


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=layers())
def test_any_layer_equals_the_reference(backend: ModuleType, poison: None, case: tuple[Layer, dict[str, Any]]) -> None:
    """Sizes that no tile divides, groups that end short, ids out of range and repeated: all within rounding."""
    layer, options = case
    ids, weights = layer.ids.clone(), layer.weights.clone()
    out = run(backend, layer, **options)
    assert_close(str(options), out, layer.expected(**options), INTERPRETED[layer.x.dtype])
    assert torch.equal(ids, layer.ids)
    assert torch.equal(weights, layer.weights)


@pytest.mark.parametrize("scaling", ["sum", "operand"])
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("row_tiles", [1, 2])
def test_every_way_to_launch_computes_the_layer(
    backend: ModuleType, poison: None, scaling: str, unroll: int, row_tiles: int
) -> None:
    """Odd numbers of K tiles and of row tiles leave a part of the last step and of the last program empty."""
    layer = make_layer(experts=3, hidden=192, intermediate=112, groups=(64, 16), dtype=torch.float16, bias=True)
    config = importlib.import_module(f"{PACKAGE}.config")
    gemm = config.GemmConfig(16, 64, 4, 2, scaling, None, unroll, row_tiles)
    launch = config.LaunchConfig(gemm, replace(gemm, block_tokens=32))
    experts = backend.prepare(
        layer.w13, layer.w2, layer.biases["w13_bias"], layer.biases["w2_bias"], torch.device("cpu"), torch.float16
    )
    out = backend.run(launch, layer.x, experts, layer.weights, layer.ids, None, CallOptions("gelu_tanh"))
    assert_close("launch", out, layer.expected(activation="gelu_tanh"), TOLERANCE[torch.float16])


@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize("padded", ["half", "one slot", "all"])
def test_padding_ids_give_zero_rows_and_leave_the_others_as_they_are(
    backend: ModuleType, poison: None, tokens: int, padded: str
) -> None:
    """CUDA graphs and idle data-parallel ranks pad with -1: such a row is 0, and no other row may change.

    To the bit on a GPU (`gpu_checks/moe_checks.py`). Here products are NumPy's, and where a column stands in a block
    may decide how its BLAS adds: one rounding of FP16 is let pass.
    """
    layer = make_layer(experts=4, hidden=64, intermediate=32, groups=(32, 32), tokens=tokens, dtype=torch.float16)
    full = run(backend, layer)
    ids = layer.ids.clone()
    if padded == "half":
        ids[1::2] = -1
    elif padded == "all":
        ids[:] = -1
    else:
        ids[0, 1] = -1
    out = run(backend, replace(layer, ids=ids))
    rows = (ids < 0).all(1)
    assert out[rows].count_nonzero() == 0
    whole = (ids >= 0).all(1)
    rounding = {"rtol": 2.0**-10, "atol": 2.0**-14}
    torch.testing.assert_close(out[whole], full[whole], **rounding)
    if padded == "half":
        torch.testing.assert_close(run(backend, layer.rows(slice(0, None, 2))), out[0::2], **rounding)
    if padded == "one slot":
        assert_close("one slot", out, replace(layer, ids=ids).expected(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("out_of_range", [4, 1 << 30, (1 << 32) + 1, 1 - (1 << 32)])
def test_ids_past_the_experts_are_not_routed(backend: ModuleType, poison: None, out_of_range: int) -> None:
    """Past 32 bits as well, where the low half names an expert."""
    layer = make_layer(experts=4, hidden=64, intermediate=32, groups=(32, 32), tokens=3, dtype=torch.float16)
    layer.ids = layer.ids.long() if abs(out_of_range) >> 31 else layer.ids
    layer.ids[0] = out_of_range
    layer.ids[1, 0] = out_of_range
    out = run(backend, layer)
    assert out[0].count_nonzero() == 0
    assert_close("out of range", out, layer.expected(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_expert_map_keeps_the_experts_of_this_rank(backend: ModuleType, poison: None, id_dtype: torch.dtype) -> None:
    """Global ids beyond the map, and experts of other ranks, contribute nothing."""
    layer = make_layer(experts=4, hidden=64, intermediate=32, groups=(32, 32), tokens=9, dtype=torch.float16)
    # What lies past the map's end would name an expert.
    expert_map = torch.tensor([2, -1, 0, 1, (1 << 32) + 1, 3, 0])[:6]
    layer.ids = torch.randint(-1, 9, layer.ids.shape, generator=torch.Generator().manual_seed(3)).to(id_dtype)
    out = run(backend, layer, expert_map)
    assert_close("map", out, layer.expected(expert_map=expert_map), TOLERANCE[torch.float16])
    # A map of no expert divided the slots by its length.
    assert run(backend, layer, expert_map[:0]).count_nonzero() == 0


def test_a_batch_invariant_row_does_not_see_the_others(backend: ModuleType) -> None:
    layer = make_layer(experts=4, hidden=64, intermediate=48, groups=(32, 16), tokens=40)
    out = run(backend, layer, batch_invariant=True)
    for row in (0, 17, 39):
        alone = run(backend, layer.rows(slice(row, row + 1)), batch_invariant=True)
        assert torch.equal(alone[0], out[row])


def _strided(tensor: torch.Tensor, filling: float) -> torch.Tensor:
    """`tensor` as every other element of a wider one."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), filling, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def test_arguments_are_read_by_their_strides(backend: ModuleType) -> None:
    """Parts of wider tensors, in rows and in columns: what lies between must not be read, nor the order be assumed."""
    layer = make_layer(experts=3, hidden=64, intermediate=32, groups=(32, 32), dtype=torch.float16)
    expert_map = torch.tensor([1, -1, 0, 2])
    layer.ids = (layer.ids + 1) % 4
    expected = run(backend, layer, expert_map)
    rows = torch.full((layer.x.shape[0], 96), float("nan"), dtype=torch.float16)
    rows[:, :64] = layer.x
    for changed in (
        {"x": rows[:, :64]},
        {"x": layer.x.t().contiguous().t()},
        {"x": _strided(layer.x, float("nan"))},
        {"ids": _strided(layer.ids, 2)},
        {"weights": _strided(layer.weights, float("nan"))},
    ):
        assert torch.equal(run(backend, replace(layer, **changed), expert_map), expected), changed.keys()
    assert torch.equal(run(backend, layer, _strided(expert_map, 2)), expected)


@pytest.mark.parametrize("on_input", [False, True])
def test_what_is_not_routed_may_hold_anything(backend: ModuleType, poison: None, on_input: bool) -> None:
    """Rows of padding come from uninitialised buffers: NaN and infinity there stay there."""
    layer = make_layer(experts=4, hidden=64, intermediate=32, groups=(32, 32), tokens=6, dtype=torch.float16)
    layer.ids[0, 0], layer.weights[0, 0] = -1, float("nan")
    layer.ids[1], layer.weights[1], layer.x[1] = 4, float("inf"), float("nan")
    out = run(backend, layer, apply_router_weight_on_input=on_input)
    assert out[1].count_nonzero() == 0
    layer.weights[:2].nan_to_num_(0, 0)
    layer.x[1] = 0
    assert_close("padding", out, layer.expected(apply_router_weight_on_input=on_input), TOLERANCE[torch.float16])


def test_biases_are_added_after_the_routers_weight_on_the_input(backend: ModuleType) -> None:
    layer = make_layer(hidden=64, intermediate=32, groups=(32, 32), dtype=torch.float16, bias=True)
    layer.biases = {name: 10 * bias for name, bias in layer.biases.items()}
    options = {"apply_router_weight_on_input": True}
    assert_close("bias", run(backend, layer, **options), layer.expected(**options), TOLERANCE[torch.float16])


def test_the_clamped_activation_takes_its_numbers_from_the_call(backend: ModuleType) -> None:
    layer = make_layer(hidden=64, intermediate=32, groups=(32, 32), dtype=torch.float16)
    options = {"activation": "swigluoai", "swiglu_alpha": 0.6, "swiglu_limit": 0.5}
    assert_close("clamped", run(backend, layer, **options), layer.expected(**options), TOLERANCE[torch.float16])


def test_the_second_gemm_gets_sums_of_what_it_reads(backend: ModuleType) -> None:
    """Of the rounded values: the zero points' term takes off offsets of up to 1024 times these sums on a GPU."""
    layer = make_layer(hidden=64, intermediate=64, groups=(32, 32), dtype=torch.bfloat16)
    experts = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), torch.bfloat16)
    config, options = importlib.import_module(f"{PACKAGE}.choice").portable(1), CallOptions()
    aligned = backend.align_call(config, layer.x, layer.ids, None, experts)
    inner, sums = backend.gate_up(config, experts, layer.weights, aligned, layer.ids.shape[1], options)
    expected = inner.double().reshape(*sums.shape, -1).sum(-1)
    torch.testing.assert_close(sums.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 200),
    group=st.sampled_from([8, 16, 24, 32, 64, 128]),
    gated=st.booleans(),
    seed=st.integers(0, 100),
)
def test_kernel_order_holds_every_code_where_the_kernels_look(
    backend: ModuleType, rows: int, columns: int, group: int, gated: bool, seed: int
) -> None:
    """Word (k tile, row, j) holds the codes of columns j, j + P, j + 2P and j + 3P of the tile; padding is zero."""
    from vllm_ext.quantization import quantize_weight

    layout = importlib.import_module(f"{PACKAGE}.layout")
    rows *= 2 if gated else 1
    weight = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    quantized = quantize_weight(weight, group, method="minmax")
    kernel = layout.to_kernel_order(quantized, gated, torch.bfloat16)
    _, tiles, padded_rows, plane = kernel.words.shape
    words = kernel.words.to(torch.int32) & 0xFFFF
    codes = torch.stack([words >> shift & 0xF for shift in (0, 4, 8, 12)], 3)
    codes = codes.permute(0, 2, 1, 3, 4).reshape(2, padded_rows, tiles * 4 * plane)
    order = torch.arange(padded_rows)
    if gated:
        pair, place = order // 16, order % 8
        up = order % 16 >= 8
        order = torch.where(up, rows // 2, 0) + pair * 8 + place
        real = pair * 8 + place < rows // 2
    else:
        real = order < rows
    plain = unpack_nibbles(quantized.packed, columns)
    assert torch.equal(codes[:, real, :columns], plain[:, order[real]].int())
    assert codes[:, ~real].count_nonzero() == 0
    assert codes[:, :, columns:].count_nonzero() == 0
    assert torch.equal(kernel.factors[:, :, real, 0], quantized.scale[:, order[real]].transpose(1, 2))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
def test_the_first_kernel_is_right_where_it_is_made_for(backend: ModuleType, poison: None, activation: str) -> None:
    """The baseline of the speed claims computes the same layer (gated, no biases)."""
    v1 = importlib.import_module(f"{PACKAGE}.grouped_v1")
    layer = make_layer(experts=3, hidden=96, intermediate=40, groups=(32, 16), dtype=torch.float16, distinct=False)
    experts = v1.ExpertsV1(layer.w13, layer.w2)
    out = v1.grouped_v1(layer.x, experts, layer.weights, layer.ids, activation)
    assert_close("v1", out, layer.expected(activation=activation), TOLERANCE[torch.float16])


def test_activations_saturate_without_nan(backend: ModuleType) -> None:
    """Large gates of either sign reach the limits of each activation, in the kernel as in the definition."""
    layer = make_layer(experts=1, hidden=32, intermediate=16, groups=(32, 16), top_k=1, dtype=torch.float32, bias=True)
    layer.biases["w13_bias"] = torch.linspace(-200, 200, 32)[None]
    for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        first = torch.zeros(1, 32) + layer.biases["w13_bias"]
        assert torch.isfinite(apply_activation(first, True, CallOptions(activation))).all()
        out = run(backend, layer, activation=activation)
        assert_close(activation, out, layer.expected(activation=activation), 1e-5)
