"""The definition of fused_moe_w4a16: weights dequantised to FP64, one expert after another, slots summed in order."""

from __future__ import annotations

import torch

from vllm_ext.ops.moe.activation import apply_activation
from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta, PreparedExperts
from vllm_ext.ops.moe.experts import experts_meta as make_meta
from vllm_ext.ops.moe.routing import local_expert_ids
from vllm_ext.quantization import QuantizedWeight

NAME = "reference"


def usable(device: torch.device) -> tuple[bool, str]:
    """Plain torch: usable wherever FP64 is."""
    if device.type == "npu":
        return False, "the reference computes in FP64, which NPUs lack"
    return True, "plain torch in FP64, for checking only"


def prepare(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PreparedExperts:
    """Keep the plain order; only the device changes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in (("w13", w13), ("w2", w2)):
        tensors[f"{name}_packed"] = weight.packed.to(device)
        tensors[f"{name}_scale"] = weight.scale.to(device)
        if weight.zero_point is not None:
            tensors[f"{name}_zero_point"] = weight.zero_point.to(device)
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        if bias is not None:
            tensors[name] = bias.to(device)
    return PreparedExperts(make_meta(NAME, w13, w2, dtype), tensors)


def _dequantize(meta: ExpertsMeta, tensors: dict[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
    rows, columns, group_size = (
        (meta.intermediate_size * (2 if meta.gated else 1), meta.hidden_size, meta.group_size_w13)
        if name == "w13"
        else (meta.hidden_size, meta.intermediate_size, meta.group_size_w2)
    )
    zero = tensors.get(f"{name}_zero_point")
    return QuantizedWeight(
        tensors[f"{name}_packed"][expert],
        tensors[f"{name}_scale"][expert],
        None if zero is None else zero[expert],
        group_size,
        torch.Size((rows, columns)),
    ).dequantize(torch.float64)


def apply(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """[M, H] in hidden_states' dtype, rounded once, at the end."""
    meta, tensors = experts.meta, experts.tensors
    ids = local_expert_ids(topk_ids, expert_map, meta.num_experts)
    slots = hidden_states.new_zeros((*ids.shape, meta.hidden_size), dtype=torch.float64)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        weight = topk_weights[token, slot].double()[:, None]
        x = hidden_states[token].double()
        if options.apply_router_weight_on_input:
            x = x * weight
        first = x @ _dequantize(meta, tensors, "w13", expert).T
        if "w13_bias" in tensors:
            first = first + tensors["w13_bias"][expert].double()
        second = apply_activation(first, meta.gated, options) @ _dequantize(meta, tensors, "w2", expert).T
        if "w2_bias" in tensors:
            second = second + tensors["w2_bias"][expert].double()
        slots[token, slot] = second if options.apply_router_weight_on_input else second * weight
    out = slots.new_zeros((ids.shape[0], meta.hidden_size))
    for slot in range(ids.shape[1]):
        out += slots[:, slot]
    return out.to(hidden_states.dtype)
