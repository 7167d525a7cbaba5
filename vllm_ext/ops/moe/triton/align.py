"""Group slots by expert on the device: one launch, no host synchronisation, no atomics, the same order every time.

A slot is one (token, k) pair of the routing, numbered m * top_k + k. Slots are listed expert by expert, in rising
order within an expert, and every expert's list is cut into blocks of at most `block_tokens` slots.
"""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK = 4096


@dataclass(frozen=True)
class Alignment:
    """sorted_slots int32 [S]; blocks int32 [max_blocks, 4]: (expert, first place in sorted_slots, slots, unused);
    num_blocks int32 [1] is how many of them are real; group_sums FP32 [M, groups] of the activations."""

    sorted_slots: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    group_sums: torch.Tensor

    @property
    def max_blocks(self) -> int:
        """Blocks that any routing of so many slots can need."""
        return self.blocks.shape[0]


@triton.jit
def local_expert(ids, valid, expert_map, num_experts, num_global, HAS_MAP: tl.constexpr):
    """Local expert of each id, -1 where it is not routed here."""
    if HAS_MAP:
        known = valid & (ids >= 0) & (ids < num_global)
        ids = tl.load(expert_map + ids, mask=known, other=-1)
        valid = known
    ids = ids.to(tl.int32)
    return tl.where(valid & (ids >= 0) & (ids < num_experts), ids, -1)


@triton.jit(do_not_specialize=["num_slots", "num_tokens"])
def _align_kernel(
    topk_ids,
    expert_map,
    x,
    sorted_slots,
    blocks,
    num_blocks,
    group_sums,
    num_slots,
    num_tokens,
    num_experts,
    num_global,
    x_stride,
    columns,
    HAS_MAP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    SUMS_POW2: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid >= num_experts:
        token = (pid - num_experts).to(tl.int64)
        sum_id = tl.arange(0, SUMS_POW2)
        k = sum_id[:, None] * SUM_WIDTH + tl.arange(0, SUM_WIDTH)[None, :]
        value = tl.load(x + token * x_stride + k, mask=k < columns, other=0.0).to(tl.float32)
        tl.store(group_sums + token * SUMS + sum_id, tl.sum(value, 1), mask=sum_id < SUMS)
    else:
        bins = tl.arange(0, BINS)
        counts = tl.zeros([BINS], tl.int32)
        for base in range(0, num_slots, CHUNK):
            slot = base + tl.arange(0, CHUNK)
            ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
            expert = local_expert(ids, slot < num_slots, expert_map, num_experts, num_global, HAS_MAP)
            counts += tl.histogram(tl.where(expert < 0, BINS - 1, expert), BINS)
        counts = tl.where(bins < num_experts, counts, 0)
        needed = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        count = tl.sum(tl.where(bins == pid, counts, 0))
        first = tl.sum(tl.where(bins < pid, counts, 0))
        block = tl.sum(tl.where(bins < pid, needed, 0))
        if pid == 0:
            tl.store(num_blocks, tl.sum(needed))

        written = 0
        for base in range(0, tl.where(count > 0, num_slots, 0), CHUNK):
            slot = base + tl.arange(0, CHUNK)
            ids = tl.load(topk_ids + slot, mask=slot < num_slots, other=-1)
            expert = local_expert(ids, slot < num_slots, expert_map, num_experts, num_global, HAS_MAP)
            mine = (expert == pid).to(tl.int32)
            place = first + written + tl.cumsum(mine, 0) - 1
            tl.store(sorted_slots + place, slot, mask=mine > 0)
            written += tl.sum(mine)
        for done in range(0, count, BLOCK_TOKENS):
            entry = blocks + (block + done // BLOCK_TOKENS) * 4
            tl.store(entry, pid)
            tl.store(entry + 1, first + done)
            tl.store(entry + 2, tl.minimum(count - done, BLOCK_TOKENS))


def max_blocks(num_slots: int, num_experts: int, block_tokens: int) -> int:
    """Most blocks any routing can need: each expert hit may leave one block nearly empty."""
    return min(num_slots, (num_slots + min(num_slots, num_experts) * (block_tokens - 1)) // block_tokens)


def align(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    block_tokens: int,
    sum_width: int,
) -> Alignment:
    """Group the slots of topk_ids [M, top_k] by expert and sum x [M, K] over runs of `sum_width` columns.

    `sum_width` is a power of 2. The sums feed the zero points' rank-one term.
    """
    num_tokens, columns = x.shape
    num_slots = topk_ids.numel()
    sums = -(-columns // sum_width)
    ints = torch.empty(
        num_slots + 4 * max_blocks(num_slots, num_experts, block_tokens) + 4, dtype=torch.int32, device=x.device
    )
    num_blocks, sorted_slots, blocks = ints[:1], ints[4 : 4 + num_slots], ints[4 + num_slots :].view(-1, 4)
    group_sums = torch.empty(num_tokens, sums, dtype=torch.float32, device=x.device)
    chunk = min(_CHUNK, triton.next_power_of_2(max(num_slots, 128)))
    _align_kernel[(num_experts + num_tokens,)](
        topk_ids,
        expert_map if expert_map is not None else topk_ids,
        x,
        sorted_slots,
        blocks,
        num_blocks,
        group_sums,
        num_slots,
        num_tokens,
        num_experts,
        expert_map.shape[0] if expert_map is not None else 0,
        x.stride(0),
        columns,
        HAS_MAP=expert_map is not None,
        BLOCK_TOKENS=block_tokens,
        BINS=triton.next_power_of_2(num_experts + 1),
        CHUNK=chunk,
        SUM_WIDTH=sum_width,
        SUMS=sums,
        SUMS_POW2=triton.next_power_of_2(sums),
        num_warps=4,
    )
    return Alignment(sorted_slots, blocks, num_blocks, group_sums)
