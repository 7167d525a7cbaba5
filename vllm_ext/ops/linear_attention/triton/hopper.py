"""What the kernels for compute capability 9.0 share."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

L2_NORM_EPS = gl.constexpr(1e-6)
LOG2_E = gl.constexpr(1.4426950408889634)
LEAST_STEP = gl.constexpr(-120.0)
_SEARCH = gl.constexpr(64)
_FARTHEST = gl.constexpr(2**31 - 1)


@gluon.jit
def exp2(x):
    """2^x without the care for results below 2^-126 that the compiler's own takes: they are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, True, 1)


@gluon.jit
def to_half(x):
    """FP32 as FP16, the largest number for what is past it."""
    return gl.inline_asm_elementwise("cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, True, 2)


@gluon.jit
def narrowed(x, dtype: gl.constexpr):
    """FP32 in 16 bits, rounded where it stands: the compiler moves conversions of its own behind the next wait."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, False, 2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, False, 2)


@gluon.jit
def times(x, y):
    """x y in FP32, multiplied where it stands."""
    return gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=r,r,r", [x, y], gl.float32, False, 1)


@gluon.jit
def await_launches():
    """Wait for the launches before this one, which may still run if this one was launched as their dependent."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def let_dependents_launch():
    """Once every program has come here, a dependent launch may take the place that programs leave."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def sequence_of_slot(
    cu_seqlens, slot, num_sequences, num_tokens, unit, PACKED: gl.constexpr, ONE_TRIP: gl.constexpr = True
):
    """`slots.locate`; with more registers, in one trip to memory: offsets rise, so the greatest of those reached is
    where the sequence begins, and the least of the others where it ends.
    """
    if PACKED:
        # Every warp searches for itself: no barrier.
        layout: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
        before = 0
        begin = 0
        end = _FARTHEST
        for start in range(0, num_sequences + 1, _SEARCH):
            n = start + gl.arange(0, _SEARCH, layout)
            first = gl.load(cu_seqlens + n, mask=n <= num_sequences, other=_FARTHEST).to(gl.int32)
            # first // unit + n <= slot without a division.
            reached = (first.to(gl.int64) < (slot - n + 1).to(gl.int64) * unit) & (n < num_sequences)
            before += gl.sum(reached.to(gl.int32), 0)
            if ONE_TRIP:
                begin = gl.maximum(begin, gl.max(gl.where(reached, first, 0), 0))
                end = gl.minimum(end, gl.min(gl.where(reached, _FARTHEST, first), 0))
        n = before - 1
        if not ONE_TRIP:
            begin = gl.load(cu_seqlens + n).to(gl.int32)
            end = gl.load(cu_seqlens + n + 1).to(gl.int32)
        length = end - begin
        within = slot - (begin // unit + n)
        chunk_slot = begin // 64 + n
    else:
        units = gl.maximum((num_tokens + unit - 1) // unit, 1)
        n = slot // units
        begin = n * num_tokens
        length = num_tokens
        within = slot - n * units
        chunk_slot = n * gl.maximum((num_tokens + 63) // 64, 1)
    return n, begin, length, within, chunk_slot


@gluon.jit
def zero_past(tile, count, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Zero the rows of a tile in shared memory from `count` on: what is there belongs to another sequence."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    value = tile.load(layout)
    tile.store(gl.where((row < count)[:, None], value, 0.0).to(value.dtype))


def descriptor(x: torch.Tensor, block: list[int], swizzle: bool = True) -> TensorDescriptor:
    """Of a matrix [rows, columns] for the copy engine, which wants rows of adjacent numbers that do not overlap, at
    multiples of 16 bytes: a copy is made of what is otherwise, though torch may call it contiguous.
    """
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype) if swizzle else gl.NVMMASharedLayout(0, 32, 2)
    apart = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    if not apart or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
