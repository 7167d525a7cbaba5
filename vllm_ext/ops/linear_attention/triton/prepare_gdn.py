"""What a chunk of the gated delta rule needs that does not read the state; one program a chunk and value head.

For the chunk's rows i, j and between(i, j) = exp(sum of g over j+1..i):

    inverse [64, 64]   (I + strictlower(beta_i between(i, j) k_i.k_j))^-1 diag(beta)
    scores  [64, 64]   lower(scale between(i, j) q_i.k_j)
    factors [4, 64]    of the rows of K S, of Q S, of V' on its way into the state, and (its first) of the state itself

A step below -120 is taken for -120: either decay is 0 in FP32, and sums stay small enough to tell other steps apart.
L2 norms of q and k are factors of rows, so they go into these, in FP32, and q and k are never written again.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from vllm_ext.ops.linear_attention.triton.inverse import assemble, blocks_of, diagonal_of, invert, load_once, to_half
from vllm_ext.ops.linear_attention.triton.slots import locate

L2_NORM_EPS = tl.constexpr(1e-6)
LEAST_STEP = tl.constexpr(-120.0)
# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key"]


@triton.jit
def _norm_factor(x):
    """1 / length of the rows of [rows, K]."""
    return tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1) + L2_NORM_EPS)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def prepare_gdn_kernel(
    q,
    k,
    g,
    beta,
    cu_seqlens,
    inverse,
    scores,
    factors,
    scale,
    num_sequences,
    num_tokens,
    value_heads,
    heads_a_key,
    q_token,
    k_token,
    g_token,
    beta_token,
    q_head,
    k_head,
    g_head,
    beta_head,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Grid: value_heads within slots of 64 tokens; strides in elements, of tokens and of heads."""
    slot = tl.program_id(0) // value_heads
    head = tl.program_id(0) % value_heads
    _, begin, length, chunk = locate(cu_seqlens, slot, num_sequences, num_tokens, 64, PACKED)
    count = length - chunk * 64
    if count <= 0:
        return
    token = (begin + chunk * 64).to(tl.int64)
    key_head = head // heads_a_key
    row = tl.arange(0, 64)
    ok = row < count
    at = (token + row)[:, None]
    channel = tl.arange(0, K)[None, :]
    keys = tl.load(k + at * k_token + key_head * k_head + channel, mask=ok[:, None], other=0.0)
    queries = tl.load(q + at * q_token + key_head * q_head + channel, mask=ok[:, None], other=0.0)
    coupling, asked = tl.dot(keys, tl.trans(keys)), tl.dot(queries, tl.trans(keys))
    of_k, of_q = tl.full((64,), 1.0, tl.float32), tl.full((64,), 1.0, tl.float32) * scale
    if NORMALISE:
        of_k, of_q = _norm_factor(keys), _norm_factor(queries) * scale
        coupling *= of_k[:, None] * of_k[None, :]
        asked *= of_q[:, None] * of_k[None, :]
    else:
        asked *= scale
    nearest = diagonal_of(coupling)
    FINE: tl.constexpr = k.dtype.element_ty == tl.float16
    strict = row[:, None] > row[None, :]
    causal = row[:, None] >= row[None, :]
    out = slot.to(tl.int64) * value_heads + head
    step = tl.maximum(load_once(g + (token + row) * g_token + head * g_head, ok), LEAST_STEP)
    size = load_once(beta + (token + row) * beta_token + head * beta_head, ok)
    total = tl.cumsum(step)
    between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    weight = tl.where(causal, asked * between, 0.0)
    tl.store(scores + out * 4096 + row[:, None] * 64 + row[None, :], weight.to(scores.dtype.element_ty))
    last = tl.sum(step)
    place = factors + out * 256 + row
    tl.store(place, tl.exp(total) * of_k)
    tl.store(place + 64, tl.exp(total) * of_q)
    tl.store(place + 128, tl.exp(tl.minimum(last - total, 0.0)) * of_k)
    tl.store(place + 192, tl.exp(last) + tl.zeros_like(total))
    diagonal, beside, first, second = blocks_of(tl.where(strict, coupling * between * size[:, None], 0.0))
    next_row = tl.reshape(tl.exp(step) * size, (4, 16))
    transposed = nearest * next_row[:, None, :]
    diagonal, beside, first, second = invert(diagonal, transposed, beside, first, second, FINE)
    solve = assemble(diagonal, beside, first, second) * size[None, :]
    at_out = inverse + out * 4096 + row[:, None] * 64 + row[None, :]
    tl.store(at_out, to_half(solve))
