"""Which instructions of compiled Hopper code write a register that a product under way still reads its operand from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

_PRODUCT = re.compile(r"HGMMA\S+ R\d+, R(\d+)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_BRANCH = re.compile(r"\bBRA\S* .*?(\.L_x_\d+)")
_WRITE = re.compile(r"(?:@!?U?P\d+ )?([A-Z0-9_.]+) R(\d+)\b")
_READ_ONLY = ("ST", "RED", "BAR", "BRA", "SYNCS")
_OPERAND_REGISTERS = 4


def disassemble(cubin: bytes, folder: Path) -> list[str]:
    """The lines of a kernel's machine code, labels included."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _parse(lines: list[str]) -> tuple[list[str], dict[str, int]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, lines):
        label = re.match(r"(\.L_x_\d+):", line)
        instruction = re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(code)
        elif instruction:
            code.append(instruction[1].strip())
    return code, labels


def _written(instruction: str) -> set[int]:
    match = _WRITE.match(instruction)
    if not match or match[1].startswith(_READ_ONLY):
        return set()
    width = 4 if ".128" in match[1] or ".M88.4" in match[1] else 2 if ".64" in match[1] or "WIDE" in match[1] else 1
    return set(range(int(match[2]), int(match[2]) + width))


def overwritten(lines: list[str]) -> list[str]:
    """Such instructions of every loop that multiplies, seen over two of its passes."""
    code, labels = _parse(lines)
    found = []
    for end, instruction in enumerate(code):
        branch = _BRANCH.search(instruction)
        start = labels.get(branch[1], end + 1) if branch else end + 1
        body = code[start : end + 1]
        if not any(map(_PRODUCT.match, body)):
            continue
        groups: list[set[int]] = []
        group: set[int] = set()
        for step in body * 2:
            product, wait = _PRODUCT.match(step), _WAIT.match(step)
            if product:
                group |= set(range(int(product[1]), int(product[1]) + _OPERAND_REGISTERS))
                if "gsb0" in step:
                    groups, group = [*groups, group], set()
            elif wait:
                pending = int(wait[1], 16)
                groups = groups[len(groups) - pending :] if pending < len(groups) else groups
            elif _written(step) & group.union(*groups):
                found.append(step)
    return found
