from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE, HeadMapping, map_heads, map_stages
from vllm_ext.ha_npu.strategies import chunk_head_chunk, fla, ha_npu
from vllm_ext.ha_npu.work import ChunkWork, chunk_work, column_parts, stage_work

CHIP = load_chip("310p1")
WORK = {op: chunk_work(ha_npu(op, 64, 128, CHIP), chunk_head_chunk(op, 64, 128, CHIP), CHIP) for op in ("gdn", "kda")}


def check(mapping: HeadMapping, heads: int, chunks: list[int], work: ChunkWork) -> None:
    """Every head of every sequence is done once, entirely; a core does one thing at a time; the times add up."""
    wanted = {(s, h) for s, count in enumerate(chunks) if count for h in range(heads)}
    listed = [name for names in mapping.tiers.values() for name in names]
    assert sorted(listed) == sorted(wanted)
    for lane in mapping.by_core().values():
        lane.sort(key=lambda piece: piece.start)
        for one, other in pairwise(lane):
            assert one.end <= other.start + 1e-6
    done: dict[tuple[int, int], Counter[str]] = {}
    for piece in mapping.pieces:
        done.setdefault((piece.sequence, piece.head), Counter())[f"{piece.tier} {piece.phase}".strip()] += 1
        if piece.tier == WHOLE:
            assert piece.end - piece.start == pytest.approx(work.whole * chunks[piece.sequence])
        if piece.tier == COLUMNS:
            assert piece.end - piece.start == pytest.approx(work.column[piece.parts] * chunks[piece.sequence])
    for tier, names in mapping.tiers.items():
        for name in names:
            counts = done[name]
            if tier == WHOLE:
                assert counts == {WHOLE: 1}
            elif tier == COLUMNS:
                assert counts == {COLUMNS: mapping.column_parts[name]}
            else:
                assert counts[f"{CHUNKS} reduce"] == work.strips
                for phase, cycles in (("map", work.map_chunk), ("output", work.output_chunk)):
                    pieces = [p for p in mapping.pieces if (p.sequence, p.head) == name and p.phase == phase]
                    assert sum(p.end - p.start for p in pieces) == pytest.approx(cycles * chunks[name[0]])
    if wanted:
        assert mapping.makespan == pytest.approx(max(piece.end for piece in mapping.pieces))
    assert -1e-9 <= mapping.idle_share < 1


@settings(max_examples=80, deadline=None)
@given(
    op=st.sampled_from(["gdn", "kda"]),
    heads=st.integers(1, 48),
    cores=st.integers(1, 40),
    chunks=st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_never_worse_than_whole_heads(op: str, heads: int, cores: int, chunks: list[int]) -> None:
    mapping = map_heads(heads, cores, chunks, WORK[op])
    assert mapping.makespan <= mapping.head_only_makespan + 1e-6
    check(mapping, heads, chunks, WORK[op])


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 30),
    cores=st.integers(1, 16),
    shares=st.lists(st.integers(1, 100), min_size=7, max_size=7),
    moved=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_never_worse_than_whole_heads_whatever_a_chunk_costs(
    heads: int, cores: int, shares: list[int], moved: list[int], chunks: list[int]
) -> None:
    """The promise does not lean on the model of a chunk's work: any costs will do."""
    whole, two, four, first, strip, last, strips = shares
    work = ChunkWork(
        whole, {2: two, 4: four}, first, strip, last, 1 + strips % 8, moved[0], {2: moved[1], 4: moved[2]}, moved[3]
    )
    mapping = map_heads(heads, cores, chunks, work)
    assert mapping.makespan <= mapping.head_only_makespan + 1e-6
    check(mapping, heads, chunks, work)


def test_sixteen_heads_on_ten_cores_map_as_in_the_paper() -> None:
    mapping = map_heads(16, 10, [64], WORK["gdn"])
    heads = {tier: [head for _, head in names] for tier, names in mapping.tiers.items()}
    assert heads == {WHOLE: list(range(10)), COLUMNS: [10, 11, 12, 13, 14], CHUNKS: [15]}
    assert set(mapping.column_parts.values()) == {2}
    assert mapping.makespan < mapping.head_only_makespan
    assert mapping.idle_share < 0.05


def test_heads_that_fill_the_cores_stay_whole() -> None:
    mapping = map_heads(20, 10, [64], WORK["gdn"])
    assert mapping.tiers[COLUMNS] == mapping.tiers[CHUNKS] == ()
    assert mapping.idle_share == pytest.approx(0)
    assert mapping.tail_gm_bytes == 0


def test_one_core_does_whole_heads_one_after_another() -> None:
    mapping = map_heads(7, 1, [3, 0, 5], WORK["kda"])
    assert len(mapping.tiers[WHOLE]) == 14
    assert mapping.makespan == pytest.approx(7 * 8 * WORK["kda"].whole)


def test_a_head_too_narrow_to_cut_still_falls_back_to_chunks() -> None:
    """48 columns fall into no even number of tiles; the third tier needs no such cut."""
    work = chunk_work(ha_npu("gdn", 64, 48, CHIP), chunk_head_chunk("gdn", 64, 48, CHIP), CHIP)
    mapping = map_heads(1, 10, [64], work)
    assert len(mapping.tiers[CHUNKS]) == 1
    assert mapping.makespan < mapping.head_only_makespan
    check(mapping, 1, [64], work)


def test_empty_sequences_map_to_nothing() -> None:
    mapping = map_heads(4, 10, [0, 0], WORK["gdn"])
    assert mapping.pieces == ()
    assert mapping.makespan == mapping.idle_share == 0


@pytest.mark.parametrize(("heads", "cores", "chunks"), [(0, 10, [1]), (4, 0, [1]), (4, 10, [-1])])
def test_nothing_to_map_is_refused(heads: int, cores: int, chunks: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot map"):
        map_heads(heads, cores, chunks, WORK["gdn"])


def test_a_cut_tail_pays_for_the_operands_its_parts_share() -> None:
    """Each part of a head reads keys, queries and gates again: the traffic of a part is not a part of the traffic."""
    work = WORK["gdn"]
    shared = 2 * 16 * 1024 + 512
    assert work.column_bytes[2] - work.whole_bytes == shared
    assert work.column_bytes[8] - work.whole_bytes == 7 * shared
    assert work.column[2] > work.whole / 2


def test_staged_baselines_run_every_head_through_every_stage() -> None:
    work = stage_work(fla("gdn", 64, 128, CHIP), CHIP)
    mapping = map_stages(6, 10, [8], work)
    assert len(mapping.tiers[CHUNKS]) == 6
    check(mapping, 6, [8], work)


@pytest.mark.parametrize(("dim", "parts"), [(128, (2, 4, 8)), (64, (2, 4)), (48, ()), (16, ()), (96, (2,))])
def test_parts_are_no_narrower_than_a_tile(dim: int, parts: tuple[int, ...]) -> None:
    assert column_parts(dim) == parts
    assert all(Fraction(dim, count) % 16 == 0 for count in parts)
