"""Calls of the experts of many kinds, alike but for one thing or for where their tensors are; of no values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta, PreparedExperts
from vllm_ext.ops.moe.triton.layout import PLANES, padded_rows, plane_width

B, H = torch.bfloat16, torch.float16


def experts(
    hidden: int = 512,
    intermediate: int = 256,
    count: int = 8,
    groups: tuple[int, int] = (128, 64),
    dtype: torch.dtype = B,
    gated: bool = True,
    bias: bool = False,
    factors: torch.dtype | None = None,
) -> PreparedExperts:
    """Experts as `backend.prepare` lays them out, of no values."""
    meta = ExpertsMeta("triton", count, hidden, intermediate, *groups, gated, "float", dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, columns, rows, group in (
        ("w13", hidden, padded_rows(intermediate, gated), groups[0]),
        ("w2", intermediate, hidden, groups[1]),
    ):
        plane = plane_width(columns, group)
        words = (count, -(-columns // (PLANES * plane)), rows, plane)
        tensors[f"{name}_words"] = torch.zeros(words, dtype=torch.int16)
        tensors[f"{name}_factors"] = torch.zeros(count, -(-columns // group), rows, 2, dtype=factors or dtype)
        if bias:
            tensors[f"{name}_bias"] = torch.zeros(count, rows, dtype=dtype)
    return PreparedExperts(meta, tensors)


# Two of each, alike but for where they are; all of one number of experts and of two hidden sizes, so that calls differ
# in little.
LAYERS = [
    [experts(**kind), experts(**kind)]
    for kind in (
        {},
        {"groups": (128, 128)},
        {"dtype": H},
        {"factors": H},
        {"gated": False},
        {"bias": True},
        {"hidden": 256, "intermediate": 3584},
        {"hidden": 2048, "count": 16, "intermediate": 704, "groups": (64, 64)},
        {"dtype": torch.float32},
        {"intermediate": 250},
        {"intermediate": 512, "groups": (128, 128), "gated": False},
    )
]


@dataclass(frozen=True)
class Arguments:
    """How the tensors of a call are made. Offsets and gaps are in elements."""

    layer: int = 0
    tokens: int = 3
    top_k: int = 2
    x_offset: int = 0
    x_gap: int = 0
    x_reversed: bool = False
    ids_dtype: torch.dtype = torch.int32
    ids_offset: int = 0
    ids_gap: int = 0
    weights_dtype: torch.dtype = torch.float32
    weights_offset: int = 0
    weights_gap: int = 0
    map_dtype: torch.dtype | None = None
    map_size: int = 11
    map_step: int = 1
    options: CallOptions = field(default_factory=CallOptions)

    def make(self, which: int) -> tuple[Any, ...]:
        """The arguments of `backend.apply`, in memory of their own, for the layer or the one like it."""
        layer = LAYERS[self.layer][which]
        meta = layer.meta
        x = _matrix(self.tokens, meta.hidden_size, meta.dtype, self.x_offset, self.x_gap)
        if self.x_reversed:
            x = x.t().contiguous().t()
        ids = _matrix(self.tokens, self.top_k, self.ids_dtype, self.ids_offset, self.ids_gap)
        weights = _matrix(self.tokens, self.top_k, self.weights_dtype, self.weights_offset, self.weights_gap)
        expert_map = None
        if self.map_dtype is not None:
            expert_map = torch.zeros(self.map_size * self.map_step, dtype=self.map_dtype)[:: self.map_step]
        return x, layer, weights, ids, expert_map, self.options


def _matrix(rows: int, columns: int, dtype: torch.dtype, offset: int, gap: int) -> torch.Tensor:
    whole = torch.zeros(offset + rows * (columns + gap), dtype=dtype)
    return whole[offset:].view(rows, columns + gap)[:, :columns]
