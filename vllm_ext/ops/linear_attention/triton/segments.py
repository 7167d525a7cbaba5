"""Composition of a sequence's segments: the state after each but the last, in order, S_out = P S_in + L."""

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
    cu_seqlens,
    num_tokens,
    value_heads,
    segment_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid: blocks of columns within value_heads within sequences. L^T [V, K] of each segment in `carries` [segment
    slots, value_heads, V + K, K] is replaced by the transposed state after the segment; P^T stands below it. The first
    segment's is there already, and of the last one there is neither.
    """
    program = tl.program_id(0)
    column = program % (V // BV) * BV + tl.arange(0, BV)
    head = program // (V // BV) % value_heads
    n = program // (V // BV * value_heads)
    begin, length = sequence_bounds(cu_seqlens, n, num_tokens, PACKED)
    slot = first_slot(n, begin, num_tokens, segment_chunks * 64, PACKED).to(tl.int64)
    count = (length + segment_chunks * 64 - 1) // (segment_chunks * 64)
    if count < 3:
        return
    key = tl.arange(0, K)
    at = column[:, None] * K + key[None, :]
    at_transition = V * K + key[:, None] * K + key[None, :]
    state = tl.load(carries + (slot * value_heads + head) * ((V + K) * K) + at)
    for segment in range(1, count - 1):
        carry = carries + ((slot + segment) * value_heads + head) * ((V + K) * K)
        local = tl.load(carry + at)
        state = tl.dot(state, tl.load(carry + at_transition), local, input_precision="tf32x3")
        tl.debug_barrier()
        tl.store(carry + at, state)
