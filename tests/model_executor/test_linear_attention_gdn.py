"""The calls that stand in for vLLM's GDN kernels: the state's layout, its slots, and what vLLM gets back."""

from __future__ import annotations

import pytest
import torch

from vllm_ext.model_executor import linear_attention_prefill as prefill_module
from vllm_ext.model_executor.linear_attention import GatedDeltaRulePrefill, gated_delta_rule_on_cpu
from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill, make_layer_prefill
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, dispatch
from vllm_ext.ops.linear_attention.problem import Problem
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

BOUNDS = torch.tensor([0, 1, 1, 70, 200], dtype=torch.int32)
SLOTS = torch.tensor([5, 1, 3, 6], dtype=torch.int32)


def relative_error(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def must_not_run(**kwargs):
    raise AssertionError("vLLM's kernel was called")


@pytest.fixture
def prefill():
    return LayerPrefill("model.layers.0.linear_attn", "gdn")


@pytest.fixture
def operands():
    return sample_operands("gdn", 1, 200, 2, 4, 32, 64, normalised=False)


def by_definition(operands, initial_state, **options):
    wide = {name: x.double() for name, x in operands.items()}
    return chunk_gated_delta_rule(
        **wide,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=BOUNDS,
        use_qk_l2norm_in_kernel=True,
        backend="reference",
        **options,
    )


def test_gpu_call_takes_and_returns_value_first_states(prefill, operands):
    initial = sample_state(4, 4, 64, 32)  # [N, HV, V, K], V and K unequal so that a transposed state cannot pass
    buffer = torch.full((300, 4, 64), float("nan"), dtype=torch.bfloat16)
    o, state = GatedDeltaRulePrefill(prefill, must_not_run)(
        **operands,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=BOUNDS,
        chunk_indices=None,
        chunk_offsets=None,
        core_attn_out=buffer,
    )
    expected, expected_state = by_definition(operands, initial, state_v_first=True)
    assert relative_error(o, expected) < 2**-8
    assert relative_error(state, expected_state) < 1e-5
    assert torch.equal(buffer[:200], o[0])
    assert bool(buffer[200:].isnan().all())


def test_gpu_call_that_falls_back_passes_everything_on(operands):
    """A caller that gives no buffer for the output has none made up for its kernel; one that is given is filled."""
    received = {}

    def stock(**kwargs):
        received.update(kwargs)
        return operands["v"], "state"

    op = GatedDeltaRulePrefill(LayerPrefill("layer", "gdn", fallback=True), stock)
    bad = {**operands, "initial_state": sample_state(3, 4, 64, 32), "output_final_state": True, "cu_seqlens": BOUNDS}
    bad |= {"use_qk_l2norm_in_kernel": False, "chunk_indices": "indices"}
    buffer = torch.full((300, 4, 64), float("nan"), dtype=torch.bfloat16)
    for given in ({}, {"core_attn_out": buffer}):
        assert op(**bad, **given) == (operands["v"], "state")
        assert received.keys() == bad.keys()
        assert all(received[name] is bad[name] for name in bad)
    assert torch.equal(buffer[:200], operands["v"][0])
    assert bool(buffer[200:].isnan().all())


def cpu_call(operands):
    call = {name: operands[short] for name, short in (("query", "q"), ("key", "k"), ("value", "v"))}
    call |= {"g": operands["g"], "beta": operands["beta"], "output_final_state": True, "cu_seqlens": BOUNDS}
    return {**call, "head_first": False, "use_qk_l2norm_in_kernel": True}


def test_cpu_call_updates_its_slots_of_the_pool_and_no_other(prefill, operands):
    pool = torch.full((8, 4, 32, 64), float("nan"))
    pool[SLOTS.long()] = sample_state(4, 4, 32, 64)
    o, returned = gated_delta_rule_on_cpu(
        prefill, must_not_run, **cpu_call(operands), initial_state=pool, initial_state_indices=SLOTS, eps=1e-6
    )
    expected, state = by_definition(operands, sample_state(4, 4, 32, 64))
    assert returned is pool
    assert o.dtype == torch.bfloat16
    assert relative_error(o, expected) < 2**-8
    assert relative_error(pool[SLOTS.long()], state) < 1e-5
    assert bool(pool[[0, 2, 4, 7]].isnan().all())
    assert torch.equal(pool[1], sample_state(4, 4, 32, 64)[1]), "an empty sequence changed its state"


def test_cpu_call_without_indices_returns_the_states(prefill, operands):
    """vLLM 0.23 gathers and scatters by itself."""
    initial = sample_state(4, 4, 32, 64)
    kept = initial.clone()
    _, state = gated_delta_rule_on_cpu(prefill, must_not_run, **cpu_call(operands), initial_state=initial, eps=1e-6)
    assert relative_error(state, by_definition(operands, kept)[1]) < 1e-5
    assert torch.equal(initial, kept)


def test_cpu_call_that_fails_leaves_the_pool_to_vllm_as_it_was(operands, monkeypatch):
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: None)
    pool = sample_state(8, 4, 32, 64)
    call = {**cpu_call(operands), "cu_seqlens": torch.tensor([0, 1, 1, 70, 300], dtype=torch.int32)}
    with pytest.raises(RuntimeError, match=r"model.layers.3.*gated delta rule.*T=200"):
        gated_delta_rule_on_cpu(
            LayerPrefill("model.layers.3", "gdn"), must_not_run, **call, initial_state=pool, initial_state_indices=SLOTS
        )
    assert torch.equal(pool, sample_state(8, 4, 32, 64))


@pytest.mark.parametrize("pooled", [True, False])
def test_cpu_call_that_falls_back_passes_everything_on_and_leaves_the_states_to_vllm(operands, pooled):
    """Heads first is a layout that ours refuses. 0.23's kernel knows no slots and returns the states."""
    initial = sample_state(8 if pooled else 4, 4, 32, 64)
    given = {**cpu_call(operands), "head_first": True, "use_qk_l2norm_in_kernel": False, "initial_state": initial}
    given |= {"eps": 1e-4, **({"initial_state_indices": SLOTS} if pooled else {})}
    received = {}

    def stock(**kwargs):
        received.update(kwargs)
        initial.fill_(3.0)
        return "o", initial

    o, state = gated_delta_rule_on_cpu(LayerPrefill("layer", "gdn", fallback=True), stock, **given)
    assert o == "o"
    assert state is initial
    assert bool((initial == 3.0).all())
    assert received.keys() == given.keys()
    assert all(received[name] is given[name] for name in given)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_cpu_call_agrees_with_vllms_kernel_down_to_the_norms_epsilon(prefill, scale):
    """Weak keys: vLLM's CPU kernel adds 1e-5 under the root, and 1e-6 (the operators' own) would differ by 10%."""
    ops = pytest.importorskip("vllm._custom_ops")
    operands = sample_operands("gdn", 1, 200, 2, 4, 128, 128, normalised=False)
    operands["q"], operands["k"] = operands["q"] * scale, operands["k"] * scale
    pools = [torch.zeros(8, 4, 128, 128) for _ in range(2)]
    stock = getattr(ops.chunk_gated_delta_rule_cpu, "__wrapped__", ops.chunk_gated_delta_rule_cpu)
    shared = {**cpu_call(operands), "initial_state_indices": SLOTS}
    expected, _ = stock(**shared, initial_state=pools[0])
    o, _ = gated_delta_rule_on_cpu(prefill, must_not_run, **shared, initial_state=pools[1])
    assert relative_error(o, expected) < 1e-2  # vLLM's products are BF16
    assert relative_error(pools[1], pools[0]) < 1e-2


def layer_problem(device, state_dtype=torch.float32):
    sizes = {"num_heads": 2, "num_value_heads": 4, "key_dim": 128, "value_dim": 64}
    return Problem(
        op="gdn",
        batch=1,
        num_tokens=0,
        **sizes,
        num_sequences=0,
        varlen=True,
        dtype=torch.bfloat16,
        state_dtype=state_dtype,
        device=torch.device(device),
    )


def test_layer_that_nothing_can_serve_is_refused_when_it_is_built():
    with pytest.raises(RuntimeError, match=r"model.layers.0.*cpu: .*meta"):
        make_layer_prefill("model.layers.0", layer_problem("meta"), fallback=False)
    assert make_layer_prefill("model.layers.0", layer_problem("meta"), fallback=True) is None


def raises(**call):
    raise ValueError("no such size")


def output_not_finite(q, k, v, *operands, **options):
    return torch.full_like(v, float("nan")), options["initial_state"]


def state_not_finite(q, k, v, *operands, **options):
    return v, torch.full_like(options["initial_state"], float("inf"))


@pytest.mark.parametrize(
    ("operator", "reason"),
    [(raises, "no such size"), (output_not_finite, "not finite"), (state_not_finite, "not finite")],
)
def test_layer_whose_kernel_fails_a_trial_is_refused_when_it_is_built(operator, reason, monkeypatch):
    """Not at the first request: a kernel that cannot be compiled for these sizes shows that when it is run."""
    tried = []

    def trial(*operands, **options):
        state = options["initial_state"]
        tried.append((operands[0].shape, operands[2].shape, state.shape, state.dtype))
        return operator() if operator is raises else operator(*operands, **options)

    monkeypatch.setitem(prefill_module._OPERATORS, "gdn", trial)
    prefill_module._try_kernel.cache_clear()
    with pytest.raises(RuntimeError, match=rf"model.layers.0.*gated delta rule.*{reason}.*on_kernel_error"):
        make_layer_prefill("model.layers.0", layer_problem("cpu", torch.bfloat16), fallback=False)
    assert tried == [((1, 66, 2, 128), (1, 66, 4, 64), (2, 4, 64, 128), torch.bfloat16)]
    assert make_layer_prefill("model.layers.0", layer_problem("cpu"), fallback=True) is None


def test_layers_of_one_size_are_tried_once(monkeypatch):
    calls = []
    right = prefill_module._OPERATORS["gdn"]
    monkeypatch.setitem(
        prefill_module._OPERATORS, "gdn", lambda *args, **options: calls.append(1) or right(*args, **options)
    )
    prefill_module._try_kernel.cache_clear()
    for index in range(3):
        assert make_layer_prefill(f"model.layers.{index}", layer_problem("cpu"), fallback=False) is not None
    assert calls == [1]


def test_debug_log_says_which_kernel_serves_a_layer_and_why_a_better_one_does_not(monkeypatch, caplog):
    """On a GPU whose Triton cannot, the slower kernel must not go unexplained."""
    monkeypatch.setitem(dispatch._AUTO, "cpu", ("npu", "cpu"))
    monkeypatch.setattr(prefill_module, "describe_mapping", lambda problem, tokens, name: f"{tokens} tokens by {name}")
    monkeypatch.setattr(prefill_module.logger, "handlers", [caplog.handler])  # vLLM's own keeps records to itself
    prefill_module._announce.cache_clear()
    with caplog.at_level("DEBUG", logger=prefill_module.logger.name):
        for layer in ("model.layers.6", "model.layers.7"):
            assert make_layer_prefill(layer, layer_problem("cpu"), fallback=False, num_tokens=300) is not None
    (told,) = {id(record): record for record in caplog.records if record.levelname == "WARNING"}.values()
    assert "GDN prefill by vllm_ext backend cpu, because npu: " in told.getMessage()
    _, line = dict.fromkeys(record.getMessage() for record in caplog.records if record.levelname == "DEBUG")
    assert line.startswith("model.layers.7: gdn prefill by vllm_ext backend cpu, because npu: ")
    assert "(2 key heads of 128, 4 value heads of 64, torch.bfloat16, torch.float32 states)" in line
    assert line.endswith("mapping: 300 tokens by cpu")
