"""Backend "ascend-sim": the Ascend C prefill kernels on the host simulator of `csrc_ascend/simulator`.

A tool for developing and checking the kernels, not a fast path: every call also proves that the kernels keep the rules
of the chip (310P1, 10 cores).
"""

from __future__ import annotations

import warnings

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
    return _run("gdn", call)


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    return _run("kda", call)


def _run(op: str, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = run_prefill(op, call)
    if overflows := result.counters.cast_overflows:
        warnings.warn(
            f"ascend-sim: {overflows} finite numbers of this {op} call became infinite in FP16, as they would on the "
            "chip: states, values and outputs must stay within 65504; scale v and initial_state down",
            RuntimeWarning,
            stacklevel=5,
        )
    return result.o, result.final_state
