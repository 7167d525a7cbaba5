"""Backend "npu": experts in 4 bits on Ascend NPUs, by torch_npu's grouped matmul.

A2 and A3 multiply int4 weights with scale and offset; a 310P keeps them in 4 bits and widens an expert to FP16 when it
is used. Never run on hardware so far; what was run instead is in docs/ascend.md. Imports no Triton.
"""

from __future__ import annotations

import torch

from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta, PreparedExperts
from vllm_ext.ops.moe.experts import experts_meta as make_meta
from vllm_ext.ops.moe.npu import device as npu_device
from vllm_ext.ops.moe.npu.grouped import grouped_experts, widened_experts
from vllm_ext.ops.moe.npu.layout import MAX_EXPERTS, antiquant, expert_sizes
from vllm_ext.ops.moe.routing import NOT_ROUTED, local_expert_ids
from vllm_ext.quantization import QuantizedWeight

NAME = "npu"


def usable(device: torch.device) -> tuple[bool, str]:
    """Runs where torch_npu does."""
    if device.type != "npu":
        return False, f"torch_npu's operators need an NPU, not {device.type}"
    try:
        npu_device.torch_npu()
    except RuntimeError as error:
        return False, str(error)
    return True, ""


def prepare(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PreparedExperts:
    """The order of the chip's products, on `device`.

    Raises ValueError, with the remedy, where the operator's rules on sizes, groups or dtypes cannot be met.
    """
    meta = make_meta(NAME, w13, w2, dtype)
    wide = not npu_device.takes_antiquant(device)
    check_dtype(dtype, wide)
    w13, w2 = w13.to(device), w2.to(device)
    tensors = _plain(w13, w2) if wide else _antiquant(w13, w2, meta)
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if bias is not None:
            tensors[name] = (
                _filled_bias(bias.to(device), meta, tensors, wide) if name == "w13_bias" else bias.to(device)
            )
    return PreparedExperts(meta, tensors)


def check_dtype(dtype: torch.dtype, fp16_only: bool) -> None:
    """Raises ValueError for a dtype the chip's products do not take."""
    if fp16_only and dtype != torch.float16:
        raise ValueError(
            f"npu: a 310P computes in FP16 and has no {str(dtype).removeprefix('torch.')}; serve with --dtype float16 "
            "(a model that needs BF16's range cannot be served on a 310P)"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"npu: experts run in FP16 or BF16, got {dtype}; serve with --dtype bfloat16 or float16")


def _plain(w13: QuantizedWeight, w2: QuantizedWeight) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, weight in (("w13", w13), ("w2", w2)):
        if weight.shape[-1] % 2:
            raise ValueError(
                f"npu: columns of {name} must be even, got {weight.shape[-1]}; serve this model unquantised"
            )
        tensors[name], tensors[f"{name}_scale"] = weight.packed, weight.scale
        if weight.zero_point is not None:
            tensors[f"{name}_zero_point"] = weight.zero_point
    return tensors


def _antiquant(w13: QuantizedWeight, w2: QuantizedWeight, meta: ExpertsMeta) -> dict[str, torch.Tensor]:
    if meta.num_experts > MAX_EXPERTS:
        raise ValueError(
            f"npu: npu_grouped_matmul takes at most {MAX_EXPERTS} experts a rank, got {meta.num_experts}; use expert "
            "parallelism"
        )
    sizes = expert_sizes(meta.hidden_size, meta.intermediate_size, meta.group_size_w13, meta.group_size_w2)
    shapes = (
        ("w13", w13, sizes.group_w13, sizes.intermediate, meta.hidden_size, 2 if meta.gated else 1),
        ("w2", w2, sizes.group_w2, meta.hidden_size, sizes.intermediate, 1),
    )
    tensors = {}
    for name, weight, group, rows, columns, halves in shapes:
        made = antiquant(weight, group, rows, columns, halves=halves, dtype=meta.dtype, pack=npu_device.pack_int4)
        tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_offset"] = made.weight, made.scale, made.offset
    return tensors


def _filled_bias(bias: torch.Tensor, meta: ExpertsMeta, tensors: dict[str, torch.Tensor], wide: bool) -> torch.Tensor:
    """The first product's bias [E, 2I or I], with zeros where I was filled up."""
    if wide:
        return bias
    halves = 2 if meta.gated else 1
    missing = tensors["w2"].shape[1] - meta.intermediate_size
    return torch.cat([torch.nn.functional.pad(part, (0, missing)) for part in bias.chunk(halves, dim=1)], dim=1)


def apply(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """[M, H]. Slots that are not routed are computed by the last expert and left out of the sum, as the operator wants
    its counts to add up to the rows; with an expert_map, where they are many, they are dropped: that waits for the NPU.
    """
    if options.batch_invariant:
        raise ValueError(
            "npu: batch-invariant experts are not offered: how torch_npu's grouped matmul tiles its rows is not known; "
            "drop batch_invariant"
        )
    meta, tensors = experts.meta, experts.tensors
    num_tokens, top_k = topk_ids.shape
    ids = local_expert_ids(topk_ids, expert_map, meta.num_experts).flatten()
    routed = ids != NOT_ROUTED
    key = torch.where(routed, ids, meta.num_experts if expert_map is not None else meta.num_experts - 1)
    order = torch.argsort(key.float(), stable=True)  # integers torch_npu sorts on the chip's CPU, as it warns
    if expert_map is not None:
        order = order[: int(routed.sum())]
    slots = hidden_states.new_zeros(num_tokens * top_k, meta.hidden_size)
    if order.numel():
        x = hidden_states.index_select(0, order // top_k)
        if options.apply_router_weight_on_input:
            x = x * topk_weights.flatten().index_select(0, order)[:, None].to(x.dtype)
        compute = grouped_experts if "w13_offset" in tensors else widened_experts
        slots = slots.index_copy(0, order, compute(x, key.index_select(0, order), meta, tensors, options))
    out = torch.zeros(num_tokens, meta.hidden_size, dtype=torch.float32, device=hidden_states.device)
    slots, keep = slots.view(num_tokens, top_k, -1), routed.view(num_tokens, top_k)
    for slot in range(top_k):
        weight = 1.0 if options.apply_router_weight_on_input else topk_weights[:, slot, None].float()
        out = out + torch.where(keep[:, slot, None], slots[:, slot].float() * weight, 0.0)
    return out.to(hidden_states.dtype)
