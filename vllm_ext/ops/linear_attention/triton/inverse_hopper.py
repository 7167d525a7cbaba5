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
    """16 tensors [BLOCKS, COLUMNS], row r of every block of 16 rows, as [16 BLOCKS, COLUMNS]; nothing moves between
    threads.
    """
    x = rows
    for level in gl.static_range(4):
        y = ()
        for j in gl.static_range(8 // 2**level):
            y = y + (gl.join(x[j], x[j + 8 // 2**level]),)
        x = y
    return gl.permute(x[0], (0, 2, 3, 4, 5, 1)).reshape([16 * rows[0].shape[0], COLUMNS])


@gluon.jit
def _entries(x):
    """[BLOCKS, 16], a row in one thread, as 16 tensors [BLOCKS]."""
    BLOCKS: gl.constexpr = x.shape[0]
    parts = (x,)
    for level in gl.static_range(4):
        halves = ()
        for p in gl.static_range(2**level):
            first, second = parts[p].reshape([BLOCKS, 2, 8 // 2**level]).permute((0, 2, 1)).split()
            halves = halves + (first, second)
        parts = halves
    return parts


@gluon.jit
def _block_places(four: gl.constexpr):
    """Which block of 16 rows, and of 16 columns, numbers [4, 16, 4, 16] are in."""
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, four)))
    of_column: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, four)))
    return gl.arange(0, 4, of_row)[:, None, None, None], gl.arange(0, 4, of_column)[None, None, :, None]


@gluon.jit
def room(HEADS: gl.constexpr):
    """One or two tiles [64, 64] of FP16: blocks of their own, so that who writes one need not wait for the other's."""
    kind: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    tiles = (gl.allocate_shared_memory(gl.float16, [64, 64], kind),)
    if HEADS == 2:
        tiles = tiles + (gl.allocate_shared_memory(gl.float16, [64, 64], kind),)
    return tiles


@gluon.jit
def halves_of(tile, HEADS: gl.constexpr):
    """The first HEADS of the two tiles in one of [128, 64]."""
    tiles = (tile.slice(0, 64),)
    if HEADS == 2:
        tiles = tiles + (tile.slice(64, 64),)
    return tiles


@gluon.jit
def _add_scaled(x, other, size):
    """x + other size of FP16 numbers, two at a time."""
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $2, $3, $1;", "=r,r,r,r", [x, other, size], gl.float16, True, 2)


@gluon.jit
def _scale(x, size):
    """x size of FP16 numbers, two at a time."""
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, size], gl.float16, True, 2)


@gluon.jit
def keep_diagonal(matrix, blocks):
    """Put the diagonal blocks of a matrix [64, 64] into `blocks` [4, 16, 16], shared memory; both FP16."""
    parts = matrix.reshape([4, 16, 2, 2, 16]).permute((0, 1, 4, 2, 3))
    even, odd = parts.split()
    first, third = even.split()
    second, fourth = odd.split()
    layout: gl.constexpr = first.type.layout
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    zero = gl.zeros([4, 16, 16], gl.float16, layout)
    own = _scale(first, gl.where(block == 0, 1.0, 0.0).to(gl.float16) + zero)
    own = _add_scaled(own, second, gl.where(block == 1, 1.0, 0.0).to(gl.float16) + zero)
    own = _add_scaled(own, third, gl.where(block == 2, 1.0, 0.0).to(gl.float16) + zero)
    own = _add_scaled(own, fourth, gl.where(block == 3, 1.0, 0.0).to(gl.float16) + zero)
    blocks.store(own)


@gluon.jit
def solve_diagonal(blocks, solved):
    """solved [16 BLOCKS, 16] = the inverses of I + strictlower(blocks), [BLOCKS, 16, 16], both FP16 in shared memory.

    A column a thread; a block's rows are read by half of a warp, all of it the same numbers.
    """
    BLOCKS: gl.constexpr = blocks.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    by_column: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    per_block: gl.constexpr = gl.SliceLayout(1, by_column)
    by_row: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 1, 16], [WARPS, 1, 1], [2, 1, 0])
    own = gl.arange(0, 16, gl.SliceLayout(0, by_column))[None, :] + gl.zeros([BLOCKS, 16], gl.int32, by_column)
    x = (gl.where(own == 0, 1.0, 0.0),)
    for i in gl.static_range(1, 16):
        entries = _entries(blocks.slice(i, 1, 1).load(by_row).reshape([BLOCKS, 16]))
        value = gl.where(own == i, 1.0, 0.0)
        for k in gl.static_range(i):
            factor = gl.convert_layout(entries[k].reshape([BLOCKS]), per_block, assert_trivial=True)
            value = value - factor.to(gl.float32)[:, None] * x[k]
        x = x + (value,)
    solved.store(to_half(join_rows(x, 16)))


@gluon.jit
def _spread(solved, layout: gl.constexpr):
    """Four blocks [64, 16] on the diagonal of [64, 64]."""
    small: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, 16, 16])
    wide = solved.load(small)
    wide = gl.join(wide, wide)
    wide = gl.join(wide, wide).permute((0, 2, 3, 1)).reshape([4, 16, 4, 16])
    zero = gl.zeros([64, 64], gl.float16, layout).reshape([4, 16, 4, 16])
    four: gl.constexpr = zero.type.layout
    row, column = _block_places(four)
    own = gl.where(row == column, 1.0, 0.0).to(gl.float16) + zero
    inverse = _scale(gl.convert_layout(wide, four), own).reshape([64, 64])
    return gl.convert_layout(inverse, layout, assert_trivial=True)


@gluon.jit
def _times(left, tile, zero):
    """left [64, 64], FP16 in registers, times a tile."""
    operand: gl.constexpr = gl.DotOperandLayout(0, zero.type.layout, 2)
    narrow = gl.convert_layout(left, operand)
    product = warpgroup_mma(narrow, tile, zero, use_acc=False, is_async=True)
    product, narrow = warpgroup_mma_wait(0, [product, narrow])
    return product


@gluon.jit
def _less_blocks(matrix, other, wanted):
    """FP16 matrix [64, 64] less other where wanted [4, 1, 4, 1], both cut in blocks of 16."""
    layout: gl.constexpr = matrix.type.layout
    parts = matrix.reshape([4, 16, 4, 16])
    four: gl.constexpr = parts.type.layout
    size = gl.where(wanted, -1.0, 0.0).to(gl.float16) + gl.zeros([4, 16, 4, 16], gl.float16, four)
    parts = _add_scaled(parts, other.reshape([4, 16, 4, 16]), size)
    return gl.convert_layout(parts.reshape([64, 64]), layout, assert_trivial=True)


@gluon.jit
def assemble(solved, tiles, first_tiles, second_tiles, sizes, layout: gl.constexpr):
    """Put (I + A)^-1 diag(size) into first_tiles, FP16, for every A = what a tile [64, 64] holds below its diagonal.

    solved [64 HEADS, 16] holds the inverses of the diagonal blocks, sizes 64 numbers a head; second_tiles is room.
    """
    HEADS: gl.constexpr = len(tiles)
    four: gl.constexpr = gl.zeros([64, 64], gl.float16, layout).reshape([4, 16, 4, 16]).type.layout
    row, column = _block_places(four)
    zero = gl.zeros([64, 64], gl.float32, layout)
    inverses = ()
    for h in gl.static_range(HEADS):
        inverse = _spread(solved.slice(64 * h, 64), layout)
        first_tiles[h].store(inverse)
        inverses = inverses + (inverse,)
    fence_async_shared()
    gl.thread_barrier()
    wider = ()
    for h in gl.static_range(HEADS):
        beside = to_half(_times(to_half(_times(inverses[h], tiles[h], zero)), first_tiles[h], zero))
        inverse = _less_blocks(inverses[h], beside, (row // 2 == column // 2) & (row > column))
        second_tiles[h].store(inverse)
        wider = wider + (inverse,)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        below = _times(to_half(_times(wider[h], tiles[h], zero)), second_tiles[h], zero)
        size = sizes.slice(64 * h, 64).load(gl.SliceLayout(0, layout))[None, :]
        scaled = _scale(wider[h], to_half(size) + gl.zeros([64, 64], gl.float16, layout))
        first_tiles[h].store(_less_blocks(scaled, to_half(below * size), row // 2 > column // 2))


@gluon.jit(do_not_specialize=["num_sequences", "num_tokens", "value_heads", "first_slot"])
def invert_hopper_kernel(
    coupling,
    inverse,
    beta,
    cu_seqlens,
    num_sequences,
    num_tokens,
    value_heads,
    first_slot,
    beta_token,
    beta_head,
    PACKED: gl.constexpr,
    HEADS: gl.constexpr,
):
    """inverse [slots value_heads 64, 64] = (I + strictlower(coupling))^-1 diag(beta), both by descriptors; coupling
    FP16. Grid: groups of HEADS value heads within slots of 64 tokens from first_slot on; on four warps.
    """
    let_dependents_launch()
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    gl.thread_barrier()
    groups = value_heads // HEADS
    place = gl.program_id(0) // groups
    head = gl.program_id(0) % groups * HEADS
    _, begin, length, chunk, _ = sequence_of_slot(cu_seqlens, first_slot + place, num_sequences, num_tokens, 64, PACKED)
    count = length - chunk * 64
    if count <= 0:
        return
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out = (place * value_heads + head) * 64
    tiles = room(HEADS)
    first_tiles = room(HEADS)
    second_tiles = room(HEADS)
    blocks = second_tiles[0]._reinterpret(gl.float16, [4 * HEADS, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    solved = gl.allocate_shared_memory(gl.float16, [64 * HEADS, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sizes = gl.allocate_shared_memory(gl.float32, [64 * HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    await_launches()
    mbarrier.expect(arrived, 8192 * HEADS)
    for h in gl.static_range(HEADS):
        tma.async_copy_global_to_shared(coupling, [out + 64 * h, 0], arrived, tiles[h])
    # Else the assembler asks for the second tile behind the betas.
    gl.thread_barrier()
    pair: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    own = head + gl.arange(0, HEADS, gl.SliceLayout(1, pair))[:, None]
    at = gl.arange(0, 64, gl.SliceLayout(0, pair))[None, :]
    at_beta = beta + (begin + chunk * 64 + at).to(gl.int64) * beta_token + own * beta_head
    size = gl.load(at_beta, mask=(at < count) & (own < value_heads), other=0.0).to(gl.float32)
    sizes.store(size.reshape([64 * HEADS]))
    mbarrier.wait(arrived, 0)
    for h in gl.static_range(HEADS):
        keep_diagonal(tiles[h].load(layout), blocks.slice(4 * h, 4))
    gl.thread_barrier()
    solve_diagonal(blocks, solved)
    gl.thread_barrier()
    assemble(solved, tiles, first_tiles, second_tiles, sizes, layout)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        tma.async_copy_shared_to_global(inverse, [out + 64 * h, 0], first_tiles[h])
    tma.store_wait(0)
