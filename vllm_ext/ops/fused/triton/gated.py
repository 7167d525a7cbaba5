"""activation(gate) * up, one program a piece of a row."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device
from vllm_ext.ops.moe.triton.activation import pointwise


@triton.jit
def _gated_kernel(gate_up, out, stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    value = pointwise(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    tl.store(out + row * COLUMNS + column, value.to(dtype), mask=mask)


@on_its_device
def activation_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[M, I]."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(columns))
    _gated_kernel[(rows, triton.cdiv(columns, block))](
        gate_up, out, gate_up.stride(0), COLUMNS=columns, ACTIVATION=activation, BLOCK=block, num_warps=4
    )
    return out
