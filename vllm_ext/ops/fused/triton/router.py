"""Softmax and top-k over the experts, one program a token."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device


@triton.jit
def _softmax_topk_kernel(
    logits,
    expert_scale,
    weights,
    ids,
    stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    x = tl.load(logits + token * stride + expert, mask=expert < EXPERTS, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, axis=0))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.float32)
    numbers = tl.zeros([SLOTS], tl.int32)
    left = tl.where(expert < EXPERTS, p, -1.0)
    for k in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        number = tl.min(tl.where(left == best, expert, BLOCK), axis=0)
        chosen = tl.where(slot == k, best, chosen)
        numbers = tl.where(slot == k, number, numbers)
        left = tl.where(expert == number, -2.0, left)
    chosen = chosen / tl.sum(chosen, axis=0)
    if SCALED:
        chosen *= tl.load(expert_scale + numbers).to(tl.float32)
    tl.store(weights + token * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(ids + token * TOP_K + slot, numbers, mask=slot < TOP_K)


@on_its_device
def softmax_topk(
    logits: torch.Tensor, top_k: int, expert_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights FP32 [M, k], ids int32 [M, k])."""
    tokens, experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    _softmax_topk_kernel[(tokens,)](
        logits,
        logits if expert_scale is None else expert_scale,
        weights,
        ids,
        logits.stride(0),
        EXPERTS=experts,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        SCALED=expert_scale is not None,
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1 if experts <= 512 else 4,
    )
    return weights, ids
