"""One prefill through the binding: operands in the order the kernels read, results in the order the caller knows.

The same function serves NPU tensors, which the compiled kernels compute, and CPU tensors, which the binding gives to
the simulator; only `load_simulator` differs.
"""

from __future__ import annotations

import os

import torch

from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ops.linear_attention.npu.launches import Layout, layout
from vllm_ext.ops.linear_attention.problem import Call

_ALIGNMENT = 32  # bytes: what the copy engines of the chips read


def run_prefill(
    op: str, call: Call, chip: str, *, planned: Layout | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ "gdn" or "kda" on `chip`'s cores: o [B, T, HV, V] FP16; final state in FP32 and in the caller's order, or None.

    States are widened to FP32 before and stay FP32 after, so the cache's own dtype is rounded to once, by its owner.
    Raises ValueError when the binding refuses an operand or the table, RuntimeError when a launch fails.
    """
    num_value_heads, value_dim = call.v.shape[2:]
    bounds = tuple(call.sequence_bounds())
    if planned is None:
        planned = layout(op, chip, bounds, num_value_heads, call.q.shape[-1], value_dim)
    function = torch.ops.vllm_ext.ascend_gdn_prefill if op == "gdn" else torch.ops.vllm_ext.ascend_kda_prefill
    o, final_state = function(
        _aligned(call.q),
        _aligned(call.k),
        _aligned(call.v),
        planned.pad(call.g.flatten(0, 1)),
        planned.pad(call.beta.flatten(0, 1)),
        None if call.initial_state is None else _aligned(call.initial_state.float()),
        planned.tasks,
        planned.launches,
        scale=call.scale,
        num_sequences=len(bounds) - 1,
        chip=chip,
        output_final_state=call.output_final_state,
        state_v_first=call.state_v_first,
        normalise=call.use_qk_l2norm_in_kernel,
        state_dtype=torch.float32,
    )
    return o, final_state if call.output_final_state else None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous and beginning where a copy engine can read; a copy only where it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def load_simulator(chip: str, threads: int | None = None) -> None:
    """Let the binding compute CPU tensors on a chip's simulator, built if need be. RuntimeError without a compiler."""
    from vllm_ext.ops.linear_attention.ascend_sim.session import prefill_kernels

    path = str(prefill_kernels(chip))
    torch.ops.vllm_ext.ascend_load_simulator(load_chip(chip).npu_arch, path, threads or min(4, os.cpu_count() or 1))
