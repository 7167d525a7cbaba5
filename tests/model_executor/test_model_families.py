"""Every model family through real vLLM with a tiny random checkpoint; see `families`."""

from __future__ import annotations

import json
import sys

import families
import pytest
import torch

from vllm_ext.quantization.cli import quantize_main

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints by family and name."""
    pytest.importorskip("vllm")
    root = tmp_path_factory.mktemp("families")
    return {f.name: families.write_checkpoints(f, root / f.kind) for f in families.FAMILIES}


@pytest.fixture(scope="module")
def answers(run_engines, checkpoints):
    """Answers to `single_jobs` by family, all from one process."""
    jobs = {name: families.single_jobs(paths) for name, paths in checkpoints.items()}
    results = iter(run_engines([job for each in jobs.values() for job in each], timeout=500))
    return {name: [next(results) for _ in each] for name, each in jobs.items()}


@pytest.mark.parametrize("family", [family.name for family in families.FAMILIES])
def test_family_computes_what_its_dequantised_weights_say(answers, family):
    """C06, C07, C22. gpt-oss copies its experts into parameters, and they were quantised without having arrived."""
    found = families.judge_single(answers[family])
    assert all(column["ok"] for column in found.values()), found


@pytest.mark.parametrize(("family", "column"), [("gpt-oss", "EP2"), ("Gemma-4-MoE", "TP2")])
def test_two_ranks_equal_one(answers, checkpoints, run_engines, family, column):
    """gpt-oss's loader slices ranks itself, and experts of other ranks arrive late; Gemma 4 has a dense part beside."""
    binding = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    (answer,) = run_engines([families.parallel_job(checkpoints[family], column)], **binding)
    found = families.judge_parallel(answers[family][3], answer)
    assert found["ok"], found


def test_table_in_the_docs_is_what_was_seen():
    document = json.loads(families.RESULTS.read_text())
    assert {*(family.name for family in families.FAMILIES), *families.ELSEWHERE} == set(document["families"])
    assert families.table(document) in families.DOCS.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """Qwen3.5-MoE as it is published, with a vision tower and its language model one level down: plain and packed."""
    pytest.importorskip("vllm")
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    sys.path.insert(0, str(families.ROOT / "examples"))
    import tiny_models

    root = tmp_path_factory.mktemp("multimodal")
    fields = tiny_models.KINDS["qwen3.5-moe"][0]
    text = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    text |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text["rope_parameters"] = {**rotary, "partial_rotary_factor": 0.5}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64}
    vision["out_hidden_size"] = text["hidden_size"]
    tokens = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    torch.manual_seed(0)
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision, **tokens))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=(2 if "gate.weight" in name else 1) * parameter.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(root / "plain")
    (root / "plain" / "tokenizer.json").write_text(json.dumps(tiny_models.byte_tokenizer()))
    (root / "plain" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert quantize_main([str(root / "plain"), str(root / "packed"), "--quiet"]) == 0
    return {name: str(root / name) for name in ("plain", "packed")}


def test_experts_and_linear_attention_of_a_multimodal_model_are_found_one_level_down(run_engines, multimodal):
    """C17: published Qwen3.5 and Gemma 4 checkpoints name experts `model.language_model.layers`, vLLM otherwise."""
    text_only = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    ignored = {"vllm_ext": {"ignore": ["model.language_model.layers.0.mlp.experts"]}}
    jobs = {
        "BF16": ("plain", {}),
        "at load": ("plain", families.W4),
        "packed": ("packed", {}),
        "first layer ignored": ("plain", {**families.W4, "additional_config": ignored}),
        "ha_npu": ("plain", {"attention_backend": "ha_npu"}),
    }
    asked = {"prompts": families.prompts()[:3], "max_tokens": 2}
    results = run_engines(
        [{"model": multimodal[model], "options": {**text_only, **given}, **asked} for model, given in jobs.values()],
        VLLM_LOGGING_LEVEL="DEBUG",
    )
    answers = dict(zip(jobs, results, strict=True))
    assert answers["packed"]["log_probs"] == answers["at load"]["log_probs"]
    by_one_layer, by_both = (families.gap(answers["BF16"], answers[run]) for run in ("first layer ignored", "at load"))
    assert by_both > by_one_layer > families.TOLERANCE
    assert "8 routed experts in 1 layers" in answers["BF16"]["log"]
    assert "language_model.model.layers.0.linear_attn: gdn prefill by vllm_ext backend cpu" in answers["BF16"]["log"]
    assert 0 < families.gap(answers["BF16"], answers["ha_npu"]) < families.TOLERANCE
