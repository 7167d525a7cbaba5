from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.triton import backend
from vllm_ext.ops.linear_attention.triton.chunks import Sizes
from vllm_ext.ops.linear_attention.triton.plan import CHUNK, COLUMNS, HEAD, SEGMENTS, Mapping, map_prefill
from vllm_ext.ops.linear_attention.triton.slots import slot_count


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


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("lengths", [(70, 0, 1, 64, 9000), (6400,)])
def test_parts_are_all_chunks_and_small(monkeypatch: pytest.MonkeyPatch, op: str, lengths: tuple[int, ...]) -> None:
    """What is kept of a part's chunks is below the limit; every slot is in one part."""
    tokens, heads = sum(lengths), 4
    x = torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    call = Call(
        q=x, k=x, v=x, g=x, beta=x[..., 0], scale=1.0, initial_state=None, output_final_state=True, cu_seqlens=bounds,
        use_qk_l2norm_in_kernel=False, state_v_first=True,
    )  # fmt: skip
    sizes = Sizes(len(lengths), tokens, True, heads, heads, 128, 128)
    monkeypatch.setattr(backend, "_hopper", lambda *_: object())
    monkeypatch.setattr(backend, "_MOST_BYTES", 2**20)
    parts = backend._parts(call, op, sizes, Mapping(COLUMNS, 64, None))
    slots = slot_count(tokens, len(lengths), True, CHUNK)
    assert [slot for part in parts if part is not None for slot in part] == list(range(slots))
    assert all(part is not None and len(part) * heads * backend.chunk_bytes(op, 128) <= 2**20 for part in parts)
    assert backend._parts(call, op, sizes, Mapping(SEGMENTS, 64, 16)) == [None]


@pytest.mark.parametrize("change", [{"num_sequences": 0}, {"value_heads": 0}, {"num_tokens": -1}])
def test_impossible_sizes_are_refused(change: dict[str, int]) -> None:
    sizes = {"num_tokens": 64, "num_sequences": 1, "value_heads": 4, "key_dim": 64, "value_dim": 64}
    with pytest.raises(ValueError, match="cannot map"):
        map_prefill(**{**sizes, **change}, multiprocessors=132)
