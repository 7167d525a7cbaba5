"""The order in which the kernels read 4-bit weights, made once when experts are prepared. Plain torch, any device.

A weight [E, N, K] becomes int16 words [E, k_tiles, rows, plane]: a word holds four codes of one row that lie `plane`
columns apart, so the four nibble planes of a tile of words are four contiguous slices of K, and each meets a
contiguous slice of the activations: nothing is interleaved and nothing has to be shuffled in the kernel. All rows of
a K tile lie together, so the tile of any number of rows that a program reads is one contiguous piece of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.quantization import QuantizedWeight
from vllm_ext.quantization.weight import SYMMETRIC_ZERO, unpack_nibbles

ROW_ALIGN = 16  # rows of one tensor-core fragment
PLANES = 4  # nibbles in an int16 word
_PLANE_WIDTHS = (32, 16)
_PADDING_TOLERANCE = 1.03


@dataclass(frozen=True)
class KernelWeight:
    """A weight in kernel order.

    words    int16 [E, k_tiles, rows, plane]
    factors  floating [E, groups, rows, 2]: scale and zero point, so that one load brings both
    """

    words: torch.Tensor
    factors: torch.Tensor


def plane_width(columns: int, group_size: int) -> int:
    """Columns of one nibble plane: the widest that pads K by not much more than it must.

    Tiles of four planes stay within a group where a width allows it, as the persistent kernels ask; else planes do. A
    group size that is no multiple of 16 gets the width that pads least; the kernel then scales column by column.
    """
    whole = [width for width in _PLANE_WIDTHS if group_size % (PLANES * width) == 0]
    usable = whole or [width for width in _PLANE_WIDTHS if group_size % width == 0] or list(_PLANE_WIDTHS)
    padded = {width: -(-columns // (PLANES * width)) * PLANES * width for width in usable}
    least = min(padded.values())
    return next(width for width in usable if padded[width] <= least * _PADDING_TOLERANCE)


def padded_rows(rows: int, gated: bool) -> int:
    """Rows in kernel order of `rows` output features, or, gated, of so many gate and as many up rows."""
    align = ROW_ALIGN // 2 if gated else ROW_ALIGN
    return -(-rows // align) * align * (2 if gated else 1)


def interleave_rows(tensor: torch.Tensor, gated: bool) -> torch.Tensor:
    """[E, N, ...] to [E, rows, ...]: rows padded with zeros to a multiple of 16, gate and up rows eight about eight.

    A thread that holds tensor-core accumulators holds rows r and r + 8 of a fragment: laid out so, it holds a gate
    value and the up value that it multiplies.
    """
    if not gated:
        return _pad(tensor, 1, ROW_ALIGN)
    half = ROW_ALIGN // 2
    gate, up = tensor.chunk(2, dim=1)
    parts = [_pad(part, 1, half) for part in (gate, up)]
    pair = torch.stack([part.reshape(part.shape[0], -1, half, *part.shape[2:]) for part in parts], dim=2)
    return pair.flatten(1, 3).contiguous()


def to_kernel_order(weight: QuantizedWeight, gated: bool, dtype: torch.dtype, plane: int | None = None) -> KernelWeight:
    """Reorder a weight [E, N, K], one expert at a time to bound memory; `gated`: gate rows, then up rows.

    Scales and zero points keep the scales' dtype where it is as narrow as the activations' `dtype`, else take that.
    Integer zero points, and the 8 of symmetric weights, are exact in either.
    """
    experts, _, columns = weight.shape
    plane = plane or plane_width(columns, weight.group_size)
    words = torch.stack([_words(weight.packed[e : e + 1], columns, gated, plane)[0] for e in range(experts)])
    zero = weight.zero_point if weight.zero_point is not None else torch.full_like(weight.scale, SYMMETRIC_ZERO)
    factor_dtype = weight.scale.dtype if weight.scale.dtype.itemsize <= dtype.itemsize else dtype
    factors = torch.stack((weight.scale.to(factor_dtype), zero.to(factor_dtype)), dim=-1)
    return KernelWeight(words, interleave_rows(factors, gated).transpose(1, 2).contiguous())


def _words(packed: torch.Tensor, columns: int, gated: bool, plane: int) -> torch.Tensor:
    codes = interleave_rows(unpack_nibbles(packed, columns), gated)
    codes = _pad(codes, 2, PLANES * plane).to(torch.int32)
    codes = codes.reshape(*codes.shape[:2], -1, PLANES, plane)
    word = codes[:, :, :, 0] | codes[:, :, :, 1] << 4 | codes[:, :, :, 2] << 8 | codes[:, :, :, 3] << 12
    word = torch.where(word >= 1 << 15, word - (1 << 16), word)
    return word.to(torch.int16).transpose(1, 2).contiguous()


def _pad(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
