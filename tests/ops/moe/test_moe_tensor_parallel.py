"""Experts cut over tensor-parallel ranks: the ranks' outputs sum to one rank's."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
from vllm_ext.quantization import join_quantized, quantize_weight, slice_quantized

HIDDEN, EXPERTS, TOKENS, TOP_K = 128, 4, 9, 2


@pytest.mark.parametrize(("intermediate", "ranks"), [(704, 2), (704, 4), (768, 8), (640, 2)])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_ranks_of_a_packed_layer_sum_to_the_whole(intermediate: int, ranks: int, backend: str) -> None:
    """C01 to C03: 704 over two ranks is 352 each, and 352 begins in the middle of a group of 64.

    The ranks dequantise exactly the whole layer's numbers, so only the rounding of each rank's BF16 output and of its
    intermediate differs: two or three roundings of 2^-9 on the scale of the output.
    """
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    w13 = quantize_weight(normal(EXPERTS, 2 * intermediate, HIDDEN) * 0.1, 128)
    w2 = quantize_weight(normal(EXPERTS, HIDDEN, intermediate) * 0.1, 64)
    x = normal(TOKENS, HIDDEN)
    topk_ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]).int()
    topk_weights = torch.rand(TOKENS, TOP_K, generator=generator)

    def run(first: object, second: object) -> torch.Tensor:
        experts = prepare_experts(first, second, backend=backend)  # type: ignore[arg-type]
        return fused_moe_w4a16(x, experts, topk_weights, topk_ids, activation="gelu_tanh").double()

    share = intermediate // ranks
    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for rank in range(ranks):
        gate = slice_quantized(w13, 1, rank * share, share)
        up = slice_quantized(w13, 1, intermediate + rank * share, share)
        total += run(join_quantized([gate, up], dim=1), slice_quantized(w2, 2, rank * share, share))
    whole = run(w13, w2)
    assert whole.isfinite().all()
    assert float((total - whole).norm() / whole.norm()) < 1e-2
