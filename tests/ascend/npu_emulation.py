"""CPU kernels for the few torch_npu and vLLM-Ascend operators that experts in 4 bits call, for tests.

What each computes, and which arguments it refuses, is taken from the documentation that torch_npu ships
(torch_npu/_op_plugin_docs.py) of npu_grouped_matmul, npu_convert_weight_to_int4pack, npu_swiglu,
npu_moe_init_routing_v2, npu_moe_token_unpermute and npu_moe_gating_top_k_softmax, and for vLLM-Ascend's
npu_moe_init_routing_custom and moe_gating_top_k from how its Python calls them. The kernels are registered under the
real schemas, so every call is also checked against those: torch_npu's by its own library, vLLM-Ascend's by the schema
strings inside its compiled extension. How the hardware rounds is not emulated: results are exact and rounded once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

Tensors = list[torch.Tensor]
calls: list[dict[str, Any]] = []
"""What the grouped matmul was called with, newest last."""


def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """int32 [rows, N] in -8..7 to int32 [rows, N / 8]; the order inside an int32 is the device's secret, ours here."""
    assert weight.dtype == torch.int32, weight.dtype
    assert weight.dim() == 2, weight.shape
    assert weight.is_contiguous()
    assert weight.shape[1] % 8 == 0, "the last dimension must be aligned to 8"
    assert int(weight.min()) >= -8
    assert int(weight.max()) <= 7
    nibbles = (weight & 0xF).long().unflatten(1, (-1, 8))
    packed = sum(nibbles[..., place] << (4 * place) for place in range(8))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., N / 8] to FP32 [..., N] in -8..7."""
    nibbles = torch.stack([(packed >> (4 * place)) & 0xF for place in range(8)], dim=-1).flatten(-2)
    return torch.where(nibbles >= 8, nibbles - 16, nibbles).float()


def grouped_matmul(x: Tensors, weight: Tensors, *, group_list: Any = None, **options: Any) -> Tensors:
    """One x, one weight [E, K, N], rows grouped along m: the documentation's formula 4, or 1 without scales."""
    given = {name: value for name, value in options.items() if value is not None}
    scale, offset = given.pop("antiquant_scale", None), given.pop("antiquant_offset", None)
    split_item, group_type = given.pop("split_item", 0), given.pop("group_type", None)
    group_list_type, output_dtype = given.pop("group_list_type", 0), given.pop("output_dtype", None)
    assert not [name for name, value in given.items() if value not in (0, [])], given
    assert (len(x), len(weight), split_item, group_type) == (1, 1, 2, 0), "one tensor each, out in one, grouped along m"
    (rows,), (matrix,) = x, weight
    assert rows.dim() == 2, rows.shape
    assert matrix.dim() == 3, matrix.shape
    assert rows.dtype in (torch.float16, torch.bfloat16), rows.dtype
    assert group_list.dtype == torch.int64, group_list.dtype
    assert group_list.shape == (matrix.shape[0],), (group_list.shape, matrix.shape)
    if scale is None:
        assert matrix.dtype == rows.dtype, (matrix.dtype, rows.dtype)
        values = matrix.float()
    else:
        assert matrix.dtype == torch.int32, "int4, eight in an int32"
        codes = unpack_int4(matrix)
        assert len(scale) == len(offset) == 1
        groups = scale[0].shape[1]
        assert scale[0].shape == offset[0].shape == (codes.shape[0], groups, codes.shape[2]), scale[0].shape
        assert scale[0].dtype == offset[0].dtype == rows.dtype, (scale[0].dtype, offset[0].dtype, rows.dtype)
        assert codes.shape[1] % groups == 0, f"{groups} groups do not divide K={codes.shape[1]}"
        spread = [t.float().repeat_interleave(codes.shape[1] // groups, dim=1) for t in (scale[0], offset[0])]
        values = (codes + spread[1]) * spread[0]
    assert rows.shape[1] == values.shape[1], (rows.shape, values.shape)
    assert max(rows.shape[1], values.shape[2]) < 65536
    counts = group_list if group_list_type == 1 else torch.diff(group_list, prepend=group_list.new_zeros(1))
    assert int(counts.min()) >= 0
    total = int(counts.sum())
    assert total <= rows.shape[0], (total, rows.shape)
    calls.append(
        {"rows": rows.shape[0], "counted": total, "group_list_type": group_list_type, "antiquant": bool(scale)}
    )
    # Rows beyond the groups are undefined.
    out = torch.full((rows.shape[0], values.shape[2]), float("nan"))
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            out[begin : begin + count] = (rows[begin : begin + count].double() @ values[expert].double()).float()
        begin += count
    dtype = rows.dtype
    if output_dtype is not None:
        assert output_dtype in _dtype_codes(dtype), f"output_dtype {output_dtype} is not {dtype}"
    return [out.to(dtype)]


def _dtype_codes(dtype: torch.dtype) -> tuple[Any, ...]:
    """A dtype as an operator may receive it: itself, or its number."""
    return dtype, {torch.float16: 5, torch.bfloat16: 15}[dtype]


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """A * sigmoid(A) * B for the halves A, B of x."""
    first, second = x.float().chunk(2, dim=dim)
    return (first * torch.sigmoid(first) * second).to(x.dtype)


def init_routing(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    expert_num: int = -1,
    active_expert_range: Any = (),
    expert_tokens_num_type: int = 0,
    quant_mode: int = -1,
    row_idx_type: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x sorted by expert, those of the range [start, end) first; where each (token, slot) went; counts or sums.

    row_idx_type 0: row of the sorted x by (token, slot), -1 outside the range. Rows behind the range's are undefined.
    """
    assert quant_mode == -1, "experts in 4 bits take 16-bit activations"
    assert row_idx_type == 0
    start, end = active_expert_range
    top_k = expert_idx.shape[1]
    flat = expert_idx.flatten().long()
    inside = (flat >= start) & (flat < end)
    order = torch.argsort(torch.where(inside, flat, expert_num), stable=True)
    active = int(inside.sum())
    out = torch.full((flat.numel(), x.shape[1]), float("nan"), dtype=x.dtype)
    out[:active] = x[order[:active] // top_k]
    where = torch.full_like(flat, -1)
    where[order[:active]] = torch.arange(active)
    counts = torch.bincount(flat[inside] - start, minlength=end - start)
    tokens = counts.cumsum(0) if expert_tokens_num_type == 0 else counts
    return out, where.int(), tokens, x.new_empty(0, dtype=torch.float32)


def token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> torch.Tensor:
    """Sum over a token's slots of prob * row. A slot of probability 0 counts nothing, whatever its row holds."""
    assert probs is not None
    assert not padded_mode
    rows = permuted_tokens[sorted_indices.long()].float().unflatten(0, probs.shape)
    weighted = torch.where(probs[..., None] != 0, rows * probs[..., None].float(), 0.0)
    return weighted.sum(1).to(permuted_tokens.dtype)


def gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of a softmax, their experts, and row numbers nobody here reads."""
    weights, ids = torch.softmax(x.float(), dim=-1).topk(k, dim=-1)
    return weights.to(x.dtype), ids.int(), torch.zeros_like(ids, dtype=torch.int32)


def gating_top_k(
    x: torch.Tensor, k: int, k_group: int, group_count: int, group_select_mode: int, renorm: int, norm_type: int,
    out_flag: bool, routed_scaling_factor: float, eps: float, bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The k largest of a softmax or sigmoid, renormalised when asked."""
    assert (k_group, group_count, bias_opt) == (1, 1, None), "ungrouped and unbiased only"
    scores = torch.softmax(x.float(), dim=-1) if norm_type == 0 else torch.sigmoid(x.float())
    weights, ids = scores.topk(k, dim=-1)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), scores


def register() -> None:
    """Let torch_npu's operators compute CPU tensors; torch_npu must have been imported."""
    library = torch.library.Library("npu", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for name, function in (
        ("npu_convert_weight_to_int4pack", convert_weight_to_int4pack),
        ("npu_grouped_matmul", grouped_matmul),
        ("npu_swiglu", swiglu),
        ("npu_moe_init_routing_v2", init_routing),
        ("npu_moe_token_unpermute", token_unpermute),
        ("npu_moe_gating_top_k_softmax", gating_top_k_softmax),
    ):
        library.impl(name, function)  # type: ignore[no-untyped-call]
    _KEPT.append(library)


def register_ascend(extension: Path) -> None:
    """vLLM-Ascend's own operators, under the schemas that its compiled extension holds."""
    binary = extension.read_bytes().decode("latin-1")
    library = torch.library.Library("_C_ascend", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, function in (("npu_moe_init_routing_custom", init_routing), ("moe_gating_top_k", gating_top_k)):
        found = re.search(rf"{name}\([^\0]*\) ?-> ?\([^\0]*\)", binary)
        assert found, f"no schema of {name} in {extension.name}"
        library.define(" ".join(found.group().split()))  # type: ignore[no-untyped-call]
        library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    _KEPT.append(library)


_KEPT: list[Any] = []  # a library that is let go takes its kernels along
