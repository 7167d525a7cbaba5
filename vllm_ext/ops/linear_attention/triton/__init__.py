"""Triton kernels for linear-attention prefill on NVIDIA GPUs (compute capability 8.0 and up)."""

from vllm_ext.ops.linear_attention.triton.backend import NAME, chunk_gated_delta_rule, chunk_kda, supports, usable

__all__ = ["NAME", "chunk_gated_delta_rule", "chunk_kda", "supports", "usable"]
