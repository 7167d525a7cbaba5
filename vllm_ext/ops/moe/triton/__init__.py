"""Triton kernels for 4-bit experts on NVIDIA GPUs (compute capability 8.0 and up)."""

from vllm_ext.ops.moe.triton.backend import NAME, apply, prepare, usable

__all__ = ["NAME", "apply", "prepare", "usable"]
