"""Ways to invert the unit lower triangular I + A of a chunk, in 16x16 tiles.

Each method runs on real tiles (or on none, to count only) and records what it does: matrix products of 16x16x16 and the
fractals it brings from L1 to L0. A count is therefore what the algorithm did, not a number written down beside it.
A fractal is brought in once a side (left, right) within a group, the stretch over which L0 holds a method's operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

TILE = 16
Tile = np.ndarray


@dataclass
class TileMachine:
    """Runs tile products and counts them. `reuse=False` brings both operands in for every product."""

    reuse: bool = True
    products: int = 0
    fractals: int = 0
    _held: dict[tuple[str, int], Tile] = field(default_factory=dict)

    def group(self) -> None:
        """Start a new group: L0 is empty again."""
        self._held.clear()

    def _load(self, side: str, tile: Tile) -> None:
        key = (side, id(tile))
        if not self.reuse or key not in self._held:
            self.fractals += 1
            self._held[key] = tile

    def product(self, pairs: Iterable[tuple[Tile, Tile]]) -> Tile:
        """The sum of left @ right over the pairs, accumulated in L0C."""
        total = np.zeros((TILE, TILE))
        for left, right in pairs:
            self._load("left", left)
            self._load("right", right)
            self.products += 1
            total = total + left @ right
        return total


@dataclass(frozen=True)
class InversionResult:
    """The inverse [C, C], products of 16x16x16, fractals from L1 to L0, and tiles done on the vector unit."""

    inverse: np.ndarray
    products: int
    fractals: int
    vector_tiles: int


Blocks = list[list[Tile]]
Method = Callable[[TileMachine, Blocks], tuple[Blocks, int]]


def _negative_powers(machine: TileMachine, a: Tile) -> Tile:
    """(I + a)^-1 of one strictly lower tile: (I - a)(I + a^2)(I + a^4)(I + a^8)."""
    machine.group()
    square = machine.product([(a, a)])
    inverse = np.eye(TILE) - a + square - machine.product([(a, square)])
    for _ in range(2):
        square = machine.product([(square, square)])
        inverse = inverse + machine.product([(inverse, square)])
    return inverse


def _substitute(tile: Tile) -> Tile:
    """(I + a)^-1 row by row, as the vector unit does it."""
    inverse = np.eye(len(tile))
    for row in range(1, len(tile)):
        inverse[row] -= tile[row, :row] @ inverse[:row]
    return inverse


def _merge_rows(machine: TileMachine, a: Blocks, diagonal: list[Tile]) -> Blocks:
    """Block row i of the inverse from the rows above it: T_ij = -T_ii sum_k A_ik T_kj."""
    n = len(diagonal)
    t: Blocks = [[np.zeros((TILE, TILE)) for _ in range(n)] for _ in range(n)]
    for i in range(n):
        machine.group()
        t[i][i] = diagonal[i]
        sums = [machine.product([(a[i][k], t[k][j]) for k in range(j, i)]) for j in range(i)]
        for j in range(i):
            t[i][j] = -machine.product([(t[i][i], sums[j])])
    return t


def neumann_merge(machine: TileMachine, a: Blocks) -> tuple[Blocks, int]:
    """Diagonal tiles by powers on the matrix unit, the rest by block rows. All of it on the matrix unit."""
    return _merge_rows(machine, a, [_negative_powers(machine, a[i][i]) for i in range(len(a))]), 0


def vector_merge(machine: TileMachine, a: Blocks) -> tuple[Blocks, int]:
    """Diagonal tiles by substitution on the vector unit, the rest by block rows, as FLA's solve_tril splits it."""
    return _merge_rows(machine, a, [_substitute(a[i][i]) for i in range(len(a))]), len(a)


def vector_rows(machine: TileMachine, a: Blocks) -> tuple[Blocks, int]:
    """All rows by substitution on the vector unit, as a row loop in plain torch does it; no matrix product at all."""
    n = len(a)
    return _blocks(_substitute(np.block(a))), n * (n + 1) // 2


def neumann(machine: TileMachine, a: Blocks) -> tuple[Blocks, int]:
    """(I - A)(I + A^2)(I + A^4)... over the whole chunk, skipping tiles that are zero by position."""
    n = len(a)
    span, reach = 2, n * TILE
    zero = np.zeros((TILE, TILE))

    def nonzero(power: int, i: int, j: int) -> bool:
        return TILE * (i - j) + TILE - 1 >= power

    def multiply(x: Blocks, px: int, y: Blocks, py: int) -> Blocks:
        out: Blocks = [[zero for _ in range(n)] for _ in range(n)]
        for i in range(n):
            for j in range(i + 1):
                pairs = [(x[i][k], y[k][j]) for k in range(j, i + 1) if nonzero(px, i, k) and nonzero(py, k, j)]
                if pairs and nonzero(px + py, i, j):
                    out[i][j] = machine.product(pairs)
        return out

    machine.group()
    power = multiply(a, 1, a, 1)
    odd = multiply(a, 1, power, 2)
    inverse = [[np.eye(TILE) * (i == j) - a[i][j] + power[i][j] - odd[i][j] for j in range(n)] for i in range(n)]
    while 2 * span < reach:
        machine.group()
        power = multiply(power, span, power, span)
        span *= 2
        change = multiply(inverse, 0, power, span)
        inverse = [[inverse[i][j] + change[i][j] for j in range(n)] for i in range(n)]
    return inverse, 0


METHODS: Mapping[str, Method] = {
    "neumann-merge": neumann_merge,
    "vector-merge": vector_merge,
    "vector-rows": vector_rows,
    "neumann": neumann,
}


def _blocks(dense: np.ndarray) -> Blocks:
    n = len(dense) // TILE
    return [[dense[TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)].copy() for j in range(n)] for i in range(n)]


def invert(a: np.ndarray, method: str = "neumann-merge", *, reuse: bool = True) -> InversionResult:
    """(I + a)^-1 for a strictly lower triangular [C, C], C a multiple of 16, by one of `METHODS`.

    Raises ValueError on an unknown method or a size that is no multiple of 16.
    """
    if method not in METHODS:
        raise ValueError(f"ha_npu: unknown inversion {method!r}; known: {', '.join(METHODS)}")
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.shape[0] % TILE or not a.size:
        raise ValueError(f"ha_npu: inversion needs a square matrix of a multiple of {TILE} rows, got {a.shape}")
    machine = TileMachine(reuse=reuse)
    blocks, vector_tiles = METHODS[method](machine, _blocks(np.asarray(a, dtype=np.float64)))
    return InversionResult(np.block(blocks), machine.products, machine.fractals, vector_tiles)


@cache
def inversion_counts(chunk_size: int, method: str = "neumann-merge", *, reuse: bool = True) -> tuple[int, int]:
    """(16x16x16 products, fractals from L1 to L0) of inverting a chunk, from a run of the method."""
    result = invert(np.zeros((chunk_size, chunk_size)), method, reuse=reuse)
    return result.products, result.fractals
