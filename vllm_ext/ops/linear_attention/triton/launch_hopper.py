"""Launches of the kernels for compute capability 9.0."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.triton.chunks import Chunks, Sizes
from vllm_ext.ops.linear_attention.triton.hopper import descriptor
from vllm_ext.ops.linear_attention.triton.inverse_hopper import invert_hopper_kernel
from vllm_ext.ops.linear_attention.triton.plan import CHUNK, Mapping
from vllm_ext.ops.linear_attention.triton.prepare_gdn_hopper import prepare_gdn_hopper_kernel
from vllm_ext.ops.linear_attention.triton.prepare_kda_hopper import prepare_kda_hopper_kernel
from vllm_ext.ops.linear_attention.triton.recurrence_hopper import recurrence_hopper_kernel

KEY_DIMS = (64, 128)
WIDEST_BLOCK = 128
_LEAST_COLUMNS = 64
_MOST_STAGES = 3
# What two stages but the first hold of keys is as large as a state of 64 columns in FP32.
_STATE_STAGES = 3
_SHARED_BYTES = 227 * 1024
# Of a thread, by kernel and its heads: four programs of four warps on a multiprocessor (KDA: two of eight), and five.
REGISTERS = {("gdn", 1): 128, ("gdn", 2): 128, ("kda", 1): 128, ("inverse", 1): 96, ("inverse", 2): 128}
# Of a thread of a transition: two programs of eight warps on a multiprocessor (of KDA there is no room for two).
TRANSITION_REGISTERS = 128
# From so many chunks of heads on, which are two rounds of programs, a program prepares two heads.
_LEAST_PAIRS = 1024
# Up to so many chunks of heads a launch starts while the one before it ends; more of them fill the GPU either way, and
# programs that wait for their turn take room from those that do not.
_MOST_DEPENDENT = 9216
# Along the second and the third axis of a grid.
_MOST_BLOCKS = 2**15


def serves(key_dim: int, value_dim: int, num_tokens: int) -> bool:
    """Whether the sizes fill this kernel's tiles."""
    return key_dim in KEY_DIMS and value_dim % _LEAST_COLUMNS == 0 and num_tokens > 0


def stages(key_dim: int, groups: int, kda: bool) -> int:
    """Chunks in flight that shared memory holds, at most three."""
    keys = 128 * key_dim * (3 if kda else 2)
    stage = keys + 2 * 8192 + 8192 * groups + (4 * key_dim if kda else 1024)
    return min(_MOST_STAGES, (_SHARED_BYTES - 8192 * groups - 512) // stage)


def scores_later(mapping: Mapping, sizes: Sizes, normalise: bool) -> bool:
    """Whether GDN's recurrence makes the scores itself. Its tensor cores have more to do then and the preparation less,
    of which there is much where few value heads share keys. Programs of 64 columns have nothing but their products to
    wait for, and norms of queries that the preparation does not read would take the recurrence as long.
    """
    widest = min(mapping.block_columns, sizes.key_dim, sizes.value_dim) == WIDEST_BLOCK
    return widest and mapping.segment_chunks is None and sizes.value_heads <= 2 * sizes.heads and not normalise


def _together(heads: int, chunks: int) -> int:
    """Heads, of so many that can be together, in a program that prepares: two where chunks of heads fill the GPU."""
    return 2 if heads % 2 == 0 and chunks >= _LEAST_PAIRS else 1


def columns_of_slots(slots: int, sequences: int) -> tuple[int, int, int]:
    """Columns, slots in each, and layers of the grid that prepares: a column a sequence where the grid has room for it,
    and a layer more for the slots that are left.
    """
    columns = max(min(sequences, _MOST_BLOCKS), -(-slots // _MOST_BLOCKS))
    each = slots // columns
    return columns, each, each + (columns * each < slots)


def _square(x: torch.Tensor) -> TensorDescriptor:
    """Of tiles [slots, heads, 64, 64]."""
    return descriptor(x.flatten(0, 2), [CHUNK, CHUNK])


def prepare_gdn(
    grid: tuple[int, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    counts: tuple[Any, ...],
    steps: tuple[int, ...],
    constants: dict[str, Any],
    first_slot: int,
) -> None:
    """Launch with `prepare_gdn_kernel`'s operands, in BF16, into its results (of which scores are None if they are made
    later), from first_slot on; counts, strides (steps) and constants as it takes them.
    """
    inverse, scores, factors = results
    keys = [CHUNK, constants["K"]]
    heads = _together(counts[4], grid[0])
    scale, sequences, tokens, value_heads, heads_a_key = counts
    slots = len(inverse)
    columns, each, layers = columns_of_slots(slots, sequences)
    prepare_gdn_hopper_kernel[(value_heads // heads, columns, layers)](
        descriptor(q.flatten(1), keys), descriptor(k.flatten(1), keys), g, beta, cu_seqlens, _square(inverse),
        None if scores is None else _square(scores), factors, scale, sequences, tokens, value_heads, slots, each,
        first_slot, *steps[2:4], *steps[6:], **constants, HEADS=heads, HEADS_A_KEY=heads_a_key, num_warps=4,
        maxnreg=REGISTERS["gdn", heads], launch_pdl=grid[0] <= _MOST_DEPENDENT,
    )  # fmt: skip


def prepare_kda(
    grid: tuple[int, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    results: tuple[torch.Tensor, ...],
    counts: tuple[Any, ...],
    steps: tuple[int, ...],
    constants: dict[str, Any],
    first_slot: int,
) -> None:
    """As `prepare_gdn`, for `prepare_kda_kernel`; the inverse is written over what it is the inverse of."""
    inverse, scores, *others = results
    prepare_kda_hopper_kernel[grid](
        q, k, g, beta, cu_seqlens, _square(inverse), _square(scores), *others, *counts, first_slot, *steps, **constants,
        num_warps=constants["K"] // 16, maxnreg=REGISTERS["kda", 1],
    )  # fmt: skip
    _, num_sequences, num_tokens, value_heads, _ = counts
    heads = _together(value_heads, grid[0])
    invert_hopper_kernel[(grid[0] // heads,)](
        _square(inverse), _square(inverse), beta, cu_seqlens, num_sequences, num_tokens, value_heads,
        first_slot, steps[3], steps[7], PACKED=constants["PACKED"], HEADS=heads, num_warps=4,
        maxnreg=REGISTERS["inverse", heads], launch_pdl=grid[0] <= _MOST_DEPENDENT,
    )  # fmt: skip


def state_tiles(initial: torch.Tensor, state_v_first: bool, count: int) -> TensorDescriptor | None:
    """Initial states [sequences, heads, V, K] for the copy engine, or None where it cannot bring them as they are: they
    are read before the launches before the recurrence end, of which a copy of them would be one. count: `stages`.
    """
    as_they_are = state_v_first and initial.dtype == torch.float32 and initial.data_ptr() % 16 == 0
    if not as_they_are or count < _STATE_STAGES:
        return None
    return descriptor(initial.view(-1, initial.shape[-1]), [CHUNK, initial.shape[-1]])


def recur(
    call: Call,
    kda: bool,
    sizes: Sizes,
    block: int,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    v: torch.Tensor,
    initial: torch.Tensor | None,
    carries: torch.Tensor | None,
    o: torch.Tensor,
    final: torch.Tensor | None,
    segment_chunks: int,
    slots: int,
    part: range | None,
    transition: bool,
) -> None:
    """See `backend.recur`, of which this is one launch."""
    columns = sizes.value_dim + sizes.key_dim if transition else sizes.value_dim
    block = min(block, sizes.key_dim, sizes.value_dim)
    keys = [CHUNK, sizes.key_dim]
    if kda:
        assert chunks.tails is not None
        k, q, tails = (descriptor(x.flatten(0, 2), keys) for x in (chunks.keys, chunks.queries, chunks.tails))
        factors = descriptor(chunks.factors.flatten(0, 1), [1, sizes.key_dim], swizzle=False)
    else:
        k, q = (descriptor(x.flatten(1), keys) for x in (chunks.keys, chunks.queries))
        tails = k
        factors = descriptor(chunks.factors.flatten(2).flatten(0, 1), [1, 256], swizzle=False)
    inverse = _square(chunks.inverse)
    scores = None if chunks.scores is None else _square(chunks.scores)
    values, out = (descriptor(x.flatten(-2), [CHUNK, CHUNK]) for x in (v, o.flatten(0, 1)))
    groups = block // CHUNK
    # Programs of 64 columns have no warps that would make them.
    assert scores is not None or (groups == WIDEST_BLOCK // CHUNK and not transition)
    count = stages(sizes.key_dim, groups, kda)
    whole = carries is None and part is None
    states = state_tiles(initial, call.state_v_first, count) if whole and initial is not None else None
    # A launch that starts while the one before it ends: where that leaves room, and of segments always, whose first
    # ones run beside the transitions.
    early = chunks.inverse.shape[0] * sizes.value_heads <= _MOST_DEPENDENT or carries is not None
    options = {"maxnreg": TRANSITION_REGISTERS} if transition and groups == 1 else {}
    ends = (0, 0) if part is None else (part.start, part.stop)
    recurrence_hopper_kernel[(columns // block * sizes.value_heads * slots,)](
        k, q, values, tails, inverse, scores, factors, out, states, initial, carries, final, o, cu_seqlens,
        sizes.num_sequences, sizes.num_tokens, sizes.value_heads, sizes.value_heads // sizes.heads, segment_chunks,
        *ends, call.scale, K=sizes.key_dim, V=sizes.value_dim, GROUPS=groups, KDA=kda, TRANSITION=transition,
        V_FIRST=call.state_v_first, PACKED=sizes.packed, STAGES=count,
        PART=part is not None, num_warps=4, launch_pdl=early and not transition, **options,
    )  # fmt: skip
