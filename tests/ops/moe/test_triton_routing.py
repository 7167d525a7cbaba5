"""The first and the last launch of the Triton experts, slots grouped by expert and summed by token, interpreted.

Runs in a process of its own, which test_triton_interpreted.py starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1: test_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

from moe_samples import make_layer

from vllm_ext.ops.moe import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import align
from vllm_ext.ops.moe.triton.choice import portable
from vllm_ext.ops.moe.triton.combine import combine

FLAGS = 700
HALF = torch.float16
# (most slots of one launch, slots of a chunk, most chunks): one launch; three, with one pass over the chunks' counts
# and a step a chunk; three with two passes; three with chunks of many steps, as 65536 slots and more have. A sparse
# table, which one launch makes, begins with the first block of every expert, empty or not.
LAUNCHES = {
    "one": (1 << 20, 256, 256),
    "sparse": (1 << 20, 256, 256),
    "three": (0, 256, 256),
    "chunks": (0, 32, 256),
    "steps": (0, 32, 8),
}


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 3, 1), (7, 4, 2), (300, 9, 3), (300, 1, 2), (701, 9, 3)])
def test_slots_are_listed_by_expert_in_order(
    monkeypatch: pytest.MonkeyPatch, poison: None, launches: str, tokens: int, experts: int, top_k: int
) -> None:
    """One launch for few slots, three for many: the same list, the same blocks, unused blocks marked empty. Each part
    begins at a multiple of 16 bytes: Triton compiles another kernel where one does not."""
    one_launch_slots, chunk_slots, max_chunks = LAUNCHES[launches]
    if launches == "sparse":
        one_launch_slots = tokens * top_k  # as many as it takes
    monkeypatch.setattr(align, "_CHUNK_SLOTS", chunk_slots)
    monkeypatch.setattr(align, "_MAX_CHUNKS", max_chunks)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), generator=generator, dtype=torch.int32)
    x = torch.randn(tokens, 96, generator=generator)
    form = align.TokenForm(32, 16, 3, 1)
    sparse = (launches in ("sparse", "three"), False)
    sizes = (32, 16) if experts == 4 else (16, 32)
    got = align.align(x, ids, None, experts, sizes, form, one_launch_slots, FLAGS, sparse)
    assert got.sparse == (launches == "sparse", False)
    parts = (got.blocks, got.down_blocks, got.flags)
    assert [(part.data_ptr() - got.sorted_slots.data_ptr()) % 16 for part in parts] == [0, 0, 0]
    flat = ids.flatten().tolist()
    expected = [slot for expert in range(experts) for slot, given_id in enumerate(flat) if given_id == expert]
    assert got.sorted_slots[: len(expected)].tolist() == expected
    for blocks, size in zip((got.blocks, got.down_blocks), sizes, strict=True):
        wanted, first = [], 0
        for expert in range(experts):
            count = flat.count(expert)
            wanted += [[expert, first + done, min(size, count - done)] for done in range(0, count, size)]
            first += count
        if got.sparse[0] and size == sizes[0]:
            empty = [[e, sum(0 <= given_id < e for given_id in flat), 0] for e in range(experts)]
            begun = [next((block for block in wanted if block[0] == e), empty[e]) for e in range(experts)]
            wanted = begun + [block for block in wanted if block not in begun]
        assert blocks[: len(wanted), :3].tolist() == wanted
        assert blocks[len(wanted) :, 2].count_nonzero() == 0
        assert blocks[0, 3] == len(wanted)
    assert got.flags.tolist() == [0] * FLAGS
    torch.testing.assert_close(got.group_sums, x.reshape(tokens, 3, 32).sum(-1), atol=1e-4, rtol=0)
    odd = torch.arange(96) // 16 % 2 == 1
    assert torch.equal(got.x, torch.where(odd, x * 4, x * 8))


def test_a_sparse_table_is_the_first_gemms_alone(poison: None) -> None:
    """Blocks of one size share a table, unless only one of them begins with a block of every expert."""
    ids = torch.tensor([[4], [1], [4]], dtype=torch.int32)
    form = align.TokenForm(32, 16, 0, 0)
    got = align.align(torch.zeros(3, 32), ids, None, 6, (16, 16), form, sparse=(True, False))
    assert got.blocks[:, :3].tolist() == [[0, 0, 0], [1, 0, 1], [2, 1, 0], [3, 1, 0], [4, 1, 2], [5, 3, 0]]
    assert got.down_blocks[:2, :3].tolist() == [[1, 0, 1], [4, 1, 2]]
    assert got.down_blocks[2:, 2].tolist() == [0] * (len(got.down_blocks) - 2)


@pytest.mark.parametrize("one_launch_slots", [0, 8192])
def test_a_token_two_to_the_31_elements_into_a_view_is_read(one_launch_slots: int) -> None:
    x = _virtual(((1 << 31) + 32,), HALF).as_strided((3, 32), (1 << 30, 1))
    x[2] = 1
    form = align.TokenForm(32, 16, 0, 0)
    got = align.align(x, torch.zeros(3, 1, dtype=torch.int32), None, 1, (16, 16), form, one_launch_slots)
    assert got.group_sums.tolist() == [[0], [0], [32]]


@pytest.mark.parametrize("block_tokens", [8, 16, 64])
@pytest.mark.parametrize("experts", [1, 5, 40])
def test_blocks_have_room_for_the_routing_that_needs_most(experts: int, block_tokens: int) -> None:
    """Every expert hit leaves a block of one slot: an entry less would be written past the end of the table."""
    for slots in (1, 4, 7, 64, 200):
        hit = min(experts, slots)
        first = slots - (hit - 1)  # one slot for every other expert hit, the rest for one
        needed = -(-first // block_tokens) + hit - 1
        assert align.max_blocks(slots, experts, block_tokens) >= needed


@pytest.mark.parametrize("weighted", [False, True])
def test_a_tokens_slots_are_added_in_their_order(poison: None, weighted: bool) -> None:
    """To the bit, over more columns than one program takes; and what is not routed adds nothing, NaN or not."""
    tokens, top_k, columns, experts = 5, 4, 1100, 3
    generator = torch.Generator().manual_seed(1)
    slots = torch.randn(tokens * top_k, columns, generator=generator) * 10.0 ** torch.arange(20)[:, None].fmod(7)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    ids[0, 1], ids[1], ids[2, 3] = -1, experts, -1
    slots[1], slots[4:8], slots[11] = float("nan"), float("inf"), float("nan")
    weights[0, 1], weights[1] = float("nan"), float("inf")
    expected = torch.zeros(tokens, columns)
    for token in range(tokens):
        for k in range(top_k):
            if 0 <= ids[token, k] < experts:
                expected[token] += slots[token * top_k + k] * (weights[token, k] if weighted else 1.0)
    assert torch.equal(combine(slots, ids, weights, None, experts, weighted), expected)


def test_more_slots_a_token_than_a_word_has_bits_are_refused() -> None:
    slots, ids, weights = torch.zeros(64, 16), torch.zeros(1, 64, dtype=torch.int32), torch.ones(1, 64)
    with pytest.raises(ValueError, match=r'at most 63 .* got top_k 64; prepare .* backend="reference"'):
        combine(slots, ids, weights, None, 1, True)
    assert combine(slots[:63], ids[:, :63], weights[:, :63], None, 1, True).count_nonzero() == 0


def _virtual(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written."""
    bits = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, bits)).view(dtype)


def test_offsets_past_two_to_the_31_do_not_wrap(backend: ModuleType) -> None:
    """131072 tokens of 8 slots write 2^31 elements from 2048 columns on; so do experts hold them. The last expert and
    the last slot of tensors so large must give what a single expert and slot give."""
    hidden, inter, place = 16, 16, 1 << 27
    layer = make_layer(experts=1, hidden=hidden, intermediate=inter, groups=(16, 16), top_k=1, tokens=1, dtype=HALF)
    one = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), HALF)
    launch, options = portable(1), CallOptions()
    aligned = backend.align_call(launch, layer.x, layer.ids, None, one)
    inner, sums = backend.gate_up(launch, one, layer.weights, aligned, 1, options)
    expected = backend.down(launch, inner, sums, one, aligned)
    assert expected.count_nonzero() == hidden
    large = {}
    for name, tensor in one.tensors.items():
        large[name] = _virtual(((1 << 31) // one.tensors["w2_words"].numel() + 1, *tensor.shape[1:]), tensor.dtype)
        large[name][-1] = tensor[0]
    last = PreparedExperts(replace(one.meta, num_experts=large["w2_words"].shape[0]), large)
    slots = _virtual((place + 1,), torch.int32)
    slots[place] = place
    blocks = torch.tensor([[last.meta.num_experts - 1, place, 1, 1]], dtype=torch.int32)
    x, group_sums = (
        _virtual((place + 1, hidden), HALF),
        _virtual((place + 1, aligned.group_sums.shape[1]), torch.float32),
    )
    x[place], group_sums[place] = aligned.x[0], aligned.group_sums[0]
    spread = align.Alignment(slots, blocks, blocks, x, group_sums, aligned.flags)
    first, first_sums = backend.gate_up(launch, last, layer.weights, spread, 1, options)
    assert torch.equal(first[place], inner[0])
    out = backend.down(launch, first, first_sums, last, spread)
    assert torch.equal(out[place], expected[0])
