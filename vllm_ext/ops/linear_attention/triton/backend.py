"""The Triton backend: one launch prepares every chunk, one carries the state through them; two more for segments.

Nothing is read back to the host, so a call can be captured in a CUDA graph; nothing is added atomically, so equal
inputs give equal bits.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType

import torch
import triton

from vllm_ext.ops.linear_attention.problem import Call, Problem
from vllm_ext.ops.linear_attention.triton.chunks import Chunks, Sizes
from vllm_ext.ops.linear_attention.triton.padding import KEY_SIZES, VALUE_SIZES, key_size, narrow, value_size, widen
from vllm_ext.ops.linear_attention.triton.plan import CHUNK, Mapping, map_prefill
from vllm_ext.ops.linear_attention.triton.prepare_gdn import prepare_gdn_kernel
from vllm_ext.ops.linear_attention.triton.prepare_kda import prepare_kda_kernel
from vllm_ext.ops.linear_attention.triton.recurrence import recurrence_kernel
from vllm_ext.ops.linear_attention.triton.segments import compose_kernel
from vllm_ext.ops.linear_attention.triton.slots import slot_count
from vllm_ext.ops.triton_device import interpreting
from vllm_ext.ops.triton_device import usable as usable

NAME = "triton"
DTYPES = (torch.bfloat16, torch.float16)
# Gluon changes from one version of Triton to the next; these are the ones its kernel has run with.
GLUON_VERSIONS = ("3.6.",)
_FACTOR_ROWS = 4
_COMPOSE_COLUMNS = 16
# Of a thread, without and with L2 norms: four or three programs on a multiprocessor.
_PREPARE_REGISTERS = {False: 128, True: 168}
_INTERPRETED_MULTIPROCESSORS = 4
_FARTHEST_HEAD = 2**31 - 1
# What is kept of the chunks between the launches takes no more than about so many bytes: longer calls are carried
# through part after part.
_MOST_BYTES = 768 * 2**20


def supports(problem: Problem) -> tuple[bool, str]:
    """16-bit operands and head sizes that fit tensor-core tiles."""
    if problem.dtype not in DTYPES:
        return False, f"q, k, v are {problem.dtype}; the Triton kernels take bfloat16 and float16"
    if problem.dtype == torch.bfloat16 and interpreting():
        return False, "Triton's interpreter multiplies the bits of torch.bfloat16 as integers; pass float16 to it"
    if key_size(problem.key_dim) is None:
        return False, f"K={problem.key_dim}; the Triton kernels take head sizes up to {KEY_SIZES[-1]}"
    if value_size(problem.value_dim) is None:
        return False, f"V={problem.value_dim}; the Triton kernels take head sizes up to {VALUE_SIZES[-1]}"
    return True, ""


def chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_gated_delta_rule`."""
    return narrow(*run(widen(call, "gdn"), "gdn"), call)


def chunk_kda(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `interface.chunk_kda`."""
    return narrow(*run(widen(call, "kda"), "kda"), call)


def run(call: Call, op: str, mapping: Mapping | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call's output and final state, laid out by the planner unless a mapping is given."""
    device = call.q.device
    num_sequences = call.q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.numel() - 1
    sizes = Sizes(
        num_sequences, call.q.shape[1], call.cu_seqlens is not None, call.q.shape[2], call.v.shape[2],
        call.q.shape[3], call.v.shape[3],
    )  # fmt: skip
    o = torch.empty(call.v.shape, dtype=call.v.dtype, device=device)
    final = None
    order = (sizes.value_dim, sizes.key_dim) if call.state_v_first else (sizes.key_dim, sizes.value_dim)
    if call.output_final_state:
        final = torch.empty(num_sequences, sizes.value_heads, *order, dtype=torch.float32, device=device)
    if num_sequences == 0:
        return o, final
    hopper = hopper_launches(device, sizes)
    if mapping is None:
        mapping = map_call(op, sizes, _multiprocessors(device), hopper)
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.to(device).contiguous()
    if call.initial_state is not None:
        # Before the launches: the recurrence reads it while the one before it still runs.
        call = dataclasses.replace(call, initial_state=call.initial_state.contiguous())
    parts = _parts(call, op, sizes, mapping)
    states = final
    if parts != [None] and states is None:
        states = torch.empty(num_sequences, sizes.value_heads, *order, dtype=torch.float32, device=device)
    for part in parts:
        chunks = prepare(call, op, sizes, cu_seqlens, part, mapping)
        recur(call, op, sizes, mapping, cu_seqlens, chunks, o, states, part)
        del chunks  # or the next part's would take room of its own
    return o, final


def map_call(op: str, sizes: Sizes, multiprocessors: int, hopper: ModuleType | None) -> Mapping:
    """How a call is laid over so many multiprocessors; hopper: `hopper_launches` of its device."""
    tokens = sizes.num_tokens if sizes.packed else sizes.num_tokens * sizes.num_sequences
    return map_prefill(
        tokens, sizes.num_sequences, sizes.value_heads, sizes.key_dim, sizes.value_dim, multiprocessors,
        64 if hopper is None else hopper.WIDEST_BLOCK, op, hopper is not None,
    )  # fmt: skip


def chunk_bytes(op: str, key_dim: int) -> int:
    """What is kept of a chunk of one value head between the launches; without scores that are made later it is less."""
    tiles = 2 * 2 * CHUNK * CHUNK
    return tiles + 4 * _FACTOR_ROWS * CHUNK if op == "gdn" else tiles + 3 * 2 * CHUNK * key_dim + 4 * key_dim


def _parts(call: Call, op: str, sizes: Sizes, mapping: Mapping) -> list[range | None]:
    """The slots of chunks to prepare before their states are carried on; [None] for all of them together."""
    hopper = hopper_launches(call.q.device, sizes)
    slots = slot_count(sizes.num_tokens, sizes.num_sequences, sizes.packed, CHUNK)
    most = max(1, _MOST_BYTES // (sizes.value_heads * chunk_bytes(op, sizes.key_dim)))
    if hopper is None or call.q.dtype != torch.bfloat16 or mapping.segment_chunks is not None or slots <= most:
        return [None]
    count = -(-slots // most)
    size = -(-slots // count)
    return [range(first, min(first + size, slots)) for first in range(0, slots, size)]


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[B, T, heads, ..] as [B T, heads, ..] with contiguous rows; a view where it can be one, and the kernels, which
    multiply heads in 32 bits, can reach the last head of it.
    """
    flat = x.flatten(0, 1)
    near = flat.stride(1) * flat.shape[1] <= _FARTHEST_HEAD
    return flat if near and (flat.dim() == 2 or flat.stride(-1) == 1) else flat.contiguous()


def prepare(
    call: Call,
    op: str,
    sizes: Sizes,
    cu_seqlens: torch.Tensor | None,
    part: range | None = None,
    mapping: Mapping | None = None,
) -> Chunks:
    """Everything about the chunks, or about those of the slots in `part`, that does not read the state, as the
    recurrence of this mapping reads it.
    """
    q, k, g, beta = (_tokens(x) for x in (call.q, call.k, call.g, call.beta))
    slots = slot_count(sizes.num_tokens, sizes.num_sequences, sizes.packed, CHUNK) if part is None else len(part)
    first = 0 if part is None else part.start
    heads, dim = sizes.value_heads, sizes.key_dim

    def empty(*shape: int, dtype: torch.dtype = q.dtype) -> torch.Tensor:
        return torch.empty(slots, heads, *shape, dtype=dtype, device=q.device)

    # BF16 would lose the sum of an inverse's row, which cancels where keys repeat.
    inverse = empty(CHUNK, CHUNK, dtype=torch.float16)
    counts = (call.scale, sizes.num_sequences, sizes.num_tokens, heads, heads // sizes.heads)
    steps = (*(x.stride(0) for x in (q, k, g, beta)), *(x.stride(1) for x in (q, k, g, beta)))
    common = {"K": dim, "NORMALISE": call.use_qk_l2norm_in_kernel, "PACKED": sizes.packed}
    hopper = hopper_launches(q.device, sizes) if q.dtype == torch.bfloat16 else None
    grid = (slots * heads,)
    scores: torch.Tensor | None = None
    norms = call.use_qk_l2norm_in_kernel
    if op != "gdn" or hopper is None or mapping is None or not hopper.scores_later(mapping, sizes, norms):
        scores = empty(CHUNK, CHUNK)
    if op == "gdn":
        factors = empty(_FACTOR_ROWS, CHUNK, dtype=torch.float32)
        if hopper is not None:
            hopper.prepare_gdn(
                grid, q, k, g, beta, cu_seqlens, (inverse, scores, factors), counts, steps, common, first
            )
        else:
            prepare_gdn_kernel[grid](
                q, k, g, beta, cu_seqlens, inverse, scores, factors, *counts, *steps,
                **common, num_warps=4, maxnreg=_PREPARE_REGISTERS[call.use_qk_l2norm_in_kernel],
            )  # fmt: skip
        return Chunks(q, k, None, inverse, scores, factors)
    keys, queries, tails = empty(CHUNK, dim), empty(CHUNK, dim), empty(CHUNK, dim)
    factors = empty(dim, dtype=torch.float32)
    assert scores is not None
    results = (inverse, scores, keys, queries, tails, factors)
    if hopper is not None:
        hopper.prepare_kda(grid, q, k, g, beta, cu_seqlens, results, counts, steps, common, first)
    else:
        prepare_kda_kernel[grid](q, k, g, beta, cu_seqlens, *results, *counts, *steps, **common, num_warps=4)
    return Chunks(queries, keys, tails, inverse, scores, factors)


def recur(
    call: Call,
    op: str,
    sizes: Sizes,
    mapping: Mapping,
    cu_seqlens: torch.Tensor | None,
    chunks: Chunks,
    o: torch.Tensor,
    final: torch.Tensor | None,
    part: range | None = None,
) -> None:
    """Carry the state through the chunks, writing o and, if asked for, the final states. Through those of a part of the
    slots it is carried from where the part before left it in `final`.
    """
    v = _tokens(call.v)
    initial = call.initial_state
    assert initial is None or initial.is_contiguous()
    segment_chunks = mapping.segment_chunks or max(1, -(-sizes.num_tokens // CHUNK))
    slots = slot_count(sizes.num_tokens, sizes.num_sequences, sizes.packed, segment_chunks * CHUNK)
    carries = None
    if mapping.segment_chunks is not None:
        carries = torch.empty(
            slots, sizes.value_heads, sizes.value_dim + sizes.key_dim, sizes.key_dim,
            dtype=torch.float32, device=o.device,
        )  # fmt: skip

    hopper = hopper_launches(o.device, sizes)
    launch = functools.partial(
        _launch_any if hopper is None else hopper.recur,
        call, op == "kda", sizes, mapping.block_columns, cu_seqlens, chunks, v, initial, carries, o, final,
        segment_chunks, slots, part,
    )  # fmt: skip
    if carries is None:
        launch(transition=False)
        return
    launch(transition=True)
    if sizes.num_tokens > 2 * segment_chunks * CHUNK:
        # Of two segments the second starts where the first one's transition ended.
        block = min(_COMPOSE_COLUMNS, sizes.value_dim)
        compose_kernel[(sizes.value_dim // block * sizes.value_heads * sizes.num_sequences,)](
            carries, cu_seqlens, sizes.num_tokens, sizes.value_heads, segment_chunks, BV=block, K=sizes.key_dim,
            V=sizes.value_dim, PACKED=sizes.packed, num_warps=8 if sizes.key_dim > 64 else 4,
        )  # fmt: skip
    launch(transition=False)


def hopper_launches(device: torch.device, sizes: Sizes) -> ModuleType | None:
    """The launches for compute capability 9.0 where they serve the sizes; the other kernels run everywhere."""
    module = _hopper_module(device)
    return module if module is not None and module.serves(sizes.key_dim, sizes.value_dim, sizes.num_tokens) else None


@functools.lru_cache(maxsize=64)
def _hopper_module(device: torch.device) -> ModuleType | None:
    if interpreting() or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if not triton.__version__.startswith(GLUON_VERSIONS):
        return None
    return importlib.import_module("vllm_ext.ops.linear_attention.triton.launch_hopper")


def _launch_any(
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
    assert part is None
    columns = sizes.value_dim + sizes.key_dim if transition else sizes.value_dim
    block = min(block, sizes.key_dim) if transition else block
    q, k = chunks.queries, chunks.keys
    recurrence_kernel[(columns // block * sizes.value_heads * slots,)](
        q, k, v, chunks.tails, chunks.inverse, chunks.scores, chunks.factors, initial, carries, o, final, cu_seqlens,
        sizes.num_sequences, sizes.num_tokens, sizes.value_heads, sizes.value_heads // sizes.heads, segment_chunks,
        q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1),
        K=sizes.key_dim, V=sizes.value_dim, BV=block, KDA=kda,
        TRANSITION=transition, V_FIRST=call.state_v_first, PACKED=sizes.packed,
        STAGES=3 if sizes.key_dim <= 128 else 2, num_warps=8 if block > 64 else 4,
    )  # fmt: skip
