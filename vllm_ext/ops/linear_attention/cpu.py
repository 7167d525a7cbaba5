"""Chunked prefill in vectorised plain torch: every head and sequence at once, one step of the state per 64 tokens.

Runs on CUDA too, as the fallback for shapes no Triton kernel takes. Operands are widened to FP32 (FP64 stays FP64) and
products accumulate there. Matches `reference` up to that rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ext.ops.linear_attention.chunk_terms import ChunkTerms, gdn_terms, kda_terms
from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.schedule import Segment, segments, sequence_groups

NAME = "cpu"
CHUNK_SIZE = 64
L2_NORM_EPS = 1e-6
# Chunks of one value head that are worked on together, about 200 KiB of workspace each at K = V = 128: few enough to
# stay in a CPU's cache (measured on GDN and KDA: 64 to 128 is best, 512 costs 10 to 20% more), many on a GPU.
_CHUNK_HEADS = {"cpu": 128, "cuda": 2048}


def usable(device: torch.device) -> tuple[bool, str]:
    """Plain torch, tried on CPUs and CUDA devices."""
    if device.type in ("cpu", "cuda"):
        return True, ""
    return False, f"plain torch is served on cpu and cuda, not on {device.type}"


def chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_gated_delta_rule`."""
    return _run(call, call.q.shape[2], _gdn_terms)


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    return _run(call, call.v.shape[2], _kda_terms)


def _run(
    call: Call, num_heads: int, terms_of: Callable[[Call, Segment], ChunkTerms]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """num_heads: heads that own a state of K x (R V) numbers, R = HV / num_heads."""
    num_value_heads = call.v.shape[2]
    bounds = call.sequence_bounds()
    states = _initial_states(call, len(bounds) - 1, num_heads)
    o = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    flat_o = o.flatten(0, 1)
    per_group = max(1, _CHUNK_HEADS[call.v.device.type] // num_value_heads)
    for group in sequence_groups(bounds, per_group):
        index = torch.tensor(group, device=states.device)
        state = states[index]
        for segment in segments(bounds, group, CHUNK_SIZE, per_group, states.device):
            terms = terms_of(call, segment)
            out = torch.empty_like(terms.value)
            first = 0
            for active in segment.active:
                _step(terms, slice(first, first + active), state[:active], out)
                first += active
            rows = out.flatten(1, 2).transpose(1, 2)
            flat_o[segment.tokens[segment.valid]] = rows[segment.valid].to(o.dtype)
        states[index] = state
    return o, _final_states(call, states) if call.output_final_state else None


def _step(terms: ChunkTerms, chunks: slice, state: torch.Tensor, out: torch.Tensor) -> None:
    """Read the state, write the chunk's output, then update the state in place (HA-NPU paper, section 5).

    state [n, H, K, R, V] and the `chunks` rows of out [c, H, R, C, V] are overwritten.
    """
    count, heads, key_dim, group, value_dim = state.shape
    rows = terms.value.shape[-2]
    flat_state = state.view(count * heads, key_dim, group * value_dim)
    read = terms.key_query[chunks].flatten(0, 1) @ flat_state
    read = read.view(count, heads, 2, rows, group, value_dim).permute(2, 0, 1, 4, 3, 5)
    key_read, query_read = read[0], read[1]
    if terms.read_decay is not None:
        read_decay = terms.read_decay[chunks]
        key_read, query_read = key_read * read_decay, query_read * read_decay
    delta = terms.inverse[chunks] @ (terms.value[chunks] - key_read)
    torch.add(terms.scores[chunks] @ delta, query_read, out=out[chunks])
    if terms.tail_decay is not None:
        delta.mul_(terms.tail_decay[chunks])
    carried = delta.transpose(2, 3).reshape(count * heads, rows, group * value_dim)
    state.mul_(terms.state_decay[chunks])
    flat_state.baddbmm_(terms.tail_key[chunks].flatten(0, 1).transpose(1, 2), carried)


def _gdn_terms(call: Call, segment: Segment) -> ChunkTerms:
    q, k = _query_key(call, segment)
    v, g, beta = (_split_heads(x, q.shape[1]) for x in _value_decay_step(call, segment))
    return gdn_terms(q, k, v, g, beta)


def _kda_terms(call: Call, segment: Segment) -> ChunkTerms:
    v, g, beta = _value_decay_step(call, segment)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in _query_key(call, segment))
    return kda_terms(q, k, v, g, beta)


def _query_key(call: Call, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    """q (scaled) and k, each [c, H, C, K]."""
    q, k = (_gather(x, segment, _compute_dtype(call)) for x in (call.q, call.k))
    if call.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS) for x in (q, k))
    return q * call.scale, k


def _value_decay_step(call: Call, segment: Segment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """v [c, HV, C, V], g [c, HV, C] or [c, HV, C, K], beta [c, HV, C]."""
    dtype = _compute_dtype(call)
    return _gather(call.v, segment, dtype), _gather(call.g, segment, dtype), _gather(call.beta, segment, dtype)


def _gather(x: torch.Tensor, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, heads, ...] to the segment's [c, heads, C, ...], zero on padding rows: they leave the state as it is."""
    rows = x.flatten(0, 1)[segment.tokens].to(dtype)
    if segment.ragged:
        rows[~segment.valid] = 0
    return rows.transpose(1, 2).contiguous()


def _split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[n, H R, ...] as [n, H, R, ...]."""
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads, *x.shape[2:])


def _compute_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.v.dtype == torch.float64 else torch.float32


def _initial_states(call: Call, num_sequences: int, num_heads: int) -> torch.Tensor:
    """A fresh [N, H, K, R, V]: value heads of one key head side by side, so one product reads all of them."""
    num_value_heads, value_dim = call.v.shape[2:]
    sizes = (num_sequences, num_heads, call.q.shape[-1], num_value_heads // num_heads, value_dim)
    states = torch.zeros(sizes, dtype=_compute_dtype(call), device=call.v.device)
    if call.initial_state is not None:
        initial = call.initial_state.transpose(-1, -2) if call.state_v_first else call.initial_state
        states.copy_(_split_heads(initial, num_heads).transpose(2, 3))
    return states


def _final_states(call: Call, states: torch.Tensor) -> torch.Tensor:
    final = states.transpose(2, 3).flatten(1, 2)
    return final.transpose(-1, -2).contiguous() if call.state_v_first else final.contiguous()
