"""Offsets in a buffer by first fit, in several orders. Standard library only: builds of the kernels run this."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """An item's place: bytes [offset, offset + nbytes) of its buffer during steps start..end."""

    item: str
    buffer: str
    offset: int
    nbytes: int
    start: int
    end: int


Job = tuple[str, int, int, int]
RANKS: tuple[Callable[[Job], tuple[int, int]], ...] = (
    lambda job: (-job[3], job[1]),
    lambda job: (job[1], -job[3]),
    lambda job: (job[1] - job[2], -job[3]),
    lambda job: (-job[2], -job[3]),
    lambda job: (-(job[2] - job[1] + 1) * job[3], job[1]),
)
"""Orders in which to place (name, start, end, size): largest, earliest, longest, latest-ending, largest area first."""


def best_fit(jobs: Sequence[Job], pinned: Collection[str]) -> tuple[dict[str, int], int]:
    """Offsets that keep overlapping lifetimes apart, pinned jobs first, and the top: the best of several orders."""
    results = [place(sorted(jobs, key=lambda job: (job[0] not in pinned, *rank(job)))) for rank in RANKS]
    return min(results, key=lambda result: result[1])


def place(jobs: Sequence[Job]) -> tuple[dict[str, int], int]:
    """Each job at the lowest offset that is free throughout its lifetime, in the order given; and the top."""
    placed: list[tuple[int, int, int, int]] = []
    offsets: dict[str, int] = {}
    for name, start, end, size in jobs:
        offset = 0
        for bottom, top, first, last in sorted(placed):
            if first <= end and start <= last and bottom < offset + size and offset < top:
                offset = top
        placed.append((offset, offset + size, start, end))
        offsets[name] = offset
    return offsets, max((top for _, top, _, _ in placed), default=0)


def place_tiles(sizes: Mapping[str, int], spans: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], int]:
    """Offsets of tiles of given sizes, aligned already, and lifetimes (first and last step), and the top."""
    return best_fit([(name, *spans[name], size) for name, size in sizes.items()], set())
