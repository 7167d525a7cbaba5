"""Where Triton kernels run; what both Triton backends, experts and linear attention, tell their dispatchers."""

from __future__ import annotations

import torch
import triton

MINIMUM_CAPABILITY = (8, 0)


def interpreting() -> bool:
    """True under TRITON_INTERPRET=1: kernels run on the CPU, for tests."""
    return bool(triton.knobs.runtime.interpret)


def usable(device: torch.device) -> tuple[bool, str]:
    """CUDA devices from compute capability 8.0; any device under Triton's interpreter."""
    if interpreting():
        return True, "Triton's interpreter, for tests only"
    if device.type != "cuda":
        return False, f"Triton kernels need a CUDA device, not {device.type!r} (TRITON_INTERPRET=1 runs them for tests)"
    if not torch.cuda.is_available():
        return False, "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return False, f"compute capability {capability} is below {MINIMUM_CAPABILITY}"
    return True, f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
