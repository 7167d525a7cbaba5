"""Routing: softmax over the experts, the best k, and their weights, in one kernel."""

from __future__ import annotations

import torch

from vllm_ext.ops.fused.device import runs_triton

MAX_EXPERTS = 4096


def softmax_topk(
    logits: torch.Tensor, top_k: int, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights FP32 [M, k] that sum to 1 a row, times `expert_scale` [E] where given; ids int32 [M, k]).

    logits [M, E], any floating dtype; FP32 inside. The best expert comes first, of equals the lowest id.
    """
    if logits.dim() != 2 or not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"softmax_topk: logits must be [M, E >= top_k = {top_k}], got {list(logits.shape)}")
    if runs_triton(logits) and logits.shape[1] <= MAX_EXPERTS and logits.shape[0]:
        from vllm_ext.ops.fused.triton.router import softmax_topk as kernel

        return kernel(logits, top_k, expert_scale)
    # A stable sort, not topk: of equal experts the lowest id must win.
    ordered, ids = torch.sort(logits.float().softmax(-1), dim=-1, descending=True, stable=True)
    weights, ids = ordered[:, :top_k], ids[:, :top_k]
    weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale.float()[ids]
    return weights.contiguous(), ids.to(torch.int32).contiguous()
