"""What the NPU at hand offers for experts in 4 bits."""

from __future__ import annotations

from types import ModuleType

import torch


def torch_npu() -> ModuleType:
    """torch_npu, imported when experts are prepared or run. Raises RuntimeError with the reason."""
    try:
        import torch_npu as module
    except Exception as error:  # CANN's own failures are not ImportError
        raise RuntimeError(f"npu: torch_npu cannot be imported: {error}") from error
    return module


def takes_antiquant(device: torch.device) -> bool:
    """Whether npu_grouped_matmul takes int4 weights with scale and offset: A2 and A3 do, 310P only FP16 weights."""
    name: str = torch.npu.get_device_name(device)  # type: ignore[attr-defined]
    return not name.lower().startswith("ascend310")


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N] in -8..7 to int32 [rows, N / 8], in the order the operators of this device read."""
    packed: torch.Tensor = torch_npu().npu_convert_weight_to_int4pack(values)
    return packed
