"""The inverse of a chunk's unit lower triangular matrix for compute capability 9.0, in Gluon.

The diagonal blocks of 16 rows by substitution, a column a thread, in FP32. With D the inverses of the diagonal blocks
of a size, the blocks between two of them are -D_i A_ij D_j: two products of whole tiles, of which these are kept. The
products are of FP16, as the inverse itself.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, misc"
# Compiled functions know tuples and +, but no unpacking into tuples.
# ruff: noqa: RUF005
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

from vllm_ext.ops.linear_attention.triton.hopper import await_launches, let_dependents_launch, sequence_of_slot, to_half


@gluon.jit
def join_rows(rows, COLUMNS: gl.constexpr):
    """16 tensors [4, COLUMNS], row r of every block of 16 rows, as [64, COLUMNS]; nothing moves between threads."""
    x = rows
    for level in gl.static_range(4):
        y = ()
        for j in gl.static_range(8 // 2**level):
            y = y + (gl.join(x[j], x[j + 8 // 2**level]),)
        x = y
    return gl.permute(x[0], (0, 2, 3, 4, 5, 1)).reshape([64, COLUMNS])


@gluon.jit
def _columns(x):
    """[4, 16], a row in one thread, as 16 tensors [4]."""
    parts = (x,)
    for level in gl.static_range(4):
        halves = ()
        for p in gl.static_range(2**level):
            first, second = parts[p].reshape([4, 2, 8 // 2**level]).permute((0, 2, 1)).split()
            halves = halves + (first, second)
        parts = halves
    return parts


@gluon.jit
def _times(left, right_tile, zero):
    """left [64, 64], FP32 in registers, times a tile, in FP16."""
    operand: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    narrow = gl.convert_layout(to_half(left), operand)
    product = warpgroup_mma(narrow, right_tile, zero, use_acc=False, is_async=True)
    product, narrow = warpgroup_mma_wait(0, [product, narrow])
    return product


@gluon.jit
def _replace(matrix, wanted, other):
    """matrix [64, 64] with other where wanted [4, 1, 4, 1], both cut in blocks of 16."""
    layout: gl.constexpr = matrix.type.layout
    mixed = gl.where(wanted, other.reshape([4, 16, 4, 16]), matrix.reshape([4, 16, 4, 16]))
    return gl.convert_layout(mixed.reshape([64, 64]), layout, assert_trivial=True)


@gluon.jit
def invert(matrix, tile):
    """(I + A)^-1 [64, 64], FP32, of A = matrix below its diagonal. Elsewhere matrix must be finite; `tile` is to hold
    it in FP16, and may still be on its way there.
    """
    layout: gl.constexpr = matrix.type.layout
    WIDE: gl.constexpr = gl.num_warps() // 4
    row_major: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first_tile = gl.allocate_shared_memory(gl.float16, [64, 64], tile.layout)
    second_tile = gl.allocate_shared_memory(gl.float16, [64, 64], tile.layout)
    columns = gl.allocate_shared_memory(gl.float32, [1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    solved = gl.allocate_shared_memory(gl.float32, [64, 16], row_major)
    parts = matrix.reshape([4, 16, 4, 16])
    four: gl.constexpr = parts.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, four)))
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, four)))
    row = gl.arange(0, 4, of_row)[:, None, None, None]
    column = gl.arange(0, 4, of_column)[None, None, :, None]
    # -0.0 and not 0.0: adding it to nothing is nothing to do.
    diagonal = gl.sum(gl.where(row == column, parts, -0.0), 2)
    columns.store(diagonal.permute((2, 0, 1)).reshape([1024]))
    fence_async_shared()
    gl.thread_barrier()

    by_column: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, WIDE], [1, 0])
    per_block: gl.constexpr = gl.SliceLayout(1, by_column)
    by_row: gl.constexpr = gl.BlockedLayout([1, 16], [1, 32], [4, WIDE], [1, 0])
    own = gl.arange(0, 16, gl.SliceLayout(0, by_column))[None, :] + gl.zeros([4, 16], gl.int32, by_column)
    x = ()
    for i in gl.static_range(16):
        x = x + (gl.where(own == i, 1.0, 0.0),)
    for k in gl.static_range(15):
        below = _columns(columns.slice(64 * k, 64)._reinterpret(gl.float32, [4, 16], row_major).load(by_row))
        y = ()
        for i in gl.static_range(16):
            if i > k:
                factor = gl.convert_layout(below[i].reshape([4]), per_block, assert_trivial=True)
                y = y + (x[i] - factor[:, None] * x[k],)
            else:
                y = y + (x[i],)
        x = y
    solved.store(join_rows(x, 16))
    gl.thread_barrier()

    small: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, 16, 16])
    wide = solved.load(small)
    wide = gl.join(wide, wide)
    wide = gl.convert_layout(gl.join(wide, wide).permute((0, 2, 3, 1)).reshape([4, 16, 4, 16]), four)
    inverse = gl.where(row == column, wide, 0.0).reshape([64, 64])
    inverse = gl.convert_layout(inverse, layout, assert_trivial=True)
    first_tile.store(to_half(inverse))
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([64, 64], gl.float32, layout)
    beside = _times(_times(inverse, tile, zero), first_tile, zero)
    inverse = _replace(inverse, (row // 2 == column // 2) & (row > column), -beside)
    second_tile.store(to_half(inverse))
    fence_async_shared()
    gl.thread_barrier()
    below = _times(_times(inverse, tile, zero), second_tile, zero)
    return _replace(inverse, row // 2 > column // 2, -below)


@gluon.jit(do_not_specialize=["num_sequences", "num_tokens", "value_heads"])
def invert_hopper_kernel(
    coupling,
    inverse,
    beta,
    cu_seqlens,
    num_sequences,
    num_tokens,
    value_heads,
    beta_token,
    beta_head,
    PACKED: gl.constexpr,
):
    """inverse [slots value_heads 64, 64] = (I + strictlower(coupling))^-1 diag(beta), both by descriptors; coupling
    FP16. Grid: value_heads within slots of 64 tokens; on four warps.
    """
    let_dependents_launch()
    slot = gl.program_id(0) // value_heads
    head = gl.program_id(0) % value_heads
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, slot, num_sequences, num_tokens, 64, PACKED)
    count = length - chunk * 64
    if count <= 0:
        return
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out = (slot * value_heads + head) * 64
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], coupling.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    await_launches()
    mbarrier.expect(arrived, 8192)
    tma.async_copy_global_to_shared(coupling, [out, 0], arrived, tile)
    at = gl.arange(0, 64, gl.BlockedLayout([2], [32], [4], [0]))
    at_beta = beta + (begin + chunk * 64 + at).to(gl.int64) * beta_token + head * beta_head
    sizes = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sizes.store(gl.load(at_beta, mask=at < count, other=0.0).to(gl.float32))
    mbarrier.wait(arrived, 0)
    solve = invert(tile.load(layout).to(gl.float32), tile) * sizes.load(gl.SliceLayout(0, layout))[None, :]
    solve_tile = gl.allocate_shared_memory(gl.float16, [64, 64], inverse.layout)
    solve_tile.store(to_half(solve))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(inverse, [out, 0], solve_tile)
    tma.store_wait(0)
