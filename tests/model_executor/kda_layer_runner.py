"""Drives vLLM's real Kimi-Linear attention layer on the CPU; started by `test_linear_attention_kda`.

    python kda_layer_runner.py MODEL OPTIONS.json RESULT.pt

vLLM's layer calls Triton in three places besides its prefill kernel: the causal convolution, the gather of initial
states and the gated norm. They are given vLLM's CPU convolution and two lines of torch here; the layer's own code,
metadata, cache and call of the prefill are the real ones. RESULT holds, for one prompt of 150 tokens prefilled whole
and in two pieces beside other sequences, the inputs, the weights, the outputs and the state cache.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

LENGTH, CUT = 150, 70
SLOTS = 6


def build_layer(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The first layer's attention with random weights, and vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = EngineArgs(model=model, enforce_eager=True, enable_prefix_caching=False, **options).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1)
        from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

        layer = KimiGatedDeltaNetAttention(config.model_config.hf_text_config, config, "model.layers.0.self_attn")
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    layer.A_log.data.copy_(torch.linspace(-3, 2.5, layer.A_log.numel()).view(layer.A_log.shape))
    return layer, config


def replace_triton(layer: Any) -> None:
    """Put torch where the layer would call Triton, except for the prefill kernel."""
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as module
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    module.causal_conv1d_fn = causal_conv1d_fn_cpu
    module.gather_initial_states = lambda state, index, present: torch.where(present.view(-1, 1, 1, 1), state[index], 0)
    layer.o_norm = torch.nn.Identity()
    layer.o_norm.forward = lambda x, gate: x


def prefill(
    layer: Any, config: Any, inputs: dict[str, torch.Tensor], lengths: list[int], slots: list[int], old: list[int]
) -> torch.Tensor:
    """One step of the layer over packed sequences; `old` says which of them continue. Returns [T, H, K]."""
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
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
        non_spec_query_start_loc=bounds,
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )
    out = torch.full((1, total, layer.local_num_heads, layer.head_dim), float("nan"), dtype=torch.bfloat16)
    with set_forward_context({layer.prefix: metadata}, config):
        layer._forward(g2=out, core_attn_out=out, **inputs)
    return out[0]


def part(inputs: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """The rows of every operand; qkv has no batch dimension, the gates have."""
    return {name: x[rows] if name == "mixed_qkv" else x[:, rows] for name, x in inputs.items()}


def main(model: str, options_path: str, result_path: str) -> None:
    """See the module."""
    with open(options_path) as file:
        layer, config = build_layer(model, json.load(file))
    replace_triton(layer)
    heads, size = layer.local_num_heads, layer.head_dim
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    inputs = {
        "mixed_qkv": normal(LENGTH, 3 * heads * size),
        "g1": normal(1, LENGTH, heads, size),
        "beta": normal(1, LENGTH, heads),
    }
    conv_shape, state_shape = layer.get_state_shape()
    conv_dtype, state_dtype = layer.get_state_dtype()
    results = {"inputs": inputs, "conv1d": layer.conv1d.weight.data, "A_log": layer.A_log.data}
    results |= {"dt_bias": layer.dt_bias.data, "lower_bound": layer.gate_lower_bound}

    def fresh_cache() -> None:
        poison = float("nan")
        layer.kv_cache = (
            torch.full((SLOTS, *conv_shape), poison, dtype=conv_dtype),
            torch.full((SLOTS, *state_shape), poison, dtype=state_dtype),
        )

    fresh_cache()
    results["whole"] = prefill(layer, config, inputs, [LENGTH], [4], [0])
    results["whole_state"] = layer.kv_cache[1].clone()
    fresh_cache()
    other = {name: x.flip(0) if name == "mixed_qkv" else x.flip(1) for name, x in inputs.items()}
    first = part(inputs, slice(0, CUT))
    join = lambda a, b: {n: torch.cat((a[n], b[n]), 0 if n == "mixed_qkv" else 1) for n in a}  # noqa: E731
    out = prefill(layer, config, join(first, part(other, slice(0, 65))), [CUT, 65], [2, 5], [0, 0])
    rest = join(part(other, slice(65, 66)), part(inputs, slice(CUT, LENGTH)))
    after = prefill(layer, config, rest, [1, LENGTH - CUT], [5, 2], [1, 1])
    results["pieces"] = torch.cat((out[:CUT], after[1:]))
    results["pieces_state"] = layer.kv_cache[1].clone()
    torch.save(results, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
