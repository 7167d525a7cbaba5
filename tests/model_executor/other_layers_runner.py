"""Drives vLLM's real OLMo-hybrid and Ling 3.0 layers on the CPU; started by `test_linear_attention_layers`.

    python other_layers_runner.py olmo|bailing MODEL RESULT.json

As in `kda_layer_runner`, what a layer calls in Triton besides its prefill kernel has torch behind it; its own code, its
metadata, its cache and its call of the prefill are vLLM's. RESULT holds relative errors against the definition in FP64:
of a prompt of 150 tokens whole, and in two pieces beside other sequences, the second packed behind one of one token.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

LENGTH, CUT, SLOTS, TAPS = 150, 70, 6, 4
HEADS, KEY, VALUE, LOWER_BOUND = 2, 32, 64, -5.0
Inputs = dict[str, torch.Tensor]


def build(kind: str, model: str) -> tuple[Any, Any]:
    """The layer with random weights, and the configuration it was built under."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    options = {"enforce_eager": True, "enable_prefix_caching": False, "attention_backend": "ha_npu"}
    config = EngineArgs(model=model, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1)
        layer = (olmo if kind == "olmo" else bailing)(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    layer.A_log.data.copy_(torch.linspace(-3, 2.5, layer.A_log.numel()).view(layer.A_log.shape))
    return layer, config


def olmo(config: Any) -> Any:
    """Steps up to 2 (negative eigenvalues), keys and values of unequal size."""
    import vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn as module
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    def gating(A_log: Any, a: Any, b: Any, dt_bias: Any, negative: bool) -> tuple[torch.Tensor, torch.Tensor]:
        g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
        return g[None], (b.float().sigmoid() * (2 if negative else 1))[None]

    module.set_triton_allocator = lambda device: None
    module.causal_conv1d_fn = causal_conv1d_fn_cpu
    module.fused_olmo_hybrid_gdn_gating = gating
    sizes = {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS, "linear_conv_kernel_dim": TAPS}
    sizes |= {"linear_key_head_dim": KEY, "linear_value_head_dim": VALUE, "linear_allow_neg_eigval": True}
    text = SimpleNamespace(hidden_size=128, hidden_act="silu", rms_norm_eps=1e-6, **sizes)
    return module.OlmoHybridGatedDeltaNetAttention(text, config, "model.layers.0.linear_attn")


def bailing(config: Any) -> Any:
    """KDA with the safe gate, which the layer applies before it calls the kernel."""
    import vllm.model_executor.models.bailing_moe_v3 as module
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    module.causal_conv1d_fn = causal_conv1d_fn_cpu
    text = SimpleNamespace(
        hidden_size=128,
        head_dim=KEY,
        num_attention_heads=HEADS,
        short_conv_kernel_size=TAPS,
        rms_norm_eps=1e-6,
        kda_safe_gate=True,
        kda_lower_bound=LOWER_BOUND,
        no_kda_lora=True,
    )
    return module.BailingMoeV3KimiDeltaAttention(
        text, prefix="model.layers.0.attention", model_config=config.model_config, cache_config=config.cache_config
    )


def draw(kind: str) -> Inputs:
    """What the layer's projections would give for the prompt, tokens first."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(LENGTH, *shape, generator=generator).to(torch.bfloat16)

    if kind == "olmo":
        return {"mixed_qkv": normal(HEADS * (2 * KEY + VALUE)), "a": normal(HEADS), "b": normal(HEADS)}
    inputs = {f"{name}_proj_states": normal(HEADS * KEY) for name in "qkv"}
    g = LOWER_BOUND * torch.rand(LENGTH, HEADS, KEY, generator=generator)
    return {**inputs, "g1": g, "beta": torch.rand(LENGTH, HEADS, generator=generator)}


def prefill(
    kind: str, layer: Any, config: Any, inputs: Inputs, lengths: list[int], slots: list[int], old: list[int]
) -> torch.Tensor:
    """One step of the layer over packed sequences; `old` says which of them continue. Returns [T, H, V]."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    total = sum(lengths)
    metadata = GDNAttentionMetadata(
        num_prefills=len(lengths),
        num_prefill_tokens=total,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=total,
        has_initial_state=torch.tensor(old, dtype=torch.bool),
        non_spec_query_start_loc=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )
    value_dim = VALUE if kind == "olmo" else KEY
    out = torch.full((total, HEADS, value_dim), float("nan"), dtype=torch.bfloat16)
    with set_forward_context({layer.prefix: metadata}, config):
        if kind == "olmo":
            layer._forward_core(**inputs, core_attn_out=out)
        else:
            batched = {name: x[None] if name in ("g1", "beta") else x for name, x in inputs.items()}
            layer._forward(**batched, core_attn_out=out[None])
    return out


def by_definition(kind: str, layer: Any, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution, SiLU and recurrence in FP64, activations rounded to BF16 where the layer stores them."""
    from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.double().T[None], (TAPS - 1, 0))
        return F.silu(F.conv1d(padded, weight.double(), groups=weight.shape[0]))[0].T.to(torch.bfloat16).double()

    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": True}
    if kind == "olmo":
        qkv = convolve(inputs["mixed_qkv"], layer.conv1d.weight.data)
        q, k, v = qkv.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], dim=-1)
        g = -layer.A_log.double().exp() * F.softplus(inputs["a"].double() + layer.dt_bias.double())
        heads = [x.reshape(1, LENGTH, HEADS, -1) for x in (q, k, v)]
        o, state = chunk_gated_delta_rule(
            *heads, g[None], 2 * inputs["b"].double().sigmoid()[None], backend="reference", **options
        )
    else:
        names = {name: getattr(layer, f"{name}_conv1d").weight.data for name in "qkv"}
        parts = [convolve(inputs[f"{name}_proj_states"], weight) for name, weight in names.items()]
        heads = [x.reshape(1, LENGTH, HEADS, KEY) for x in parts]
        gates = (inputs["g1"].double()[None], inputs["beta"].double()[None])
        o, state = chunk_kda(*heads, *gates, backend="reference", **options)
    assert state is not None
    return o[0], state[0]


def main(kind: str, model: str, result_path: str) -> None:
    """See the module."""
    layer, config = build(kind, model)
    inputs = draw(kind)
    poison = float("nan")

    def fresh_cache() -> torch.Tensor:
        layer.kv_cache = tuple(
            torch.full((SLOTS, *shape), poison, dtype=dtype)
            for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        )
        return layer.kv_cache[1]

    def error(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.double() - expected.double()).norm() / expected.double().norm())

    def part(source: Inputs, rows: slice) -> Inputs:
        return {name: x[rows] for name, x in source.items()}

    def join(one: Inputs, two: Inputs) -> Inputs:
        return {name: torch.cat((one[name], two[name])) for name in one}

    expected, expected_state = by_definition(kind, layer, inputs)
    key_dim = expected_state.shape[-1]
    cache = fresh_cache()
    whole = prefill(kind, layer, config, inputs, [LENGTH], [4], [0])
    found = {"whole": error(whole, expected), "whole_state": error(cache[4][..., :key_dim], expected_state)}
    found["untouched"] = bool(cache[[0, 1, 2, 3, 5]].isnan().all())
    cache = fresh_cache()
    other = {name: x.flip(0) for name, x in inputs.items()}
    first = join(part(inputs, slice(0, CUT)), part(other, slice(0, 65)))
    out = prefill(kind, layer, config, first, [CUT, 65], [2, 5], [0, 0])
    rest = join(part(other, slice(65, 66)), part(inputs, slice(CUT, LENGTH)))
    after = prefill(kind, layer, config, rest, [1, LENGTH - CUT], [5, 2], [1, 1])
    found["pieces"] = error(torch.cat((out[:CUT], after[1:])), whole)
    found["pieces_state"] = error(cache[2][..., :key_dim], expected_state)
    found["prefill"] = type(getattr(layer, "_vllm_ext_prefill", None)).__name__
    with open(result_path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
