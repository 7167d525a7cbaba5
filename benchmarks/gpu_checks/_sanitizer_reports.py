"""What compute-sanitizer reported, and whether a hazard is the hand-over of work by Triton's warp specialisation.

A warp-specialised kernel keeps a byte a worker warp in shared memory: what the warp is to run. The first warps write
it, all warps pass barrier 1, the workers read it. Racecheck 2025.3 (CUDA 13.0) reports that pair now and then, 2026.4
did not. Machine code decides: the write must stand directly before that barrier, the read directly after it, and
nothing else may touch the bytes.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_HAZARD = re.compile(
    r"Potential (\w+) hazard detected at __shared__ 0x([0-9a-f]+) in block .*\n"
    r"=+\s+(?:Write|Read) Thread .* at (\w+)\+0x([0-9a-f]+).*\n"
    r"=+\s+(?:Write|Read) Thread .* at \w+\+0x([0-9a-f]+)"
)
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_SHARED = re.compile(r"\b(LDS|STS|LDSM|STSM|ATOMS|UTMALDG|LDGSTS)")
_ADDRESS = re.compile(r"\[[^\]]*?(0x[0-9a-f]+)\]")
# A program's own shared memory begins after what the system keeps of it.
_RESERVED = 1024
_ALL_WARPS = re.compile(r"BAR\.SYNC\.DEFER_BLOCKING 0x1$")


@dataclass(frozen=True)
class Hazard:
    """One report of racecheck: two instructions of a kernel at one byte of shared memory."""

    kind: str
    address: int
    kernel: str
    first: int
    second: int


def summary(text: str) -> int | None:
    """How many reports the tool counted; None when it did not come to its summary."""
    counts = [int(count) for count in _SUMMARY.findall(text)]
    return sum(counts) if counts else None


def hazards(text: str) -> list[Hazard]:
    """Racecheck's hazards, in the order of the report."""
    return [
        Hazard(kind, int(address, 16), kernel, int(first, 16), int(second, 16))
        for kind, address, kernel, first, second in _HAZARD.findall(text)
    ]


@dataclass(frozen=True)
class HandOver:
    """Where a kernel's machine code hands out work: addresses of instructions, and the bytes they touch."""

    writes: frozenset[int]
    reads: frozenset[int]
    bytes_touched: range

    def explains(self, hazard: Hazard) -> bool:
        """Whether the hazard is between such a write and such a read, which a barrier of all warps parts."""
        places = hazard.first in self.writes and hazard.second in self.reads
        return hazard.kind == "RAW" and places and hazard.address in self.bytes_touched


def hand_over(lines: list[str]) -> HandOver | None:
    """The hand-over in a disassembled kernel; None where the code is not as this file's docstring says."""
    code = [(int(match[1], 16), match[2]) for match in map(_INSTRUCTION.search, lines) if match]
    reads, start = set(), None
    for (_, before), (place, instruction) in itertools.pairwise(code):
        if "LDS.U8" in instruction and _ALL_WARPS.search(before):
            found = _ADDRESS.search(instruction)
            reads.add(place)
            start = int(found[1], 16) if found else None
    if start is None:
        return None
    # Indexed by the number of the warp: the workers come after the first four or eight.
    writes, touched = set(), []
    for index, (place, instruction) in enumerate(code):
        found = _ADDRESS.search(instruction)
        if not _SHARED.search(instruction) or not found or place in reads:
            continue
        address = int(found[1], 16)
        if not start <= address < start + 16:
            continue
        after = next((text for _, text in code[index + 1 :] if _SHARED.search(text) or "BAR" in text), "")
        if not instruction.lstrip("@!UP0123456789 ").startswith("STS") or not _ALL_WARPS.search(after):
            return None
        writes.add(place)
        touched.append(address)
    if not writes:
        return None
    own = range(_RESERVED + min(touched), _RESERVED + max(touched) + 4)
    return HandOver(frozenset(writes), frozenset(reads), own)
