"""How sequences of unequal length are cut into chunks that a few vectorised passes can compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of a group of sequences; step i is the next chunk of every sequence that has one.

    active: sequences still running at each step, falling, because a group is sorted longest first;
    tokens: int64 [sum(active), chunk_size], flat token index of each row, 0 where the chunk is past its end;
    valid: bool, same shape, False there; ragged: whether any row is. Chunks stand step by step, in the group's order.
    """

    active: list[int]
    tokens: torch.Tensor
    valid: torch.Tensor
    ragged: bool


def sequence_groups(bounds: Sequence[int], group_size: int) -> list[list[int]]:
    """Sequence indices, longest first (ties in order), in groups of at most group_size."""
    lengths = [end - begin for begin, end in pairwise(bounds)]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + group_size] for start in range(0, len(order), group_size)]


def segments(
    bounds: Sequence[int], group: Sequence[int], chunk_size: int, max_chunks: int, device: torch.device
) -> Iterator[Segment]:
    """The group's steps in order, cut so that a segment holds at most max_chunks chunks, but at least one step."""
    begins = torch.tensor([bounds[index] for index in group], dtype=torch.int64)
    ends = torch.tensor([bounds[index + 1] for index in group], dtype=torch.int64)
    counts = ((ends - begins + chunk_size - 1) // chunk_size).tolist()
    rows = torch.arange(chunk_size, dtype=torch.int64)
    step, running = 0, len(group)
    while True:
        active: list[int] = []
        starts, limits = [], []
        while True:
            while running and counts[running - 1] <= step:
                running -= 1
            if not running or (active and sum(active) + running > max_chunks):
                break
            active.append(running)
            starts.append(begins[:running] + step * chunk_size)
            limits.append(ends[:running])
            step += 1
        if not active:
            return
        tokens = torch.cat(starts)[:, None] + rows
        valid = tokens < torch.cat(limits)[:, None]
        yield Segment(active, (tokens * valid).to(device), valid.to(device), ragged=not bool(valid.all()))
