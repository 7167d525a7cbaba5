"""Group slots by expert on the device: no host synchronisation, no atomics, the same order every time.

A slot is one (token, k) pair of the routing, numbered m * top_k + k. Slots are listed expert by expert, in rising
order within an expert, and every expert's list is cut into blocks, for each of the two GEMMs in its own block size.

Few slots take one launch, in which one program cuts the blocks and every expert's lists its slots; all read all ids.
Many take three: count the ids of each chunk of slots, turn the counts into places, put the slots there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.ops.moe.triton.align_kernels import align_kernel, count_kernel, offset_kernel, place_kernel
from vllm_ext.ops.moe.triton.launch_sizes import cdiv, next_power_of_2
from vllm_ext.ops.moe.triton.pdl import carve_shared_memory, dependent_launch
from vllm_ext.ops.moe.triton.replay import launch

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


def one_launch_shape(num_slots: int) -> tuple[int, int, int]:
    """Slots that a program reads, its warps, and the tokens it prepares, when all happens in one launch.

    As many warps a token as in three launches: so the threads' parts of a token's sums, and with them the sums' bits,
    are the same for every number of slots.
    """
    chunk = next_power_of_2(max(num_slots, 128))
    warps = min(max(chunk // 128, _TOKEN_WARPS), _MANY_WARPS)
    return chunk, warps, warps // _TOKEN_WARPS


def chunks_of(num_slots: int) -> tuple[int, int]:
    """Slots of a chunk, and chunks, in three launches."""
    chunk_slots = max(_CHUNK_SLOTS, next_power_of_2(cdiv(num_slots, _MAX_CHUNKS)))
    return chunk_slots, cdiv(num_slots, chunk_slots)


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
    early = {"PDL": pdl, "launch_pdl": pdl}
    if num_slots <= one_launch_slots:
        chunk, warps, together = one_launch_shape(num_slots)
        kernel = launch(
            align_kernel, (1 + num_experts + cdiv(num_tokens, together),),
            topk_ids, id_map, x, scaled, sorted_slots, blocks, other, group_sums, flags, num_slots, *limits, num_flags,
            num_tokens, num_experts, num_global, x.stride(0),
            CHUNK=chunk, TOKENS=together, SPARSE=sparse[0], OTHER=not same, num_warps=warps,
            **ids, **tokens, **token, **early,
        )  # fmt: skip
        if pdl:
            carve_shared_memory(kernel)
        return aligned
    chunk_slots, num_chunks = chunks_of(num_slots)
    counts, offsets = torch.empty(2, num_chunks, ids["BINS"], dtype=torch.int32, device=x.device)
    launch(
        count_kernel, (num_chunks + num_tokens,),
        topk_ids, id_map, x, scaled, counts, group_sums, num_slots, num_tokens, num_chunks, chunk_slots, num_experts,
        num_global, x.stride(0), STEP=_CHUNK_SLOTS, num_warps=_TOKEN_WARPS, **ids, **token, **early,
    )  # fmt: skip
    launch(
        offset_kernel, (num_experts,),
        counts, offsets, blocks, other, flags, num_chunks, *limits, num_flags, num_experts,
        BINS=ids["BINS"], CHUNKS_POW2=next_power_of_2(num_chunks), num_warps=8, **tokens, **early,
    )  # fmt: skip
    launch(
        place_kernel, (cdiv(num_slots, _PLACE_SLOTS),),
        topk_ids, id_map, offsets, sorted_slots, num_slots, chunk_slots, num_experts, num_global,
        SLOTS=_PLACE_SLOTS, STEP=_CHUNK_SLOTS, num_warps=4, **ids, **early,
    )  # fmt: skip
    return aligned
