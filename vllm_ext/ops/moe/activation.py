"""The experts' activations in plain torch, in whatever dtype they are given; kernels are tested against these."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_ext.ops.moe.experts import CallOptions


def pointwise(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The one-argument activations: "silu", "gelu" (erf), "gelu_tanh", "relu2" (squared ReLU)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu2":
        return F.relu(x).square()
    raise ValueError(f"fused_moe_w4a16: {activation!r} is not a one-argument activation")


def apply_activation(first: torch.Tensor, gated: bool, options: CallOptions) -> torch.Tensor:
    """[..., 2I] (gate columns, then up columns) to [..., I], or [..., I] to [..., I] for experts without a gate.

    "swigluoai" is gpt-oss's clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with gate limited from above and
    up on both sides.
    """
    if not gated:
        return pointwise(first, options.activation)
    gate, up = first.chunk(2, dim=-1)
    if options.activation == "swigluoai":
        gate = gate.clamp(max=options.swiglu_limit)
        up = up.clamp(-options.swiglu_limit, options.swiglu_limit)
        return (up + 1) * (gate * torch.sigmoid(gate * options.swiglu_alpha))
    return pointwise(gate, options.activation) * up
