"""What only a GPU shows: replayed layers, the captured decoder, kernels inside generate()."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_transformers as tiny
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from vllm_ext.integrations.transformers import accelerate_generate, quantize_experts

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> Any:
    model = tiny.diffusion_gemma(torch.bfloat16).cuda()
    quantize_experts(model, group_sizes=(16, 8), progress=False, replay=True)
    return model


def test_a_replayed_layer_gives_the_bits_of_its_launches(model: Any) -> None:
    """Results are handed out before the next replay overwrites what they were computed in."""
    experts = model.model.decoder.layers[0].experts
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for turn in range(12):
            rows = (16, 40)[turn % 2]
            x = torch.randn(rows, 64, device="cuda", generator=generator).bfloat16()
            ids = torch.rand(rows, 8, device="cuda", generator=generator).topk(2).indices
            weights = torch.rand(rows, 2, device="cuda", generator=generator)
            kept = experts.routed(x, ids, weights)
            experts.routed(x + 1, ids, weights)
            assert torch.equal(kept, experts.computed(x, ids, weights))
    assert not experts.graphs.broken
    assert len(experts.graphs.graphs) == 2


def test_moved_weights_are_not_read_from_old_graphs(model: Any) -> None:
    experts = model.model.decoder.layers[0].experts
    x = torch.randn(16, 64, device="cuda").bfloat16()
    ids = torch.rand(16, 8, device="cuda").topk(2).indices
    for _ in range(4):
        experts.routed(x, ids, torch.ones(16, 2, device="cuda"))
    assert experts.graphs.graphs
    model.cpu().cuda()
    assert not experts.graphs.graphs


@pytest.mark.parametrize(
    "parts", [{"fused_layers": False}, {}, {"encoder": True}], ids=["modules", "layers", "encoder"]
)
def test_the_captured_kit_computes_the_stock_logits(model: Any, parts: dict[str, bool]) -> None:
    """BF16 of three layers: forms differ by roundings, and by a token's expert where two are nearly equal."""
    prompt = (torch.arange(20, device="cuda")[None] * 7 + 3) % 300
    done = accelerate_generate(model, verify=prompt, progress=False, **parts)
    assert done.relative_error is not None
    assert done.relative_error < 0.1
    assert "captured" in done.decoder
    out = model.generate(prompt, max_new_tokens=32, max_denoising_steps=4, eos_token_id=None).sequences
    assert out.shape == (1, 52)
