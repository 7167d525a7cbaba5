"""What vLLM can do beside serving: the features that touch experts or their weights, with 4-bit experts on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ext.quantization import compressed_tensors, quantize_weight
from vllm_ext.quantization.cli import quantize_main

pytestmark = pytest.mark.vllm
RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj")
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LORA = {"enable_lora": True, "max_lora_rank": 8}


def adapter_of(model: Path, target: Path, modules: tuple[str, ...] = TARGETS) -> dict[str, torch.Tensor]:
    """Write a random LoRA adapter; what it adds to each weight of `model`, by name."""
    generator = torch.Generator().manual_seed(3)
    target.mkdir()
    tensors, added = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith(tuple(f"{module}.weight" for module in modules)):
            continue
        down = torch.randn(RANK, weight.shape[1], generator=generator).bfloat16() * weight.shape[1] ** -0.5
        up = torch.randn(weight.shape[0], RANK, generator=generator).bfloat16() * 0.3
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        added[name] = (up.float() @ down.float()) * ALPHA / RANK
    save_file(tensors, target / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(modules), "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return added


def fuse_packed(source: Path, target: Path) -> None:
    """Store the experts of a packed checkpoint as 3-D tensors over all of them (C04)."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        for role in ("packed", "scale", "zero_point"):

            def of_all(projection: str, layer: str = layer, role: str = role) -> torch.Tensor:
                names = [f"{layer}.experts.{expert}.{projection}.weight_{role}" for expert in range(8)]
                return torch.stack([tensors[name] for name in names])

            fused[f"{layer}.experts.gate_up_proj.weight_{role}"] = torch.cat(
                (of_all("gate_proj"), of_all("up_proj")), 1
            )
            fused[f"{layer}.experts.down_proj.weight_{role}"] = of_all("down_proj")
    save_file(fused, target / "model.safetensors", {"format": "pt"})


def quantise_attention(source: Path, target: Path, *, store: bool) -> None:
    """A packed checkpoint whose attention is in 4 bits too, as other tools write them; or in 16 bits with the same
    values."""
    shutil.copytree(source, target)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".self_attn." not in name or not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        quantized = quantize_weight(tensor, 32, zero_point="int", method="minmax")
        stored = compressed_tensors.to_tensors(name.removesuffix(".weight"), quantized)
        tensors |= stored if store else {name: quantized.dequantize(tensor.dtype)}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    given = config["quantization_config"]
    assert given["config_groups"]["group_0"]["weights"]["group_size"] == 32
    if store:
        given["ignore"] = [module for module in given["ignore"] if "self_attn" not in module]
    (target / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("features")
    plain = Path(tiny_model("qwen3-moe", moe_intermediate_size=96, num_hidden_layers=2))
    other = Path(tiny_model("qwen3-moe", moe_intermediate_size=96, num_hidden_layers=2, rms_norm_eps=1e-5))
    tensors = load_file(other / "model.safetensors")
    changed = {name: tensor * 1.5 if ".experts.2." in name else tensor for name, tensor in tensors.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    added = adapter_of(plain, root / "adapter")
    adapter_of(plain, root / "expert adapter", ("up_proj",))
    merged = root / "merged"
    shutil.copytree(plain, merged)
    tensors = load_file(merged / "model.safetensors")
    tensors |= {name: (tensors[name].float() + delta).to(tensors[name].dtype) for name, delta in added.items()}
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    assert quantize_main([str(plain), str(root / "packed"), "--quiet"]) == 0
    assert quantize_main([str(other), str(root / "other packed"), "--quiet"]) == 0
    exported = root / "exported"
    assert quantize_main([str(plain), str(exported), "--quiet", "--format", "compressed-tensors"]) == 0
    fuse_packed(exported, root / "exported, fused")
    quantise_attention(exported, root / "attention too", store=True)
    quantise_attention(exported, root / "attention rounded", store=False)
    short = root / "short"
    shutil.copytree(plain, short)
    tensors = load_file(short / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, short / "model.safetensors", {"format": "pt"})
    made = (path.name for path in root.iterdir())
    return {"plain": str(plain), "other": str(other), **{name: str(root / name) for name in made}}


@pytest.fixture(scope="module")
def answers(run_engines, checkpoints, prompts):
    """Every engine of this file, by name. Late come those meant to fail; no engine starts after one that speculates."""
    plain, packed, w4 = checkpoints["plain"], checkpoints["packed"], families.W4
    chunked = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    jobs = {
        "whole": {"model": packed},
        "chunked": {"model": packed, "options": chunked},
        "prefixes cached": {"model": packed, "options": {"enable_prefix_caching": True}, "cached": True},
        "FP16": {"model": packed, "options": {"dtype": "float16"}},
        "FP32": {"model": packed, "options": {"dtype": "float32"}},
        "FP16 at load": {"model": plain, "options": {**w4, "dtype": "float16"}},
        "LoRA": {"model": plain, "options": {**w4, **LORA}, "lora": checkpoints["adapter"]},
        "LoRA, packed": {"model": packed, "options": LORA, "lora": checkpoints["adapter"]},
        "merged": {"model": checkpoints["merged"], "options": w4},
        "other": {"model": checkpoints["other"], "options": w4},
        "reloaded": {"model": plain, "options": w4, "reload": checkpoints["other"]},
        "reloaded, packed": {"model": packed, "reload": checkpoints["other packed"]},
        "exported": {"model": checkpoints["exported"], "options": w4},
        "exported, fused": {"model": checkpoints["exported, fused"], "options": w4},
        "attention too": {"model": checkpoints["attention too"], "options": w4},
        "attention rounded": {"model": checkpoints["attention rounded"], "options": w4},
        "dummy": {"model": plain, "options": {**w4, "load_format": "dummy"}},
        "dummy, packed": {"model": packed, "options": {"load_format": "dummy"}},
        "weight missing": {"model": checkpoints["short"], "options": w4},
        "LoRA of experts": {"model": packed, "options": LORA, "lora": checkpoints["expert adapter"]},
        "speculation": {"model": packed, "options": {"speculative_config": SPECULATION}},
    }
    results = run_engines([{"prompts": prompts[:6], **job} for job in jobs.values()], timeout=500)
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize(
    ("run", "same"),
    [
        ("chunked", "whole"),
        ("FP16", "whole"),
        ("FP32", "whole"),
        ("reloaded", "other"),
        ("reloaded, packed", "other"),
        ("attention too", "attention rounded"),
    ],
)
def test_feature_changes_nothing_but_rounding(answers, run, same):
    assert families.gap(answers[same], answers[run]) < families.TOLERANCE, answers[run].get("error")


def test_fp16_model_quantised_at_load_differs_by_the_rounding_of_its_scales(answers):
    """A packed checkpoint of BF16 weights has BF16 scales, an FP16 model's are FP16."""
    assert families.gap(answers["whole"], answers["FP16 at load"]) < 2 * families.TOLERANCE


def test_comparisons_above_would_notice_a_feature_without_effect(answers):
    assert families.gap(answers["whole"], answers["merged"]) > 2 * families.TOLERANCE
    assert families.gap(answers["whole"], answers["other"]) > 2 * families.TOLERANCE
    assert families.gap(answers["exported"], answers["attention rounded"]) > 2 * families.TOLERANCE


@pytest.mark.parametrize("run", ["dummy", "dummy, packed"])
def test_weights_that_vllm_draws_need_no_checkpoint(answers, run):
    """--load-format dummy on a packed checkpoint was refused as one that lacks its experts."""
    assert "error" not in answers[run]
    assert all(torch.tensor(prompt).isfinite().all() for prompt in answers[run]["log_probs"])


def first_difference(one, other):
    """The smallest margin by which a token was chosen where two engines' greedy tokens part; None where none do."""
    margins = []
    for a, b, chosen in zip(one["tokens"], other["tokens"], one["margins"], strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        margins += [] if place is None else [chosen[place]]
    return max(margins, default=None)


@pytest.mark.parametrize(
    ("run", "same"),
    [("prefixes cached", "whole"), ("speculation", "whole"), ("LoRA", "merged"), ("LoRA, packed", "merged")],
)
def test_greedy_tokens_part_only_where_two_tokens_tie(answers, run, same):
    assert "error" not in answers[run]
    margin = first_difference(answers[same], answers[run])
    assert margin is None or margin < 0.25
    assert first_difference(answers["whole"], answers["merged"]) > 0.25, "the adapter would not be noticed"


def test_packed_experts_fused_in_one_tensor_load_like_separate_ones(answers):
    """C04: vLLM's loaders know fused names for 16-bit weights only, and passed over packed ones."""
    assert answers["exported, fused"].get("error") is None
    assert answers["exported, fused"]["log_probs"] == answers["exported"]["log_probs"]


def test_experts_that_did_not_arrive_are_not_quantised_from_whatever_memory_held(answers):
    """A 16-bit checkpoint that lacks a weight: vLLM processes the layer all the same."""
    error = answers["weight missing"]["error"]
    assert "model.layers.1.mlp.experts" in error
    assert "elements of its experts arrived" in error


def test_adapters_of_experts_are_refused_by_name(answers):
    assert "up_proj" in answers["LoRA of experts"]["error"]
