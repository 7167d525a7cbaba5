"""Parts of a quantised weight that dequantise to exactly the same numbers: slices for a rank, smaller groups, joins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from vllm_ext.quantization.weight import QuantizedWeight, check_group_size, group_count, pack_nibbles


def local_group_size(columns: int, group_size: int) -> int:
    """The largest group that divides a rank's `columns` evenly and is no larger than `group_size`, else `group_size`.

    For kernels and formats that have no short last group: 704 columns and groups of 128 give 64; a quarter of them,
    176, gives 16. Where no multiple of 8 divides the columns the last group is short.
    """
    check_group_size(group_size)
    if columns <= 0:
        raise ValueError(f"local_group_size: columns must be positive, got {columns}")
    common = math.gcd(columns, group_size)
    return common if common % 8 == 0 else group_size


def regroup(weight: QuantizedWeight, group_size: int) -> QuantizedWeight:
    """`weight` with smaller groups, by repeating scales and zero points. `group_size` must divide the weight's own."""
    check_group_size(group_size)
    if weight.group_size % group_size:
        raise ValueError(f"regroup: groups of {weight.group_size} cannot be cut evenly into groups of {group_size}")
    return slice_columns(weight, 0, weight.shape[-1], group_size)


def slice_quantized(weight: QuantizedWeight, dim: int, start: int, length: int) -> QuantizedWeight:
    """Elements `start` to `start + length` of dimension `dim` of a quantised [..., N, K] weight, exactly.

    Along K a slice that begins inside a group is expressed with a smaller group, the greatest common divisor of
    `start` and the group size, with scales and zero points repeated. Other dimensions keep their groups.

    Raises ValueError when the slice is out of range, or begins at a column no multiple of 8 can express.
    """
    rank = len(weight.shape)
    if not -rank <= dim < rank:
        raise ValueError(f"slice_quantized: dim must be in [-{rank}, {rank}), got {dim}")
    dim %= rank
    size = weight.shape[dim]
    if start < 0 or length < 0 or start + length > size or (dim == rank - 1 and length == 0):
        raise ValueError(
            f"slice_quantized: [{start}, {start + length}) is not a part of dimension {dim} of size {size}"
        )
    if dim == rank - 1:
        group = weight.group_size if start % weight.group_size == 0 else math.gcd(start, weight.group_size)
        if group % 8:
            raise ValueError(
                f"slice_quantized: columns [{start}, {start + length}) of {size} begin {start % weight.group_size} "
                f"columns inside a group of {weight.group_size}; a slice must begin at a multiple of 8: use a "
                "tensor-parallel size whose share of the columns is a multiple of 8"
            )
        return slice_columns(weight, start, length, group)
    zero = weight.zero_point
    return QuantizedWeight(
        weight.packed.narrow(dim, start, length),
        weight.scale.narrow(dim, start, length),
        None if zero is None else zero.narrow(dim, start, length),
        weight.group_size,
        torch.Size((*weight.shape[:dim], length, *weight.shape[dim + 1 :])),
    )


def slice_columns(weight: QuantizedWeight, start: int, length: int, group_size: int) -> QuantizedWeight:
    """Columns of `weight` in groups of `group_size`, which divides the weight's own and (inside a group) `start`."""
    if start % 2 == 0:
        packed = weight.packed[..., start // 2 : -(-(start + length) // 2)]
        if length % 2 and start + length < weight.shape[-1]:
            packed = torch.cat((packed[..., :-1], packed[..., -1:] & 0xF), dim=-1)
    else:
        packed = pack_nibbles(weight.codes()[..., start : start + length])
    first = torch.arange(group_count(length, group_size), device=weight.scale.device) * group_size
    source = (first + start) // weight.group_size
    zero = weight.zero_point
    return QuantizedWeight(
        packed,
        weight.scale.index_select(-1, source),
        None if zero is None else zero.index_select(-1, source),
        group_size,
        torch.Size((*weight.shape[:-1], length)),
    )


def join_quantized(weights: Sequence[QuantizedWeight], dim: int = 0, *, stack: bool = False) -> QuantizedWeight:
    """Concatenate along `dim` (rows or a leading dimension), or stack along a new first dimension, exactly.

    Groups of different sizes are cut to their greatest common divisor. Raises ValueError when kinds of zero point,
    dtypes or shapes differ.
    """
    if not weights:
        raise ValueError("join_quantized: nothing to join")
    rank = len(weights[0].shape)
    if not stack and dim % rank == rank - 1:
        raise ValueError("join_quantized: columns cannot be joined: a group must not span two weights")
    described = {(w.zero_point_kind, w.scale.dtype, w.shape[-1]) for w in weights}
    if len(described) > 1:
        raise ValueError(f"join_quantized: zero point, dtype or columns differ: {sorted(map(str, described))}")
    group = math.gcd(*(w.group_size for w in weights))
    even = [w if w.group_size == group else regroup(w, group) for w in weights]

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors) if stack else torch.cat(tensors, dim=dim)

    zeros = [w.zero_point for w in even if w.zero_point is not None]
    packed = joined([w.packed for w in even])
    shape = torch.Size((*packed.shape[:-1], weights[0].shape[-1]))
    return QuantizedWeight(packed, joined([w.scale for w in even]), joined(zeros) if zeros else None, group, shape)
