"""Weights to quantise, and what came of them."""

from __future__ import annotations

import torch

from vllm_ext.quantization import QuantizedWeight

# (zero points, symmetric)
KINDS = [("float", False), ("int", False), ("int", True)]


def weights(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, spread: float = 0.02) -> torch.Tensor:
    """Weights as trained layers have them: bell-shaped, rows of different spread, a few outliers."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator) * spread
    value *= 0.5 + torch.rand(*shape[:-1], 1, generator=generator)
    outliers = torch.rand(*shape, generator=generator) < 0.002
    return torch.where(outliers, value * 8, value).to(dtype)


def error(quantized: QuantizedWeight, original: torch.Tensor) -> torch.Tensor:
    return quantized.dequantize(torch.float64) - original.double()
