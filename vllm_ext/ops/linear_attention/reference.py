"""The definition: one token at a time, FP64 inside. Slow; every other backend is tested against it."""

from __future__ import annotations

import torch

from vllm_ext.ops.linear_attention.problem import Call

NAME = "reference"
L2_NORM_EPS = 1e-6


def usable(device: torch.device) -> tuple[bool, str]:
    """Runs wherever torch computes in FP64."""
    if device.type in ("cpu", "cuda"):
        return True, ""
    return False, f"it computes in FP64 with plain torch, which is served on cpu and cuda, not on {device.type}"


def chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_gated_delta_rule`."""
    return _recurrence(call, call.g.double().exp()[..., None, None])


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    return _recurrence(call, call.g.double().exp()[..., None])


def _recurrence(call: Call, decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """decay broadcasts against [B, T, HV, K, V]."""
    key_dim = call.q.shape[-1]
    num_value_heads, value_dim = call.v.shape[2:]
    group = num_value_heads // call.q.shape[2]
    q, k = (_flatten(_normalise(x.double()) if call.use_qk_l2norm_in_kernel else x.double()) for x in (call.q, call.k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * call.scale, k))
    v, beta, decay = _flatten(call.v.double()), _flatten(call.beta.double()), _flatten(decay)
    bounds = call.sequence_bounds()
    o = torch.empty_like(v)
    states = v.new_zeros(len(bounds) - 1, num_value_heads, key_dim, value_dim)
    if call.initial_state is not None:
        initial = call.initial_state.double()
        states.copy_(initial.transpose(-1, -2) if call.state_v_first else initial)
    for state, begin, end in zip(states, bounds, bounds[1:], strict=False):
        for t in range(begin, end):
            state.mul_(decay[t])
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state.add_(torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error))
            o[t] = torch.einsum("hkv,hk->hv", state, q[t])
    o = o.view(call.v.shape).to(call.v.dtype)
    if not call.output_final_state:
        return o, None
    states = states.to(torch.float64 if call.v.dtype == torch.float64 else torch.float32)
    return o, states.transpose(-1, -2).contiguous() if call.state_v_first else states


def _flatten(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
