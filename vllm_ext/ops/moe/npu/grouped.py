"""The experts' two products: grouped on int4 weights (A2, A3), or one expert at a time widened to FP16 (310P)."""

from __future__ import annotations

import torch

from vllm_ext.ops.moe.activation import apply_activation
from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta
from vllm_ext.ops.moe.npu.device import torch_npu
from vllm_ext.quantization.weight import SYMMETRIC_ZERO

Tensors = dict[str, torch.Tensor]


def grouped_experts(
    x: torch.Tensor, expert_of_row: torch.Tensor, meta: ExpertsMeta, tensors: Tensors, options: CallOptions
) -> torch.Tensor:
    """[R, H] in x's dtype: rows are sorted by expert, `expert_of_row` int64 [R] says whose they are."""
    experts = torch.arange(meta.num_experts, device=x.device)
    counts = (expert_of_row == experts[:, None]).sum(1)  # neither a sort nor a histogram, which not every chip has
    first = _product(x, tensors, "w13", counts, expert_of_row)
    if meta.gated and options.activation == "silu":
        middle = torch_npu().npu_swiglu(first)
    else:
        middle = apply_activation(first, meta.gated, options)
    return _product(middle, tensors, "w2", counts, expert_of_row)


def _product(
    x: torch.Tensor, tensors: Tensors, shard: str, counts: torch.Tensor, expert_of_row: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = torch_npu().npu_grouped_matmul(
        x=[x],
        weight=[tensors[shard]],
        antiquant_scale=[tensors[f"{shard}_scale"]],
        antiquant_offset=[tensors[f"{shard}_offset"]],
        split_item=2,  # one tensor out
        group_list_type=1,  # counts
        group_type=0,  # along the rows of x
        group_list=counts,
        output_dtype=x.dtype,
    )[0]
    bias = tensors.get(f"{shard}_bias")
    return out if bias is None else out + bias.index_select(0, expert_of_row).to(out.dtype)


def widened_experts(
    x: torch.Tensor, expert_of_row: torch.Tensor, meta: ExpertsMeta, tensors: Tensors, options: CallOptions
) -> torch.Tensor:
    """The same on a chip whose products take FP16 only: each expert that has rows is widened, used and let go.

    Waits for the device once, to know how many rows each expert has.
    """
    out = x.new_empty(x.shape[0], meta.hidden_size)
    begin = 0
    for expert, count in enumerate(torch.bincount(expert_of_row.cpu(), minlength=meta.num_experts).tolist()):
        if not count:
            continue
        rows = slice(begin, begin + count)
        first = torch.matmul(x[rows], _widened(tensors, "w13", expert, meta.group_size_w13, x.dtype).T)
        if "w13_bias" in tensors:
            first = first + tensors["w13_bias"][expert].to(x.dtype)
        middle = apply_activation(first, meta.gated, options)
        second = torch.matmul(middle, _widened(tensors, "w2", expert, meta.group_size_w2, x.dtype).T)
        out[rows] = second + tensors["w2_bias"][expert].to(x.dtype) if "w2_bias" in tensors else second
        begin += count
    return out


def _widened(tensors: Tensors, shard: str, expert: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] from codes [E, rows, columns / 2], low nibble first, in arithmetic that every chip has."""
    pairs, scale = tensors[shard][expert].float(), tensors[f"{shard}_scale"][expert].float()
    high = torch.floor(pairs / 16)
    codes = torch.stack((pairs - 16 * high, high), dim=-1).flatten(-2)
    zero = tensors.get(f"{shard}_zero_point")
    zeros = SYMMETRIC_ZERO if zero is None else _spread(zero[expert].float(), group, codes.shape[-1])
    limit = torch.finfo(torch.float16).max
    return (_spread(scale, group, codes.shape[-1]) * (codes - zeros)).clamp(-limit, limit).to(dtype)


def _spread(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return values.repeat_interleave(group, dim=-1)[..., :columns]
