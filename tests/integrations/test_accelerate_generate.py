"""The kit on a tiny DiffusionGemma (transformers' own class, random weights) through its official sampler."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from torch import nn

from vllm_ext.integrations import canvas_sampler
from vllm_ext.integrations.norms import norm_form
from vllm_ext.integrations.transformers import (
    accelerate_generate,
    join_projections,
    merge_lora,
    patch_rms_norms,
    quantize_experts,
)

IDS = (torch.arange(40).view(2, 20) * 7 + 3) % 300
PADDED = torch.ones_like(IDS)
PADDED[1, :6] = 0


def generate(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    given = {"max_new_tokens": 48, "max_denoising_steps": 5, "eos_token_id": None, "attention_mask": PADDED, **options}
    return model.generate(IDS, **given).sequences


@pytest.fixture(scope="module")
def swapped() -> Any:
    """DiffusionGemma in FP32 with 4-bit experts: without roundings of 16 bits every form must agree."""
    model = tiny.diffusion_gemma()
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    return model


def test_the_official_sampler_runs_before_and_after_the_swap() -> None:
    """The published experiment: one load, generate() untouched, only the experts change."""
    model = tiny.diffusion_gemma()
    before = generate(model)
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    after = generate(model)
    assert before.shape == after.shape == (2, 68)
    assert torch.equal(generate(model), after), "equal seeds must give equal tokens"
    model.model.decoder.layers[0].experts.tensor_names.clear()
    with pytest.raises((ValueError, KeyError)):
        generate(model)


@pytest.mark.parametrize(
    "parts",
    [
        {"fused_layers": False, "sampler": False},
        {"fused_layers": False, "norms": False, "projections": False},
        {"sampler": False},
        {},
        {"encoder": True},
    ],
    ids=["norms and projections", "sampler", "fused layers", "defaults", "everything"],
)
def test_every_part_generates_the_stock_tokens(swapped: Any, parts: dict[str, bool]) -> None:
    """A batch with padding over three canvases: masks, positions, random numbers and stopping must all agree."""
    wanted = generate(swapped)
    done = accelerate_generate(swapped, verify=IDS, progress=False, **parts)
    try:
        assert done.relative_error is not None
        assert done.relative_error < 1e-5
        assert torch.equal(generate(swapped), wanted)
        assert "the experts were in 4 bits already" in done.notes
    finally:
        done.undo()
    assert torch.equal(generate(swapped), wanted), "undo() must give the stock model back"


def test_a_static_cache_and_a_streamer_work(swapped: Any) -> None:
    class Drafts:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value)

        def put_draft(self, value: torch.Tensor) -> None:
            self.seen.append(value)

        def end(self) -> None:
            pass

    # One canvas: past its window, a static sliding cache of stock code overwrites keys of the prompt.
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 16}
    wanted = generate(swapped, **options)
    done = accelerate_generate(swapped, progress=False)
    drafts = Drafts()
    found = generate(swapped, streamer=drafts, **options)
    done.undo()
    assert torch.equal(found, wanted)
    assert len(drafts.seen) == 1 + 5 + 1, "prompt, drafts, canvas"


def test_the_callers_own_processors_go_through_stock_code(swapped: Any) -> None:
    """A processor may do anything to the logits: the fused step must not pretend to know it."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Forbid(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, cur_step: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[..., :200] = float("-inf")
            return scores

    def run() -> torch.Tensor:
        return generate(swapped, logits_processor=LogitsProcessorList([Forbid()]))

    wanted = run()
    done = accelerate_generate(swapped, progress=False)
    found = run()
    done.undo()
    assert torch.equal(found, wanted)
    assert int(found[:, 20:].min()) >= 200


def test_arguments_it_does_not_know_reach_the_stock_step(swapped: Any) -> None:
    """A later transformers may pass more to a step: dropping it in silence would change what is generated."""
    done = accelerate_generate(swapped, progress=False)
    try:
        with pytest.raises(TypeError, match="_denoising_step"):
            swapped._denoising_step(guidance=1.5)
    finally:
        done.undo()


def test_stopping_early_agrees(swapped: Any) -> None:
    """Rows of a batch stop at different steps; a finished row must not change any more."""

    def stopping(threshold: float) -> tuple[torch.Tensor, list[float]]:
        torch.manual_seed(5)
        out = swapped.generate(
            IDS, max_new_tokens=48, max_denoising_steps=12, eos_token_id=None, attention_mask=PADDED,
            stability_threshold=0, confidence_threshold=threshold,
        )  # fmt: skip
        return out.sequences, out.tokens_per_forward.tolist()

    thresholds = (0.8, 1.4, 2.2)
    wanted = [stopping(threshold) for threshold in thresholds]
    assert any(first != second for _, (first, second) in wanted), "no threshold stops one row before the other"
    done = accelerate_generate(swapped, progress=False)
    found = [stopping(threshold) for threshold in thresholds]
    stable = generate(swapped, stability_threshold=1, confidence_threshold=100.0)
    done.undo()
    for (tokens, passes), (wanted_tokens, wanted_passes) in zip(found, wanted, strict=True):
        assert torch.equal(tokens, wanted_tokens)
        assert passes == wanted_passes
    assert torch.equal(stable, generate(swapped, stability_threshold=1, confidence_threshold=100.0))


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_a_canvas_is_stable_when_stock_says_so(threshold: int) -> None:
    """One row returns to an earlier canvas, which two equal steps must follow before a threshold of two is met."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import StableAndConfidentStoppingCriteria

    stock, ours = (StableAndConfidentStoppingCriteria(threshold, confidence_threshold=9.0) for _ in range(2))
    for first, second in zip((1, 1, 2, 1, 1, 1, 1), (3, 4, 4, 4, 4, 5, 5), strict=True):
        argmax = torch.tensor([[first, 0], [second, 0]])
        wanted = stock(argmax, torch.zeros(2, 2, 8))
        assert canvas_sampler._stable(ours, argmax).tolist() == wanted.tolist()


def test_models_that_generate_token_by_token_get_the_parts_that_apply() -> None:
    model = tiny.mixtral()
    done = accelerate_generate(model, group_sizes=(16, 8), progress=False)
    assert done.experts is not None
    assert len(done.experts.layers) == 2
    assert (done.norms, done.projections) == (5, 2)
    assert model.generation_config.cache_implementation == "static"
    done.undo()
    assert model.generation_config.cache_implementation is None


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "jetmoe", "qwen3_moe", "diffusion_gemma"])
def test_norms_keep_their_numbers(family: str) -> None:
    """Families round in different places; a patch that takes one form for another is off by a factor, or by 1 + w."""
    model = getattr(tiny, family)()
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    x = [
        torch.randn(3, getattr(m, "weight", torch.empty(32)).shape[0], generator=torch.Generator().manual_seed(2))
        for m in norms
    ]
    with torch.no_grad():
        before = [m(value) for m, value in zip(norms, x, strict=True)]
        patch = patch_rms_norms(model)
        after = [m(value) for m, value in zip(norms, x, strict=True)]
    assert patch.count == len(norms)
    assert not patch.skipped
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    patch.undo()
    assert not any("forward" in vars(m) for m in norms)


def test_gemmas_one_plus_weight_is_recognised() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert norm_form(GemmaRMSNorm(16))[0] == "1 + weight"
    assert norm_form(LlamaRMSNorm(16))[0] == "round, then weight"


def test_a_norm_that_centres_is_left_alone_with_the_reason() -> None:
    class CentredRMSNorm(nn.Module):
        eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x - x.mean(-1, keepdim=True)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    patch = patch_rms_norms(nn.Sequential(CentredRMSNorm()))
    assert patch.count == 0
    assert patch.skipped == {"0": "it computes none of the known forms"}


def test_joined_projections_share_one_matrix_and_follow_new_weights() -> None:
    """Two copies of the attention's weights would cost what joining saves, and a reloaded layer must not be ignored."""
    model = tiny.mixtral()
    attention = model.model.layers[0].self_attn
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        patch = join_projections(model)
        found = [layer(x) for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        for one, two in zip(wanted, found, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
        storage = {layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.v_proj)}
        assert len(storage) == 1
        attention.k_proj.weight = nn.Parameter(torch.zeros_like(attention.k_proj.weight))
        assert not attention.k_proj(x).any()
    assert patch.count == 2
    patch.undo()


def test_layers_of_one_group_asked_about_different_inputs() -> None:
    """Cross attention asks q about one sequence, k and v about another."""
    model = tiny.mixtral()
    attention = model.model.layers[0].self_attn
    x, y = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(y)]
        join_projections(model)
        found = [attention.q_proj(x), attention.k_proj(y), attention.v_proj(y)]
    for one, two in zip(wanted, found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


def test_adapters_are_merged_before_joining() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.mixtral(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    ids = IDS % 90
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        attached = join_projections(model)
        assert attached.count == 0
        assert all("merge it first" in reason for reason in attached.skipped.values())
        merged = merge_lora(model)
        assert join_projections(merged).count == 2
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_second_call_finds_its_work_done() -> None:
    model = tiny.mixtral()
    for _ in range(2):
        done = accelerate_generate(model, ignore=["layers.1"], group_sizes=(16, 8), progress=False)
    assert "the experts were in 4 bits already" in done.notes


def test_other_models_logits_are_compared_too() -> None:
    model = tiny.mixtral()
    done = accelerate_generate(model, group_sizes=(16, 8), progress=False, verify=IDS % 90)
    assert done.relative_error is not None
    assert done.relative_error < 1e-5
    with pytest.raises(ValueError, match="verify must be prompt ids"):
        accelerate_generate(model, verify=[1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("joined", [False, True], ids=["norms", "norms and projections"])
def test_the_kit_compiles_as_one_graph(joined: bool) -> None:
    """transformers compiles the forward over a static cache: addresses and dictionaries cannot be part of it."""
    model = tiny.mixtral()
    accelerate_generate(model, projections=joined, group_sizes=(16, 8), progress=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = IDS % 90
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_joined_layers_keep_their_gradients() -> None:
    """The joined matrix is made without a graph: through it the layers would never be trained, in silence."""
    model, plain = tiny.mixtral(), tiny.mixtral()
    join_projections(model)
    for one in (model, plain):
        one(input_ids=IDS % 90, labels=IDS % 90).loss.backward()
    found, wanted = (one.model.layers[0].self_attn.k_proj.weight.grad for one in (model, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_copy_computes_with_its_own_weights(swapped: Any) -> None:
    """A forward that closes over a layer runs the original's weights in every copy of the model."""
    model = tiny.mixtral()
    accelerate_generate(model, group_sizes=(16, 8), progress=False)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS % 90).logits
        for part in (model.model.norm, model.model.layers[0].self_attn.q_proj):
            part.weight.zero_()
        assert torch.equal(twin(input_ids=IDS % 90).logits, wanted)
    tokens = generate(swapped)
    done = accelerate_generate(swapped, progress=False)
    twin = copy.deepcopy(swapped)
    done.undo()
    assert torch.equal(generate(twin), tokens)


def test_fused_layers_follow_weights_that_change() -> None:
    """They read a router's scale and joined matrices that were derived once: new weights must not be ignored."""
    model = tiny.diffusion_gemma()
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    before = generate(model)
    done = accelerate_generate(model, encoder=True, progress=False)
    assert torch.equal(generate(model), before)
    layer = model.model.decoder.layers[0]
    with torch.no_grad():
        layer.router.scale.mul_(torch.linspace(0.2, 3, layer.router.scale.numel()))
        layer.self_attn.k_proj.weight = nn.Parameter(layer.self_attn.k_proj.weight.flip(0))
    found = generate(model)
    done.undo()
    assert torch.equal(found, generate(model))
    assert not torch.equal(found, before)


def test_adapters_of_peft_leave_the_denoising_steps_to_the_kit() -> None:
    peft = pytest.importorskip("peft")
    base = tiny.diffusion_gemma()
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=r".*decoder.*q_proj"))
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    wanted = generate(model)
    done = accelerate_generate(model, progress=False)
    assert done.sampler == "fused"
    assert "_denoising_step" in vars(base)
    assert torch.equal(generate(model), wanted)
    done.undo()
    assert torch.equal(generate(model), wanted)


def test_offloaded_norms_and_projections_still_come_from_disk(tmp_path: Path) -> None:
    """accelerate's hooks bring a module's weights before its forward: a forward that replaces the hook finds none."""
    pytest.importorskip("accelerate")
    tiny.mixtral().save_pretrained(tmp_path / "model")
    places = {
        "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu",
        "model.layers.0.self_attn": "disk", "model.layers.0.mlp": "cpu", "model.layers.0.input_layernorm": "cpu",
        "model.layers.0.post_attention_layernorm": "disk", "model.layers.1": "cpu",
    }  # fmt: skip
    model = type(tiny.mixtral()).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    ids = IDS % 90
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        done = accelerate_generate(model, progress=False)
        assert (done.norms, done.projections) == (5, 1)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)
        done.undo()
        assert torch.equal(model(input_ids=ids).logits, wanted)
