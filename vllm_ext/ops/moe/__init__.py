"""Mixture of experts on 4-bit weights and 16-bit activations: one dispatcher over the backends beside it."""

from vllm_ext.ops.moe.dispatch import backend_status, fused_moe_w4a16, prepare_experts
from vllm_ext.ops.moe.experts import ACTIVATIONS, CallOptions, ExpertsMeta, PreparedExperts

__all__ = [
    "ACTIVATIONS",
    "CallOptions",
    "ExpertsMeta",
    "PreparedExperts",
    "backend_status",
    "fused_moe_w4a16",
    "prepare_experts",
]
