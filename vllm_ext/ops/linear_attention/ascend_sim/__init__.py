"""Backend "ascend-sim": the Ascend C prefill kernels on the host simulator of `csrc_ascend/simulator`."""

from __future__ import annotations

import torch

from vllm_ext.ops.linear_attention.ascend_sim import build

NAME = "ascend-sim"


def usable(device: torch.device) -> tuple[bool, str]:
    """Runs on CPU tensors where the kernel sources and a C++ compiler are at hand."""
    if device.type != "cpu":
        return False, f"the simulator computes on CPU tensors, not on {device.type}"
    reason = build.missing()
    return not reason, reason
