"""What a call to a linear-attention operator is, checked once before any backend sees it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsFloat

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """Sizes and kinds of one call, for backends to say whether they can serve it.

    op "gdn" or "kda"; q, k are [batch, num_tokens, num_heads, key_dim], v is [batch, num_tokens, num_value_heads,
    value_dim]; num_sequences N is `batch` without cu_seqlens and len(cu_seqlens) - 1 with; dtype is that of q, k, v;
    state_dtype that of initial_state, None without one.
    """

    op: str
    batch: int
    num_tokens: int
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_sequences: int
    varlen: bool
    dtype: torch.dtype
    state_dtype: torch.dtype | None
    device: torch.device


@dataclass(frozen=True)
class Call:
    """The operands and options every backend receives; `scale` is resolved, everything has passed `check_call`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float
    initial_state: torch.Tensor | None
    output_final_state: bool
    cu_seqlens: torch.Tensor | None
    use_qk_l2norm_in_kernel: bool
    state_v_first: bool

    def sequence_bounds(self) -> list[int]:
        """Token offsets [N + 1] into the flattened [B * T] tokens; reads cu_seqlens on the host."""
        if self.cu_seqlens is not None:
            return [int(offset) for offset in self.cu_seqlens.tolist()]
        batch, num_tokens = self.q.shape[:2]
        return [num_tokens * index for index in range(batch + 1)]


def check_kinds(name: str, scale: object, initial_state: object, cu_seqlens: object, **operands: object) -> None:
    """Refuse what is no tensor, before anything is asked of it.

    Raises:
        TypeError: an operand that is no tensor, or a scale that is no number.
    """
    optional = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    for what, value in {**operands, **{key: each for key, each in optional.items() if each is not None}}.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: {what} must be a tensor, got {type(value).__name__}; pass torch.as_tensor of it")
    if scale is not None and not isinstance(scale, SupportsFloat):
        raise TypeError(f"{name}: scale must be a number, got {type(scale).__name__}; leave it out for K**-0.5")


def check_call(name: str, op: str, call: Call) -> Problem:
    """Refuse what no backend may compute; `name` is the public function named in the message.

    Values of cu_seqlens and g are read only where that costs no device synchronisation (a CPU tensor).

    Raises:
        ValueError: shapes, dtypes, devices or offsets that contradict each other.
    """
    batch, num_tokens, num_heads, key_dim = _check_query_key(name, call)
    if call.v.dim() != 4 or call.v.shape[:2] != call.q.shape[:2]:
        raise ValueError(f"{name}: v must be [{batch}, {num_tokens}, HV, V] beside q, got {tuple(call.v.shape)}")
    num_value_heads, value_dim = call.v.shape[2:]
    if min(num_heads, num_value_heads, key_dim, value_dim) < 1 or num_value_heads % num_heads:
        raise ValueError(
            f"{name}: v has {num_value_heads} heads and q, k have {num_heads}; value heads must be a "
            f"positive multiple of key heads, and head sizes positive (K={key_dim}, V={value_dim})"
        )
    beta_shape = (batch, num_tokens, num_value_heads)
    _check_shape(name, "beta", call.beta, beta_shape)
    _check_shape(name, "g", call.g, (*beta_shape, key_dim) if op == "kda" else beta_shape)
    _check_dtypes_and_devices(name, call)
    _check_decays(name, call.g)
    if not (call.scale == call.scale and abs(call.scale) != float("inf")):
        raise ValueError(
            f"{name}: scale must be finite, got {call.scale}; leave it out for K**-0.5 = {key_dim**-0.5:.4g}"
        )
    num_sequences = _check_cu_seqlens(name, call, batch, num_tokens)
    if call.initial_state is not None:
        sizes = (value_dim, key_dim) if call.state_v_first else (key_dim, value_dim)
        _check_shape(name, "initial_state", call.initial_state, (num_sequences, num_value_heads, *sizes))
    return Problem(
        op=op,
        batch=batch,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        num_sequences=num_sequences,
        varlen=call.cu_seqlens is not None,
        dtype=call.q.dtype,
        state_dtype=None if call.initial_state is None else call.initial_state.dtype,
        device=call.q.device,
    )


def _check_query_key(name: str, call: Call) -> torch.Size:
    if call.q.dim() != 4 or call.k.shape != call.q.shape:
        raise ValueError(
            f"{name}: q and k must both be [B, T, H, K], got {tuple(call.q.shape)} and {tuple(call.k.shape)}; "
            "add the batch dimension to packed sequences"
        )
    return call.q.shape


def _check_shape(name: str, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: {what} must be {list(shape)} beside these q, v, got {list(tensor.shape)}")


def _check_dtypes_and_devices(name: str, call: Call) -> None:
    operands = {"q": call.q, "k": call.k, "v": call.v, "g": call.g, "beta": call.beta}
    if call.initial_state is not None:
        operands["initial_state"] = call.initial_state
    for what, tensor in operands.items():
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(f"{name}: {what} has dtype {tensor.dtype}; convert it to one of {allowed}")
        if tensor.device != call.q.device:
            raise ValueError(f"{name}: {what} is on {tensor.device} and q on {call.q.device}; move them to one device")
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        raise ValueError(
            f"{name}: q, k, v must share a dtype, got {call.q.dtype}, {call.k.dtype}, {call.v.dtype}; convert to one"
        )


def _check_decays(name: str, g: torch.Tensor) -> None:
    """Refuse what would make states grow; NaN goes its own way to the sequence that has it."""
    if g.device.type != "cpu":
        return
    above = g > 0
    if bool(above.any()):
        raise ValueError(
            f"{name}: g must be at most 0 (the natural logarithm of a decay), got {float(g[above].max()):.4g} at "
            f"{above.nonzero()[0].tolist()} and {int(above.sum())} of {g.numel()} above 0; if g holds the decays "
            "themselves, pass g.log()"
        )


def _check_cu_seqlens(name: str, call: Call, batch: int, num_tokens: int) -> int:
    """The number of sequences."""
    cu_seqlens = call.cu_seqlens
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: cu_seqlens must be an int32 or int64 tensor [N + 1], "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"{name}: with cu_seqlens B must be 1, got B={batch}; flatten to [1, B*T, ...]")
    if cu_seqlens.device.type == "cpu":
        offsets = cu_seqlens.tolist()
        rising = all(left <= right for left, right in pairwise(offsets))
        if offsets[0] != 0 or offsets[-1] != num_tokens or not rising:
            raise ValueError(
                f"{name}: cu_seqlens must rise from 0 to T={num_tokens} without falling, got {offsets[:8]}"
                f"{'...' if len(offsets) > 8 else ''} ending at {offsets[-1]}"
            )
    return int(cu_seqlens.numel()) - 1
