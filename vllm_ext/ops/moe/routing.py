"""Routing ids as every backend must read them: which (token, slot) pairs this rank computes, and with which expert."""

from __future__ import annotations

import torch

NOT_ROUTED = -1


def local_expert_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Local expert of each (token, slot), int64 [M, top_k], NOT_ROUTED where there is none.

    topk_ids    int32 or int64 [M, top_k], global ids; never written to. CUDA-graph padding and idle data-parallel ranks
                give -1, Hugging Face expert parallelism gives ids == num_experts, stale buffers give larger ones.
    expert_map  int [global_experts], global id -> local id or -1; None when every expert is local
    """
    ids = topk_ids.long()
    if expert_map is not None:
        global_experts = expert_map.shape[0]
        if not global_experts:
            return torch.full_like(ids, NOT_ROUTED)
        known = (ids >= 0) & (ids < global_experts)
        ids = torch.where(known, expert_map.long()[ids.clamp(0, global_experts - 1)], NOT_ROUTED)
    return torch.where((ids >= 0) & (ids < num_experts), ids, NOT_ROUTED)
