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
    await_launches,
    exp2,
    let_dependents_launch,
    sequence_of_slot,
    to_half,
    zero_past,
)
from vllm_ext.ops.linear_attention.triton.inverse_hopper import (
    assemble,
    halves_of,
    keep_diagonal,
    room,
    room_for_diagonal,
    solve_diagonal,
)

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "slots", "each", "first_slot"]


@gluon.jit
def norm_factor(products, diagonal):
    """1 / length of rows, from their products with each other."""
    return gl.rsqrt(gl.sum(gl.where(diagonal, products, 0.0), 1) + L2_NORM_EPS)


@gluon.jit
def _read_gates(g, beta, token, count, g_token, beta_token, g_head, beta_head, head, HEADS: gl.constexpr):
    """Rows of 64 numbers: for every head the sums of its gates, in powers of 2, and then for every head its betas. Each
    is read by one warp.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    which = gl.arange(0, 2 * HEADS, gl.SliceLayout(1, layout))[:, None]
    at = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    own = head + which % HEADS
    at_g = g + (token + at).to(gl.int64) * g_token + own * g_head
    at_beta = beta + (token + at).to(gl.int64) * beta_token + own * beta_head
    step = gl.load(at_g, mask=(which < HEADS) & (at < count), other=0.0).to(gl.float32)
    size = gl.load(at_beta, mask=(which >= HEADS) & (at < count), other=0.0).to(gl.float32)
    total = gl.associative_scan(gl.maximum(step, LEAST_STEP) * LOG2_E, 1, add)
    return gl.where(which < HEADS, total, size).reshape([128 * HEADS])


@gluon.jit
def factor_rows(totals, norms, scale, NORMALISE: gl.constexpr, SCORED: gl.constexpr):
    """The four rows of factors of a chunk, [4, 64]; norms: 64 of its keys, 64 of its queries with the scale. SCORED:
    for a recurrence that makes the scores, with the sums of gates in place of the last row.
    """
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
    result = exp2(exponent) * factor
    return gl.where(which == 3, total, result) if SCORED else result


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
    slots,
    each,
    first_slot,
    g_token,
    beta_token,
    g_head,
    beta_head,
    K: gl.constexpr,
    NORMALISE: gl.constexpr,
    PACKED: gl.constexpr,
    HEADS: gl.constexpr,
    HEADS_A_KEY: gl.constexpr,
):
    """Tiles by descriptors: q and k [tokens, heads K], inverse and scores [slots value_heads 64, 64]. Without scores,
    which the recurrence then makes, not to NORMALISE, no queries are read (`factor_rows`). Grid: groups of HEADS value
    heads, which share a key head, by columns of `each` of the slots of 64 tokens from first_slot on, by `each` and one
    more for what is left of the slots; on four warps.
    """
    # Before the place is looked up, which takes a trip to memory: the tiles are asked for right after it.
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    await_launches()
    # Not before: the recurrence reads initial states as it starts, which may be the last launch's final ones.
    let_dependents_launch()
    # A column is a sequence or like one. The first chunks of all come last: the recurrence, which begins with them,
    # finds them in the L2 cache. Nothing is divided: every division takes as long as a trip to the L1 cache.
    head = gl.program_id(0) * HEADS
    late = gl.program_id(2)
    place = gl.program_id(1) * each + each - 1 - late
    place = gl.where(late < each, place, gl.num_programs(1) * each + gl.program_id(1))
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, first_slot + place, num_sequences, num_tokens, 64, PACKED)
    count = length - chunk * 64
    if (count <= 0) | (place >= slots):
        return
    dtype: gl.constexpr = k.dtype
    SCORED: gl.constexpr = scores is None
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token = begin + chunk * 64
    out = place * value_heads + head
    # Keys and queries make room for the matrices and the scores as soon as they are multiplied, the diagonal blocks for
    # the first tiles and the scores for the second: four programs find room on a multiprocessor.
    tiles = gl.allocate_shared_memory(gl.float16, [128, 64], inverse.layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    first_tiles = room(HEADS)
    k_tile = tiles._reinterpret(dtype, [64, K], k.layout)
    q_tile = weight_tiles._reinterpret(dtype, [64, K], q.layout)
    second_tiles = halves_of(weight_tiles._reinterpret(gl.float16, [128, 64], inverse.layout), HEADS)
    tiles = halves_of(tiles, HEADS)
    blocks = first_tiles[0]._reinterpret(gl.float16, [4 * HEADS, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    solved = room_for_diagonal(HEADS)
    vectors = gl.allocate_shared_memory(gl.float32, [128 * HEADS], vector)
    norms = gl.allocate_shared_memory(gl.float32, [128], vector)
    mbarrier.expect(arrived, 128 * K if SCORED else 256 * K)
    key_column = head // HEADS_A_KEY * K
    tma.async_copy_global_to_shared(k, [token, key_column], arrived, k_tile)
    if not SCORED:
        tma.async_copy_global_to_shared(q, [token, key_column], arrived, q_tile)
    # Else the assembler asks for the second tile behind what is made of the gates, which have to come first.
    gl.thread_barrier()
    vectors.store(_read_gates(g, beta, token, count, g_token, beta_token, g_head, beta_head, head, HEADS))
    row = gl.arange(0, 64, by_row)[:, None]
    column = gl.arange(0, 64, by_column)[None, :]
    of_factors: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    number = gl.arange(0, 4, gl.SliceLayout(1, of_factors))[:, None] * 64
    number += gl.arange(0, 64, gl.SliceLayout(0, of_factors))[None, :]

    # A zero that the compiler does not know of. It would keep what is at or below the diagonal, a bit each, from one
    # head to the next, and fetch the scale once a product: more instructions than to find out again, and to keep it.
    nothing = num_tokens >> 31

    mbarrier.wait(arrived, 0)
    if count < 64:
        zero_past(k_tile, count, 64, K)
        if not SCORED:
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
    if SCORED:
        coupling = warpgroup_mma_wait(0, [coupling])
    else:
        asked = warpgroup_mma(q_tile, across, zero, use_acc=False, is_async=True)
        coupling, asked = warpgroup_mma_wait(0, [coupling, asked])
    if NORMALISE:
        norms.slice(0, 64).store(norm_factor(coupling, row == column))
    elif not SCORED:
        asked = asked * (scale + nothing)
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        totals = vectors.slice(64 * h, 64)
        between = exp2(totals.load(by_row)[:, None] - totals.load(by_column)[None, :])
        between = gl.where(row + nothing * h >= column, between, 0.0)
        row_size = vectors.slice(64 * (HEADS + h), 64).load(by_row)
        if NORMALISE:
            between = between * norms.slice(0, 64).load(by_column)[None, :]
            row_size = row_size * norms.slice(0, 64).load(by_row)
            weights = asked * between * norms.slice(64, 64).load(by_row)[:, None]
        elif not SCORED:
            weights = asked * between
        if not SCORED:
            weight_tiles.slice(64 * h, 64).store(weights.to(dtype))
        matrix = to_half(coupling * between * row_size[:, None])
        tiles[h].store(matrix)
        keep_diagonal(matrix, blocks.slice(4 * h, 4))
        at_factors = factors + (out + h).to(gl.int64) * 256 + number
        gl.store(at_factors, factor_rows(totals, norms, scale, NORMALISE, SCORED))
    if not SCORED:
        fence_async_shared()
    gl.thread_barrier()
    if not SCORED:
        for h in gl.static_range(HEADS):
            tma.async_copy_shared_to_global(scores, [(out + h) * 64, 0], weight_tiles.slice(64 * h, 64))
    solve_diagonal(blocks, solved)
    if not SCORED:
        tma.store_wait(0)
    fence_async_shared()
    gl.thread_barrier()
    assemble(solved, tiles, first_tiles, second_tiles, vectors.slice(64 * HEADS, 64 * HEADS), layout)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        tma.async_copy_shared_to_global(inverse, [(out + h) * 64, 0], first_tiles[h])
    tma.store_wait(0)
