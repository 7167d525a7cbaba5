"""Torch in place of what vLLM's Kimi-Linear layer calls in Triton, so that a whole KDA + MoE model runs on a CPU.

The layer's own code, its metadata, its cache and every call are vLLM's. Prefill, where ha_npu is not asked for, is the
definition: one token at a time in FP64. Convolutions and decode are written here once and serve both engines alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def install() -> None:
    """Replace the calls. Needs VLLM_KIMI_K3_GEMM_AR=0, without which vLLM's package wants a CUDA-only library."""
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as layer
    import vllm.models.kimi_k3.nvidia.ops.third_party.kda as kernels
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    from vllm_ext.model_executor.linear_attention_hooks import hook_kda_kernels

    layer.causal_conv1d_fn = causal_conv1d_fn_cpu
    layer.causal_conv1d_update = causal_conv1d_update
    layer.gather_initial_states = lambda state, index, present: torch.where(present.view(-1, 1, 1, 1), state[index], 0)
    kernels.fused_recurrent_kda = fused_recurrent_kda
    kernels.fused_recurrent_kda_packed_decode = fused_recurrent_kda_packed_decode
    kernels.chunk_kda_with_fused_gate = chunk_kda_with_fused_gate
    hook_kda_kernels(kernels)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve tokens x [T, D] behind each slot's history [slots, D, width - 1 + num_spec], and move that on.

    Without query_start_loc every token is a sequence. A history begins after the tokens accepted in the step before.
    """
    out = torch.empty_like(x) if out is None else out
    history = weight.shape[-1] - 1
    slots = conv_state_indices.tolist()
    bounds = list(range(len(slots) + 1)) if query_start_loc is None else query_start_loc.tolist()
    for index, slot in enumerate(slots):
        begin, end = bounds[index : index + 2]
        state = conv_state[slot]
        new = x[begin:end].T.to(state.dtype)
        first = 0 if num_accepted_tokens is None else int(num_accepted_tokens[index]) - 1
        before = state[:, first : first + history]
        joined = torch.cat([before, new], dim=-1).to(weight.dtype)
        out[begin:end] = F.silu(F.conv1d(joined[None], weight[:, None], bias, groups=weight.shape[0])[0]).T.to(
            out.dtype
        )
        if num_accepted_tokens is None:
            state[:, :history] = joined[:, -history:].to(state.dtype)
        else:
            kept = state[:, first + 1 : first + 1 + state.shape[-1] - new.shape[-1]]
            state.copy_(torch.cat([kept, new], dim=-1))
    return out


def gate(raw_g: torch.Tensor, A_log: torch.Tensor, bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Log decays [T, H, K] in FP64 from raw_g [1, T, H, K]."""
    x = raw_g[0].double() + bias.double().view(raw_g.shape[-2:])
    rate = A_log.double().view(-1, 1).exp()
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)


def step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: the new state [H, V, K] and the output [H, V]; q, k, g [H, K], v [H, V], beta [H]."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = state * g.exp()[:, None, :]
    error = beta[:, None] * (v - torch.einsum("hvk,hk->hv", state, k))
    state = state + torch.einsum("hv,hk->hvk", error, k)
    return state, torch.einsum("hvk,hk->hv", state, q) * q.shape[-1] ** -0.5


def chunk_kda_with_fused_gate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's prefill kernel by the definition."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    wide = [x[0].double() for x in (q, k, v)]
    g, beta = gate(raw_g, A_log, g_bias, lower_bound), raw_beta[0].double().sigmoid()
    states, o = initial_state.double(), torch.empty_like(wide[2])
    bounds = cu_seqlens.tolist()
    for index in range(len(bounds) - 1):
        for t in range(bounds[index], bounds[index + 1]):
            states[index], o[t] = step(states[index], *(x[t] for x in wide), g[t], beta[t])
    return o[None].to(v.dtype), states.to(initial_state.dtype)


def fused_recurrent_kda_packed_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence; states [slots, H, V, K] are read and written."""
    heads, size = raw_g.shape[-2:]
    q, k, v = mixed_qkv.view(-1, 3, heads, size).double().unbind(1)
    g, beta = gate(raw_g, A_log, dt_bias, lower_bound), raw_beta[0].double().sigmoid()
    o = torch.empty_like(v)
    for t, slot in enumerate(state_indices.tolist()):
        state, o[t] = step(initial_state[slot].double(), q[t], k[t], v[t], g[t], beta[t])
        initial_state[slot] = state.to(initial_state.dtype)
    return o[None].to(mixed_qkv.dtype), initial_state


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens under check: from the slot of the last accepted one; the state after token t goes to the t-th slot."""
    wide = [x[0].double() for x in (q, k, v)]
    g, beta = gate(raw_g, A_log, dt_bias, lower_bound), raw_beta[0].double().sigmoid()
    o = torch.empty_like(v) if out is None else out
    bounds = cu_seqlens.tolist()
    for index in range(len(bounds) - 1):
        slots = ssm_state_indices[index].tolist()
        state = initial_state[slots[int(num_accepted_tokens[index]) - 1]].double()
        for place, t in enumerate(range(bounds[index], bounds[index + 1])):
            state, token = step(state, *(x[t] for x in wide), g[t], beta[t])
            o[0, t] = token.to(o.dtype)
            initial_state[slots[place]] = state.to(initial_state.dtype)
    return o, initial_state
