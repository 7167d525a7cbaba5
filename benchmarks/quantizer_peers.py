"""Published data-free quantisers, written down from their papers, to compare ours with on the same tensors.

Each takes a weight [E, N, K] and a group size that divides K and returns the dequantised FP32 weight. Scales and zero
points are rounded to BF16 as ours are, so that only the way they are found differs.
"""

from __future__ import annotations

import torch

TOP = 15
STORE = torch.bfloat16


def stored(value: torch.Tensor) -> torch.Tensor:
    """Rounded to what a checkpoint keeps."""
    return value.to(STORE).float()


def dequantised(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, top: int = TOP) -> torch.Tensor:
    """Nearest codes on the grid and back, [R, G, g]."""
    codes = torch.round(groups / scale + zero).clamp(0, top)
    return scale * (codes - zero)


def half_quadratic(weight: torch.Tensor, group_size: int, *, steps: int = 20, bits: int = 4) -> torch.Tensor:
    """Half-quadratic quantisation (HQQ; Badri and Shaji, 2023): the scale is the range's, the zero point minimises a
    sparsity-promoting norm (p = 0.7) of the error by alternating a shrinkage step and a mean. beta 10, kappa 1.01."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, group_size)
    top = 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / top).clamp(min=1e-8)
    zero = -low / scale
    beta, best = 10.0, float("inf")
    for _ in range(steps):
        error = groups - dequantised(groups, scale, zero, top)
        mean = float(error.abs().mean())
        if mean >= best:
            break
        best = mean
        sparse = error.sign() * (error.abs() - error.abs().clamp(min=1e-8).pow(0.7 - 1) / beta).clamp(min=0)
        codes = torch.round(groups / scale + zero).clamp(0, top)
        zero = (codes - (groups - sparse) / scale).mean(-1, keepdim=True)
        beta *= 1.01
    return dequantised(groups, stored(scale), stored(zero), top).flatten(-2)


def clip_search(
    weight: torch.Tensor, group_size: int, *, symmetric: bool = False, power: float = 2.4, least: float = 0.2
) -> torch.Tensor:
    """The range search of GPTQ's and llm-compressor's "mse" observers: of 80 ranges shrunk towards zero, the one whose
    error to the power 2.4 is least; integer zero points."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, group_size)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    best = torch.full_like(low, float("inf"))
    result = torch.zeros_like(groups)
    for factor in torch.arange(1.0, least, -0.01).tolist():
        scale = stored(((high - low) * factor / TOP).clamp(min=1e-8))
        zero = torch.full_like(scale, 8.0) if symmetric else torch.round(-low * factor / scale)
        value = dequantised(groups, scale, zero)
        error = (value - groups).abs().pow(power).sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        result = torch.where(better, value, result)
    return result.flatten(-2)


def hqq_package(weight: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """What the `hqq` package from the package index makes of it, None where that is not installed."""
    try:
        from hqq.core.quantize import Quantizer
    except ImportError:
        return None
    device = str(weight.device)
    values = []
    for expert in weight:
        packed, meta = Quantizer.quantize(
            expert.float(), nbits=4, group_size=group_size, axis=1, optimize=True, device=device, compute_dtype=STORE
        )
        values.append(Quantizer.dequantize(packed, meta).float().reshape(expert.shape))
    return torch.stack(values)


def gptqmodel_package(weight: torch.Tensor, group_size: int, *, symmetric: bool = False) -> torch.Tensor | None:
    """What the data-free path of `gptqmodel` (rounding after its range search by squared error) makes of it, None where
    that is not installed. Its scales stay in FP32, which flatters it a little."""
    try:
        from gptqmodel.quantization.config import RTNConfig, SmoothMSE
        from gptqmodel.quantization.rtn import RTN
    except ImportError:
        return None
    values = []
    for expert in weight:
        layer = torch.nn.Linear(expert.shape[1], expert.shape[0], bias=False, device=weight.device)
        layer.weight = torch.nn.Parameter(expert.float(), requires_grad=False)
        config = RTNConfig(bits=4, group_size=group_size, sym=symmetric, smooth=SmoothMSE())
        values.append(RTN(layer, config).quantize()[0])
    return torch.stack(values)
