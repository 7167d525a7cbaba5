"""Backend "npu": the Ascend C prefill kernels on an NPU, through the binding that setup.py builds with CANN.

Never run on hardware so far; what was run instead is in docs/ascend.md. Imports no Triton, and torch_npu when asked.
"""

from __future__ import annotations

import torch

from vllm_ext.ops.linear_attention.npu import extension
from vllm_ext.ops.linear_attention.npu.prefill import run_prefill
from vllm_ext.ops.linear_attention.problem import Call, Problem

NAME = "npu"
HEAD_DIMS = (64, 128)


def usable(device: torch.device) -> tuple[bool, str]:
    """Runs where torch_npu has a chip that this installation has kernels for."""
    if device.type != "npu":
        return False, f"the compiled kernels need an NPU, not {device.type}"
    if reason := extension.load():
        return False, reason
    chip, reason = extension.chip_of(device)
    return chip is not None, reason


def supports(problem: Problem) -> tuple[bool, str]:
    """310P multiplies FP16 and no other 16-bit type; tiles are laid out for heads of 64 and 128."""
    if problem.dtype != torch.float16:
        return False, (
            f"310P and these kernels multiply FP16 only, q, k and v are {problem.dtype}; serve the model with "
            "--dtype float16 (a model that needs BF16's range cannot be served on a 310P)"
        )
    if problem.key_dim not in HEAD_DIMS or problem.value_dim not in HEAD_DIMS:
        return False, (
            f"the kernels take K and V of {HEAD_DIMS[0]} or {HEAD_DIMS[1]}, got {problem.key_dim} and "
            f"{problem.value_dim}"
        )
    return True, ""


def chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_gated_delta_rule`."""
    return run_prefill("gdn", call, _chip(call))


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    return run_prefill("kda", call, _chip(call))


def _chip(call: Call) -> str:
    chip, reason = extension.chip_of(call.q.device)
    if chip is None:
        raise RuntimeError(f"npu: {reason}")
    return chip
