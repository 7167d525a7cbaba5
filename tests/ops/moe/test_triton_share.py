"""Who computes what in the persistent kernels: every K tile once, and sums handed over by those who have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
module = pytest.importorskip("vllm_ext.ops.moe.triton.share")


def shares(programs: int, units: int, tiles: int, split: bool) -> list[tuple[int, int, int]]:
    """`share` of every rank, in plain numbers."""
    plain = SimpleNamespace(
        num_programs=lambda axis: programs, minimum=min, where=lambda condition, a, b: a if condition else b
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "gl", plain)
        return [module.share.fn(units, rank, tiles, split) for rank in range(programs)]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(programs=st.integers(1, 40), units=st.integers(0, 60), tiles=st.integers(1, 12), split=st.booleans())
def test_every_tile_is_computed_once_and_every_sum_handed_over(
    programs: int, units: int, tiles: int, split: bool
) -> None:
    """A program that begins a piece waits for the next ranks until all its tiles are in: one too many would never come,
    one too few would be left out."""
    found = shares(programs, units, tiles, split)
    done, waited_for, handed_over = [], set(), set()
    for rank, (tile, last, skip) in enumerate(found):
        while tile < last:
            start = tile % tiles
            end = min(tiles, start + last - tile)
            done += range(tile, tile + end - start)
            tile += end - start + skip
            if start > 0:
                handed_over.add(rank)
                continue
            giver = rank
            while end < tiles:
                giver += 1
                waited_for.add(giver)
                end += found[giver][1] - found[giver][0]
    assert sorted(done) == list(range(units * tiles))
    assert waited_for == handed_over
    if split:
        lengths = [last - first for first, last, _ in found]
        assert max(lengths) - min(lengths) <= 1
    else:
        assert not handed_over
