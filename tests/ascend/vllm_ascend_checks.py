"""Checks of the glue inside real vllm-ascend 0.23.0 on real vLLM 0.23.0 (Python of both) and real torch_npu.

The platform is vLLM-Ascend's, its patches are applied, its layers and callers are run; tensors lie on the CPU, and
`npu_emulation` computes the few operators of torch_npu and of vLLM-Ascend's extension on the way. Which chip it is: as
the stub calls itself, and as vLLM-Ascend would have been built for it.
"""

from __future__ import annotations

import inspect
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import npu_emulation
import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend
from vllm_ascend import _build_info

ON_310P = os.environ["STUB_SOC_NAME"].startswith("Ascend310P")
_build_info.__device_type__ = "_310P" if ON_310P else "A2"
torch.set_num_threads(1)
torch.set_default_dtype(torch.float16)

from transformers import Qwen3MoeConfig  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm_ascend.utils import adapt_patch  # noqa: E402

from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill  # noqa: E402
from vllm_ext.model_executor.quantization import W4A16GroupedConfig  # noqa: E402
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda  # noqa: E402
from vllm_ext.ops.moe import npu as npu_experts  # noqa: E402
from vllm_ext.quantization import Scheme, quantize_weight  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 64, 32, 2
GROUPS = {"group_size_w13": 32, "group_size_w2": 32}
# On a device of its own "auto" is the NPU's backend; these tensors lie on the CPU.
OPTIONS = {**GROUPS, "moe_backend": "npu"}


def engine_config(packed: dict[str, Any] | None = None, **options: Any) -> Any:
    """What `vllm serve` of a tiny mixture of experts with --quantization w4a16-grouped configures on this platform.

    packed: the `quantization_config` of a packed checkpoint.
    """
    folder = tempfile.mkdtemp()
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=128,
        dtype="float16",
        **({} if packed is None else {"quantization_config": packed}),
    ).save_pretrained(folder)
    given: dict[str, Any] = {
        "model": folder,
        "quantization": "w4a16-grouped",
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 128,
        "enforce_eager": True,
        "dtype": "float16",
        "additional_config": {"vllm_ext": OPTIONS},
        **options,
    }
    return EngineArgs(**given).create_engine_config()


CONFIG = engine_config()
# In the order of a worker: general plugins have been loaded, vLLM-Ascend patches vLLM, then the model is built.
adapt_patch(is_global_patch=True)
adapt_patch()

import vllm_ascend.ops.gdn as gdn_a2  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn, qwen_gdn_linear_attn  # noqa: E402
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata  # noqa: E402
from vllm_ascend._310p.ops.fla import gdn_310  # noqa: E402
from vllm_ascend.ascend_config import init_ascend_config  # noqa: E402
from vllm_ascend.ascend_forward_context import set_ascend_forward_context  # noqa: E402
from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel  # noqa: E402
from vllm_ascend.utils import register_ascend_customop  # noqa: E402

npu_emulation.register()
(_extension,) = Path(vllm_ascend.__file__).parent.glob("vllm_ascend_C.*.so")
npu_emulation.register_ascend(_extension)
npu_experts.usable = lambda device: (True, "")  # CPU tensors stand for the NPU's
npu_experts.npu_device.takes_antiquant = lambda device: not ON_310P

with set_current_vllm_config(CONFIG):
    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)
    init_ascend_model_parallel(CONFIG.parallel_config)
    init_ascend_config(CONFIG)
    register_ascend_customop(CONFIG)


def make_experts(prefix: str, config: Any = CONFIG, **options: Any) -> Any:
    """A layer of routed experts as a model builds it; vLLM-Ascend's class takes the place of vLLM's."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    with set_current_vllm_config(config):
        return FusedMoE(
            num_experts=EXPERTS,
            top_k=TOP_K,
            intermediate_size=INTERMEDIATE,
            renormalize=True,
            quant_config=config.quant_config,
            prefix=prefix,
            **{"hidden_size": HIDDEN, **options},
        )


def load_experts(layer: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Load 16-bit experts one projection after another, as a checkpoint brings them; what was loaded."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    loaded = {
        name: (torch.randn(EXPERTS, *shape, generator=generator, dtype=torch.float32) / shape[1] ** 0.5).half()
        for name, shape in shapes.items()
    }
    with set_current_vllm_config(CONFIG):
        for expert in range(EXPERTS):
            for shard, weights in loaded.items():
                name = "w2_weight" if shard == "w2" else "w13_weight"
                parameter = getattr(layer, name)
                parameter.weight_loader(
                    parameter, weights[expert], f"experts.{expert}.{shard}.weight", shard_id=shard, expert_id=expert
                )
    return loaded


def expected_experts(loaded: dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer in FP64 on the weights our scheme stores."""
    w13 = torch.cat((loaded["w1"], loaded["w3"]), dim=1)
    w13, w2 = (
        quantize_weight(w, g, method="hqq").dequantize(torch.float64)
        for w, g in ((w13, GROUPS["group_size_w13"]), (loaded["w2"], GROUPS["group_size_w2"]))
    )
    weights, ids = torch.softmax(logits.double(), -1).topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(TOP_K):
            expert = int(ids[token, slot])
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            out[token] += weights[token, slot] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def step(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, H] and router logits [M, experts]."""
    generator = torch.Generator().manual_seed(num_tokens)
    x, logits = (
        torch.randn(num_tokens, columns, generator=generator, dtype=torch.float32).half()
        for columns in (HIDDEN, num_experts)
    )
    return x, logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within FP16's rounding inside, out, and of the weights on the experts (2.4e-4 each), summed over some slots."""
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= 4e-3, error


@contextmanager
def forward_context(num_tokens: int, metadata: Any = None) -> Any:
    """vLLM-Ascend's context of a step."""
    with (
        set_current_vllm_config(CONFIG),
        set_ascend_forward_context(metadata, CONFIG, num_tokens=num_tokens, num_actual_tokens=num_tokens),
    ):
        yield


def check_the_flag_passes_the_platforms_list() -> None:
    """vLLM asks the platform whether it supports the method; vLLM-Ascend's list holds its own only, and now ours."""
    assert current_platform.device_type == "npu"
    assert isinstance(CONFIG.quant_config, W4A16GroupedConfig)
    current_platform.verify_quantization("w4a16-grouped")
    with pytest.raises(ValueError, match="not supported"):
        current_platform.verify_quantization("awq")


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
    binary = _extension.read_bytes().decode("latin-1")
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
        return
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


def check_experts_load_quantise_and_run_in_vllm_ascends_layer() -> None:
    """Its class, set up twice as it does, loaded expert by expert, run through its routing, dispatch and combining."""
    layer = make_experts("model.layers.0.mlp.experts")
    assert type(layer).__name__ == ("AscendFusedMoE310" if ON_310P else "AscendFusedMoE"), type(layer)
    assert type(layer.quant_method).__name__ == "AscendAtLoadMoEMethod"
    assert layer.w13_weight.device.type == "meta", "16-bit experts must not be allocated"
    loaded = load_experts(layer)
    assert layer.w13_weight.dtype == (torch.uint8 if ON_310P else torch.int32), layer.w13_weight.dtype
    x, logits = step(7, EXPERTS)
    npu_emulation.calls.clear()
    with forward_context(7):
        got = layer.forward_impl(x.clone(), logits)
    assert_close(got, expected_experts(loaded, x, logits))
    assert len(npu_emulation.calls) == (0 if ON_310P else 2)
    assert all(call["antiquant"] for call in npu_emulation.calls)


def check_packed_experts_load_and_run_in_vllm_ascends_layer() -> None:
    """A checkpoint of `vllm-ext quantize` needs no flag, and gives what quantising at load gives."""
    from vllm_ext.quantization import packed

    scheme = Scheme(**GROUPS)
    config = engine_config(scheme.to_dict(), quantization=None, additional_config={"vllm_ext": {"moe_backend": "npu"}})
    layer = make_experts("model.layers.2.mlp.experts", config)
    assert type(layer.quant_method).__name__ == "AscendPackedMoEMethod"
    plain = make_experts("model.layers.3.mlp.experts")
    loaded = load_experts(plain)
    for expert in range(EXPERTS):
        for shard, weights in loaded.items():
            stored = scheme.quantize(weights[expert], "w2" if shard == "w2" else "w13")
            for name, tensor in packed.to_tensors("expert", stored).items():
                parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name.partition('.')[2]}")
                parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    x, logits = step(5, EXPERTS)
    with forward_context(5):
        assert torch.equal(layer.forward_impl(x.clone(), logits), plain.forward_impl(x.clone(), logits))


def check_expert_parallel_ranks_add_up() -> None:
    """vLLM-Ascend's dispatch sends a rank the tokens of its experts: two ranks' sums are the layer of all experts.

    310P's layer refuses expert parallelism itself.
    """
    if ON_310P:
        return
    from vllm_ascend.ops.fused_moe import token_dispatcher

    layers = [make_experts(f"model.layers.{8 + rank}.mlp.experts") for rank in range(2)]
    loaded = [load_experts(layer, seed=rank) for rank, layer in enumerate(layers)]
    x, logits = step(9, 2 * EXPERTS)
    total = torch.zeros(x.shape, dtype=torch.float64)
    group = token_dispatcher.get_ep_group
    for rank, layer in enumerate(layers):
        expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        expert_map[EXPERTS * rank : EXPERTS * (rank + 1)] = torch.arange(EXPERTS, dtype=torch.int32)
        token_dispatcher.get_ep_group = lambda rank=rank: SimpleNamespace(rank_in_group=rank)
        try:
            with forward_context(9):
                result = layer.quant_method.apply(
                    layer=layer, x=x.clone(), router_logits=logits, top_k=TOP_K, renormalize=True,
                    num_experts=2 * EXPERTS, expert_map=expert_map,
                )  # fmt: skip
        finally:
            token_dispatcher.get_ep_group = group
        total += result.routed_out.double()
    whole = {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}
    assert_close(total, expected_experts(whole, x, logits))


def check_shared_experts_are_added_by_vllm_ascends_layer() -> None:
    """They stay its own: the layer returns them beside the routed experts' output."""
    shared = SharedExperts()
    layer = make_experts("model.layers.12.mlp.experts", shared_experts=shared)
    loaded = load_experts(layer)
    x, logits = step(5, EXPERTS)
    with forward_context(5):
        shared_out, routed = layer.shared_forward_impl(x.clone(), logits)
    assert torch.equal(shared_out, 3 * x)
    assert_close(routed, expected_experts(loaded, x, logits))


class SharedExperts(torch.nn.Module):
    """Three times its input, in the parts that vLLM-Ascend runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both parts."""
        return 3 * x

    def gate_up_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """First part."""
        return x, None

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        """Between them."""
        return x

    def down_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Second part."""
        return 3 * x, None


def check_apply_takes_every_argument_vllm_ascend_passes() -> None:
    """Its own adapter's signature: the same names in the same order, so that keyword and positional calls both fit."""
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod

    from vllm_ext.model_executor.ascend.experts import AscendAtLoadMoEMethod

    theirs = inspect.signature(AscendFusedMoEMethod.apply).parameters
    ours = inspect.signature(AscendAtLoadMoEMethod.apply).parameters
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].default == theirs[name].default, name


def check_linear_layers_and_ignored_experts_get_vllm_ascends_methods() -> None:
    """Everything but routed experts stays in 16 bits, by the methods that bring weights into the chip's own order."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod

    with set_current_vllm_config(CONFIG):
        linear = ReplicatedLinear(HIDDEN, HIDDEN, quant_config=CONFIG.quant_config, prefix="model.layers.0.mlp.gate")
    assert isinstance(linear.quant_method, AscendUnquantizedLinearMethod), type(linear.quant_method)
    ignoring = engine_config(additional_config={"vllm_ext": {**OPTIONS, "ignore": ["model.layers.5.mlp.experts"]}})
    layer = make_experts("model.layers.5.mlp.experts", ignoring)
    assert type(layer.quant_method).__name__.startswith("AscendUnquantizedFusedMoEMethod")


def check_what_its_path_cannot_compute_is_refused_with_the_remedy() -> None:
    """Other activations, clamped SwiGLU, biases: its W4A16 path ignores them; on a 310P we compute them ourselves."""
    from vllm_ext.model_executor.ascend.experts import make_method

    layer = make_experts("model.layers.7.mlp.experts")
    method = layer.quant_method
    for name, value in (("swiglu_limit", 7.0), ("activation", "gelu")):
        before = getattr(layer, name, 0)
        setattr(layer, name, value)
        if ON_310P:
            method.check_layer(layer)
        else:
            with pytest.raises(ValueError, match=r"layers\.7.*serve the model without"):
                method.check_layer(layer)
        setattr(layer, name, before)
    if not ON_310P:
        with pytest.raises(ValueError, match=r"layers\.11.*multiple of 8.*got 60"):
            make_experts("model.layers.11.mlp.experts", hidden_size=60)
    with pytest.raises(ValueError, match="moe_backend 'triton' does not run under vLLM-Ascend"):
        make_method(layer, "x", Scheme(), SimpleNamespace(moe_backend="triton"), CONFIG.quant_config.report)


def check_a_310p_refuses_bf16_before_loading() -> None:
    """With the remedy, at the first layer that needs it; an A2 takes BF16."""
    layer = SimpleNamespace(moe_config=SimpleNamespace(in_dtype=torch.bfloat16))
    from vllm_ext.model_executor.ascend.platform import check_model_dtype

    if ON_310P:
        with pytest.raises(ValueError, match="--dtype float16"):
            check_model_dtype(layer.moe_config.in_dtype, "w4a16-grouped, layer x")
    else:
        check_model_dtype(layer.moe_config.in_dtype, "w4a16-grouped, layer x")


def check_no_triton_is_imported_on_a_310p() -> None:
    """C21: on a 310P importing Triton fails, and everything above ran."""
    if ON_310P:
        with pytest.raises(ImportError):
            import triton  # noqa: F401
