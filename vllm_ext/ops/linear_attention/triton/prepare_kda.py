"""What a chunk of Kimi Delta Attention needs that does not read the state; one program a chunk and value head.

The decay is per channel, inside both products: sum_c x_ic k_jc exp(sum of g_c over j+1..i), x = k or q. A block of 2 b
rows is cut in halves: for i in the lower and j in the upper half that sum is what remains of the upper half after j,
plus what the lower half has up to i, so the quarter is a product of two matrices decayed by factors of at most 1. All
blocks of a size, b = 1, 2, .. 32, are one product of [64, K], of which the quarters are kept.

Written: inverse and scores [64, 64] as for the gated delta rule; keys, queries (scaled) and tails [64, K], decayed for
reading the state and for being added to it; decays [K] of the state. A step below -120 is taken for -120, as there.

A tile is [16, 4, K], row and block of 16 rows: a thread then holds all rows of its channels, and sums over rows stay in
its registers.
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
def _matrix(x, dtype: tl.constexpr):
    """[16, 4, K] as [64, K]."""
    return tl.reshape(tl.permute(x, (1, 0, 2)), (64, x.shape[2])).to(dtype)


@triton.jit
def _to_boundary(prefix, HALF: tl.constexpr, K: tl.constexpr):
    """Log decays, at most 0, between each row and the boundary of the two halves of its block of 2 HALF <= 16 rows."""
    place = tl.arange(0, 2 * HALF)[None, :, None, None]
    parts = tl.reshape(prefix, (8 // HALF, 2 * HALF, 4, K))
    boundary = tl.sum(tl.where(place == HALF - 1, parts, 0.0), axis=1)[:, None, :, :]
    return tl.reshape(tl.minimum(parts - boundary, boundary - parts), (16, 4, K))


@triton.jit
def _quarters(HALF: tl.constexpr):
    """[64, 64]: rows in the lower, columns in the upper half of the same block of 2 HALF rows."""
    row = tl.arange(0, 64)[:, None]
    column = tl.arange(0, 64)[None, :]
    return (row // (2 * HALF) == column // (2 * HALF)) & ((row // HALF) % 2 == 1) & ((column // HALF) % 2 == 0)


@triton.jit
def _add_quarters(coupling, asked, key, query, decay, HALF: tl.constexpr, dtype: tl.constexpr):
    """Add the products between halves of blocks of 2 HALF rows; also the first product itself, which is symmetric."""
    right = _matrix(key * decay, dtype)
    left = tl.trans(right)
    product = tl.dot(right, left)
    coupling += tl.where(_quarters(HALF), product, 0.0)
    asked += tl.where(_quarters(HALF), tl.dot(_matrix(query * decay, dtype), left), 0.0)
    return coupling, asked, product


@triton.jit
def _of_blocks(total, wanted):
    """For every block the sum of the other blocks' totals [4, K] where wanted [4 others, 4] is true."""
    return tl.sum(tl.where(wanted[:, :, None], total[:, None, :], 0.0), axis=0)[None, :, :]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def prepare_kda_kernel(
    q,
    k,
    g,
    beta,
    cu_seqlens,
    inverse,
    scores,
    keys,
    queries,
    tails,
    decays,
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
    dtype: tl.constexpr = keys.dtype.element_ty
    FINE: tl.constexpr = dtype == tl.float16
    token = (begin + chunk * 64).to(tl.int64)
    key_head = head // heads_a_key
    out = slot.to(tl.int64) * value_heads + head
    block = tl.arange(0, 4)
    rows = tl.arange(0, 16)[:, None] + block[None, :] * 16
    channel = tl.arange(0, K)[None, None, :]
    ok = (rows < count)[:, :, None]
    at = token + rows[:, :, None]
    step = tl.load(g + at * g_token + head * g_head + channel, mask=ok, other=0.0).to(tl.float32)
    key = tl.load(k + at * k_token + key_head * k_head + channel, mask=ok, other=0.0)
    query = tl.load(q + at * q_token + key_head * q_head + channel, mask=ok, other=0.0)
    step = tl.maximum(step, LEAST_STEP)
    prefix = tl.cumsum(step, axis=0)
    total = tl.sum(step, axis=0)
    own_key, own_query = key.to(tl.float32), query.to(tl.float32)
    of_k, of_q = tl.full((16, 4), 1.0, tl.float32), tl.full((16, 4), 1.0, tl.float32)
    if NORMALISE:
        of_k = tl.rsqrt(tl.sum(own_key * own_key, axis=2) + L2_NORM_EPS)
        of_q = tl.rsqrt(tl.sum(own_query * own_query, axis=2) + L2_NORM_EPS)
    of_q *= scale
    itself = tl.reshape(tl.permute(tl.sum(own_key * own_query, axis=2), (1, 0)), (64,))
    row = tl.arange(0, 64)
    asked = tl.where(row[:, None] == row[None, :], itself[:, None], 0.0)
    coupling = tl.zeros((64, 64), tl.float32)
    coupling, asked, nearest = _add_quarters(coupling, asked, key, query, tl.exp(_to_boundary(prefix, 1, K)), 1, dtype)
    for level in tl.static_range(1, 4):
        decay = tl.exp(_to_boundary(prefix, 2**level, K))
        coupling, asked, _ = _add_quarters(coupling, asked, key, query, decay, 2**level, dtype)
    suffix = total[None, :, :] - prefix
    other = block[:, None]
    own = block[None, :]
    decay = tl.exp(tl.minimum(tl.where(block[None, :, None] % 2 == 1, prefix, suffix), 0.0))
    coupling, asked, _ = _add_quarters(coupling, asked, key, query, decay, 16, dtype)
    inner = _of_blocks(total, ((other == 2) & (own == 3)) | ((other == 1) & (own == 0)))
    decay = tl.exp(tl.minimum(tl.where(block[None, :, None] >= 2, prefix, suffix) + inner, 0.0))
    coupling, asked, _ = _add_quarters(coupling, asked, key, query, decay, 32, dtype)

    place = out * (64 * K) + rows[:, :, None] * K + channel
    read = tl.exp(prefix + _of_blocks(total, other < own))
    tail = tl.exp(tl.minimum(suffix + _of_blocks(total, other > own), 0.0))
    tl.store(keys + place, (key * read * of_k[:, :, None]).to(dtype))
    tl.store(queries + place, (query * read * of_q[:, :, None]).to(dtype))
    tl.store(tails + place, (key * tail * of_k[:, :, None]).to(dtype))
    tl.store(decays + out * K + tl.arange(0, K), tl.exp(tl.sum(total, axis=0)))

    of_k = tl.reshape(tl.permute(of_k, (1, 0)), (64,))
    of_q = tl.reshape(tl.permute(of_q, (1, 0)), (64,))
    at_out = out * 4096 + row[:, None] * 64 + row[None, :]
    tl.store(scores + at_out, (asked * of_q[:, None] * of_k[None, :]).to(dtype))
    size = load_once(beta + (token + row) * beta_token + head * beta_head, row < count)
    norms = of_k[:, None] * of_k[None, :]
    diagonal, beside, first, second = blocks_of(coupling * norms * size[:, None])
    transposed = diagonal_of(nearest * norms) * tl.reshape(size, (4, 16))[:, None, :]
    diagonal, beside, first, second = invert(diagonal, transposed, beside, first, second, FINE)
    solve = assemble(diagonal, beside, first, second) * size[None, :]
    tl.store(inverse + at_out, to_half(solve))
