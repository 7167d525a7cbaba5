"""The sum over a token's slots, in slot order: no atomics, so equal inputs give equal bits."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.ops.moe.triton.align_kernels import local_expert
from vllm_ext.ops.moe.triton.launch_sizes import cdiv, next_power_of_2
from vllm_ext.ops.moe.triton.pdl import carve_shared_memory, dependent_launch, wait_for_previous
from vllm_ext.ops.moe.triton.replay import launch

_MOST_SLOTS = 63  # bits of the word that holds which of a token's slots are routed


@triton.jit(do_not_specialize_on_alignment=["topk_ids", "topk_weights", "expert_map"])
def _combine_kernel(
    slots,
    topk_ids,
    topk_weights,
    expert_map,
    out,
    num_experts,
    num_global,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The routing was there before the layer began: reading it need not wait for the second GEMM.
    routed = token * 0
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        expert = local_expert(tl.load(topk_ids + slot), slot >= 0, expert_map, num_experts, num_global, HAS_MAP)
        routed |= (expert >= 0).to(tl.int64) << k
    wait_for_previous(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        wanted = tl.where((routed >> k) & 1 != 0, column, COLUMNS) < COLUMNS
        value = tl.load(slots + slot * COLUMNS + column, mask=wanted, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(topk_weights + slot).to(tl.float32)
            # A slot that is not routed adds 0 whatever its weight holds.
            value *= tl.where((routed >> k) & 1 != 0, weight, 0.0)
        total += value
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=column < COLUMNS)


def combine(
    slots: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    weighted: bool,
) -> torch.Tensor:
    """out [M, H] = sum over k of slots[m * top_k + k] (times topk_weights[m, k] if `weighted`), FP32 inside."""
    tokens, top_k = topk_ids.shape
    if top_k > _MOST_SLOTS:
        raise ValueError(
            f"fused_moe_w4a16: the triton backend adds up at most {_MOST_SLOTS} experts a token, got top_k {top_k}; "
            'prepare the experts with backend="reference"'
        )
    columns = slots.shape[1]
    out = torch.empty(tokens, columns, dtype=slots.dtype, device=slots.device)
    block = min(1024, next_power_of_2(columns))
    kernel = launch(
        _combine_kernel,
        (tokens, cdiv(columns, block)),
        slots,
        topk_ids,
        topk_weights,
        expert_map if expert_map is not None else topk_ids,
        out,
        num_experts,
        expert_map.shape[0] if expert_map is not None else 0,
        COLUMNS=columns,
        TOP_K=top_k,
        HAS_MAP=expert_map is not None,
        WEIGHTED=weighted,
        BLOCK=block,
        PDL=dependent_launch(slots.device),
        num_warps=4,
        launch_pdl=dependent_launch(slots.device),
    )
    if dependent_launch(slots.device):
        carve_shared_memory(kernel)
    return out
