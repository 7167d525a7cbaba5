"""What only a GPU shows: replayed layers, the captured decoder, kernels inside generate()."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_transformers as tiny
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from vllm_ext.integrations.transformers import accelerate_generate, quantize_experts
from vllm_ext.ops.fused import rms_norm

pytestmark = pytest.mark.gpu


@pytest.fixture
def model() -> Any:
    model = tiny.diffusion_gemma(torch.bfloat16).cuda()
    quantize_experts(model, group_sizes=(16, 8), progress=False)
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


def test_layers_share_the_memory_of_their_intermediates(model: Any) -> None:
    """Thirty layers recorded in pools of their own, or on streams of their own, would take thirty times as much."""
    layers = [layer.experts for layer in model.model.decoder.layers]
    x = torch.randn(1024, 64, device="cuda").bfloat16()
    ids = torch.rand(1024, 8, device="cuda").topk(2).indices
    weights = torch.rand(1024, 2, device="cuda")
    reserved = []
    with torch.no_grad():
        for experts in layers:
            for _ in range(4):
                experts(x, ids, weights)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    assert all(experts.graphs.graphs and not experts.graphs.broken for experts in layers)
    assert reserved[-1] == reserved[0]


def test_an_outer_capture_records_launches_and_not_replays(model: Any) -> None:
    experts = model.model.decoder.layers[0].experts
    x = torch.randn(16, 64, device="cuda").bfloat16()
    ids = torch.rand(16, 8, device="cuda").topk(2).indices
    weights = torch.rand(16, 2, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            wanted = experts(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, ids, weights)
        x.mul_(0)
        graph.replay()
        assert not out.any()
        assert wanted.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_layer_runs_on_the_gpu_its_weights_are_on(model: Any) -> None:
    """device_map spreads layers; nobody makes their device the current one, where Triton would launch."""
    experts = model.model.decoder.layers[0].experts
    x = torch.randn(16, 64, device="cuda").bfloat16()
    ids = torch.rand(16, 8, device="cuda").topk(2).indices
    weights = torch.rand(16, 2, device="cuda")
    with torch.no_grad():
        wanted = [experts(x * turn, ids, weights) for turn in range(5)]
        normed = rms_norm(x)
        experts.to("cuda:1")
        there = [tensor.to("cuda:1") for tensor in (x, ids, weights)]
        found = [experts(there[0] * turn, *there[1:]) for turn in range(5)]
        assert experts.graphs.graphs
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, wanted, strict=True))
        assert torch.equal(rms_norm(there[0]).cpu(), normed.cpu())


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


def test_a_model_that_generates_token_by_token_is_compiled_over_a_static_cache() -> None:
    """transformers does both; the experts are one operator in what it compiles."""
    model = tiny.mixtral().cuda()
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    prompt = (torch.arange(20, device="cuda")[None] * 7 + 3) % 90

    def tokens() -> torch.Tensor:
        return model.generate(prompt, max_new_tokens=12, do_sample=False)

    wanted = tokens()
    done = accelerate_generate(model, progress=False)
    assert "static cache" in done.decoder
    assert torch.equal(tokens(), wanted)
