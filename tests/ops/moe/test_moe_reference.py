"""The reference against the formula written out by hand, token by token, sharing no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from moe_samples import assert_close, make_layer


def _act(value: float, activation: str) -> float:
    if activation == "silu":
        return value / (1 + math.exp(-value))
    if activation == "gelu":
        return 0.5 * value * (1 + math.erf(value / math.sqrt(2)))
    if activation == "gelu_tanh":
        return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))
    return max(value, 0.0) ** 2


def _expert(x, w13, w2, b13, b2, activation, gated, alpha, limit):
    first = [sum(a * b for a, b in zip(x, row, strict=True)) + bias for row, bias in zip(w13, b13, strict=True)]
    if not gated:
        inner = [_act(value, activation) for value in first]
    else:
        half = len(first) // 2
        gate, up = first[:half], first[half:]
        if activation == "swigluoai":
            gate = [min(g, limit) for g in gate]
            up = [max(-limit, min(u, limit)) for u in up]
            inner = [g / (1 + math.exp(-alpha * g)) * (u + 1) for g, u in zip(gate, up, strict=True)]
        else:
            inner = [_act(g, activation) * u for g, u in zip(gate, up, strict=True)]
    return [sum(a * b for a, b in zip(inner, row, strict=True)) + bias for row, bias in zip(w2, b2, strict=True)]


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        ("silu", True),
        ("gelu", True),
        ("gelu_tanh", True),
        ("relu2", True),
        ("swigluoai", True),
        ("silu", False),
        ("gelu", False),
        ("gelu_tanh", False),
        ("relu2", False),
    ],
)
def test_reference_is_the_formula(activation: str, gated: bool, on_input: bool) -> None:
    layer = make_layer(
        experts=3, hidden=24, intermediate=16, top_k=2, tokens=4, groups=(16, 8), gated=gated, bias=True, distinct=False
    )
    layer.x = layer.x.float() * 3
    layer.ids[0] = torch.tensor([-1, 3])
    options = {"activation": activation, "swiglu_alpha": 1.5, "swiglu_limit": 0.7}
    got = layer.run(layer.prepare(backend="reference"), apply_router_weight_on_input=on_input, **options)
    w13, w2 = layer.w13.dequantize(torch.float64).tolist(), layer.w2.dequantize(torch.float64).tolist()
    b13, b2 = layer.biases["w13_bias"].tolist(), layer.biases["w2_bias"].tolist()
    expected = []
    for row, ids, weights in zip(layer.x.tolist(), layer.ids.tolist(), layer.weights.tolist(), strict=True):
        total = [0.0] * 24
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < 3:
                x = [weight * value for value in row] if on_input else row
                y = _expert(x, w13[expert], w2[expert], b13[expert], b2[expert], activation, gated, 1.5, 0.7)
                total = [t + (v if on_input else weight * v) for t, v in zip(total, y, strict=True)]
        expected.append(total)
    assert got[0].count_nonzero() == 0
    assert_close("reference", got, torch.tensor(expected, dtype=torch.float64), 1e-6)
