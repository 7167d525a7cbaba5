"""The experts' activations in Triton, FP32 in and out; `vllm_ext.ops.moe.activation` defines them."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_GELU_TANH_SCALE = tl.constexpr(2 * 0.7978845608028654)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); the limits at both ends are exact."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def pointwise(x, ACTIVATION: tl.constexpr):
    """One-argument activations. tanh(u) is 2 sigmoid(2u) - 1, so tanh GELU is x sigmoid(2u)."""
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = x * sigmoid((x + 0.044715 * x * x * x) * _GELU_TANH_SCALE)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def gated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """activation(gate) * up, or gpt-oss's clamped SwiGLU."""
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = (up + 1.0) * gate * sigmoid(alpha * gate)
    else:
        y = pointwise(gate, ACTIVATION) * up
    return y
