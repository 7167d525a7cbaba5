"""`prepare_kda_kernel` for compute capability 9.0 in Gluon, in BF16; the inverse is left to `invert_hopper_kernel`.

The same halves of blocks as there. One exponential a step and channel: the decay between a row and the boundary of its
block's halves is a product of these, and all of its factors are at most 1.
A thread holds 16 rows of two channels, so the products stay in it. Keys and queries are one tile of 128 rows.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, misc"
# Compiled functions know tuples and +, but no unpacking into tuples, and choose at compile time by `if` alone.
# ruff: noqa: RUF005, SIM108
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm_ext.ops.linear_attention.triton.hopper import (
    L2_NORM_EPS,
    LEAST_STEP,
    LOG2_E,
    exp2,
    let_dependents_launch,
    sequence_of_slot,
)
from vllm_ext.ops.linear_attention.triton.inverse_hopper import join_rows

# One compiled kernel serves every count.
_UNSPECIALIZED = ["num_sequences", "num_tokens", "value_heads", "heads_a_key", "first_slot"]


@gluon.jit
def _forward(e, start, SPAN: gl.constexpr):
    """For every row r, start times the product of e from the first row of its span of SPAN rows to r."""
    x = (start * e[0],)
    for r in gl.static_range(1, 16):
        if r % SPAN == 0:
            x = x + (start * e[r],)
        else:
            x = x + (x[r - 1] * e[r],)
    return x


@gluon.jit
def _backward(e, start, SPAN: gl.constexpr):
    """For every row r, at 15 - r, start times the product of e behind r to the last row of its span."""
    x = (start,)
    for i in gl.static_range(1, 16):
        if i % SPAN == 0:
            x = x + (start,)
        else:
            x = x + (x[i - 1] * e[16 - i],)
    return x


@gluon.jit
def _rows(tile, like):
    """A tile [64, K] in shared memory as 16 tensors [4, K] laid out as `like`, row r of every block of 16 rows."""
    K: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = like.type.layout
    together: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, K // 64], [1, 0])
    parts = (tile.load(together).reshape([4, 16, K]),)
    for level in gl.static_range(4):
        halves = ()
        for p in gl.static_range(2**level):
            first, second = parts[p].reshape([4, 2, 8 // 2**level, K]).permute((0, 2, 3, 1)).split()
            halves = halves + (first, second)
        parts = halves
    rows = ()
    for r in gl.static_range(16):
        rows = rows + (gl.convert_layout(parts[r].reshape([4, K]), layout, assert_trivial=True),)
    return rows


@gluon.jit
def _multiply(keys, queries, tile):
    """[128, 64]: the products of keys, then of queries, with keys, all 16 rows [4, K]."""
    WARPS: gl.constexpr = gl.num_warps()
    K: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    gl.thread_barrier()
    tile.store(gl.join(join_rows(keys, K), join_rows(queries, K)).permute((2, 0, 1)).reshape([128, K]))
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([128, 64], gl.float32, layout)
    product = warpgroup_mma(tile, tile.slice(0, 64).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [product])


@gluon.jit
def _diagonal(product, same):
    """Of [128, 64] the diagonal blocks, [8, 16, 16]: four of keys, four of queries."""
    return gl.sum(gl.where(same, product.reshape([8, 16, 4, 16]), -0.0), 2)


@gluon.jit
def _near(e, one, raw, tile, nearest, same, apart, HALF: gl.constexpr):
    """Put the products between halves of blocks of 2 HALF <= 16 rows into `nearest`, the diagonal blocks."""
    key, query = _rows(raw.slice(0, 64), one), _rows(raw.slice(64, 64), one)
    after = _forward(e, one, HALF)
    before = _backward(e, one, HALF)
    keys = ()
    queries = ()
    for r in gl.static_range(16):
        if r // HALF % 2 == 1:
            keys = keys + ((key[r].to(gl.float32) * after[r]).to(key[r].dtype),)
            queries = queries + ((query[r].to(gl.float32) * after[r]).to(key[r].dtype),)
        else:
            if r % HALF == HALF - 1:
                keys = keys + (key[r],)
            else:
                keys = keys + ((key[r].to(gl.float32) * before[15 - r]).to(key[r].dtype),)
            # Of no product that is kept.
            queries = queries + (query[r],)
    return gl.where(apart // HALF == 1, _diagonal(_multiply(keys, queries, tile), same), nearest)


@gluon.jit
def _far(e, lower, start, raw, tile, results, factors, is_key, wanted, FIRST: gl.constexpr):
    """Put the products between blocks of 16 rows into `results`: rows where `lower` decay from their block's first row
    on, others to its last; times start. What is not wanted is 0 at FIRST, and as it was later.
    """
    key, query = _rows(raw.slice(0, 64), start), _rows(raw.slice(64, 64), start)
    after = _forward(e, start, 16)
    before = _backward(e, start, 16)
    keys = ()
    queries = ()
    for r in gl.static_range(16):
        decay = gl.where(lower, after[r], before[15 - r])
        keys = keys + ((key[r].to(gl.float32) * decay).to(key[r].dtype),)
        queries = queries + ((query[r].to(gl.float32) * decay).to(key[r].dtype),)
    product = _scaled(_multiply(keys, queries, tile), factors)
    layout: gl.constexpr = product.type.layout
    bits = _narrow(product.reshape([8, 16, 4, 16]), is_key)
    if FIRST:
        bits = gl.where(wanted, bits, 0)
    else:
        bits = gl.where(wanted, bits, results.load(layout).reshape([8, 16, 4, 16]))
    results.store(gl.convert_layout(bits.to(gl.int16).reshape([128, 64]), layout, assert_trivial=True))


@gluon.jit
def _scaled(product, factors):
    """product [128, 64] times the factors of its rows and of its columns, 128 and 64 numbers in shared memory."""
    layout: gl.constexpr = product.type.layout
    row = factors.slice(0, 128).load(gl.SliceLayout(1, layout))
    column = factors.slice(128, 64).load(gl.SliceLayout(0, layout))
    return product * row[:, None] * column[None, :]


@gluon.jit
def _narrow(x, is_key):
    """The bits of FP32 numbers in FP16 where is_key is not 0, else in BF16."""
    layout: gl.constexpr = x.type.layout
    flag = is_key + gl.zeros(x.shape, gl.int32, layout)
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 half, brain;
        .reg .pred p;
        cvt.rn.satfinite.f16x2.f32 half, $2, $1;
        cvt.rn.bf16x2.f32 brain, $2, $1;
        setp.ne.s32 p, $3, 0;
        selp.b32 $0, half, brain, p;
        }""",
        "=r,r,r,r,r",
        [x, flag],
        gl.int16,
        True,
        2,
    )


@gluon.jit(do_not_specialize=_UNSPECIALIZED)
def prepare_kda_hopper_kernel(
    q,
    k,
    g,
    beta,
    cu_seqlens,
    coupling,
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
    first_slot,
    q_token,
    k_token,
    g_token,
    beta_token,
    q_head,
    k_head,
    g_head,
    beta_head,
    K: gl.constexpr,
    NORMALISE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Arguments as `prepare_kda_kernel`, but coupling for the inverse, strictlower(beta_i between(i, j) k_i.k_j) in
    FP16; it and scores are [slots value_heads 64, 64] by descriptors. On K / 16 warps.
    """
    let_dependents_launch()
    place = gl.program_id(0) // value_heads
    head = gl.program_id(0) % value_heads
    _, begin, length, chunk, _ = sequence_of_slot(
        cu_seqlens, first_slot + place, num_sequences, num_tokens, 64, PACKED, ONE_TRIP=False
    )
    count = length - chunk * 64
    if count <= 0:
        return
    dtype: gl.constexpr = keys.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, K // 64], [1, 0])
    of_channel: gl.constexpr = gl.SliceLayout(0, layout)
    of_block: gl.constexpr = gl.SliceLayout(1, layout)
    token = (begin + chunk * 64).to(gl.int64)
    key_head = head // heads_a_key
    out = place.to(gl.int64) * value_heads + head
    block = gl.arange(0, 4, of_block)[:, None]
    channel = gl.arange(0, K, of_channel)[None, :]
    at_g = g + token * g_token + head * g_head + channel
    at_k = k + token * k_token + key_head * k_head + channel
    at_q = q + token * q_token + key_head * q_head + channel
    e = ()
    key = ()
    query = ()
    for r in gl.static_range(16):
        row = block * 16 + r
        step = gl.load(at_g + row * g_token, mask=row < count, other=0.0).to(gl.float32)
        e = e + (exp2(gl.maximum(step, LEAST_STEP) * LOG2_E),)
        key = key + (gl.load(at_k + row * k_token, mask=row < count, other=0.0),)
        query = query + (gl.load(at_q + row * q_token, mask=row < count, other=0.0),)
    total = e[0]
    for r in gl.static_range(1, 16):
        total = total * e[r]
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = gl.allocate_shared_memory(gl.float32, [4 * K], vector)
    totals.store(total.reshape([4 * K]))
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, K], dtype)
    raw = gl.allocate_shared_memory(dtype, [128, K], tile_layout)
    tile = gl.allocate_shared_memory(dtype, [128, K], tile_layout)
    product = _multiply(key, query, raw)

    accumulator: gl.constexpr = product.type.layout
    four: gl.constexpr = product.reshape([8, 16, 4, 16]).type.layout
    three: gl.constexpr = gl.SliceLayout(2, four)
    outer_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, four)))
    outer_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, four)))
    row_block = gl.arange(0, 8, outer_row)[:, None, None, None]
    column_block = gl.arange(0, 4, outer_column)[None, None, :, None]
    same = row_block % 4 == column_block
    near_block = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None, None]
    near_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, three)))[None, :, None]
    near_column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, three)))[None, None, :]
    # Of the products as they are only q_i k_i is kept, and for norms k_i k_i.
    itself = gl.where(near_row == near_column, _diagonal(product, same), 0.0)
    factors = gl.allocate_shared_memory(gl.float32, [256], vector)
    of_rows: gl.constexpr = gl.SliceLayout(1, accumulator)
    of_columns: gl.constexpr = gl.SliceLayout(0, accumulator)
    each = gl.arange(0, 128, of_rows)
    at_beta = beta + (token + each % 64) * beta_token + head * beta_head
    size = gl.load(at_beta, mask=(each < 64) & (each < count), other=0.0).to(gl.float32)
    row_factor = gl.where(each < 64, size, scale)
    column_factor = gl.full([64], 1.0, gl.float32, of_columns)
    norms = gl.allocate_shared_memory(gl.float32, [128], vector)
    if NORMALISE:
        zero = gl.zeros([128, 64], gl.float32, accumulator)
        lengths = warpgroup_mma(raw, raw.slice(64, 64).permute((1, 0)), zero, use_acc=False, is_async=True)
        lengths = _diagonal(warpgroup_mma_wait(0, [lengths]), same)
        lengths = gl.where(near_row == near_column, gl.where(near_block < 4, itself, lengths), 0.0)
        norm = gl.rsqrt(gl.sum(lengths, 2) + L2_NORM_EPS)
        norms.store(norm.reshape([128]))
        gl.thread_barrier()
        row_factor = row_factor * norms.load(of_rows)
        column_factor = norms.slice(0, 64).load(of_columns)
        gl.thread_barrier()
        norms.store(norm.permute((1, 0)).reshape([128]))
    factors.slice(0, 128).store(row_factor)
    factors.slice(128, 64).store(column_factor)

    nearest = gl.where(near_block < 4, 0.0, itself)
    apart = gl.where(near_row > near_column, near_row ^ near_column, 0)
    one = gl.full([4, K], 1.0, gl.float32, layout)
    # True all of them, but not known to be: else the compiler starts on the next products before it has room for them.
    always = (num_tokens, value_heads, num_sequences, heads_a_key, k_token, q_token)
    for level in gl.static_range(4):
        if always[level] > 0:
            nearest = _near(e, one, raw, tile, nearest, same, apart, 2**level)
    is_key = gl.where(row_block < 4, 1, 0)
    # Two bytes at a time on their way to global memory, these products took a third of the kernel's time.
    kind: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.int16)
    results = gl.allocate_shared_memory(gl.int16, [128, 64], kind)
    if always[4] > 0:
        wanted = (row_block % 4 // 2 == column_block // 2) & (row_block % 4 > column_block)
        _far(e, block % 2 == 1, one, raw, tile, results, factors, is_key, wanted, True)
    total0 = totals.slice(0 * K, K).load(of_channel)[None, :]
    total1 = totals.slice(1 * K, K).load(of_channel)[None, :]
    total2 = totals.slice(2 * K, K).load(of_channel)[None, :]
    total3 = totals.slice(3 * K, K).load(of_channel)[None, :]
    if always[5] > 0:
        inner = gl.where(block == 3, total2, gl.where(block == 0, total1, 1.0))
        wanted = row_block % 4 // 2 > column_block // 2
        _far(e, block >= 2, inner, raw, tile, results, factors, is_key, wanted, False)

    ones = gl.full([128, 64], 1.0, gl.float32, accumulator)
    nearest = nearest * _diagonal(_scaled(ones, factors), same)
    bits = _narrow(nearest, gl.where(near_block < 4, 1, 0))[:, :, None, :]
    bits = gl.where(same, bits, results.load(accumulator).reshape([8, 16, 4, 16])).to(gl.int16)
    results.store(gl.convert_layout(bits.reshape([128, 64]), accumulator, assert_trivial=True))
    fence_async_shared()
    gl.thread_barrier()
    row = (out * 64).to(gl.int32)
    tma.async_copy_shared_to_global(
        coupling, [row, 0], results._reinterpret(gl.float16, [128, 64], coupling.layout).slice(0, 64)
    )
    tma.async_copy_shared_to_global(
        scores, [row, 0], results._reinterpret(dtype, [128, 64], scores.layout).slice(64, 64)
    )

    before = gl.where(block > 0, total0, 1.0) * gl.where(block > 1, total1, 1.0) * gl.where(block > 2, total2, 1.0)
    behind = gl.where(block < 3, total3, 1.0) * gl.where(block < 2, total2, 1.0) * gl.where(block < 1, total1, 1.0)
    read = _forward(e, before, 16)
    tail = _backward(e, behind, 16)
    key, query = _rows(raw.slice(0, 64), one), _rows(raw.slice(64, 64), one)
    place = out * (64 * K) + block * (16 * K) + channel
    for r in gl.static_range(16):
        wide_key = key[r].to(gl.float32)
        wide_query = query[r].to(gl.float32) * scale
        if NORMALISE:
            wide_key = wide_key * norms.slice(r * 8, 4).load(of_block)[:, None]
            wide_query = wide_query * norms.slice(r * 8 + 4, 4).load(of_block)[:, None]
        gl.store(keys + place + r * K, (wide_key * read[r]).to(dtype))
        gl.store(queries + place + r * K, (wide_query * read[r]).to(dtype))
        gl.store(tails + place + r * K, (wide_key * tail[15 - r]).to(dtype))
    gl.store(decays + out * K + channel + block * 0, total0 * total1 * total2 * total3, mask=block == 0)
    tma.store_wait(0)
