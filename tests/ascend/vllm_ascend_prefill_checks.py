"""Checks of the prefill hooks inside vLLM-Ascend: its patched layers and its own callers, on `vllm_ascend_engine`."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_ascend_engine import EXTENSION, ON_310P, forward_context  # first: it makes the platform

import vllm_ascend.ops.gdn as gdn_a2  # isort: skip
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm_ascend._310p.ops.fla import gdn_310

from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda


def check_hooks_stand_after_vllm_ascends_patches() -> None:
    """The functions that its patched layers look up are ours, with the stock function's signature."""
    for module, name in (
        (gdn_310, "chunk_gated_delta_rule_310"),
        (gdn_a2, "chunk_gated_delta_rule"),
        (kimi_gdn_linear_attn, "chunk_kda_with_fused_gate"),
    ):
        function = getattr(module, name)
        assert getattr(function, "_vllm_ext_wrapped", False), name
        assert inspect.signature(function) == inspect.signature(function.__wrapped__), name
    cls = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    owner = gdn_310.AscendGatedDeltaNetAttention310 if ON_310P else gdn_a2.AscendGatedDeltaNetAttention
    assert cls._forward_core is owner._forward_core
    assert getattr(cls.rearrange_mixed_qkv, "_vllm_ext_wrapped", False), "how the running layer is known"


def check_calls_of_layers_that_are_not_ours_reach_vllm_ascend() -> None:
    """Without --attention-backend ha_npu nothing changes: the stock function gets the very call."""
    module, name = (gdn_310, "chunk_gated_delta_rule_310") if ON_310P else (gdn_a2, "chunk_gated_delta_rule")
    # Neither survives a call without operands, and both say so in their own words.
    with pytest.raises((RuntimeError, AttributeError), match="chunk-gdr path" if ON_310P else "NoneType"):
        getattr(module, name)(None, None, None, None, None)


HEADS, VALUE_HEADS, KEY, VALUE, SLOTS = 2, 4, 16, 32, 6


def gdn_layer(prefix: str) -> Any:
    """vLLM's Qwen layer, patched by vLLM-Ascend, with what its core reads; the convolution is emulated as identity."""
    cls = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.prefix, layer.tp_size, layer.activation = prefix, 1, "silu"
    layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim = HEADS * KEY, VALUE_HEADS * VALUE, KEY, VALUE
    layer.conv1d = SimpleNamespace(weight=torch.zeros(1, 1, 4), bias=None)
    layer.A_log = torch.linspace(-2, 1, VALUE_HEADS, dtype=torch.float32)
    layer.dt_bias = torch.linspace(-1, 1, VALUE_HEADS, dtype=torch.float32)
    return layer


def identity_convolution() -> torch.library.Library:
    """The extension's convolutions, which come before the rule: what goes in comes out."""
    library = torch.library.Library("_C_ascend", "FRAGMENT")  # type: ignore[no-untyped-call]
    binary = EXTENSION.read_bytes().decode("latin-1")
    start = binary.index("npu_causal_conv1d_custom(Tensor output")
    library.define(
        " ".join(binary[start : binary.index("\0", start)].split()).replace("-> (Tensor output)", "-> Tensor")
    )  # type: ignore[no-untyped-call]
    library.impl("npu_causal_conv1d_custom", lambda output, x, *rest: output.copy_(x).clone(), "CPU")  # type: ignore[no-untyped-call]
    # Built for A2, the extension has no 310P operators: this schema is that of the call.
    library.define(  # type: ignore[no-untyped-call]
        "npu_causal_conv1d_310(Tensor x, Tensor weight, *, Tensor? bias, Tensor conv_states, Tensor? query_start_loc, "
        "Tensor? cache_indices, Tensor? initial_state_mode, Tensor? num_accepted_tokens, int activation_mode, "
        "int pad_slot_id, int run_mode) -> Tensor"
    )
    library.impl("npu_causal_conv1d_310", lambda x, *rest, **named: x.clone(), "CPU")  # type: ignore[no-untyped-call]
    return library


_convolutions = identity_convolution()


@contextmanager
def planted_failure() -> Any:
    """Our operator refuses every call."""
    from vllm_ext.model_executor.ascend import gdn

    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("planted")

    rule = gdn.chunk_gated_delta_rule
    gdn.chunk_gated_delta_rule = fail
    try:
        yield
    finally:
        gdn.chunk_gated_delta_rule = rule


def check_gated_delta_rule_through_vllm_ascends_own_caller() -> None:
    """Its `_forward_core` gathers, zeroes, calls us, casts and scatters: outputs and cache equal the recurrence, where
    a sequence continues, where one begins in a slot full of rubbish, and in slots that nobody touches.
    """
    from vllm_ascend._310p.ops.fla.fused_gdn_gating import fused_gdn_gating_pytorch
    from vllm_ascend.device.device_op import DeviceOperator

    # A2's gating and clearing are Triton kernels; these are their definitions.
    DeviceOperator.fused_gdn_gating = staticmethod(fused_gdn_gating_pytorch)
    gdn_a2.clear_ssm_states = lambda states, has: states.masked_fill_(~has.bool().view(-1, 1, 1, 1), 0)

    generator = torch.Generator().manual_seed(7)
    bounds, slots, continues = [0, 70, 75, 140], [4, 1, 2], [True, False, True]
    tokens = bounds[-1]
    mixed = torch.randn(tokens, 2 * HEADS * KEY + VALUE_HEADS * VALUE, generator=generator, dtype=torch.float32).half()
    a, b = (torch.randn(tokens, VALUE_HEADS, generator=generator, dtype=torch.float32).half() for _ in range(2))
    dtype = torch.float16 if ON_310P else torch.float32
    cache = torch.randn(SLOTS, VALUE_HEADS, VALUE, KEY, generator=generator, dtype=torch.float32).to(dtype)
    before = cache.clone()
    layer = gdn_layer("model.layers.0.linear_attn")
    layer.kv_cache = (torch.zeros(SLOTS, 3, 4), cache)
    layer._vllm_ext_prefill = LayerPrefill(layer.prefix, "gdn")
    starts, states = torch.tensor(bounds, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    has = torch.tensor(continues)
    metadata = GDNAttentionMetadata(
        num_prefills=3,
        num_prefill_tokens=tokens,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=tokens,
        has_initial_state=has,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=states,
        prefill_query_start_loc=starts,
        prefill_state_indices=states,
        prefill_has_initial_state=has,
    )
    metadata.non_spec_prefill_metadata = SimpleNamespace(
        causal_conv1d=SimpleNamespace(query_start_loc=starts, cache_indices=states, initial_state_mode=has), chunk=None
    )
    out = torch.full((tokens, VALUE_HEADS, VALUE), float("nan"))
    with forward_context(tokens, {layer.prefix: metadata}):
        layer._forward_core(mixed, b, a, out)
        after = cache.clone()
        with pytest.raises(RuntimeError, match=r"layers\.0\.linear_attn.*planted"), planted_failure():
            layer._forward_core(mixed, b, a, torch.empty_like(out))
    assert torch.equal(cache, after), "vLLM-Ascend's worker would not pass a failure on: it must not become zeros"

    q, k, v = layer.rearrange_mixed_qkv(mixed)
    g, beta = fused_gdn_gating_pytorch(layer.A_log, a, b, layer.dt_bias)
    initial = before[slots].double() * has.view(-1, 1, 1, 1)
    expected, final = chunk_gated_delta_rule(
        *(t.double() for t in (q, k, v, g, beta)),
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=starts,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        backend="reference",
    )
    assert final is not None
    scale = float(expected.abs().max())
    assert float((out.double() - expected[0]).abs().max()) <= 2e-3 * scale, "outputs"
    # FP32 inside, one rounding to the cache's dtype on the way out.
    rounding = torch.finfo(dtype).eps if dtype == torch.float16 else 1e-4
    assert float((cache[slots].double() - final).abs().max()) <= rounding * float(final.abs().max()), "states"
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(cache[untouched], before[untouched])


def check_a_refused_call_falls_back_to_vllm_ascends_function_when_asked_to() -> None:
    """The stock function then receives what its caller gave, by name; without the option the error names the layer."""
    from vllm_ext.model_executor.ascend import gdn

    seen: dict[str, Any] = {}

    def stock(**call: Any) -> Any:
        seen.update(call)
        return call["v"], call["initial_state"]

    serve = gdn.serve_310p if ON_310P else gdn.serve_a2
    sizes = (VALUE, KEY) if ON_310P else (KEY, VALUE)
    call = {
        "q": torch.zeros(1, 3, HEADS, KEY),
        "k": torch.zeros(1, 3, HEADS, KEY),
        "v": torch.zeros(1, 3, VALUE_HEADS, VALUE),
        "g": torch.zeros(1, 3, VALUE_HEADS),
        "beta": torch.zeros(1, 3, VALUE_HEADS),
        "initial_state": torch.zeros(1, VALUE_HEADS, *sizes),
        "output_final_state": True,
        "cu_seqlens": torch.tensor([0, 3]),
        "use_qk_l2norm_in_kernel": True,
        "head_first": True,
        **({} if ON_310P else {"prebuilt_meta": "theirs"}),
    }
    serve(LayerPrefill("layers.3", "gdn", fallback=True), stock, **call)
    for name, value in call.items():
        assert seen[name] is value, name
    with pytest.raises(RuntimeError, match=r"layers\.3.*head_first"):
        serve(LayerPrefill("layers.3", "gdn"), stock, **call)


def check_a_chip_without_kernels_is_refused_at_start_up() -> None:
    """A2's matrix and vector units are separate cores, and there are no kernels for that: said before anyone is served,
    unless vLLM-Ascend's own kernel may take over.
    """
    if ON_310P:
        pytest.skip("for a 310P there are kernels")
    from vllm_ext.model_executor.linear_attention_prefill import make_layer_prefill
    from vllm_ext.ops.linear_attention.problem import Problem

    device = torch.device("npu", 0)
    problem = Problem("gdn", 1, 0, 2, 4, 128, 128, 0, True, torch.float16, torch.float32, device)
    with pytest.raises(RuntimeError, match=r"layers\.0.*separate cores.*on_kernel_error"):
        make_layer_prefill("layers.0", problem, fallback=False)
    assert make_layer_prefill("layers.0", problem, fallback=True) is None


def check_kimi_delta_attention_is_served_where_vllm_calls_it() -> None:
    """KDA is vLLM's own layer on every platform: its function, called from a layer of ours, computes our rule."""
    from vllm_ext.model_executor import linear_attention_hooks

    generator = torch.Generator().manual_seed(3)
    size, heads, tokens = 16, 2, 70

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).half()

    q, k, v, raw = (normal(1, tokens, heads, size) for _ in range(4))
    beta = torch.sigmoid(normal(1, tokens, heads))
    rate = torch.zeros(heads, dtype=torch.float32)
    state = normal(1, heads, size, size)
    layer = torch.nn.Module()
    layer._vllm_ext_prefill = LayerPrefill("model.layers.1.self_attn", "kda")
    linear_attention_hooks._running.layer = lambda: layer
    try:
        o, final = kimi_gdn_linear_attn.chunk_kda_with_fused_gate(
            q=q, k=k, v=v, raw_g=raw, beta=beta, A_log=rate, g_bias=None, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, tokens]),
        )  # fmt: skip
    finally:
        linear_attention_hooks._running.layer = lambda: None
    gate = -torch.nn.functional.softplus(raw.double())
    expected, expected_state = chunk_kda(
        q.double(), k.double(), v.double(), gate, beta.double(), initial_state=state.double(), output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=True, backend="reference",
    )  # fmt: skip
    assert expected_state is not None
    assert float((o.double() - expected).abs().max()) <= 2e-3 * float(expected.abs().max())
    assert final.dtype == state.dtype, "vLLM's layer scatters it without a cast"
    assert float((final.double() - expected_state).abs().max()) <= 2e-3 * float(expected_state.abs().max())


def check_no_triton_is_imported_on_a_310p() -> None:
    """C21: on a 310P importing Triton fails, and everything above ran."""
    if not ON_310P:
        pytest.skip("Triton may be imported for an A2")
    with pytest.raises(ImportError):
        import triton  # noqa: F401
