"""Heads to cores in three tiers (paper, section 4): whole heads, heads cut by columns of the state, chunk-head-chunk.

Whole heads go longest first to the core that is free first. A tail of heads that would leave cores idle is cut by
columns, which needs no reduction; the last of them may fall back to chunk-head-chunk, which needs all cores at once.
Several tails are tried, whole heads only among them. Of those done within `SLACK` of the first, and no later than whole
heads alone, the one with the least global-memory traffic is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ext.ha_npu.work import ChunkWork

WHOLE, COLUMNS, CHUNKS = "head", "columns", "chunks"
SLACK = 1.05
"""Less than the model of a chunk's work can tell apart, while the traffic it saves is exact."""


@dataclass(frozen=True)
class Piece:
    """Work of one core in [start, end), in cycles: `part` of `parts`, in a named phase if chunk-head-chunk."""

    core: int
    sequence: int
    head: int
    tier: str
    part: int
    parts: int
    start: float
    end: float
    phase: str = ""


@dataclass(frozen=True)
class HeadMapping:
    """Who does what when.

    makespan            cycles until the last core is done; `head_only_makespan` is that of whole heads alone, for a
                        strategy that has whole heads, else the same
    idle_share          share of core time without work until then
    tiers               per tier, the (sequence, head) pairs; `column_parts` gives the number of parts of a cut head
    tail_gm_bytes       global-memory bytes the cut heads cost over what they would whole
    """

    cores: int
    pieces: tuple[Piece, ...]
    makespan: float
    head_only_makespan: float
    tiers: dict[str, tuple[tuple[int, int], ...]]
    column_parts: dict[tuple[int, int], int]
    tail_gm_bytes: int

    @property
    def idle_share(self) -> float:
        busy = sum(piece.end - piece.start for piece in self.pieces)
        return max(0.0, 1 - busy / (self.makespan * self.cores)) if self.makespan else 0.0

    def by_core(self) -> dict[int, list[Piece]]:
        lanes: dict[int, list[Piece]] = {core: [] for core in range(self.cores)}
        for piece in self.pieces:
            lanes[piece.core].append(piece)
        return lanes


@dataclass(frozen=True)
class _Task:
    sequence: int
    head: int
    chunks: int


class _Schedule:
    """Cores with the times they become free."""

    def __init__(self, cores: int) -> None:
        self.free = [(0.0, core) for core in range(cores)]
        self.pieces: list[Piece] = []
        self.cores = cores

    def copy(self) -> _Schedule:
        other = _Schedule(0)
        other.free, other.pieces, other.cores = list(self.free), list(self.pieces), self.cores
        return other

    def run(self, task: _Task, tier: str, cycles: float, part: int = 0, parts: int = 1, phase: str = "") -> None:
        start, core = heapq.heappop(self.free)
        end = start + cycles
        heapq.heappush(self.free, (end, core))
        self.pieces.append(Piece(core, task.sequence, task.head, tier, part, parts, start, end, phase))

    def barrier(self) -> None:
        latest = self.makespan()
        self.free = [(latest, core) for core in range(self.cores)]

    def makespan(self) -> float:
        return max(time for time, _ in self.free)

    def chunk_head_chunk(self, tasks: Sequence[_Task], work: ChunkWork) -> None:
        """All cores prepare chunks, then run the recurrences by strips, then make the output by chunks."""
        for phase in ("map", "reduce", "output"):
            self.barrier()
            if phase == "reduce":
                for task in tasks:
                    for strip in range(work.strips):
                        self.run(task, CHUNKS, work.reduce_strip * task.chunks, strip, work.strips, phase)
            else:
                cycles = work.map_chunk if phase == "map" else work.output_chunk
                for task in tasks:
                    self._spread(task, cycles, phase)
        self.barrier()

    def _spread(self, task: _Task, cycles: float, phase: str) -> None:
        """A task's chunks over the cores, in runs of as even a length as can be."""
        runs = min(self.cores, task.chunks)
        for part in range(runs):
            count = task.chunks * (part + 1) // runs - task.chunks * part // runs
            self.run(task, CHUNKS, cycles * count, part, runs, phase)


def map_heads(num_heads: int, cores: int, sequence_chunks: Sequence[int], work: ChunkWork) -> HeadMapping:
    """The mapping done first among those tried.

    sequence_chunks     chunks of each sequence; an empty sequence has none
    Raises ValueError on no heads, no cores or a negative number of chunks.
    """
    if num_heads < 1 or cores < 1 or any(chunks < 0 for chunks in sequence_chunks):
        raise ValueError(f"ha_npu: cannot map {num_heads} heads on {cores} cores for chunks {list(sequence_chunks)}")
    tasks = [_Task(s, h, chunks) for s, chunks in enumerate(sequence_chunks) for h in range(num_heads) if chunks]
    tasks.sort(key=lambda task: -task.chunks)
    base = _whole(tasks, cores, work)
    head_only = base.makespan()
    trials: list[tuple[_Schedule, tuple[int, int, int]]] = [(base, (0, 0, 0))]
    for tail in _tail_lengths(len(tasks), cores):
        head = _whole(tasks[: len(tasks) - tail], cores, work)
        for parts, last in _cuts(tail, cores, work):
            trial = head.copy()
            _columns(trial, tasks[len(tasks) - tail : len(tasks) - last], parts, work)
            if last:
                trial.chunk_head_chunk(tasks[len(tasks) - last :], work)
            if trial.makespan() <= head_only:
                trials.append((trial, (tail, parts, last)))
    limit = SLACK * min(trial.makespan() for trial, _ in trials)
    timely = [(trial, cut) for trial, cut in trials if trial.makespan() <= limit]
    best, best_cut = min(timely, key=lambda pair: (_tail_bytes(tasks, pair[1], work), pair[0].makespan()))
    return _finish(tasks, cores, best, head_only, best_cut, work)


def map_stages(num_heads: int, cores: int, sequence_chunks: Sequence[int], work: ChunkWork) -> HeadMapping:
    """The mapping of a staged baseline: every head chunk-head-chunk, all cores together through every stage."""
    tasks = [_Task(s, h, chunks) for s, chunks in enumerate(sequence_chunks) for h in range(num_heads) if chunks]
    schedule = _Schedule(cores)
    schedule.chunk_head_chunk(tasks, work)
    tiers = {WHOLE: (), COLUMNS: (), CHUNKS: tuple((task.sequence, task.head) for task in tasks)}
    return HeadMapping(cores, tuple(schedule.pieces), schedule.makespan(), schedule.makespan(), tiers, {}, 0)


def _tail_lengths(tasks: int, cores: int) -> list[int]:
    """Tails worth trying: what is left over of whole rounds, and one round more."""
    if cores == 1:
        return []
    rest = tasks % cores
    return sorted(
        {length for length in (rest, rest + cores, tasks if tasks <= 2 * cores else 0) if 0 < length <= tasks}
    )


def _cuts(tail: int, cores: int, work: ChunkWork) -> list[tuple[int, int]]:
    """(parts of a head, heads left for chunk-head-chunk) worth trying on a tail."""
    cuts = [(1, tail)]
    for parts in work.column:
        together = max(cores // parts, 1)
        cuts += [(parts, last) for last in sorted({0, 1, 2, tail % together}) if last < tail]
    return cuts


def _whole(tasks: Sequence[_Task], cores: int, work: ChunkWork) -> _Schedule:
    schedule = _Schedule(cores)
    for task in tasks:
        schedule.run(task, WHOLE, work.whole * task.chunks)
    return schedule


def _columns(schedule: _Schedule, tasks: Sequence[_Task], parts: int, work: ChunkWork) -> None:
    for task in tasks:
        for part in range(parts):
            schedule.run(task, COLUMNS, work.column[parts] * task.chunks, part, parts)


def _tail_bytes(tasks: Sequence[_Task], cut: tuple[int, int, int], work: ChunkWork) -> int:
    """Global-memory bytes a tail adds to those of whole heads."""
    tail, parts, last = cut
    middle, end = len(tasks) - tail, len(tasks) - last
    extra = work.column_bytes[parts] - work.whole_bytes if middle < end else 0
    columns = extra * sum(task.chunks for task in tasks[middle:end])
    return columns + sum(task.chunks for task in tasks[end:]) * (work.chunks_bytes - work.whole_bytes)


def _finish(
    tasks: Sequence[_Task],
    cores: int,
    schedule: _Schedule,
    head_only: float,
    cut: tuple[int, int, int],
    work: ChunkWork,
) -> HeadMapping:
    tail, parts, last = cut
    names = [(task.sequence, task.head) for task in tasks]
    middle, end = len(names) - tail, len(names) - last
    tiers = {WHOLE: tuple(names[:middle]), COLUMNS: tuple(names[middle:end]), CHUNKS: tuple(names[end:])}
    return HeadMapping(
        cores,
        tuple(schedule.pieces),
        schedule.makespan(),
        head_only,
        tiers,
        dict.fromkeys(tiers[COLUMNS], parts),
        _tail_bytes(tasks, cut, work),
    )
