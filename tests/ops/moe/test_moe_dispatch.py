"""Which backend runs, and what is refused before one does."""

from __future__ import annotations

import logging
import math
import subprocess
import sys

import pytest
import torch
from moe_samples import make_layer

from vllm_ext.ops.moe import backend_status, dispatch, fused_moe_w4a16, prepare_experts
from vllm_ext.quantization import quantize_weight


def test_auto_takes_the_cpu_backend_on_a_cpu() -> None:
    assert make_layer().prepare().backend == "cpu"


def test_status_names_every_backend_with_a_reason() -> None:
    status = {name: (usable, reason) for name, usable, reason in backend_status()}
    assert set(status) == {"reference", "cpu", "triton", "npu"}
    assert status["cpu"][0]
    assert all(reason for _, reason in status.values())


def test_unusable_backend_is_a_runtime_error_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"'npu' is not usable on 'cpu': \w+"):
        make_layer().prepare(backend="npu")


def test_unknown_backend_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"auto.*reference.*cpu.*triton.*npu.*got 'cuda'"):
        make_layer().prepare(backend="cuda")


def test_fallback_is_logged_once_with_the_reason(monkeypatch, caplog) -> None:
    from vllm_ext.ops.moe import cpu

    monkeypatch.setattr(cpu, "usable", lambda device: (False, "no kernel today"))
    dispatch._auto.cache_clear()
    with caplog.at_level(logging.WARNING):
        backends = [make_layer().prepare().backend for _ in range(2)]
    dispatch._auto.cache_clear()
    assert backends == ["reference", "reference"]
    assert [record.message.count("no kernel today") for record in caplog.records] == [1]


def test_importing_the_package_imports_no_kernel_compiler() -> None:
    """C21: on a machine where Triton has no target, importing it already fails."""
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['vllm'] = None; sys.modules['torch_npu'] = None\n"
        "import vllm_ext.ops.moe, vllm_ext.ops.moe.custom_op, vllm_ext.ops.moe.cpu\n"
        "assert 'vllm_ext.ops.moe.triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_unknown_keyword_is_a_type_error() -> None:
    layer = make_layer()
    with pytest.raises(TypeError, match="scoring"):
        layer.run(layer.prepare(), scoring="softmax")


def _weight(*shape: int, **options):
    return quantize_weight(torch.randn(shape), 32, method="minmax", **options)


@pytest.mark.parametrize(
    ("w13", "w2", "options", "message"),
    [
        ((64, 32), (2, 32, 32), {}, r"w13 must be \[experts, rows, columns\]"),
        ((2, 64, 32), (3, 32, 32), {}, "2 experts and w2 has 3"),
        ((2, 64, 32), (2, 40, 32), {}, "H=32.*H=40"),
        ((2, 48, 32), (2, 32, 32), {}, "2I=64.*I=32.*got 48"),
        ((2, 64, 32), (2, 32, 32), {"w13_bias": torch.zeros(2, 32)}, r"w13_bias must be floating \[2, 64\].*\[2, 32\]"),
        ((2, 64, 32), (2, 32, 32), {"w2_bias": torch.zeros(64)}, r"w2_bias must be floating \[2, 32\], got .*\[64\]"),
        ((2, 64, 32), (2, 32, 32), {"w2_bias": torch.zeros(2, 32).int()}, "must be floating.*got torch.int32"),
        ((2, 64, 32), (2, 32, 32), {"dtype": torch.float64}, "dtype must be one of.*float64"),
    ],
)
def test_weights_that_do_not_belong_together_are_refused(w13, w2, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_experts(_weight(*w13), _weight(*w2), **options)


def test_weights_with_different_kinds_of_zero_point_are_refused() -> None:
    with pytest.raises(ValueError, match="float and symmetric"):
        prepare_experts(_weight(2, 64, 32), _weight(2, 32, 32, symmetric=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(5, 8)}, r"must be \[M, 64\], got \[5, 8\]"),
        ({"hidden_states": torch.zeros(5, 64, dtype=torch.float64)}, "float64"),
        ({"topk_ids": torch.zeros(5, 3, dtype=torch.int32)}, r"\[5, 2\] and \[5, 3\]"),
        ({"topk_ids": torch.zeros(4, 2, dtype=torch.int32)}, "M=5"),
        ({"topk_ids": torch.zeros(5, 2)}, "int32 or int64, got torch.float32"),
        ({"expert_map": torch.zeros(2, 2, dtype=torch.int32)}, r"must be a vector.*got torch.int32 \[2, 2\]"),
        ({"expert_map": torch.zeros(2, dtype=torch.bool)}, r"signed integers.*torch.bool \[2\]"),
        ({"topk_weights": torch.zeros(5, 2, dtype=torch.int64)}, "topk_weights must be floating, got torch.int64"),
        ({"topk_ids": torch.zeros(5, 2, dtype=torch.int32, device="meta")}, "on 'cpu'; got .*topk_ids on 'meta'"),
        ({"expert_map": torch.zeros(2, dtype=torch.int32, device="meta")}, "on 'cpu'; got .*expert_map on 'meta'"),
        ({"activation": "swish"}, "silu.*got 'swish'"),
        ({"swiglu_limit": None}, "swiglu_limit must be a number, got None"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha must be a number, got nan"),
        ({"swiglu_limit": -7.0}, r"swiglu_limit must be above 0 \(inf: none\), got -7.0"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change, message) -> None:
    layer = make_layer(hidden=64, intermediate=32)
    call = {"hidden_states": layer.x, "topk_weights": layer.weights, "topk_ids": layer.ids, **change}
    with pytest.raises(ValueError, match=message):
        fused_moe_w4a16(experts=layer.prepare(), **call)


def test_weights_that_are_not_quantised_are_named() -> None:
    weight = _weight(2, 32, 32)
    with pytest.raises(TypeError, match=r"w2 must be a QuantizedWeight, as quantize_weight returns, got Tensor"):
        prepare_experts(weight, torch.zeros(2, 32, 32))  # type: ignore[arg-type]


def test_a_limit_of_infinity_is_none_and_whole_numbers_are_numbers() -> None:
    layer = make_layer(hidden=64, intermediate=32)
    experts = layer.prepare()
    clamped, whole, unlimited = (layer.run(experts, activation="swigluoai", swiglu_limit=x) for x in (1e9, 7, math.inf))
    assert torch.equal(clamped, unlimited)
    assert torch.equal(whole, layer.run(experts, activation="swigluoai", swiglu_limit=7.0))


def test_clamped_swiglu_needs_a_gate() -> None:
    layer = make_layer(hidden=64, intermediate=32, gated=False)
    with pytest.raises(ValueError, match="no gate"):
        layer.run(layer.prepare(), activation="swigluoai")


def test_another_dtype_than_prepared_for_is_computed_and_returned() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    experts = layer.prepare(dtype=torch.bfloat16)
    rounded = layer.run(experts)
    layer.x = layer.x.float()
    out = layer.run(experts)
    assert out.dtype == torch.float32
    assert torch.equal(out, rounded.float())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_call_without_rows_or_without_slots_returns(backend: str) -> None:
    """Idle data-parallel ranks call with no token; nothing of the kernels may depend on there being one."""
    layer = make_layer(hidden=64, intermediate=32)
    experts = layer.prepare(backend=backend)
    assert layer.rows(slice(0, 0)).run(experts).shape == (0, 64)
    layer.ids, layer.weights = layer.ids[:, :0], layer.weights[:, :0]
    out = layer.run(experts)
    assert out.shape == layer.x.shape
    assert out.count_nonzero() == 0
