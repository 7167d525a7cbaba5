"""Torch in place of what vLLM's OLMo-hybrid layer calls in Triton, so that a whole model runs on a CPU.

As in `kda_on_cpu`: the layer's own code, its metadata, its cache and every call are vLLM's, and prefill, where ha_npu
is not asked for, is the definition in FP64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from kda_on_cpu import causal_conv1d_update, step


def install() -> None:
    """Replace the calls."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn as layer
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    from vllm_ext.model_executor.linear_attention_hooks import hook_olmo_layer

    make_loader = layer._make_fused_conv1d_weight_loader

    def make_loader_that_finds_its_part(*sizes: Any) -> Any:
        load = make_loader(*sizes)
        return lambda parameter, weight, part=None: load(parameter, weight, getattr(weight, "shard_id", part))

    # 0.32 hands the part over on the tensor, and this layer's loader does not look there: no checkpoint loads.
    layer._make_fused_conv1d_weight_loader = make_loader_that_finds_its_part
    if hasattr(ops, "causal_conv1d_weight_pack"):
        del ops.causal_conv1d_weight_pack  # the order that its own convolution reads, which is not called here
    layer.set_triton_allocator = lambda device: None
    layer.causal_conv1d_fn = causal_conv1d_fn_cpu
    layer.causal_conv1d_update = causal_conv1d_update
    layer.fused_olmo_hybrid_gdn_gating = gating
    layer.fused_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
    layer.chunk_gated_delta_rule = chunk_gated_delta_rule
    hook_olmo_layer(layer)


def gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, negative: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decays and steps [1, T, H] in FP32; `negative`: steps up to 2, so that a state may change its sign."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], (b.float().sigmoid() * (2 if negative else 1))[None]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's prefill kernel by the definition; states [N, H, V, K]."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    q, k, g, beta, wide_v = (x[0].double() for x in (q, k, g, beta, v))
    states, o = initial_state.double(), torch.empty_like(wide_v)
    bounds = cu_seqlens.tolist()
    for index in range(len(bounds) - 1):
        for t in range(bounds[index], bounds[index + 1]):
            states[index], o[t] = step(states[index], q[t], k[t], wide_v[t], g[t, :, None], beta[t])
    return o[None].to(v.dtype), states.float()


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    inplace_final_state: bool,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    num_accepted_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decodes; and tokens under check, which begin at the last accepted one's slot and leave a state each."""
    assert inplace_final_state
    assert use_qk_l2norm_in_kernel
    q, k, g, beta, wide_v = (x[0].double() for x in (q, k, g, beta, v))
    o = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for index in range(len(bounds) - 1):
        slots = ssm_state_indices[index].reshape(-1).tolist()
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[index]) - 1
        state = initial_state[slots[first]].double()
        for place, t in enumerate(range(bounds[index], bounds[index + 1])):
            state, token = step(state, q[t], k[t], wide_v[t], g[t, :, None], beta[t])
            o[0, t] = token.to(o.dtype)
            initial_state[slots[place]] = state.to(initial_state.dtype)
    return o, initial_state
