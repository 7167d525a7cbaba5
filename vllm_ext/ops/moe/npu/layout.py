"""4-bit experts in the order that torch_npu's grouped matmul with antiquantisation reads.

The operator computes x * (weight + antiquant_offset) * antiquant_scale with an int4 weight [E, K, N], eight of whose
columns share an int32, and scale and offset [E, G, N] in the activation's dtype; G must divide K (torch_npu's own
documentation of npu_grouped_matmul). Our weight is [E, N, K] with codes 0..15 and values scale * (code - zero_point):
weight = code - 8, offset = 8 - zero_point, everything transposed, groups made even.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_ext.quantization import QuantizedWeight, regroup
from vllm_ext.quantization.weight import SYMMETRIC_ZERO, unpack_nibbles

PACKED = 8  # int4 columns an int32 holds
SMALL_GROUP = 32  # rather pad than cut groups smaller than this
MAX_INNER = 65536  # of the operator, exclusive: columns of a row of x and of the weight
MAX_EXPERTS = 1024  # of the operator's group_list

PackInt4 = Callable[[torch.Tensor], torch.Tensor]
"""int32 [rows, N] in -8..7 to int32 [rows, N / 8], in the device's own order."""


@dataclass(frozen=True)
class Antiquant:
    """A weight for the operator: weight int32 [E, K, N / 8], scale and offset [E, G, N]."""

    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor


@dataclass(frozen=True)
class ExpertSizes:
    """How a pair of weights is cut and padded: groups along H and along I, and I filled up with zero weights."""

    group_w13: int
    group_w2: int
    intermediate: int


def expert_sizes(hidden: int, intermediate: int, group_w13: int, group_w2: int) -> ExpertSizes:
    """Even groups for both weights. Groups are cut to their common divisor with the size, exactly, unless they became
    smaller than 32 along I; then I is filled up to whole groups with zero weights, exactly too.

    Raises ValueError naming the rule and the remedy where the operator's rules cannot be met.
    """
    if hidden % PACKED:
        raise ValueError(
            f"npu: the hidden size must be a multiple of {PACKED}, eight 4-bit columns share an int32, got {hidden}; "
            "serve this model unquantised"
        )
    even_w13 = math.gcd(hidden, group_w13)
    if even_w13 % 8:
        raise ValueError(
            f"npu: groups must divide the hidden size evenly, and {hidden} in groups of {group_w13} leaves only groups "
            f"of {even_w13}; choose group_size_w13 as a multiple of 8 that divides {hidden}, or serve unquantised"
        )
    even_w2 = math.gcd(intermediate, group_w2)
    if even_w2 >= min(SMALL_GROUP, group_w2) and even_w2 % 8 == 0:
        padded = intermediate
    else:
        even_w2, padded = group_w2, -(-intermediate // group_w2) * group_w2
    for name, size in (("hidden size", hidden), ("gate and up columns", 2 * padded)):
        if size >= MAX_INNER:
            raise ValueError(
                f"npu: npu_grouped_matmul takes rows of fewer than {MAX_INNER}, the {name} are {size}; use more "
                "tensor-parallel ranks"
            )
    return ExpertSizes(even_w13, even_w2, padded)


def antiquant(
    weight: QuantizedWeight, group: int, rows: int, columns: int, *, halves: int, dtype: torch.dtype, pack: PackInt4
) -> Antiquant:
    """A weight [E, halves * n, k] for the operator, in groups of `group`, each half filled up to `rows` x `columns`.

    One expert at a time, so that little is in flight. Codes are kept exactly. The scale is rounded to `dtype`, and so
    is 8 - zero_point: exactly for integer zero points and for those from 4 to 16; below 4 the error is at most a 64th
    of a quantisation step in BF16 and a 512th in FP16, outside 0..16 more in proportion.
    """
    # Whole groups are cut where the size asks for it; a short last group is filled up instead.
    even = regroup(weight, group) if weight.group_size != group else weight
    weights: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for expert in range(weight.shape[0]):
        zero = SYMMETRIC_ZERO if even.zero_point is None else even.zero_point[expert].float()
        scale = even.scale[expert]
        offset = torch.zeros_like(scale, dtype=torch.float32) + (SYMMETRIC_ZERO - zero)
        codes = unpack_nibbles(even.packed[expert], even.shape[-1]).to(torch.int32) - SYMMETRIC_ZERO
        weights.append(pack(_filled(codes, rows, columns, halves).transpose(0, 1).contiguous()))
        for parts, values in ((scales, scale), (offsets, offset)):
            parts.append(_filled(values.to(dtype), rows, columns // group, halves).transpose(0, 1))
    return Antiquant(torch.stack(weights), torch.stack(scales).contiguous(), torch.stack(offsets).contiguous())


def _filled(values: torch.Tensor, rows: int, columns: int, halves: int) -> torch.Tensor:
    """[halves * n, k] to [halves * rows, columns], zeros behind each half's rows and columns."""
    parts = values.chunk(halves)
    n, k = parts[0].shape
    return torch.cat([torch.nn.functional.pad(part, (0, columns - k, 0, rows - n)) for part in parts])
