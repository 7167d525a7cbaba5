"""Triton kernels of the fused operations; imported only where they run."""
