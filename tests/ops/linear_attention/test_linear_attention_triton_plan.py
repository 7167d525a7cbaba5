from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.triton import backend
from vllm_ext.ops.linear_attention.triton.chunks import Chunks, Sizes
from vllm_ext.ops.linear_attention.triton.plan import CHUNK, COLUMNS, HEAD, SEGMENTS, Mapping, map_prefill
from vllm_ext.ops.linear_attention.triton.slots import slot_count

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "linear_attention_h200.json"
TIMED = [row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if "mapping" in row]


def _call(op: str, tokens: int, heads: int) -> Call:
    """One sequence of BF16 zeros, head size 128."""
    x = torch.zeros(1, tokens, heads, 128, dtype=torch.bfloat16)
    return Call(
        q=x, k=x, v=x, g=x if op == "kda" else x[..., 0], beta=x[..., 0], scale=1.0, initial_state=None,
        output_final_state=True, cu_seqlens=None, use_qk_l2norm_in_kernel=False, state_v_first=True,
    )  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 300), max_size=12), st.sampled_from([64, 128, 640]))
def test_units_of_packed_sequences_have_slots_of_their_own(lengths: list[int], unit: int) -> None:
    """The host sizes workspaces without reading offsets, so places must follow from a sequence's own offset alone."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    slots = [
        begin // unit + n + place
        for n, (begin, end) in enumerate(pairwise(bounds))
        for place in range(max(1, -(-(end - begin) // unit)))
    ]
    assert slots == sorted(set(slots))
    assert not slots or slots[-1] < slot_count(bounds[-1], len(lengths), True, unit)


def test_tiers_follow_heads_and_length() -> None:
    """Whole heads where a block holds one, columns where heads are few, segments where sequences are long as well."""
    assert map_prefill(2048, 1, 32, 64, 64, 132).tier == HEAD
    assert map_prefill(2048, 1, 32, 128, 128, 132).tier == COLUMNS
    assert map_prefill(32768, 1, 64, 128, 128, 132).segment_chunks is None
    long = map_prefill(32768, 1, 8, 128, 128, 132)
    assert long.tier == SEGMENTS
    assert long.segment_chunks is not None
    assert 512 // 32 <= long.segment_chunks <= 512 // 2
    assert map_prefill(0, 3, 8, 128, 128, 132).segment_chunks is None
    # Of two segments the first, carried beside its transition, is the longer one; not among several sequences.
    assert map_prefill(32768, 1, 32, 128, 128, 132).segment_chunks == 384
    assert map_prefill(32768, 1, 32, 128, 128, 132, overlapping=False).segment_chunks == 256
    assert map_prefill(32768, 4, 8, 128, 128, 132).segment_chunks is None
    # KDA keeps 2 GiB of 65536 tokens' chunks of 32 heads, and segments would want them all at once.
    assert map_prefill(65536, 1, 32, 128, 128, 132, 128, "kda").segment_chunks is None
    assert map_prefill(32768, 1, 16, 128, 128, 132, 128, "kda").segment_chunks == 171
    # Two waves of programs of 64 columns against one of 128.
    assert map_prefill(8192, 4, 32, 128, 128, 132, 128).tier == HEAD
    assert map_prefill(8192, 4, 32, 128, 128, 132).block_columns == 64


@pytest.mark.parametrize("row", TIMED, ids=[row["row"] for row in TIMED])
def test_rows_of_the_published_table_are_mapped_as_they_were_timed(row: dict[str, Any]) -> None:
    """A planner that changes its mind leaves the document with times of what no call does any more."""
    one, many = row["shape"].split("x")
    tokens, sequences = (int(many), 1) if one == "1" else (int(one) * int(many), int(many))
    mapping = map_prefill(tokens, sequences, int(row["heads"].split("/")[1]), 128, 128, 132, 128, row["op"])
    assert vars(mapping) == row["mapping"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    chunks=st.integers(0, 1200),
    sequences=st.sampled_from([1, 2, 8]),
    heads=st.sampled_from([1, 3, 8, 32, 64]),
    dims=st.sampled_from([(16, 16), (32, 64), (64, 128), (128, 32), (128, 128), (256, 128), (256, 256)]),
    widest=st.sampled_from([64, 128]),
    op=st.sampled_from(["gdn", "kda"]),
)
def test_mappings_are_ones_that_the_kernels_have(
    chunks: int, sequences: int, heads: int, dims: tuple[int, int], widest: int, op: str
) -> None:
    """Blocks that tile the state; segments not too short for their transitions, never of what composing cannot hold,
    and shorter than the sequence.
    """
    mapping = map_prefill(64 * chunks * sequences, sequences, heads, *dims, 132, widest, op)
    assert dims[1] % mapping.block_columns == 0
    assert mapping.block_columns <= widest
    assert (mapping.tier == HEAD) == (mapping.block_columns == dims[1] and mapping.segment_chunks is None)
    assert (mapping.tier == SEGMENTS) == (mapping.segment_chunks is not None)
    if mapping.segment_chunks is not None:
        assert 16 <= mapping.segment_chunks < chunks
        assert dims[0] <= 128


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("lengths", [(70, 0, 1, 64, 9000), (6400,)])
def test_parts_are_all_chunks_and_small(monkeypatch: pytest.MonkeyPatch, op: str, lengths: tuple[int, ...]) -> None:
    """What is kept of a part's chunks is below the limit; every slot is in one part."""
    tokens, heads = sum(lengths), 4
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    call = replace(_call(op, tokens, heads), cu_seqlens=bounds)
    sizes = Sizes(len(lengths), tokens, True, heads, heads, 128, 128)
    monkeypatch.setattr(backend, "hopper_launches", lambda *_: object())
    monkeypatch.setattr(backend, "_MOST_BYTES", 2**20)
    parts = backend._parts(call, op, sizes, Mapping(COLUMNS, 64, None))
    slots = slot_count(tokens, len(lengths), True, CHUNK)
    assert [slot for part in parts if part is not None for slot in part] == list(range(slots))
    assert all(part is not None and len(part) * heads * backend.chunk_bytes(op, 128) <= 2**20 for part in parts)
    assert backend._parts(call, op, sizes, Mapping(SEGMENTS, 64, 16)) == [None]
    # The portable kernels, which FP16 takes, know no parts.
    half = call.q.half()
    narrow = replace(call, q=half, k=half, v=half)
    assert backend._parts(narrow, op, sizes, Mapping(COLUMNS, 64, None)) == [None]


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_parts_are_reckoned_at_what_a_chunk_takes(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """chunk_bytes is what `prepare` allocates of one chunk and value head."""
    launch = {name: lambda *_, **__: None for name in ("prepare_gdn_kernel", "prepare_kda_kernel")}
    for name, nothing in launch.items():
        monkeypatch.setattr(backend, name, {(10 * 4,): nothing})
    chunks = backend.prepare(_call(op, 640, 4), op, Sizes(1, 640, False, 4, 4, 128, 128), None)
    kept = [chunks.inverse, chunks.scores, chunks.factors]
    if op == "kda":
        assert chunks.tails is not None
        kept += [chunks.keys, chunks.queries, chunks.tails]
    assert sum(x.nbytes for x in kept) == 10 * 4 * backend.chunk_bytes(op, 128)


@pytest.mark.parametrize("wanted", [False, True])
def test_parts_hand_states_on_though_nobody_asked_for_them(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """A part takes its states from where the one before it left them, which is in the final states."""
    states: list[torch.Tensor | None] = []
    monkeypatch.setattr(backend, "hopper_launches", lambda *_: SimpleNamespace(WIDEST_BLOCK=128))
    monkeypatch.setattr(backend, "_MOST_BYTES", 2**18)
    monkeypatch.setattr(backend, "prepare", lambda *_: Chunks(*[torch.empty(0)] * 6))
    monkeypatch.setattr(backend, "recur", lambda *given: states.append(given[7]))
    _, final = backend.run(replace(_call("gdn", 640, 4), output_final_state=wanted), "gdn")
    assert len(states) > 1
    assert states[0] is not None
    assert states[0].shape == (1, 4, 128, 128)
    assert all(state is states[0] for state in states)
    assert (final is states[0]) if wanted else (final is None)


def test_a_batch_is_mapped_by_all_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cu_seqlens the tokens of a call are those of one sequence."""
    seen: list[tuple[Any, ...]] = []

    def mapped(*given: Any) -> Mapping:
        seen.append(given[:3])
        return Mapping(COLUMNS, 64, None)

    monkeypatch.setattr(backend, "map_prefill", mapped)
    monkeypatch.setattr(backend, "prepare", lambda *_: None)
    monkeypatch.setattr(backend, "recur", lambda *_: None)
    call = _call("gdn", 640, 4)
    backend.run(call, "gdn")
    rows = {name: getattr(call, name).view(5, 128, *getattr(call, name).shape[2:]) for name in ("q", "k", "v", "g")}
    backend.run(replace(call, **rows, beta=call.beta.view(5, 128, 4)), "gdn")
    assert seen == [(640, 1, 4), (640, 5, 4)]


@pytest.mark.parametrize(("tokens", "kept"), [(2**20 - 1, True), (2**20, False)])
def test_heads_past_two_to_the_31_are_brought_near(tokens: int, kept: bool) -> None:
    """Operands that lie head by head, [B, heads, T, ..]: the kernels multiply a head by its stride in 32 bits, and the
    last heads of long prompts would be read before the tensor's start.
    """
    x = torch.empty(1, 16, tokens, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    flat = backend._tokens(x)
    assert flat.shape == (tokens, 16, 128)
    assert flat.stride() == ((128, tokens * 128, 1) if kept else (2048, 128, 1))


@pytest.mark.parametrize("change", [{"num_sequences": 0}, {"value_heads": 0}, {"num_tokens": -1}])
def test_impossible_sizes_are_refused(change: dict[str, int]) -> None:
    sizes = {"num_tokens": 64, "num_sequences": 1, "value_heads": 4, "key_dim": 64, "value_dim": 64}
    with pytest.raises(ValueError, match="cannot map"):
        map_prefill(**{**sizes, **change}, multiprocessors=132)
