"""activation(gate) * up of a joined gate and up product, in one kernel."""

from __future__ import annotations

import torch

from vllm_ext.ops.fused.device import runs_triton
from vllm_ext.ops.moe.activation import pointwise

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


def activation_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[M, 2I] (gate columns, then up columns) to [M, I] in the same dtype; the activation is rounded to it first."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation_and_mul: activation must be one of {ACTIVATIONS}, got {activation!r}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"activation_and_mul: gate_up must be [M, 2I], got {list(gate_up.shape)}")
    if runs_triton(gate_up) and gate_up.numel():
        from vllm_ext.ops.fused.triton.gated import activation_and_mul as kernel

        return kernel(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return pointwise(gate, activation) * up
