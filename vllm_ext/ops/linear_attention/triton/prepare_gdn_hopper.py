"""`prepare_gdn_kernel` for compute capability 9.0 in Gluon, in BF16; operands and results as there.

Programs stay and take turns with the chunks: the next one's tiles and gates come while this one's inverse is made.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_ext.ops.linear_attention.triton.hopper import (
    L2_NORM_EPS,
    LEAST_STEP,
    LOG2_E,
    add,
    exp2,
    let_dependents_launch,
    sequence_of_slot,
    to_half,
    zero_past,
)
from vllm_ext.ops.linear_attention.triton.inverse_hopper import invert

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key", "items"]


@gluon.jit
def _norm_factor(products, diagonal):
    """1 / length of rows, from their products with each other."""
    return gl.rsqrt(gl.sum(gl.where(diagonal, products, 0.0), 1) + L2_NORM_EPS)


@gluon.jit
def _first_at(slot, cu_seqlens, num_sequences, num_tokens, PACKED: gl.constexpr):
    """First token of a slot's chunk, and how many tokens there are from it on; none or fewer for nobody's slot."""
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, slot, num_sequences, num_tokens, 64, PACKED)
    return begin + chunk * 64, length - chunk * 64


@gluon.jit
def _read(x, token, count, token_step, head):
    """64 numbers of a head's tokens, two to a thread; 0 past the last."""
    at = gl.arange(0, 64, gl.BlockedLayout([2], [32], [4], [0]))
    return gl.load(x + (token + at).to(gl.int64) * token_step + head, mask=at < count, other=0.0).to(gl.float32)


@gluon.jit
def _fetch(k, q, k_tile, q_tile, arrived, token, key_column):
    K: gl.constexpr = k_tile.shape[1]
    mbarrier.expect(arrived, 256 * K)
    tma.async_copy_global_to_shared(k, [token, key_column], arrived, k_tile)
    tma.async_copy_global_to_shared(q, [token, key_column], arrived, q_tile)


@gluon.jit
def _couple(k_tile, q_tile, totals, sizes, scale, NORMALISE: gl.constexpr):
    """Of a chunk the matrix to invert, with anything above its diagonal, the scores, and the factors of its keys and
    queries.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    row = gl.arange(0, 64, by_row)[:, None]
    column = gl.arange(0, 64, by_column)[None, :]
    zero = gl.zeros([64, 64], gl.float32, layout)
    across = k_tile.permute((1, 0))
    coupling = warpgroup_mma(k_tile, across, zero, use_acc=False, is_async=True)
    asked = warpgroup_mma(q_tile, across, zero, use_acc=False, is_async=True)
    between = exp2(totals.load(by_row)[:, None] - totals.load(by_column)[None, :])
    between = gl.where(row >= column, between, 0.0)
    coupling, asked = warpgroup_mma_wait(0, [coupling, asked])
    row_size = sizes.load(by_row)
    of_k = gl.full([64], 1.0, gl.float32, flat)
    of_q = gl.full([64], 1.0, gl.float32, flat) * scale
    if NORMALISE:
        lengths = warpgroup_mma(q_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lengths = warpgroup_mma_wait(0, [lengths])
        k_row = _norm_factor(coupling, row == column)
        q_row = _norm_factor(lengths, row == column) * scale
        of_k, of_q = gl.convert_layout(k_row, flat), gl.convert_layout(q_row, flat)
        between = between * gl.convert_layout(k_row, by_column)[None, :]
        weights = asked * between * q_row[:, None]
        row_size = row_size * k_row
    else:
        weights = asked * between * scale
    return coupling * between * row_size[:, None], weights, of_k, of_q


@gluon.jit
def _store_factors(factors, out, total, last, of_k, of_q):
    flat: gl.constexpr = total.type.layout
    at = gl.arange(0, 64, flat)
    place = factors + out.to(gl.int64) * 256 + at
    gl.store(place, exp2(total) * of_k)
    gl.store(place + 64, exp2(total) * of_q)
    gl.store(place + 128, exp2(gl.minimum(last - total, 0.0)) * of_k)
    gl.store(place + 192, exp2(last + gl.zeros([64], gl.float32, flat)))


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def prepare_gdn_hopper_kernel(
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
    g_token,
    beta_token,
    g_head,
    beta_head,
    items,
    K: gl.constexpr,
    NORMALISE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Tiles by descriptors: q and k [tokens, heads K], inverse and scores [slots value_heads 64, 64]. Programs take
    turns with the `items`, value_heads within slots; on four warps.
    """
    let_dependents_launch()
    dtype: gl.constexpr = k.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    by_column: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    k_tile = gl.allocate_shared_memory(dtype, [64, K], k.layout)
    q_tile = gl.allocate_shared_memory(dtype, [64, K], q.layout)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], inverse.layout)
    other = gl.allocate_shared_memory(gl.float16, [64, 64], inverse.layout)
    weight_tile = other._reinterpret(dtype, [64, 64], scores.layout)
    scratch = gl.allocate_shared_memory(gl.float32, [1024], vector)
    totals = gl.allocate_shared_memory(gl.float32, [64], vector)
    sizes = gl.allocate_shared_memory(gl.float32, [64], vector)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    item = gl.program_id(0)
    head = item % value_heads
    token, count = _first_at(item // value_heads, cu_seqlens, num_sequences, num_tokens, PACKED)
    step = _read(g, token, count, g_token, head * g_head)
    size = _read(beta, token, count, beta_token, head * beta_head)
    if count > 0:
        _fetch(k, q, k_tile, q_tile, arrived, token, head // heads_a_key * K)
    phase = 0
    while item < items:
        out, length = item, count
        item += gl.num_programs(0)
        head = item % value_heads
        slot = gl.minimum(item, items - 1) // value_heads
        token, count = _first_at(slot, cu_seqlens, num_sequences, num_tokens, PACKED)
        count = gl.where(item < items, count, 0)
        total = gl.associative_scan(gl.maximum(step, LEAST_STEP) * LOG2_E, 0, add)
        last = gl.sum(gl.where(gl.arange(0, 64, flat) == 63, total, 0.0), 0)
        totals.store(total)
        sizes.store(size)
        step = _read(g, token, count, g_token, head * g_head)
        size = _read(beta, token, count, beta_token, head * beta_head)
        gl.thread_barrier()
        if length > 0:
            mbarrier.wait(arrived, phase)
            phase = phase ^ 1
            if length < 64:
                zero_past(k_tile, length, 64, K)
                zero_past(q_tile, length, 64, K)
                fence_async_shared()
                gl.thread_barrier()
            matrix, weights, of_k, of_q = _couple(k_tile, q_tile, totals, sizes, scale, NORMALISE)
            # What the turn before has made is on its way, and nobody reads keys and queries any more.
            tma.store_wait(0)
            gl.thread_barrier()
            if count > 0:
                _fetch(k, q, k_tile, q_tile, arrived, token, head // heads_a_key * K)
            weight_tile.store(weights.to(dtype))
            tile.store(to_half(matrix))
            _store_factors(factors, out, total, last, of_k, of_q)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(scores, [out * 64, 0], weight_tile)
            solve = invert(matrix, tile, other, scratch)
            solve = solve * sizes.load(by_column)[None, :]
            gl.thread_barrier()
            tile.store(to_half(solve))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(inverse, [out * 64, 0], tile)
        elif count > 0:
            _fetch(k, q, k_tile, q_tile, arrived, token, head // heads_a_key * K)
    tma.store_wait(0)
