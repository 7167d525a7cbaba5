"""The inverse of a chunk's unit lower triangular matrix for compute capability 9.0, in Gluon.

The diagonal blocks of 16 rows by substitution, a column a thread, in FP32. With D the inverses of the diagonal blocks
of a size, the blocks between two of them are -D_i A_ij D_j: two products of 64 rows for all of a size. They are of
FP16, as the inverse itself.
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
def room_for_diagonal(HEADS: gl.constexpr):
    """[64 HEADS, 16] of FP16, which products read as well."""
    kind: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64 * HEADS, 16], gl.float16)
    return gl.allocate_shared_memory(gl.float16, [64 * HEADS, 16], kind)


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
def _halves(x):
    """[64, 64] by columns."""
    return x.reshape([64, 2, 32]).permute((0, 2, 1)).split()


@gluon.jit
def _quarters(x):
    """[64, 64] by columns: the even ones of four parts and the odd ones."""
    even, odd = x.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2)).split()
    return even.split(), odd.split()


@gluon.jit
def _columns(parts, layout: gl.constexpr):
    """Two or four parts of so many columns each, one beside the other."""
    if len(parts) == 2:
        x = gl.join(parts[0], parts[1]).permute((0, 2, 1))
    else:
        x = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3])).permute((0, 2, 3, 1))
    width: gl.constexpr = len(parts) * parts[0].shape[1]
    return gl.convert_layout(x.reshape([64, width]), layout, assert_trivial=True)


@gluon.jit
def _times(left, tile, layout: gl.constexpr):
    """left [64, K], FP16 in registers, times a tile [K, N]."""
    narrow = gl.convert_layout(left, gl.DotOperandLayout(0, layout, 2))
    N: gl.constexpr = tile.shape[1]
    zero = gl.zeros([64, N], gl.float32, layout)
    product = warpgroup_mma(narrow, tile, zero, use_acc=False, is_async=True)
    product, narrow = warpgroup_mma_wait(0, [product, narrow])
    return product


@gluon.jit
def _times_two(left, tiles, layout: gl.constexpr, SUM: gl.constexpr):
    """Two such products, or their sum and nothing."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    first, second = gl.convert_layout(left[0], operand), gl.convert_layout(left[1], operand)
    N: gl.constexpr = tiles[0].shape[1]
    zero = gl.zeros([64, N], gl.float32, layout)
    product = warpgroup_mma(first, tiles[0], zero, use_acc=False, is_async=True)
    if SUM:
        product = warpgroup_mma(second, tiles[1], product, is_async=True)
        product, first, second = warpgroup_mma_wait(0, [product, first, second])
        other = zero
    else:
        other = warpgroup_mma(second, tiles[1], zero, use_acc=False, is_async=True)
        product, other, first, second = warpgroup_mma_wait(0, [product, other, first, second])
    return product, other


@gluon.jit
def _less(x, other, first: gl.constexpr, count: gl.constexpr):
    """FP16 x [64, N] less `count` rows of other from `first` on."""
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    size = gl.where((row >= first) & (row < first + count), -1.0, 0.0).to(gl.float16)
    other = gl.convert_layout(other, layout, assert_trivial=True)
    return _add_scaled(x, other, size + gl.zeros([64, N], gl.float16, layout))


@gluon.jit
def assemble(solved, tiles, first_tiles, second_tiles, sizes, layout: gl.constexpr):
    """Put (I + A)^-1 diag(size) into first_tiles, FP16, for every A = what a tile [64, 64] holds below its diagonal.

    solved, `room_for_diagonal`, holds the inverses of the diagonal blocks, sizes 64 numbers a head; second_tiles is
    room. Of factors only the blocks are multiplied that are not zeros, and little is made that is not wanted: what the
    tensor cores read of shared memory is what a preparation waits for.
    """
    HEADS: gl.constexpr = len(tiles)
    of_quarter: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    of_half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    half_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], gl.float16)
    wider = ()
    for h in gl.static_range(HEADS):
        inverse = _spread(solved.slice(64 * h, 64), layout)
        even, odd = _quarters(inverse)
        product, _ = _times_two(odd, (tiles[h].slice(16, 16), tiles[h].slice(48, 16)), layout, True)
        wanted, _ = _quarters(to_half(product))
        own = (solved.slice(64 * h, 16), solved.slice(64 * h + 32, 16))
        first, third = _times_two(wanted, own, of_quarter, False)
        first = _less(even[0], to_half(first), 16, 16)
        third = _less(even[1], to_half(third), 48, 16)
        inverse = _columns((first, odd[0], third, odd[1]), layout)
        second_tiles[h]._reinterpret(gl.float16, [64, 32], half_tile).store(_columns((first, odd[0]), of_half))
        wider = wider + (inverse,)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        left, right = _halves(wider[h])
        below, _ = _halves(to_half(_times(right, tiles[h].slice(32, 32), layout)))
        across = second_tiles[h]._reinterpret(gl.float16, [64, 32], half_tile).slice(0, 32)
        below = _times(below, across, of_half)
        size = sizes.slice(64 * h, 32).load(gl.SliceLayout(0, of_half))[None, :]
        size_right = sizes.slice(64 * h + 32, 32).load(gl.SliceLayout(0, of_half))[None, :]
        nothing = gl.zeros([64, 32], gl.float16, of_half)
        left, right = (
            gl.convert_layout(left, of_half, assert_trivial=True),
            gl.convert_layout(right, of_half, assert_trivial=True),
        )
        left = _scale(left, to_half(size) + nothing)
        left = _less(left, to_half(below * size), 32, 32)
        first_tiles[h].store(_columns((left, _scale(right, to_half(size_right) + nothing)), layout))


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
    solved = room_for_diagonal(HEADS)
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
    fence_async_shared()
    gl.thread_barrier()
    assemble(solved, tiles, first_tiles, second_tiles, sizes, layout)
    fence_async_shared()
    gl.thread_barrier()
    for h in gl.static_range(HEADS):
        tma.async_copy_shared_to_global(inverse, [out + 64 * h, 0], first_tiles[h])
    tma.store_wait(0)
