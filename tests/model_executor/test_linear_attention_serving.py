"""GDN + MoE through real vLLM on the CPU, with `ha_npu` and without.

vLLM's own CPU kernel multiplies in BF16 (its outputs are 4e-3 from the exact recurrence; ours 1e-7, before the BF16
they are stored in), and runs that differ by BF16 rounding in one layer differ in the log-probabilities by 0.01 to 0.03
on average on this model (measured: stock with prompts cut at 128 tokens against whole ones 0.011; our kernel against
the FP64 recurrence in its place, whose outputs round differently in one element of 5000, 0.010; stock against ours
0.024).
Where a token's two best experts tie, rounding can swap them: single log-probabilities then move by up to 0.7, so the
mean and the 90th percentile are held, not the maximum. A wrong kernel is far outside.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.vllm

MEAN_TOLERANCE = 0.05
PERCENTILE_90_TOLERANCE = 0.1
HA_NPU = {"attention_backend": "ha_npu"}
SINGLE = {"prompts": [[7], [200], [31]]}


@pytest.fixture(scope="module")
def answers(run_engines, tiny_model, prompts):
    """Every in-process engine of this file, by name."""
    model = tiny_model("qwen3-next")

    def job(options, **extra):
        return {"model": model, "prompts": prompts, "options": options, **extra}

    jobs = {
        "stock": job({}),
        "ha_npu": job(HA_NPU),
        "ha_npu, small budget": job({**HA_NPU, "max_num_batched_tokens": 128}),
        "stock after ha_npu": job({}),
        "upper case": job({"attention_backend": "HA_NPU"}, max_tokens=1),
        "compiled": job({**HA_NPU, "enforce_eager": False}),
        "both flags": job({**HA_NPU, "quantization": "w4a16-grouped"}),
        "both flags, compiled": job({**HA_NPU, "quantization": "w4a16-grouped", "enforce_eager": False}),
        "w4a16": job({"quantization": "w4a16-grouped"}),
        "qwen3.5-moe": {**job({}), "model": tiny_model("qwen3.5-moe")},
        "qwen3.5-moe, ha_npu": {**job(HA_NPU), "model": tiny_model("qwen3.5-moe")},
        "qwen3.5": {**job({}), "model": tiny_model("qwen3.5")},
        "qwen3.5, ha_npu": {**job(HA_NPU), "model": tiny_model("qwen3.5")},
        "no linear attention": {**job(HA_NPU, max_tokens=1), "model": tiny_model("qwen3-moe")},
        "wrong kernel": job(HA_NPU, before="forget_half_as_fast", max_tokens=1),
        "single tokens": job(HA_NPU, **SINGLE),
        "single tokens, told by length": job(HA_NPU, **SINGLE, used_slots=True, before="tell_decodes_by_length"),
        "refusing kernel, fallback": job(
            {**HA_NPU, "additional_config": {"vllm_ext": {"on_kernel_error": "fallback"}}}, before="refuse_every_call"
        ),
        "refusing kernel": job(HA_NPU, before="refuse_every_call", max_tokens=1),
    }
    results = run_engines(list(jobs.values()), timeout=600, VLLM_LOGGING_LEVEL="DEBUG")
    return dict(zip(jobs, results, strict=True))


def differences(one, other):
    pairs = zip(one["log_probs"], other["log_probs"], strict=True)
    return torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in pairs])


def check_close(one, other):
    """Prompt log-probabilities within tolerance; greedy tokens equal up to the first that hung on less than that."""
    gaps = differences(one, other)
    assert float(gaps.mean()) < MEAN_TOLERANCE
    assert float(gaps.quantile(0.9)) < PERCENTILE_90_TOLERANCE
    for a, b, margins in zip(one["tokens"], other["tokens"], one["margins"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        assert first is None or margins[first] < 2 * PERCENTILE_90_TOLERANCE, (first, margins)


def served_layers(log, name):
    return sum(f"{name} prefill by vllm_ext backend cpu" in line for line in log.splitlines())


@pytest.mark.parametrize("run", ["ha_npu", "ha_npu, small budget", "compiled"])
def test_prompt_log_probabilities_equal_those_without_ha_npu(answers, run):
    check_close(answers["stock"], answers[run])


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3.5"])
def test_qwen3_5_is_served_as_qwen3_next_is(answers, family):
    """The same layer, whose projections come unpacked, in front of experts or of a dense feed-forward."""
    check_close(answers[family], answers[f"{family}, ha_npu"])
    assert answers[family]["log_probs"] != answers[f"{family}, ha_npu"]["log_probs"]


@pytest.mark.parametrize("run", ["both flags", "both flags, compiled"])
def test_both_flags_equal_the_quantised_model_without_ha_npu(answers, run):
    check_close(answers["w4a16"], answers[run])
    assert float(differences(answers["stock"], answers["w4a16"]).mean()) > MEAN_TOLERANCE


def test_the_comparison_notices_a_wrong_kernel(answers):
    gaps = differences(answers["stock"], answers["wrong kernel"])
    assert float(gaps.mean()) > 2 * MEAN_TOLERANCE
    assert float(gaps.quantile(0.9)) > 2 * PERCENTILE_90_TOLERANCE


def test_prompts_cut_by_the_token_budget_carry_their_state_exactly(answers):
    """Our kernel's own cuts cost no accuracy beyond the rounding of outputs: most log-probabilities do not move."""
    gaps = differences(answers["ha_npu"], answers["ha_npu, small budget"])
    assert float(gaps.median()) < 2e-3
    assert float(gaps.mean()) < 0.02


def test_a_first_token_alone_does_not_continue_the_state_of_a_request_that_is_gone(answers):
    """vLLM 0.23 takes a prompt of one token for a decode; on a GPU its state was off by 7 to 16 times its size."""
    one, other = answers["single tokens"], answers["single tokens, told by length"]
    assert one["tokens"] == other["tokens"]
    margins = torch.tensor(one["margins"]) - torch.tensor(other["margins"])
    assert float(margins.abs().max()) < PERCENTILE_90_TOLERANCE


def test_without_the_flag_vllm_is_bit_for_bit_itself_even_after_an_engine_with_it(answers):
    """The CPU kernel is one function for the whole process; a second engine must not inherit the first one's choice."""
    assert answers["stock"]["log_probs"] == answers["stock after ha_npu"]["log_probs"]
    assert answers["stock"]["tokens"] == answers["stock after ha_npu"]["tokens"]
    assert answers["stock"]["log_probs"] != answers["ha_npu"]["log_probs"]


def test_name_is_accepted_in_any_case_of_letters(answers):
    assert answers["upper case"]["log_probs"] == answers["ha_npu"]["log_probs"]


def test_debug_log_names_each_layer_and_its_kernel_once_per_engine(answers):
    log = answers["ha_npu"]["log"]
    engines = 13  # of this file's, those that serve a hybrid model with ha_npu
    for index in range(3):
        assert served_layers(log, f"model.layers.{index}.linear_attn: gdn") == engines


def test_model_without_linear_attention_gets_one_warning(answers):
    assert "error" not in answers["no linear attention"]
    lines = [line for line in answers["ha_npu"]["log"].splitlines() if "ha_npu has no effect on" in line]
    assert len(lines) == 1
    assert "Qwen3MoeForCausalLM" in lines[0]


def test_kernel_error_ends_each_request_with_the_layer_the_rule_and_the_remedy(answers, prompts):
    """Not the engine. One refused request among others: test_linear_attention_mixes."""
    run = answers["refusing kernel"]
    assert "error" not in run
    assert len(run["refused"]) == len(prompts)
    for message in run["refused"]:
        for part in ("model.layers.0.linear_attn", "gated delta rule", "refused for a test", "on_kernel_error"):
            assert part in message


def test_kernel_error_with_fallback_is_served_by_vllm_with_one_warning_a_layer(answers):
    run = answers["refusing kernel, fallback"]
    assert run["log_probs"] == answers["stock"]["log_probs"]
    assert run["tokens"] == answers["stock"]["tokens"]
    warnings = [line for line in run["log"].splitlines() if "vLLM's own kernel takes over" in line]
    assert len(warnings) == 3


@pytest.mark.parametrize("eager", [True, False])
def test_tensor_parallel_halves_equal_the_whole(answers, run_engines, tiny_model, prompts, eager):
    job = {"model": tiny_model("qwen3-next"), "prompts": prompts}
    options = {**HA_NPU, "quantization": "w4a16-grouped", "tensor_parallel_size": 2, "enforce_eager": eager}
    (result,) = run_engines(
        [{**job, "options": options}],
        VLLM_CPU_OMP_THREADS_BIND="0|1",
        VLLM_LOGGING_LEVEL="DEBUG",
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    check_close(answers["w4a16"], result)
    assert served_layers(result["log"], "model.layers.0.linear_attn: gdn") == 2
    assert "1 key heads of 128, 2 value heads of 128" in result["log"], "what is tried and mapped is a rank's half"
