"""Random layers of experts and their calls, for the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_ext.ops.moe import PreparedExperts, fused_moe_w4a16, prepare_experts
from vllm_ext.quantization import QuantizedWeight, quantize_weight

# Frobenius norm of the error over the result's. A rounding to BF16 costs at most 2^-9 = 2e-3, to FP16 2.4e-4; the
# intermediate, the zeros and the output are rounded once each, and PyTorch's BF16 kernel rounds its products as well.
# FP32 sums a few hundred products.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3, torch.float32: 5e-6}


@dataclass
class Layer:
    """Weights, biases and one call's tensors."""

    w13: QuantizedWeight
    w2: QuantizedWeight
    biases: dict[str, torch.Tensor]
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor

    def prepare(self, **options: Any) -> PreparedExperts:
        """The experts in a backend's order."""
        return prepare_experts(self.w13, self.w2, **self.biases, **{"dtype": self.x.dtype, **options})

    def run(self, experts: PreparedExperts, **options: Any) -> torch.Tensor:
        """The layer's output."""
        return fused_moe_w4a16(self.x, experts, self.weights, self.ids, **options)

    def expected(self, **options: Any) -> torch.Tensor:
        """The reference's output, in FP32, so that its own rounding does not count."""
        exact = replace(self, x=self.x.float())
        return exact.run(exact.prepare(backend="reference"), **options)

    def rows(self, index: Any) -> Layer:
        """The same experts on some of the rows."""
        return replace(self, x=self.x[index], weights=self.weights[index], ids=self.ids[index])


def make_layer(
    *,
    experts: int = 8,
    hidden: int = 576,
    intermediate: int = 192,
    top_k: int = 2,
    tokens: int = 5,
    groups: tuple[int, int] = (128, 64),
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    zero_point: str | None = "float",
    bias: bool = False,
    distinct: bool = True,
    seed: int = 0,
) -> Layer:
    """Activations of a trained model's size: x of order 1, weights 1/sqrt(K) with a shifted mean, as real ones have.

    zero_point None is symmetric; distinct=False draws ids that repeat within a row and reach past both ends.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    storage = torch.bfloat16 if dtype == torch.float32 else dtype
    kind: dict[str, Any] = {"symmetric": True} if zero_point is None else {"zero_point": zero_point}
    rows = 2 * intermediate if gated else intermediate
    made = []
    for shape, group in (((experts, rows, hidden), groups[0]), ((experts, hidden, intermediate), groups[1])):
        weight = (normal(*shape) + 0.3 * normal(*shape[:2], 1)) / shape[2] ** 0.5
        made.append(quantize_weight(weight.to(storage), group, method="minmax", **kind))
    biases = {"w13_bias": 0.2 * normal(experts, rows), "w2_bias": 0.2 * normal(experts, hidden)} if bias else {}
    if distinct:
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].int()
    else:
        ids = torch.randint(-2, experts + 2, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return Layer(*made, biases, normal(tokens, hidden).to(dtype), weights, ids)


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Relative error in the Frobenius norm; rows that must be zero are compared exactly."""
    assert got.shape == expected.shape, name
    assert torch.isfinite(got.float()).all(), f"{name}: not finite"
    scale = float(expected.double().norm())
    error = float((got.double() - expected.double()).norm())
    assert error <= tolerance * scale, (
        f"{name}: relative error {error / max(scale, 1e-30):.2e}, allowed {tolerance:.0e}"
    )
