"""The recurrence over chunks: one program carries BV columns of one head's state, in registers, through its chunks.

The state is held transposed, S^T [BV, K], so every product has what depends on the state on its left, in the registers
that the product before it left it in; K, Q, inverse and scores stand on the right, in shared memory, fetched ahead:

    X^T  = V^T - (S^T K^T) read        V'^T = X^T inverse^T
    O^T  = (S^T Q^T) read + V'^T scores^T          S^T <- decay S^T + (V'^T tail) K

Columns of the state are independent, so a head may be split among programs without any reduction (HA-NPU paper,
section 4). A sequence may also be cut into segments, exactly: with `TRANSITION`, the same recurrence is run from zero
with the segment's values and, for K more columns, from the identity without values, which gives S_out = P S_in + L.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.linear_attention.triton.inverse import to_half
from vllm_ext.ops.linear_attention.triton.slots import first_slot, locate

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key", "segment_chunks"]


@triton.jit
def _state_place(column, key, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets [BV, K] into a state [V, K] or [K, V]."""
    place = column[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + column[:, None]
    return place


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def recurrence_kernel(
    q,
    k,
    v,
    tails,
    inverse,
    scores,
    factors,
    initial_state,
    carries,
    o,
    final_state,
    cu_seqlens,
    num_sequences,
    num_tokens,
    value_heads,
    heads_a_key,
    segment_chunks,
    q_token,
    k_token,
    v_token,
    q_head,
    k_head,
    v_head,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KDA: tl.constexpr,
    TRANSITION: tl.constexpr,
    V_FIRST: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: blocks of columns within value_heads within slots of segments of segment_chunks chunks.

    initial_state, final_state: None or [N, value_heads, ..]; carries: None, or FP32 [segment slots, value_heads, V + K,
    K]: written with L^T and P^T by TRANSITION, of a sequence's first segment with the transposed state after it alone,
    and read for the state after the segment before otherwise.
    For KDA q, k and tails are chunks [slots, value_heads, 64, K], decayed, and factors [.., K] those of the state.
    """
    COLUMN_BLOCKS: tl.constexpr = (V + K if TRANSITION else V) // BV
    program = tl.program_id(0)
    column = program % COLUMN_BLOCKS * BV + tl.arange(0, BV)
    head = program // COLUMN_BLOCKS % value_heads
    segment_slot = program // (COLUMN_BLOCKS * value_heads)
    n, begin, length, segment = locate(cu_seqlens, segment_slot, num_sequences, num_tokens, segment_chunks * 64, PACKED)
    chunks = (length + 63) // 64
    start = segment * segment_chunks
    if (segment > 0) & (start >= chunks):
        return
    stop = tl.minimum(start + segment_chunks, chunks)
    if TRANSITION and (stop == chunks) | ((segment == 0) & (program % COLUMN_BLOCKS * BV >= V)):
        return
    key = tl.arange(0, K)
    row = tl.arange(0, 64)
    at_state = _state_place(column, key, K, V, V_FIRST)
    carried = segment_slot if TRANSITION else segment_slot - 1
    carry = carried.to(tl.int64) * value_heads + head
    values = column < V
    state = tl.zeros((BV, K), tl.float32)
    own = (n.to(tl.int64) * value_heads + head) * (V * K)
    if carries is None or segment == 0:
        if initial_state is not None:
            state = tl.load(initial_state + own + at_state).to(tl.float32)
    elif TRANSITION:
        state = tl.where(column[:, None] == key[None, :] + V, 1.0, 0.0)
    else:
        state = tl.load(carries + carry * ((V + K) * K) + column[:, None] * K + key[None, :])
    dtype: tl.constexpr = v.dtype.element_ty
    chunk_slot = first_slot(n, begin, num_tokens, 64, PACKED).to(tl.int64)
    key_head = head // heads_a_key
    if not KDA:
        k += key_head * k_head
        q += key_head * q_head
    v += head * v_head
    for chunk in tl.range(start, stop, num_stages=STAGES):
        out = (chunk_slot + chunk) * value_heads + head
        token = begin + chunk * 64 + row
        ok = chunk * 64 + row < length
        if KDA:
            tile = out * (64 * K) + row[:, None] * K + key[None, :]
            keys = tl.load(k + tile)
            decay = tl.load(factors + out * K + key)[None, :]
        else:
            keys = tl.load(k + token[:, None].to(tl.int64) * k_token + key[None, :], mask=ok[:, None], other=0.0)
            decay = tl.load(factors + out * 256 + 192)
        if TRANSITION:
            at_values = v + token[:, None].to(tl.int64) * v_token + column[None, :]
            rest = tl.load(at_values, mask=ok[:, None] & values[None, :], other=0.0)
        else:
            rest = tl.load(v + token[:, None].to(tl.int64) * v_token + column[None, :], mask=ok[:, None], other=0.0)
        solve = tl.load(inverse + out * 4096 + row[:, None] * 64 + row[None, :])
        narrow = state.to(dtype)
        read = tl.dot(narrow, tl.trans(keys))
        if not KDA:
            read *= tl.load(factors + out * 256 + row)[None, :]
        rest = tl.trans(rest).to(tl.float32) - read
        delta = tl.dot(to_half(rest), tl.trans(solve))
        if KDA:
            added = tl.dot(delta.to(dtype), tl.load(tails + tile))
        else:
            tail = tl.load(factors + out * 256 + 128 + row)[None, :]
            added = tl.dot((delta * tail).to(dtype), keys)
        if not TRANSITION:
            if KDA:
                asked = tl.dot(narrow, tl.trans(tl.load(q + tile)))
            else:
                at_query = token[:, None].to(tl.int64) * q_token + key[None, :]
                asked = tl.dot(narrow, tl.trans(tl.load(q + at_query, mask=ok[:, None], other=0.0)))
                asked *= tl.load(factors + out * 256 + 64 + row)[None, :]
            weight = tl.load(scores + out * 4096 + row[:, None] * 64 + row[None, :])
            answer = tl.dot(delta.to(dtype), tl.trans(weight), asked)
            place = (token[:, None].to(tl.int64) * value_heads + head) * V + column[None, :]
            tl.store(o + place, tl.trans(answer).to(dtype), mask=ok[:, None])
        state = state * decay + added
    if TRANSITION:
        tl.store(carries + carry * ((V + K) * K) + column[:, None] * K + key[None, :], state)
    elif final_state is not None and stop == chunks:
        tl.store(final_state + own + at_state, state)
