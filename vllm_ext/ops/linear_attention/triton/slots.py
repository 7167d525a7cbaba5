"""Which sequence a program works on, found on the device: the host reads no offsets, so it never waits for the GPU.

Packed sequences are cut into units of `unit` tokens, and unit u of sequence n has slot cu_seqlens[n] // unit + n + u.
Slots never collide (ceil(a) units of a sequence, or one if it is empty, are at most one more than the whole units that
the next sequence's offset has grown by) and there are at most num_tokens // unit + num_sequences of them.
Sequences of equal length need no table: slot n * units + u.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

_SEARCH = tl.constexpr(128)


def slot_count(num_tokens: int, num_sequences: int, packed: bool, unit: int) -> int:
    """An upper bound of slots; num_tokens of all sequences if packed, else of one."""
    if packed:
        return num_tokens // unit + num_sequences
    return max(1, -(-num_tokens // unit)) * num_sequences


@triton.jit
def first_slot(n, begin, num_tokens, unit, PACKED: tl.constexpr):
    """Slot of sequence n's first unit; `begin` is its first token."""
    slot = begin // unit + n if PACKED else n * tl.maximum((num_tokens + unit - 1) // unit, 1)
    return slot


@triton.jit
def sequence_bounds(cu_seqlens, n, num_tokens, PACKED: tl.constexpr):
    """(first token, token count) of sequence n."""
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int32)
        length = tl.load(cu_seqlens + n + 1).to(tl.int32) - begin
    else:
        begin = n * num_tokens
        length = num_tokens
    return begin, length


@triton.jit
def locate(cu_seqlens, slot, num_sequences, num_tokens, unit, PACKED: tl.constexpr):
    """(sequence, its first token, its token count, unit within it) of a slot; nobody's slot has a unit past the end."""
    if PACKED:
        before = 0
        for start in range(0, num_sequences, _SEARCH):
            n = start + tl.arange(0, _SEARCH)
            begin = tl.load(cu_seqlens + n, mask=n < num_sequences, other=0).to(tl.int32)
            before += tl.sum(((begin // unit + n <= slot) & (n < num_sequences)).to(tl.int32))
        n = before - 1
    else:
        n = slot // tl.maximum((num_tokens + unit - 1) // unit, 1)
    begin, length = sequence_bounds(cu_seqlens, n, num_tokens, PACKED)
    return n, begin, length, slot - first_slot(n, begin, num_tokens, unit, PACKED)
