"""Backend "ascend-sim": the Ascend C prefill kernels on the host simulator of `csrc_ascend/simulator`.

A tool for developing and checking the kernels, not a fast path: every call also proves that the kernels keep the rules
of the chip (310P1, 10 cores).
"""

from __future__ import annotations

import torch

from vllm_ext.ops.linear_attention.ascend_sim import build
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.problem import Call, Problem

NAME = "ascend-sim"
HEAD_DIMS = (64, 128)


def usable(device: torch.device) -> tuple[bool, str]:
    """Runs on CPU tensors where the kernel sources and a C++ compiler are at hand."""
    if device.type != "cpu":
        return False, f"the simulator computes on CPU tensors, not on {device.type}"
    reason = build.missing()
    return not reason, reason


def supports(problem: Problem) -> tuple[bool, str]:
    """310P has FP16 and no other 16-bit type; tiles are laid out for heads of 64 and 128."""
    if problem.dtype != torch.float16:
        return False, f"310P multiplies FP16 only, q, k and v are {problem.dtype}; convert them to torch.float16"
    if problem.key_dim not in HEAD_DIMS or problem.value_dim not in HEAD_DIMS:
        return False, f"the kernels take K and V of {HEAD_DIMS[0]} or {HEAD_DIMS[1]}"
    return True, ""


def chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_gated_delta_rule`."""
    result = run_prefill("gdn", call)
    return result.o, result.final_state


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    result = run_prefill("kda", call)
    return result.o, result.final_state
