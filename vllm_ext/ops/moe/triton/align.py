"""Group slots by expert on the device: no host synchronisation, no atomics, the same order every time.

A slot is one (token, k) pair of the routing, numbered m * top_k + k. Slots are listed expert by expert, in rising
order within an expert, and every expert's list is cut into blocks, for each of the two GEMMs in its own block size.

Few slots take one launch, in which one program cuts the blocks and every expert's lists its slots; all read all ids.
Many take three: count the ids of each chunk of slots, turn the counts into places, put the slots there.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_ext.ops.moe.triton.dequant import scale_activations
from vllm_ext.ops.moe.triton.launch_sizes import cdiv, next_power_of_2
from vllm_ext.ops.moe.triton.pdl import carve_shared_memory, dependent_launch, wait_for_previous

_ONE_LAUNCH_SLOTS = 8192
_MANY_WARPS = 16
_TOKEN_WARPS = 4
_CHUNK_SLOTS = 256
_PLACE_SLOTS = 32
_MAX_CHUNKS = 256


@dataclass(frozen=True)
class Alignment:
    """Where the slots are.

    sorted_slots  int32 [S]
    blocks        int32 [max_blocks, 4] of the first GEMM: (expert, first place in sorted_slots, slots, nothing), with 0
                  slots in blocks that this routing does not need; down_blocks likewise of the second. The number of
                  blocks needed stands in the last column of the first
    x             [M, K], the activations as the first GEMM reads them
    group_sums    FP32 [M, runs], sums of the activations
    flags         int32 zeros, for the GEMMs
    """

    sorted_slots: torch.Tensor
    blocks: torch.Tensor
    down_blocks: torch.Tensor
    x: torch.Tensor
    group_sums: torch.Tensor
    flags: torch.Tensor
    sparse: tuple[bool, bool] = (False, False)


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
def _align_kernel(
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
def _count_kernel(
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
def _offset_kernel(
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
def _place_kernel(
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


def one_launch_shape(num_slots: int) -> tuple[int, int, int]:
    """Slots that a program reads, its warps, and the tokens it prepares, when all happens in one launch.

    As many warps a token as in three launches: so the threads' parts of a token's sums, and with them the sums' bits,
    are the same for every number of slots.
    """
    chunk = next_power_of_2(max(num_slots, 128))
    warps = min(max(chunk // 128, _TOKEN_WARPS), _MANY_WARPS)
    return chunk, warps, warps // _TOKEN_WARPS


def max_blocks(num_slots: int, num_experts: int, block_tokens: int) -> int:
    """Most blocks any routing can need: each expert hit may leave one block nearly empty."""
    return min(num_slots, (num_slots + min(num_slots, num_experts) * (block_tokens - 1)) // block_tokens)


@dataclass(frozen=True)
class TokenForm:
    """How the first GEMM reads activations: sums over `sum_width` columns (a power of 2); columns times a power of two
    that depends on their place in tiles of planes, `plane` columns each (`dequant.CodeForm`)."""

    sum_width: int
    plane: int
    exponent: int
    step: int


def align(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    block_tokens: tuple[int, int],
    form: TokenForm,
    one_launch_slots: int = _ONE_LAUNCH_SLOTS,
    num_flags: int = 0,
    sparse: tuple[bool, bool] = (False, False),
) -> Alignment:
    """Group the slots of topk_ids [M, top_k] by expert and bring x [M, K] into the first GEMM's form.

    `block_tokens` is the size of the first and of the second GEMM's blocks.
    """
    num_tokens, columns = x.shape
    num_slots = topk_ids.numel()
    sums = -(-columns // form.sum_width)
    sparse = sparse if num_slots <= one_launch_slots else (False, False)
    limits = [
        num_experts + num_slots // size if listed else max_blocks(num_slots, num_experts, size)
        for size, listed in zip(block_tokens, sparse, strict=True)
    ]
    # Every part starts at a multiple of 16 bytes, so that one compiled kernel serves all sizes.
    table = -(-num_slots // 4) * 4
    ints = torch.empty(table + 4 * sum(limits) + num_flags, dtype=torch.int32, device=x.device)
    sorted_slots, blocks = ints[:num_slots], ints[table : table + 4 * limits[0]].view(-1, 4)
    same = block_tokens[0] == block_tokens[1] and sparse[0] == sparse[1]
    other = blocks if same else ints[table + 4 * limits[0] : table + 4 * sum(limits)].view(-1, 4)
    flags = ints[table + 4 * sum(limits) :]
    group_sums = torch.empty(num_tokens, sums, dtype=torch.float32, device=x.device)
    scaled = torch.empty(num_tokens, columns, dtype=x.dtype, device=x.device) if form.exponent else x
    aligned = Alignment(sorted_slots, blocks, other, scaled, group_sums, flags, sparse)
    id_map = expert_map if expert_map is not None else topk_ids
    num_global = expert_map.shape[0] if expert_map is not None else 0
    pdl = dependent_launch(x.device)
    ids = {"HAS_MAP": expert_map is not None, "BINS": next_power_of_2(num_experts)}
    tokens = {"BLOCK_TOKENS": block_tokens[0], "OTHER_BLOCK_TOKENS": block_tokens[1]}
    pow2 = next_power_of_2(sums)
    token = {"TOKEN": (columns, form.sum_width, sums, pow2, form.exponent, form.step, form.plane)}
    launch = {"PDL": pdl, "launch_pdl": pdl}
    if num_slots <= one_launch_slots:
        chunk, warps, together = one_launch_shape(num_slots)
        kernel = _align_kernel[(1 + num_experts + cdiv(num_tokens, together),)](
            topk_ids, id_map, x, scaled, sorted_slots, blocks, other, group_sums, flags, num_slots, *limits, num_flags,
            num_tokens, num_experts, num_global, x.stride(0),
            CHUNK=chunk, TOKENS=together, SPARSE=sparse[0], OTHER=not same, num_warps=warps,
            **ids, **tokens, **token, **launch,
        )  # fmt: skip
        if pdl:
            carve_shared_memory(kernel)
        return aligned
    chunk_slots = max(_CHUNK_SLOTS, next_power_of_2(cdiv(num_slots, _MAX_CHUNKS)))
    num_chunks = cdiv(num_slots, chunk_slots)
    counts, offsets = torch.empty(2, num_chunks, ids["BINS"], dtype=torch.int32, device=x.device)
    _count_kernel[(num_chunks + num_tokens,)](
        topk_ids, id_map, x, scaled, counts, group_sums, num_slots, num_tokens, num_chunks, chunk_slots, num_experts,
        num_global, x.stride(0), STEP=_CHUNK_SLOTS, num_warps=_TOKEN_WARPS, **ids, **token, **launch,
    )  # fmt: skip
    _offset_kernel[(num_experts,)](
        counts, offsets, blocks, other, flags, num_chunks, *limits, num_flags, num_experts,
        BINS=ids["BINS"], CHUNKS_POW2=next_power_of_2(num_chunks), num_warps=8, **tokens, **launch,
    )  # fmt: skip
    _place_kernel[(cdiv(num_slots, _PLACE_SLOTS),)](
        topk_ids, id_map, offsets, sorted_slots, num_slots, chunk_slots, num_experts, num_global,
        SLOTS=_PLACE_SLOTS, STEP=_CHUNK_SLOTS, num_warps=4, **ids, **launch,
    )  # fmt: skip
    return aligned
