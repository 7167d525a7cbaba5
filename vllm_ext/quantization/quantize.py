"""`quantize_weight`: from a floating weight to codes, scales and zero points, vectorised over every leading dimension."""

from __future__ import annotations

import torch

from vllm_ext.quantization.weight import LEVELS, QuantizedWeight, group_count, pack_nibbles

ZERO_POINTS = ("float", "int")
METHODS = ("hqq", "minmax")


def check_group_size(group_size: int) -> None:
    """Raise ValueError unless `group_size` is a positive multiple of 8."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size <= 0 or group_size % 8:
        raise ValueError(f"quantize_weight: group_size must be a positive multiple of 8, got {group_size!r}")


def quantize_weight(
    weight: torch.Tensor,
    group_size: int,
    *,
    symmetric: bool = False,
    zero_point: str = "float",
    method: str = "hqq",
) -> QuantizedWeight:
    """Quantise `weight` [..., N, K] to 4 bits in groups of `group_size` columns."""
    check_group_size(group_size)
    columns = weight.shape[-1]
    groups = group_count(columns, group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - columns), value=float("nan"))
    grouped = padded.unflatten(-1, (groups, group_size))
    low = torch.nan_to_num(grouped, nan=float("inf"), posinf=float("inf")).amin(-1)
    high = torch.nan_to_num(grouped, nan=float("-inf"), neginf=float("-inf")).amax(-1)
    store = weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    scale = ((high - low) / (LEVELS - 1)).clamp(min=1e-8).to(store)
    zero = (-low / scale.float()).to(store)
    codes = torch.round(torch.nan_to_num(grouped) / scale.float()[..., None] + zero.float()[..., None]).clamp(0, LEVELS - 1)
    codes = codes.flatten(-2)[..., :columns].to(torch.uint8)
    return QuantizedWeight(pack_nibbles(codes), scale, zero, group_size, weight.shape)
