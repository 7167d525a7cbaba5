"""The kernels that group slots by expert; align.py says how many of them a call takes.

Nothing is atomic and no order is left open, so equal ids give equal lists.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.dequant import scale_activations
from vllm_ext.ops.moe.triton.pdl import wait_for_previous


@triton.jit
def local_expert(ids, valid, expert_map, num_experts, num_global, HAS_MAP: tl.constexpr):
    """Local expert of each id, -1 where it is not routed here."""
    if HAS_MAP:
        known = valid & (ids >= 0) & (ids < num_global)
        ids = tl.load(expert_map + ids, mask=known, other=-1)
        valid = known
    # Compared before they are narrowed: 2^32 is no expert, and its low half is expert 0.
    return tl.where(valid & (ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def _write_blocks(blocks, max_blocks, counts, first, count, BINS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """This program's blocks, at their places after those of the experts before; program 0 clears the unused ones."""
    pid = tl.program_id(0)
    needed = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    place = tl.sum(tl.where(tl.arange(0, BINS) < pid, needed, 0))
    for done in range(0, count, BLOCK_TOKENS):
        entry = blocks + (place + done // BLOCK_TOKENS) * 4
        tl.store(entry, pid)
        tl.store(entry + 1, first + done)
        tl.store(entry + 2, tl.minimum(count - done, BLOCK_TOKENS))
    if pid == 0:
        tl.store(blocks + 3, tl.sum(needed))
        for unused in range(tl.sum(needed), max_blocks, 128):
            clear = unused + tl.arange(0, 128)
            tl.store(blocks + clear * 4 + 2, 0, mask=clear < max_blocks)


@triton.jit
def _write_all_blocks(
    blocks, max_blocks, counts, num_experts, BINS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SPARSE: tl.constexpr
):
    """The blocks of all experts, from one program; the unused ones cleared.

    SPARSE: first a block of every expert, with slots or without, then further ones.
    """
    needed = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first = tl.cumsum(counts, 0) - counts
    if SPARSE:
        needed = tl.where(tl.arange(0, BINS) < num_experts, tl.maximum(needed, 1), 0)
        place = num_experts - 1 + tl.cumsum(tl.maximum(needed - 1, 0), 0) - tl.maximum(needed - 1, 0)
    else:
        place = tl.cumsum(needed, 0) - needed
    for i in range(tl.max(needed)):
        ok = needed > i
        at = place + i
        if SPARSE:
            at = tl.where(i == 0, tl.arange(0, BINS), at)
        entry = blocks + at * 4
        tl.store(entry, tl.arange(0, BINS), mask=ok)
        tl.store(entry + 1, first + i * BLOCK_TOKENS, mask=ok)
        tl.store(entry + 2, tl.minimum(counts - i * BLOCK_TOKENS, BLOCK_TOKENS), mask=ok)
    used = tl.sum(needed)
    tl.store(blocks + 3, used)
    for unused in range(used, max_blocks, 1024):
        clear = unused + tl.arange(0, 1024)
        tl.store(blocks + clear * 4 + 2, 0, mask=clear < max_blocks)


@triton.jit
def _clear_flags(flags, num_flags, expert, num_experts):
    """The experts' programs clear the flags together."""
    for base in range(expert * 32, num_flags, num_experts * 32):
        place = base + tl.arange(0, 32)
        tl.store(flags + place, 0, mask=place < num_flags)


@triton.jit
def _load_experts(topk_ids, slot, num_slots, expert_map, num_experts, num_global, HAS_MAP: tl.constexpr):
    ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
    return local_expert(ids, slot < num_slots, expert_map, num_experts, num_global, HAS_MAP)


@triton.jit
def _prepare_tokens(x, scaled, group_sums, first, num_tokens, x_stride, TOKENS: tl.constexpr, p: tl.constexpr):
    """TOKENS tokens' sums over runs of columns, and their activations as the first GEMM reads them.

    `p` is (K, columns of a sum, sums, sums rounded up to a power of two, exponent, its step, plane width).
    """
    row = tl.arange(0, TOKENS * p[3])
    token = (first + row // p[3]).to(tl.int64)
    run = row % p[3]
    k = run[:, None] * p[1] + tl.arange(0, p[1])[None, :]
    ok = (token < num_tokens)[:, None] & (k < p[0])
    value = tl.load(x + (token * x_stride)[:, None] + k, mask=ok, other=0.0).to(tl.float32)
    tl.store(group_sums + token * p[2] + run, tl.sum(value, 1), mask=(token < num_tokens) & (run < p[2]))
    if p[4] != 0:
        value = scale_activations(value, k, p[4], p[5], p[6])
        tl.store(scaled + (token * p[0])[:, None] + k, value.to(scaled.dtype.element_ty), mask=ok)


@triton.jit(
    do_not_specialize=["num_slots", "max_blocks", "other_max_blocks", "num_flags", "num_tokens"],
    do_not_specialize_on_alignment=["topk_ids", "expert_map"],
)
def align_kernel(
    topk_ids,
    expert_map,
    x,
    scaled,
    sorted_slots,
    blocks,
    other_blocks,
    group_sums,
    flags,
    num_slots,
    max_blocks,
    other_max_blocks,
    num_flags,
    num_tokens,
    num_experts,
    num_global,
    x_stride,
    HAS_MAP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    OTHER_BLOCK_TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    SPARSE: tl.constexpr,
    OTHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program cuts the blocks, the next E each list an expert's slots, the others prepare TOKENS tokens."""
    if PDL:
        # Before the wait: the first GEMM's programs have weights to ask for meanwhile.
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0) - 1
    if pid >= num_experts:
        first = (pid - num_experts) * TOKENS
        _prepare_tokens(x, scaled, group_sums, first, num_tokens, x_stride, TOKENS, TOKEN)
    else:
        slot = tl.arange(0, CHUNK)
        expert = _load_experts(topk_ids, slot, num_slots, expert_map, num_experts, num_global, HAS_MAP)
        # Alone in needing all counts: counting is what takes longest here.
        if pid < 0:
            counts = tl.histogram(expert, BINS, mask=expert >= 0)
            _write_all_blocks(blocks, max_blocks, counts, num_experts, BINS, BLOCK_TOKENS, SPARSE)
            if OTHER:
                _write_all_blocks(other_blocks, other_max_blocks, counts, num_experts, BINS, OTHER_BLOCK_TOKENS, False)
        else:
            _clear_flags(flags, num_flags, pid, num_experts)
            mine = (expert == pid).to(tl.int32)
            first = tl.sum(((expert >= 0) & (expert < pid)).to(tl.int32), 0)
            tl.store(sorted_slots + first + tl.cumsum(mine, 0) - 1, slot, mask=mine > 0)


@triton.jit(
    do_not_specialize=["num_slots", "num_tokens", "num_chunks", "chunk_slots"],
    do_not_specialize_on_alignment=["topk_ids", "expert_map"],
)
def count_kernel(
    topk_ids,
    expert_map,
    x,
    scaled,
    counts,
    group_sums,
    num_slots,
    num_tokens,
    num_chunks,
    chunk_slots,
    num_experts,
    num_global,
    x_stride,
    HAS_MAP: tl.constexpr,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs each count one chunk's ids: counts [chunks, BINS]; the others each prepare one token."""
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    if pid >= num_chunks:
        _prepare_tokens(x, scaled, group_sums, pid - num_chunks, num_tokens, x_stride, 1, TOKEN)
    else:
        total = tl.zeros([BINS], tl.int32)
        for base in range(pid * chunk_slots, pid * chunk_slots + chunk_slots, STEP):
            slot = base + tl.arange(0, STEP)
            expert = _load_experts(topk_ids, slot, num_slots, expert_map, num_experts, num_global, HAS_MAP)
            total += tl.histogram(expert, BINS, mask=expert >= 0)
        tl.store(counts + pid * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["num_chunks", "max_blocks", "other_max_blocks", "num_flags"])
def offset_kernel(
    counts,
    offsets,
    blocks,
    other_blocks,
    flags,
    num_chunks,
    max_blocks,
    other_max_blocks,
    num_flags,
    num_experts,
    BLOCK_TOKENS: tl.constexpr,
    OTHER_BLOCK_TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNKS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert a program: offsets [chunks, BINS], the place of its first slot in each chunk; and its blocks."""
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    _clear_flags(flags, num_flags, pid, num_experts)
    bins = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    for base in range(0, num_chunks, 64):
        row = base + tl.arange(0, 64)
        ok = (row < num_chunks)[:, None] & (bins < num_experts)[None, :]
        totals += tl.sum(tl.load(counts + row[:, None] * BINS + bins[None, :], mask=ok, other=0), 0)
    count = tl.sum(tl.where(bins == pid, totals, 0))
    first = tl.sum(tl.where(bins < pid, totals, 0))
    chunk = tl.arange(0, CHUNKS_POW2)
    own = tl.load(counts + chunk * BINS + pid, mask=chunk < num_chunks, other=0)
    tl.store(offsets + chunk * BINS + pid, first + tl.cumsum(own, 0) - own, mask=chunk < num_chunks)
    _write_blocks(blocks, max_blocks, totals, first, count, BINS, BLOCK_TOKENS)
    if OTHER_BLOCK_TOKENS != BLOCK_TOKENS:
        _write_blocks(other_blocks, other_max_blocks, totals, first, count, BINS, OTHER_BLOCK_TOKENS)


@triton.jit(do_not_specialize=["num_slots", "chunk_slots"], do_not_specialize_on_alignment=["topk_ids", "expert_map"])
def place_kernel(
    topk_ids,
    expert_map,
    offsets,
    sorted_slots,
    num_slots,
    chunk_slots,
    num_experts,
    num_global,
    HAS_MAP: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put SLOTS slots at their places: their chunk's offset plus the equal ids before them in the chunk."""
    wait_for_previous(PDL)
    start = tl.program_id(0) * SLOTS
    chunk = start // chunk_slots
    slot = start + tl.arange(0, SLOTS)
    expert = _load_experts(topk_ids, slot, num_slots, expert_map, num_experts, num_global, HAS_MAP)
    rank = tl.zeros([SLOTS], tl.int32)
    for base in range(chunk * chunk_slots, start + SLOTS, STEP):
        before = base + tl.arange(0, STEP)
        other = _load_experts(topk_ids, before, num_slots, expert_map, num_experts, num_global, HAS_MAP)
        equal = (other[None, :] == expert[:, None]) & (before[None, :] < slot[:, None])
        rank += tl.sum(equal.to(tl.int32), 1)
    place = tl.load(offsets + chunk * BINS + expert, mask=expert >= 0, other=0) + rank
    tl.store(sorted_slots + place, slot, mask=expert >= 0)
