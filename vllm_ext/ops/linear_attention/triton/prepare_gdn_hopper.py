"""`prepare_gdn_kernel` for compute capability 9.0 in Gluon, in BF16; results as there.

A program prepares a chunk of HEADS value heads with the same keys and queries: these are multiplied once, and the
diagonal blocks of the heads' matrices are solved together, half of a warp a block.
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
from vllm_ext.ops.linear_attention.triton.inverse_hopper import assemble, halves_of, keep_diagonal, room, solve_diagonal

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key", "first_slot", "items"]


@gluon.jit
def norm_factor(products, diagonal):
    """1 / length of rows, from their products with each other."""
    return gl.rsqrt(gl.sum(gl.where(diagonal, products, 0.0), 1) + L2_NORM_EPS)


@gluon.jit
def _read_gates(g, beta, token, count, g_token, beta_token, g_head, beta_head, head, HEADS: gl.constexpr):
    """[2 HEADS, 64]: for every head its gates, in powers of 2, and then for every head its betas. A row is read by one
    warp.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    which = gl.arange(0, 2 * HEADS, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    own = head + which % HEADS
    at_g = g + (token + at).to(gl.int64) * g_token + own * g_head
    at_beta = beta + (token + at).to(gl.int64) * beta_token + own * beta_head
    step = gl.load(at_g, mask=(which < HEADS) & (at < count), other=0.0).to(gl.float32)
    size = gl.load(at_beta, mask=(which >= HEADS) & (at < count), other=0.0).to(gl.float32)
    return gl.where(which < HEADS, gl.maximum(step, LEAST_STEP) * LOG2_E, size)


@gluon.jit
def _sums_of_gates(numbers, HEADS: gl.constexpr):
    """What `_read_gates` has read, with the sums of gates up to each token, one row after the other."""
    layout: gl.constexpr = numbers.type.layout
    which = gl.arange(0, 2 * HEADS, gl.SliceLayout(1, layout))[:, None]
    return gl.where(which < HEADS, gl.associative_scan(numbers, 1, add), numbers).reshape([128 * HEADS])


@gluon.jit
def _first_at(slot, cu_seqlens, num_sequences, num_tokens, PACKED: gl.constexpr):
    """First token of a slot's chunk, and how many tokens there are from it on; none or fewer for nobody's slot."""
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, slot, num_sequences, num_tokens, 64, PACKED)
    return begin + chunk * 64, length - chunk * 64


@gluon.jit
def _fetch(k, q, k_tile, q_tile, arrived, token, key_head):
    K: gl.constexpr = k_tile.shape[1]
    mbarrier.expect(arrived, 256 * K)
    tma.async_copy_global_to_shared(k, [token, key_head * K], arrived, k_tile)
    tma.async_copy_global_to_shared(q, [token, key_head * K], arrived, q_tile)


@gluon.jit
def factor_rows(totals, norms, scale, NORMALISE: gl.constexpr):
    """The four rows of factors of a chunk, [4, 64]; norms: 64 of its keys, 64 of its queries with the scale."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    of_token: gl.constexpr = gl.SliceLayout(0, layout)
    which = gl.arange(0, 4, gl.SliceLayout(1, layout))[:, None]
    total = totals.load(of_token)[None, :]
    last = totals.slice(63, 1).load(of_token)[None, :]
    exponent = gl.where(which < 2, total, gl.where(which == 2, gl.minimum(last - total, 0.0), last))
    if NORMALISE:
        key, query = norms.slice(0, 64).load(of_token)[None, :], norms.slice(64, 64).load(of_token)[None, :]
        factor = gl.where(which == 1, query, gl.where(which == 3, 1.0, key))
    else:
        factor = gl.where(which == 1, scale, 1.0)
    return exp2(exponent) * factor


@gluon.jit
def _prepare(tiles, outputs, out, count, scale, NORMALISE: gl.constexpr, HEADS: gl.constexpr):
    """Of the keys and queries of a chunk, which are there, what its heads need. The copy engine is left to read the
    inverses, and all else is free.
    """
    k_tile, q_tile, matrices, weight_tiles, first_tiles, second_tiles, blocks, solved, vectors, norms = tiles
    inverse, scores, factors = outputs
    dtype: gl.constexpr = k_tile.dtype
    K: gl.constexpr = k_tile.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, 64, by_row)[:, None]
    column = gl.arange(0, 64, by_column)[None, :]
    of_factors: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    number = gl.arange(0, 4, gl.SliceLayout(1, of_factors))[:, None] * 64
    number += gl.arange(0, 64, gl.SliceLayout(0, of_factors))[None, :]
    if count < 64:
        zero_past(k_tile, count, 64, K)
        zero_past(q_tile, count, 64, K)
        fence_async_shared()
        gl.thread_barrier()
    zero = gl.zeros([64, 64], gl.float32, layout)
    if NORMALISE:
        lengths = warpgroup_mma(q_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        lengths = warpgroup_mma_wait(0, [lengths])
        norms.slice(64, 64).store(norm_factor(lengths, row == column) * scale)
    across = k_tile.permute((1, 0))
    coupling = warpgroup_mma(k_tile, across, zero, use_acc=False, is_async=True)
    asked = warpgroup_mma(q_tile, across, zero, use_acc=False, is_async=True)
    coupling, asked = warpgroup_mma_wait(0, [coupling, asked])
    if NORMALISE:
        norms.slice(0, 64).store(norm_factor(coupling, row == column))
    else:
        asked = asked * scale
    # Nobody reads keys and queries any more, nor the copy engine the inverses of the chunk before.
    tma.store_wait(0)
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        totals = vectors.slice(64 * h, 64)
        between = exp2(totals.load(by_row)[:, None] - totals.load(by_column)[None, :])
        between = gl.where(row >= column, between, 0.0)
        row_size = vectors.slice(64 * (HEADS + h), 64).load(by_row)
        if NORMALISE:
            between = between * norms.slice(0, 64).load(by_column)[None, :]
            row_size = row_size * norms.slice(0, 64).load(by_row)
            weights = asked * between * norms.slice(64, 64).load(by_row)[:, None]
        else:
            weights = asked * between
        weight_tiles.slice(64 * h, 64).store(weights.to(dtype))
        matrix = to_half(coupling * between * row_size[:, None])
        matrices[h].store(matrix)
        keep_diagonal(matrix, blocks.slice(4 * h, 4))
        at_factors = factors + (out + h).to(gl.int64) * 256 + number
        gl.store(at_factors, factor_rows(totals, norms, scale, NORMALISE))
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        tma.async_copy_shared_to_global(scores, [(out + h) * 64, 0], weight_tiles.slice(64 * h, 64))
    solve_diagonal(blocks, solved)
    tma.store_wait(0)
    gl.thread_barrier()
    assemble(solved, matrices, first_tiles, second_tiles, vectors.slice(64 * HEADS, 64 * HEADS), layout)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        tma.async_copy_shared_to_global(inverse, [(out + h) * 64, 0], first_tiles[h])


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
    first_slot,
    items,
    g_token,
    beta_token,
    g_head,
    beta_head,
    K: gl.constexpr,
    NORMALISE: gl.constexpr,
    PACKED: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Tiles by descriptors: q and k [tokens, heads K], inverse and scores [slots value_heads 64, 64]. Programs take
    turns with the `items`, groups of HEADS value heads, which share a key head, within slots of 64 tokens from
    first_slot on; on four warps.
    """
    let_dependents_launch()
    groups = value_heads // HEADS
    dtype: gl.constexpr = k.dtype
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Keys and queries make room for the matrices and the scores as soon as they are multiplied, the diagonal blocks for
    # the first tiles and the scores for the second: four programs find room on a multiprocessor.
    matrix_space = gl.allocate_shared_memory(gl.float16, [128, 64], inverse.layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [128, 64], scores.layout)
    first_tiles = room(HEADS)
    k_tile = matrix_space._reinterpret(dtype, [64, K], k.layout)
    q_tile = weight_tiles._reinterpret(dtype, [64, K], q.layout)
    second_tiles = halves_of(weight_tiles._reinterpret(gl.float16, [128, 64], inverse.layout), HEADS)
    matrices = halves_of(matrix_space, HEADS)
    blocks = first_tiles[0]._reinterpret(gl.float16, [4 * HEADS, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    solved = gl.allocate_shared_memory(gl.float16, [64 * HEADS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    vectors = gl.allocate_shared_memory(gl.float32, [128 * HEADS], vector)
    norms = gl.allocate_shared_memory(gl.float32, [128], vector)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    tiles = (k_tile, q_tile, matrices, weight_tiles, first_tiles, second_tiles, blocks, solved, vectors, norms)
    item = gl.program_id(0)
    head = item % groups * HEADS
    token, count = _first_at(first_slot + item // groups, cu_seqlens, num_sequences, num_tokens, PACKED)
    numbers = _read_gates(g, beta, token, count, g_token, beta_token, g_head, beta_head, head, HEADS)
    if count > 0:
        _fetch(k, q, k_tile, q_tile, arrived, token, head // heads_a_key)
    phase = 0
    while item < items:
        length = count
        out = item // groups * value_heads + head
        # The next one's gates come while this one is prepared; its keys and queries when there is room for them.
        item += gl.num_programs(0)
        head = item % groups * HEADS
        slot = first_slot + gl.minimum(item, items - 1) // groups
        token, count = _first_at(slot, cu_seqlens, num_sequences, num_tokens, PACKED)
        count = gl.where(item < items, count, 0)
        vectors.store(_sums_of_gates(numbers, HEADS))
        numbers = _read_gates(g, beta, token, count, g_token, beta_token, g_head, beta_head, head, HEADS)
        if length > 0:
            mbarrier.wait(arrived, phase)
            phase = phase ^ 1
            _prepare(tiles, (inverse, scores, factors), out, length, scale, NORMALISE, HEADS)
        else:
            gl.thread_barrier()
        if count > 0:
            _fetch(k, q, k_tile, q_tile, arrived, token, head // heads_a_key)
    tma.store_wait(0)
