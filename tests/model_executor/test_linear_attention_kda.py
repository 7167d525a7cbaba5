"""KDA on the CPU: the call that stands in for vLLM's kernel, and vLLM's real layer around it.

vLLM's own Kimi-Linear does not run on a CPU; the whole model is checked on a GPU by benchmarks/gpu_checks/kda_model.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vllm_ext.model_executor import linear_attention_prefill as prefill_module
from vllm_ext.model_executor.linear_attention import kda, kda_gate, kda_with_fused_gate
from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill
from vllm_ext.ops.linear_attention import chunk_kda
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

HEADS, SIZE = 4, 128


def relative_error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def must_not_run(**kwargs):
    raise AssertionError("vLLM's kernel was called")


@pytest.fixture
def call():
    operands = sample_operands("kda", 1, 150, 2, 2, 32, 32, normalised=False)
    generator = torch.Generator().manual_seed(3)
    return {
        "q": operands["q"],
        "k": operands["k"],
        "v": operands["v"],
        "raw_g": (2 * torch.randn(1, 150, 2, 32, generator=generator)).to(torch.bfloat16),
        "A_log": torch.tensor([-3.0, 2.5]).view(1, 1, 2, 1),
        "g_bias": torch.randn(64, generator=generator),
        "initial_state": sample_state(2, 2, 32, 32),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.tensor([0, 70, 150], dtype=torch.int32),
    }


def expected_answer(call, g, beta, **options):
    return chunk_kda(
        *(call[name].double() for name in "qkv"),
        g,
        beta,
        initial_state=call["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=call["cu_seqlens"],
        state_v_first=True,
        backend="reference",
        **options,
    )


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("step", ["beta", "raw_beta"])
def test_fused_gate_call_of_each_vllm_version(call, lower_bound, step):
    """0.23 passes beta ready and knows no lower bound; later versions pass its projection."""
    projection = torch.randn(1, 150, 2, generator=torch.Generator().manual_seed(4))
    given = projection.sigmoid() if step == "beta" else projection
    o, state = kda_with_fused_gate(
        LayerPrefill("model.layers.0.self_attn", "kda"), must_not_run, lower_bound=lower_bound, **call, **{step: given}
    )
    x = call["raw_g"].double() + call["g_bias"].double().view(2, 32)
    rate = call["A_log"].double().view(2, 1).exp()
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    expected, expected_state = expected_answer(call, g, projection.double().sigmoid())
    assert o.dtype == torch.bfloat16
    assert relative_error(o, expected) < 2**-8
    assert relative_error(state, expected_state) < 1e-5


def test_fused_gate_call_writes_where_the_caller_says_with_the_scale_it_gives(call):
    beta = torch.rand(1, 150, 2, generator=torch.Generator().manual_seed(4))
    out = torch.full((1, 150, 2, 32), float("nan"), dtype=torch.bfloat16)
    o, _ = kda_with_fused_gate(LayerPrefill("layer", "kda"), must_not_run, **call, beta=beta, scale=0.5, out=out)
    g = kda_gate(call["raw_g"], call["A_log"], call["g_bias"], None)
    assert o is out
    assert relative_error(o, expected_answer(call, g, beta, scale=0.5)[0]) < 2**-8


def test_state_comes_back_in_the_cache_dtype_because_the_caller_scatters_without_a_cast(call):
    call["initial_state"] = call["initial_state"].to(torch.bfloat16)
    _, state = kda_with_fused_gate(
        LayerPrefill("layer", "kda"), must_not_run, **call, raw_beta=torch.zeros(1, 150, 2, dtype=torch.bfloat16)
    )
    assert state.dtype == torch.bfloat16


def test_gate_is_never_positive_and_finite_at_the_ends():
    x = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4]).view(1, 5, 1, 1)
    for lower_bound in (None, -5.0):
        g = kda_gate(x, torch.tensor([2.0]), None, lower_bound)
        assert bool((g <= 0).all())
        assert bool(torch.isfinite(g).all())


def test_error_names_the_layer_the_rule_and_what_is_wrong(call, monkeypatch):
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: None)
    call["q"] = call["q"][..., :16]
    with pytest.raises(RuntimeError, match=r"model.layers.7.*Kimi delta attention.*q and k must both be"):
        kda_with_fused_gate(
            LayerPrefill("model.layers.7.self_attn", "kda"), must_not_run, **call, beta=torch.zeros(1, 150, 2)
        )


@pytest.mark.parametrize(
    "step", [{"beta": torch.zeros(1, 150, 2)}, {"raw_beta": torch.zeros(1, 150, 2), "lower_bound": -5.0, "scale": 0.5}]
)
def test_fallback_passes_vllm_its_own_arguments_untouched(call, step):
    """Arguments this version's kernel does not know must not be made up (0.23 has no lower_bound)."""
    received = {}

    def stock(**kwargs):
        received.update(kwargs)
        return call["v"], call["initial_state"]

    given = {**call, "q": call["q"][..., :16], **step}
    o, state = kda_with_fused_gate(LayerPrefill("layer", "kda", fallback=True), stock, **given)
    assert o is call["v"]
    assert state is call["initial_state"]
    assert received.keys() == given.keys()
    assert all(received[name] is value for name, value in given.items())


def test_call_with_the_gate_applied_needs_no_word_on_how(call):
    """Ling 3.0's layer gates by itself, and tells vLLM's kernel so that its products cannot overflow."""
    beta = torch.randn(1, 150, 2, generator=torch.Generator().manual_seed(4)).sigmoid()
    g = kda_gate(call.pop("raw_g"), call.pop("A_log"), call.pop("g_bias"), -5.0)
    how = {"safe_gate": True, "lower_bound": -5.0}
    o, state = kda(LayerPrefill("layer", "kda"), must_not_run, **call, g=g, beta=beta, scale=0.5, **how)
    expected, expected_state = expected_answer(call, g, beta, scale=0.5)
    assert relative_error(o, expected) < 2**-8
    assert relative_error(state, expected_state) < 1e-5
    received = {}

    def stock(**kwargs):
        received.update(kwargs)
        return call["v"], call["initial_state"]

    broken = {**call, "q": call["q"][..., :16]}
    kda(LayerPrefill("layer", "kda", fallback=True), stock, **broken, g=g, beta=beta, **how)
    assert {name: received[name] for name in how} == how
    assert all(received[name] is value for name, value in broken.items() if isinstance(value, torch.Tensor))


@pytest.fixture(scope="module")
def layer_run(tiny_model, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("kda_layer")
    (folder / "options.json").write_text(json.dumps({"attention_backend": "ha_npu"}))
    runner = Path(__file__).with_name("kda_layer_runner.py")
    # vLLM's package of Kimi kernels imports a CUDA-only library unless this is 0.
    environment = {"VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        [sys.executable, str(runner), tiny_model("kimi-linear"), "options.json", "result.pt"],
        env={**os.environ, **environment, "VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return torch.load(folder / "result.pt"), process.stdout + process.stderr


def layer_by_definition(run):
    """Convolution, SiLU, gates and recurrence in FP64 (activations rounded to BF16 where the layer stores them)."""
    inputs = {name: x.double() for name, x in run["inputs"].items()}
    qkv = inputs["mixed_qkv"].T.unsqueeze(0)
    weight = run["conv1d"].double()
    qkv = F.silu(F.conv1d(F.pad(qkv, (3, 0)), weight, groups=weight.shape[0]))[0].T.to(torch.bfloat16).double()
    q, k, v = (x.view(1, -1, HEADS, SIZE) for x in qkv.split(HEADS * SIZE, dim=-1))
    rate = run["A_log"].double().view(HEADS, 1).exp()
    g = -rate * F.softplus(inputs["g1"] + run["dt_bias"].double().view(HEADS, SIZE))
    beta = inputs["beta"].sigmoid()
    return chunk_kda(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True, state_v_first=True, backend="reference"
    )


def test_vllms_layer_prefills_a_prompt_and_stores_its_state(layer_run):
    run, _ = layer_run
    expected, state = layer_by_definition(run)
    assert relative_error(run["whole"], expected[0]) < 1e-2  # the convolution's BF16 output rounds either way
    assert relative_error(run["whole_state"][4], state[0]) < 1e-2
    assert bool(run["whole_state"][[0, 1, 2, 3, 5]].isnan().all()), "another request's slot was written"


def test_vllms_layer_continues_a_prompt_beside_other_requests(layer_run):
    """The second chunk of a prompt, packed behind a sequence of one token, equals the prompt in one piece."""
    run, _ = layer_run
    assert relative_error(run["pieces"], run["whole"]) < 1e-3
    assert relative_error(run["pieces_state"][2], run["whole_state"][4]) < 1e-5
    assert bool(run["pieces_state"][[0, 1, 3, 4]].isnan().all()), "another request's slot was written"


def test_debug_log_names_the_kda_layer(layer_run):
    assert "model.layers.0.self_attn: kda prefill by vllm_ext backend cpu" in layer_run[1]
