"""`quantize_weight`: a floating weight to codes, scales and zero points, vectorised over every leading dimension."""

from __future__ import annotations

import torch

from vllm_ext.quantization.fit import fit
from vllm_ext.quantization.weight import QuantizedWeight, check_group_size, group_count, pack_nibbles

ZERO_POINTS = ("float", "int")
METHODS = ("hqq", "minmax")
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Elements in flight: what stays in a CPU core's cache, and what keeps a GPU busy with temporaries of about 1.2 GiB.
CPU_BLOCK = 1 << 19
DEVICE_BLOCK = 1 << 26


def quantize_weight(
    weight: torch.Tensor,
    group_size: int,
    *,
    symmetric: bool = False,
    zero_point: str = "float",
    method: str = "hqq",
    name: str | None = None,
) -> QuantizedWeight:
    """Quantise `weight` [..., N, K] to 4 bits in groups of `group_size` columns; the last group may be short.

    zero_point "float" stores zero points in the scale's dtype, "int" as uint8 0..15; ignored when `symmetric`.
    method "minmax" is plain rounding to the group's range; "hqq" searches without data and never has a higher squared
    error. Scales take the weight's dtype when it has 16 bits, else BF16. `name` is what errors call the tensor.

    Raises ValueError on a bad option, a weight that is not floating or has under two dimensions, and on NaN or Inf.
    """
    check_group_size(group_size)
    if zero_point not in ZERO_POINTS:
        raise ValueError(f"quantize_weight: zero_point must be one of {ZERO_POINTS}, got {zero_point!r}")
    if method not in METHODS:
        raise ValueError(f"quantize_weight: method must be one of {METHODS}, got {method!r}")
    if not isinstance(symmetric, bool):
        raise ValueError(f"quantize_weight: symmetric must be True or False, got {symmetric!r}")
    label = "weight" if name is None else name
    if weight.dtype not in FLOATING:
        raise ValueError(f"quantize_weight: {label} must be FP16, BF16, FP32 or FP64, got {weight.dtype}")
    if weight.dim() < 2 or weight.shape[-1] == 0:
        raise ValueError(f"quantize_weight: {label} must be [..., N, K] with K > 0, got {tuple(weight.shape)}")

    kind = None if symmetric else zero_point
    store = weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    rows = weight.detach().reshape(-1, weight.shape[-1])
    count, columns = rows.shape
    groups = group_count(columns, group_size)
    packed = torch.empty(count, -(-columns // 2), dtype=torch.uint8, device=weight.device)
    scale = torch.empty(count, groups, dtype=store, device=weight.device)
    zero = None if kind is None else torch.empty_like(scale, dtype=torch.uint8 if kind == "int" else store)

    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    block = max(1, (CPU_BLOCK if weight.device.type == "cpu" else DEVICE_BLOCK) // columns)
    for start in range(0, count, block):
        part = slice(start, start + block)
        # The search's sums are FP32; on a GPU autocast would take its products with ones in 16 bits.
        with torch.autocast(weight.device.type, enabled=False):
            codes, grid_scale, grid_zero, part_finite = _quantize_rows(rows[part], group_size, kind, method, store)
        finite &= part_finite
        packed[part] = pack_nibbles(codes)
        scale[part] = grid_scale
        if zero is not None:
            zero[part] = grid_zero
    # Looked at once, after the last block: a look in each would make a GPU wait for the host.
    if not finite:
        _raise_not_finite(rows, label)

    lead = weight.shape[:-1]
    return QuantizedWeight(
        packed.reshape(*lead, packed.shape[-1]),
        scale.reshape(*lead, groups),
        None if zero is None else zero.reshape(*lead, groups),
        group_size,
        weight.shape,
    )


def _quantize_rows(
    rows: torch.Tensor, group_size: int, kind: str | None, method: str, store: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [R, K], scales and zero points [R, groups] (FP32) and whether all is finite, of rows [R, K]."""
    # A copy: the fit overwrites it.
    rows = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    whole = rows.shape[-1] // group_size * group_size
    codes, scales, zeros, finite = [], [], [], []
    for columns, size in ((rows[:, :whole], group_size), (rows[:, whole:], rows.shape[-1] - whole)):
        if columns.shape[-1]:
            groups = columns.reshape(columns.shape[0], -1, size)
            low, high = torch.aminmax(groups, dim=-1)
            finite.append((torch.isfinite(low) & torch.isfinite(high)).all())
            part, grid = fit(groups, low, high, kind, method, store)
            codes.append(part.flatten(1))
            scales.append(grid.scale)
            zeros.append(grid.zero)
    if len(codes) == 1:
        return codes[0], scales[0], zeros[0], finite[0]
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(zeros, 1), finite[0] & finite[1]


def _raise_not_finite(rows: torch.Tensor, label: str) -> None:
    nan = int(rows.isnan().sum())
    inf = int((~rows.float().isfinite()).sum()) - nan
    raise ValueError(
        f"quantize_weight: {label} has {nan} NaN and {inf} infinite values of {rows.numel()}; "
        "4-bit groups need finite weights: repair the checkpoint, or leave the tensor out with `ignore`"
    )
