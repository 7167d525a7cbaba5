"""Composition of a sequence's segments: the state each one starts from, in order, S_out = P S_in + L."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.linear_attention.triton.slots import first_slot, sequence_bounds

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_tokens", "value_heads", "segment_chunks"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def compose_kernel(
    carries,
    initial_state,
    cu_seqlens,
    num_tokens,
    value_heads,
    segment_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid: blocks of columns within value_heads within sequences. L^T [V, K] of each segment in `carries` [segment
    slots, value_heads, V + K, K] is replaced by the transposed state that the segment starts from; P^T stands below it.
    """
    program = tl.program_id(0)
    column = program % (V // BV) * BV + tl.arange(0, BV)
    head = program // (V // BV) % value_heads
    n = program // (V // BV * value_heads)
    begin, length = sequence_bounds(cu_seqlens, n, num_tokens, PACKED)
    slot = first_slot(n, begin, num_tokens, segment_chunks * 64, PACKED).to(tl.int64)
    count = tl.maximum((length + segment_chunks * 64 - 1) // (segment_chunks * 64), 1)
    key = tl.arange(0, K)
    if initial_state is not None:
        own = (n.to(tl.int64) * value_heads + head) * (V * K)
        at = column[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + column[:, None]
        state = tl.load(initial_state + own + at).to(tl.float32)
    else:
        state = tl.zeros((BV, K), tl.float32)
    at = column[:, None] * K + key[None, :]
    for segment in range(count - 1):
        carry = carries + ((slot + segment) * value_heads + head) * ((V + K) * K)
        local = tl.load(carry + at)
        transition = tl.load(carry + V * K + key[:, None] * K + key[None, :])
        tl.debug_barrier()
        tl.store(carry + at, state)
        state = tl.dot(state, transition, local, input_precision="tf32x3")
    carry = carries + ((slot + count - 1) * value_heads + head) * ((V + K) * K)
    tl.store(carry + at, state)
