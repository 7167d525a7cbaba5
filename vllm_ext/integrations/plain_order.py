"""Prepared experts back to the plain order of checkpoints, so that weights need not be held twice to be saved."""

from __future__ import annotations

import torch

from vllm_ext.ops.moe import PreparedExperts
from vllm_ext.quantization import QuantizedWeight, pack_nibbles

_HALF_FRAGMENT = 8


def plain_order(
    prepared: PreparedExperts, zero_point_kind: str | None, scale_dtype: torch.dtype | None = None
) -> tuple[QuantizedWeight, QuantizedWeight] | None:
    """(w13, w2) of experts the Triton or the reference backend prepared; None for another backend."""
    meta, tensors = prepared.meta, prepared.tensors
    first = torch.Size((meta.num_experts, meta.intermediate_size * (2 if meta.gated else 1), meta.hidden_size))
    second = torch.Size((meta.num_experts, meta.hidden_size, meta.intermediate_size))
    sides = (("w13", first, meta.group_size_w13, meta.gated), ("w2", second, meta.group_size_w2, False))
    if meta.backend == "reference":
        made = [
            QuantizedWeight(tensors[f"{n}_packed"], tensors[f"{n}_scale"], tensors.get(f"{n}_zero_point"), group, shape)
            for n, shape, group, _ in sides
        ]
    elif meta.backend == "triton" and all(f"{n}_words" in tensors for n, *_ in sides):
        made = [
            _from_kernel(
                tensors[f"{n}_words"], tensors[f"{n}_factors"], shape, group, gated, zero_point_kind, scale_dtype
            )
            for n, shape, group, gated in sides
        ]
    else:
        return None
    return made[0], made[1]


def _from_kernel(
    words: torch.Tensor,
    factors: torch.Tensor,
    shape: torch.Size,
    group_size: int,
    gated: bool,
    kind: str | None,
    scale_dtype: torch.dtype | None,
) -> QuantizedWeight:
    codes = torch.stack([_codes(words[expert], shape, gated) for expert in range(shape[0])])
    both = _separate(factors.transpose(1, 2), shape[1], gated)
    scale, zero = both[..., 0].contiguous(), both[..., 1].contiguous()
    point = None if kind is None else zero.to(torch.uint8) if kind == "int" else zero.to(scale_dtype or zero.dtype)
    return QuantizedWeight(codes, scale.to(scale_dtype or scale.dtype), point, group_size, shape)


def _codes(words: torch.Tensor, shape: torch.Size, gated: bool) -> torch.Tensor:
    """int16 [k_tiles, rows, plane] of one expert to packed nibbles [N, K / 2]."""
    wide = words.to(torch.int32) & 0xFFFF
    planes = torch.stack([(wide >> (4 * nibble)) & 0xF for nibble in range(4)], dim=2)
    codes = planes.to(torch.uint8).transpose(0, 1).flatten(1)
    return pack_nibbles(_separate(codes[None], shape[1], gated)[0][:, : shape[2]])


def _separate(tensor: torch.Tensor, rows: int, gated: bool) -> torch.Tensor:
    """[E, padded rows, ...] to [E, rows, ...], undoing eight gate rows about eight up rows."""
    if not gated:
        return tensor[:, :rows]
    pairs = tensor.reshape(tensor.shape[0], -1, 2, _HALF_FRAGMENT, *tensor.shape[2:])
    halves = [pairs[:, :, i].flatten(1, 2)[:, : rows // 2] for i in range(2)]
    return torch.cat(halves, dim=1)
