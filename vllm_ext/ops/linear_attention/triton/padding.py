"""Heads of a size that the kernels have no tiles for, as wider ones: channels of zeros change no number of the others.

OLMo-hybrid's keys have 96 channels and its values 192. A key's channel that is 0 in every q and k reads and writes
nothing, and one of the values that is 0 in every v stays 0 in the state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from vllm_ext.ops.linear_attention.problem import Call

KEY_SIZES = (16, 32, 64, 128, 256)
# A program carries columns of the state, so values need not be a power of two of them.
VALUE_SIZES = (16, 32, 64, 128, 192, 256)


def key_size(size: int) -> int | None:
    """The least of the kernels' key sizes that holds `size` channels; None when there is none."""
    return next((known for known in KEY_SIZES if size <= known), None)


def value_size(size: int) -> int | None:
    """The least of the kernels' value sizes that holds `size` channels; None when there is none."""
    return next((known for known in VALUE_SIZES if size <= known), None)


def head_sizes(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The sizes that heads of such sizes are computed in; their own where none holds them."""
    return key_size(key_dim) or key_dim, value_size(value_dim) or value_dim


def widen(call: Call, op: str) -> Call:
    """The call with heads of the kernels' sizes; the very call where they are. `supports` has looked at them."""
    key_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    keys, values = head_sizes(key_dim, value_dim)
    more_keys, more_values = keys - key_dim, values - value_dim
    if not more_keys and not more_values:
        return call
    state = call.initial_state
    if state is not None:
        last, before = (more_keys, more_values) if call.state_v_first else (more_values, more_keys)
        state = F.pad(state, (0, last, 0, before))
    return replace(
        call,
        q=F.pad(call.q, (0, more_keys)),
        k=F.pad(call.k, (0, more_keys)),
        v=F.pad(call.v, (0, more_values)),
        g=F.pad(call.g, (0, more_keys)) if op == "kda" else call.g,
        initial_state=state,
    )


def narrow(o: torch.Tensor, state: torch.Tensor | None, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of the widened call in the sizes of the one that was made."""
    key_dim, value_dim = call.q.shape[-1], call.v.shape[-1]
    rows, columns = (value_dim, key_dim) if call.state_v_first else (key_dim, value_dim)
    if o.shape[-1] != value_dim:
        o = o[..., :value_dim].contiguous()
    if state is not None and state.shape[-2:] != (rows, columns):
        state = state[..., :rows, :columns].contiguous()
    return o, state
