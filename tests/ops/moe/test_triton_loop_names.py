"""No kernel gives one value two names before a loop that hands one name's value to the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm_ext

# What Triton 3.6 to 3.9 compile as if `before` never changed: both names hold the same value when the loop's carried
# variables are looked for, so `before = stage` seems to change nothing.
LOST = """
@triton.jit
def kernel(out, stage, n):
    before = stage
    for i in range(n):
        tl.store(out + i, before)
        before = stage
        stage += 1
"""
KEPT = LOST.replace("    before = stage\n    for", "    before = stage - 1\n    for")


def _copies(node: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, name, other name) of every assignment of one name's value to another name under `node`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Assign):
            target, value = part.targets[0], part.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, other in pairs:
                if isinstance(name, ast.Name) and isinstance(other, ast.Name):
                    yield part.lineno, name.id, other.id


def lost_names(source: str) -> list[str]:
    """Where a jitted function of `source` copies a name before a loop and copies it again within."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in function.decorator_list):
            copies = list(_copies(function))
            for loop in ast.walk(function):
                if isinstance(loop, (ast.For, ast.While)):
                    again = {frozenset(names) for _, *names in _copies(loop)}
                    found += [
                        f"{function.name}, line {line}: {name} = {other}"
                        for line, name, other in copies
                        if line < loop.lineno and frozenset((name, other)) in again
                    ]
    return found


def test_no_kernel_loses_a_name_in_a_loop() -> None:
    """A persistent kernel, never shipped, freed the same stage of its ring again and again and did not end."""
    assert lost_names(LOST) == ["kernel, line 4: before = stage"]
    assert lost_names(KEPT) == []
    root = Path(vllm_ext.__file__).parent
    sources = [path for path in root.rglob("*.py") if "benchmarks" not in path.parts]
    assert any(path.name == "stream_kernel.py" for path in sources)
    for path in sources:
        assert lost_names(path.read_text(encoding="utf-8")) == [], path
