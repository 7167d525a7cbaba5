"""`prepare_gdn_kernel` for compute capability 9.0 in Gluon, in BF16; operands and results as there."""

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
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key"]


@gluon.jit
def _norm_factor(products, diagonal):
    """1 / length of rows, from their products with each other."""
    return gl.rsqrt(gl.sum(gl.where(diagonal, products, 0.0), 1) + L2_NORM_EPS)


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
    K: gl.constexpr,
    NORMALISE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Tiles by descriptors: q and k [tokens, heads K], inverse and scores [slots value_heads 64, 64]. On four warps."""
    let_dependents_launch()
    slot = gl.program_id(0) // value_heads
    head = gl.program_id(0) % value_heads
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, slot, num_sequences, num_tokens, 64, PACKED)
    count = length - chunk * 64
    if count <= 0:
        return
    dtype: gl.constexpr = k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    token = begin + chunk * 64
    out = slot * value_heads + head
    k_tile = gl.allocate_shared_memory(dtype, [64, K], k.layout)
    q_tile = gl.allocate_shared_memory(dtype, [64, K], q.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(arrived, 256 * K)
    key_column = head // heads_a_key * K
    tma.async_copy_global_to_shared(k, [token, key_column], arrived, k_tile)
    tma.async_copy_global_to_shared(q, [token, key_column], arrived, q_tile)

    flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    at = gl.arange(0, 64, flat)
    at_g = g + (token + at).to(gl.int64) * g_token + head * g_head
    at_beta = beta + (token + at).to(gl.int64) * beta_token + head * beta_head
    step = gl.load(at_g, mask=at < count, other=0.0).to(gl.float32)
    total = gl.associative_scan(gl.maximum(step, LEAST_STEP) * LOG2_E, 0, add)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = gl.allocate_shared_memory(gl.float32, [64], vector)
    sizes = gl.allocate_shared_memory(gl.float32, [64], vector)
    totals.store(total)
    sizes.store(gl.load(at_beta, mask=at < count, other=0.0).to(gl.float32))
    last = gl.sum(gl.where(at == 63, total, 0.0), 0)
    gl.thread_barrier()
    row = gl.arange(0, 64, by_row)[:, None]
    column = gl.arange(0, 64, by_column)[None, :]
    between = exp2(totals.load(by_row)[:, None] - totals.load(by_column)[None, :])
    between = gl.where(row >= column, between, 0.0)

    mbarrier.wait(arrived, 0)
    if count < 64:
        zero_past(k_tile, count, 64, K)
        zero_past(q_tile, count, 64, K)
        fence_async_shared()
        gl.thread_barrier()
    zero = gl.zeros([64, 64], gl.float32, layout)
    across = k_tile.permute((1, 0))
    coupling = warpgroup_mma(k_tile, across, zero, use_acc=False, is_async=True)
    asked = warpgroup_mma(q_tile, across, zero, use_acc=False, is_async=True)
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
    matrix = coupling * between * row_size[:, None]
    weight_tile = gl.allocate_shared_memory(dtype, [64, 64], scores.layout)
    weight_tile.store(weights.to(dtype))
    place = factors + out.to(gl.int64) * 256 + at
    gl.store(place, exp2(total) * of_k)
    gl.store(place + 64, exp2(total) * of_q)
    gl.store(place + 128, exp2(gl.minimum(last - total, 0.0)) * of_k)
    gl.store(place + 192, exp2(last + gl.zeros([64], gl.float32, flat)))
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], tile_layout)
    tile.store(to_half(matrix))
    solve = invert(matrix, tile) * sizes.load(by_column)[None, :]
    solve_tile = gl.allocate_shared_memory(gl.float16, [64, 64], inverse.layout)
    solve_tile.store(to_half(solve))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(scores, [out * 64, 0], weight_tile)
    tma.async_copy_shared_to_global(inverse, [out * 64, 0], solve_tile)
    tma.store_wait(0)
