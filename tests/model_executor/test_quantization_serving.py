"""`--quantization w4a16-grouped` through real vLLM on the CPU.

The yardstick is a BF16 checkpoint that holds the dequantised weights, served by stock vLLM: the 4-bit engine must give
its log-probabilities up to BF16 rounding. On this model, rounding alone moves them by 0.01 to 0.03 on average (see
test_linear_attention_serving); quantising moves them by more than 0.1.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_ext.quantization import Scheme
from vllm_ext.quantization.cli import quantize_main

pytestmark = pytest.mark.vllm

MEAN_TOLERANCE = 0.05
SIZES = {"moe_intermediate_size": 96}
W4 = {"quantization": "w4a16-grouped"}
INT_32 = {"zero_point": "int", "group_size_w13": 32, "group_size_w2": 32}


def options(**scheme):
    return {**W4, "additional_config": {"vllm_ext": scheme}}


def rewrite(source, target, change):
    """A copy of a one-file checkpoint with `change(name, tensor)` applied to every tensor; None drops it."""
    shutil.copytree(source, target)
    for file in Path(target).glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})
    return str(target)


def dequantised(scheme):
    def change(name, tensor):
        if ".experts." not in name:
            return tensor
        shard = "w2" if "down_proj" in name else "w13"
        return scheme.quantize(tensor, shard).dequantize(tensor.dtype)

    return change


@pytest.fixture(scope="module")
def checkpoints(tiny_model, tmp_path_factory):
    """Folders by name."""
    root = tmp_path_factory.mktemp("quantised")
    plain = tiny_model("qwen3-moe", **SIZES)

    def doubled(name, tensor):
        return tensor * 2 if "layers.1.mlp.experts.3.up_proj" in name else tensor

    def without_one_scale(name, tensor):
        return None if name.endswith("layers.1.mlp.experts.2.down_proj.weight_scale") else tensor

    packed, exported = root / "packed", root / "exported"
    assert quantize_main([plain, str(packed), "--quiet"]) == 0
    assert quantize_main([plain, str(exported), "--quiet", "--format", "compressed-tensors"]) == 0
    dense = root / "dense"
    shutil.copytree(plain, dense, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).bfloat16().save_pretrained(dense)
    return {
        "plain": plain,
        "dequantised": rewrite(plain, root / "dequantised", dequantised(Scheme())),
        "changed expert": rewrite(plain, root / "changed", doubled),
        "packed": str(packed),
        "packed, one scale short": rewrite(packed, root / "short", without_one_scale),
        "exported": str(exported),
        "fused": tiny_model("qwen3.5-moe"),
        "no experts": str(dense),
    }


@pytest.fixture(scope="module")
def answers(run_engines, checkpoints, prompts):
    """Every single-process engine of this file, by name; engines meant to fail come last.

    The dense model is the very last: vLLM makes no expert-parallel group for it, and no later engine in the process
    makes one either.
    """
    jobs = {
        "bf16": ("plain", {}),
        "dequantised": ("dequantised", {}),
        "at load": ("plain", W4),
        "at load, compiled": ("plain", {**W4, "enforce_eager": False}),
        "at load, int": ("plain", options(**INT_32)),
        "at load, first layer ignored": ("plain", options(ignore=["layers.0"])),
        "changed expert": ("changed expert", W4),
        "packed": ("packed", {}),
        "packed, flag given": ("packed", W4),
        "compressed-tensors": ("exported", W4),
        "fused": ("fused", W4),
        "missing scale": ("packed, one scale short", {}),
        "options for a packed checkpoint": ("packed", options(group_size_w13=32)),
        "unknown backend": ("plain", options(moe_backend="abacus")),
        "no experts": ("no experts", W4),
    }
    short = prompts[:6]
    results = run_engines(
        [{"model": checkpoints[model], "options": given, "prompts": short} for model, given in jobs.values()],
        timeout=600,
    )
    return dict(zip(jobs, results, strict=True))


def mean_gap(one, other):
    pairs = zip(one["log_probs"], other["log_probs"], strict=True)
    return float(torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in pairs]).mean())


@pytest.mark.parametrize("run", ["at load", "at load, compiled", "packed"])
def test_four_bit_experts_compute_what_their_dequantised_weights_say(answers, run):
    assert mean_gap(answers["dequantised"], answers[run]) < MEAN_TOLERANCE
    assert mean_gap(answers["bf16"], answers[run]) > 2 * MEAN_TOLERANCE


def test_packed_and_at_load_give_the_same_bits(answers):
    assert answers["packed"]["log_probs"] == answers["at load"]["log_probs"]
    assert answers["packed, flag given"]["log_probs"] == answers["at load"]["log_probs"]


def test_compressed_tensors_checkpoint_gives_the_bits_of_the_same_weights_at_load(answers):
    assert answers["compressed-tensors"]["log_probs"] == answers["at load, int"]["log_probs"]


def test_forward_goes_through_the_quantised_experts(answers):
    """C22: a family whose forward bypassed the new experts would not notice a changed weight."""
    assert mean_gap(answers["at load"], answers["changed expert"]) > MEAN_TOLERANCE


def test_ignored_layers_stay_in_16_bits(answers):
    ignored = answers["at load, first layer ignored"]
    assert ignored["log_probs"] != answers["at load"]["log_probs"]
    assert mean_gap(answers["bf16"], ignored) < mean_gap(answers["bf16"], answers["at load"])


def test_the_count_is_logged_once_for_each_engine(answers, checkpoints):
    """C07: experts silently left in BF16. Fused 3-D checkpoints are counted like per-expert ones."""
    logs = dict(zip(answers, answers["bf16"]["log"].split("engine_runner: ")[1:], strict=True))
    lines = {
        run: [line for line in log.splitlines() if "w4a16-grouped:" in line and "routed experts in" in line]
        for run, log in logs.items()
    }
    config = json.loads((Path(checkpoints["plain"]) / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    assert lines["bf16"] == []
    for run in ("at load", "at load, compiled", "packed", "compressed-tensors"):
        assert len(lines[run]) == 1, run
        assert f"{layers * experts} routed experts in {layers} layers" in lines[run][0]
    assert f"{(layers - 1) * experts} routed experts in {layers - 1} layers" in lines["at load, first layer ignored"][0]
    assert len(lines["fused"]) == 1


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("no experts", "has no routed experts to quantise"),
        ("missing scale", "did not arrive, first local expert 2 w2: weight_scale"),
        ("options for a packed checkpoint", "['group_size_w13'] are for quantising at load"),
        ("unknown backend", "'abacus'"),
    ],
)
def test_bad_input_is_an_error_that_names_it(answers, run, says):
    assert "error" in answers[run]
    assert says in answers[run]["error"] + answers[run]["log"]


def test_a_16_bit_model_never_accumulates_while_it_is_quantised(run_engines, tiny_model):
    """C19: methods that quantise after loading need the memory of the whole 16-bit model first."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64, "num_hidden_layers": 6}
    expert_bytes = 2 * 3 * 512 * 512 * 64 * 6
    model = tiny_model("qwen3-moe", **sizes)
    peaks = []
    for given in ({}, W4):
        engine = {**given, "num_gpu_blocks_override": 32, "max_model_len": 64}
        (result,) = run_engines([{"model": model, "prompts": [[1, 2, 3]], "options": engine, "max_tokens": 1}])
        peaks.append(result["peak_private_bytes"])
    one_layer = expert_bytes / 6
    in_4_bits = expert_bytes * 0.28
    assert peaks[1] < peaks[0] - expert_bytes + in_4_bits + 1.5 * one_layer, peaks


def test_tensor_and_expert_parallel_ranks_sum_to_one_rank(answers, checkpoints, run_engines, prompts):
    """C02 and C03: 96 columns over two ranks are 48 each, which begin inside a group of 64.

    Quantised at load by expert, a rank's layer is finished before the last of the other rank's experts arrive.
    """
    two, by_expert = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    jobs = [
        {"model": checkpoints[model], "prompts": prompts[:6], "options": given}
        for model, given in (("packed", two), ("packed", by_expert), ("plain", {**W4, **by_expert}))
    ]
    for result in run_engines(jobs, timeout=400, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1"):
        assert mean_gap(answers["packed"], result) < MEAN_TOLERANCE
