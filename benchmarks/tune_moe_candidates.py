"""What the tuner of the Triton experts tries at so many slots an expert: what won for the shapes tuned before, and its
neighbours."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ext.ops.moe.triton import stream
from vllm_ext.ops.moe.triton.choice import streamed, wide
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig


def _tiles(tokens: int, rows: int, warps: int, stages: int, unroll: int = 1) -> GemmConfig:
    """One program a tile, scales applied to sums."""
    return GemmConfig(tokens, rows, warps, stages, unroll=unroll)


def _operand_tiles(tokens: int, rows: int, warps: int, registers: int) -> GemmConfig:
    """One program a tile, scales applied to codes."""
    return GemmConfig(tokens, rows, warps, 3, "operand", registers)


_Lists = tuple[tuple[GemmConfig, ...], tuple[GemmConfig, ...]]
_FEW: _Lists = (
    (
        streamed(8, 64, 4, 4),
        streamed(8, 64, 4, 4, split=True),
        streamed(8, 64, 4, 3),
        streamed(8, 128, 4, 4),
        streamed(8, 256, 4, 2),
        _tiles(16, 64, 4, 3, 2),
    ),
    (
        streamed(8, 64, 4, 4),
        streamed(8, 128, 4, 4),
        streamed(8, 256, 4, 2),
        streamed(8, 256, 4, 2, apart=True),
        streamed(8, 256, 8, 2),
        # Few experts leave most programs idle unless they share a row's tiles.
        streamed(8, 64, 4, 4, split=True),
        streamed(8, 128, 4, 4, split=True),
        streamed(8, 256, 4, 2, split=True),
    ),
)
# From two slots an expert on nearly every expert has some, so that first weights may be guessed.
_GUESSED = (
    streamed(8, 64, 4, 4, guess=True),
    streamed(8, 128, 4, 4, guess=True),
    streamed(8, 256, 4, 2, guess=True),
    streamed(8, 256, 4, 2, guess=True, apart=True),
)
# Up to so many slots an expert: candidates for gate and up, and for down.
_CANDIDATES: tuple[tuple[float, _Lists], ...] = (
    (1.5, _FEW),
    (6, ((*_FEW[0], *_GUESSED), _FEW[1])),
    (
        12,
        (
            (
                streamed(16, 128, 4, 2),
                streamed(16, 128, 4, 2, guess=True),
                streamed(16, 128, 4, 3),
                streamed(16, 256, 4, 2),
                streamed(16, 64, 4, 4),
                streamed(8, 128, 4, 4, guess=True),
                _tiles(16, 64, 4, 3, 2),
            ),
            (
                streamed(16, 256, 4, 2),
                streamed(16, 256, 4, 2, apart=True),
                streamed(16, 128, 4, 3),
                streamed(16, 64, 4, 4),
                streamed(8, 256, 4, 2),
                streamed(16, 64, 4, 4, split=True),
                streamed(16, 256, 4, 2, split=True),
            ),
        ),
    ),
    (
        24,
        (
            (
                _tiles(32, 128, 4, 4),
                streamed(32, 128, 4, 2),
                streamed(16, 128, 4, 2),
                streamed(16, 256, 4, 2),
                wide(32, 128, 4, 2),
            ),
            (
                streamed(16, 256, 4, 2),
                streamed(16, 256, 4, 2, apart=True),
                streamed(16, 256, 4, 2, split=True),
                wide(32, 256, 8, 2),
                streamed(32, 128, 4, 3),
                streamed(32, 64, 4, 4),
            ),
        ),
    ),
    (
        48,
        (
            (
                _tiles(32, 128, 4, 4),
                streamed(32, 128, 4, 2),
                wide(64, 128, 4, 2),
                wide(32, 128, 4, 2),
                _operand_tiles(64, 128, 4, 168),
            ),
            (wide(32, 256, 8, 2), wide(64, 128, 4, 2), wide(64, 256, 8, 1), _operand_tiles(64, 128, 4, 168)),
        ),
    ),
    (
        100,
        (
            (
                wide(64, 128, 4, 2),
                wide(64, 128, 8, 2),
                wide(64, 256, 8, 1),
                wide(128, 128, 8, 1),
                _operand_tiles(64, 128, 4, 168),
            ),
            (
                wide(64, 256, 8, 1),
                wide(64, 128, 4, 2),
                wide(128, 256, 8, 1),
                wide(128, 128, 8, 1),
                _operand_tiles(64, 128, 4, 168),
            ),
        ),
    ),
    (
        float("inf"),
        (
            (
                wide(128, 128, 8, 1),
                wide(64, 128, 4, 2),
                wide(64, 256, 8, 1),
                _operand_tiles(128, 128, 8, 128),
                _operand_tiles(64, 128, 4, 168),
            ),
            (
                wide(128, 256, 8, 1),
                wide(64, 128, 4, 2),
                wide(64, 256, 8, 1),
                wide(128, 128, 8, 1),
                _operand_tiles(64, 128, 4, 168),
            ),
        ),
    ),
)

_FEW_TILES = (
    _tiles(16, 64, 4, 4),
    _tiles(16, 64, 4, 3, 2),
    _tiles(16, 128, 4, 3),
    GemmConfig(16, 128, 4, 4, max_registers=128),
    GemmConfig(16, 128, 4, 4, max_registers=128, row_tiles=2),
)
_SOME_TILES = (_tiles(32, 64, 4, 3), _tiles(32, 128, 4, 3), GemmConfig(32, 128, 4, 3, max_registers=168))
_MORE_TILES = (_tiles(64, 64, 4, 3), _operand_tiles(64, 128, 4, 168), _operand_tiles(64, 256, 8, 128))
_MANY_TILES = (_operand_tiles(128, 128, 8, 128), _operand_tiles(128, 256, 16, 128))
# The same where persistent programs do not serve or cover a weight.
_TILES: tuple[tuple[float, tuple[GemmConfig, ...]], ...] = (
    (6, _FEW_TILES),
    (24, (*_FEW_TILES, *_SOME_TILES)),
    (48, (*_SOME_TILES, *_MORE_TILES)),
    (float("inf"), (*_MORE_TILES, *_MANY_TILES)),
)


def candidates(
    slots_per_expert: float, sizes: tuple[stream.Sizes, stream.Sizes], persistent: bool
) -> list[list[GemmConfig]]:
    """What is worth trying for gate and up, and for down, of what the weights' sizes allow.

    persistent  whether the persistent kernels serve the layer at all: not with biases, nor on other GPUs
    """
    lists = next(lists for limit, lists in _CANDIDATES if slots_per_expert <= limit)
    tiles = next(found for limit, found in _TILES if slots_per_expert <= limit)
    made = []
    for found, size in zip(lists, sizes, strict=True):
        allowed = [gemm for gemm in found if not gemm.programs or (persistent and size.covered(gemm))]
        if not any(gemm.programs for gemm in allowed):
            allowed = list(dict.fromkeys([*allowed, *tiles]))
        made.append(allowed)
    return made


def every_kernel(firsts: Iterable[GemmConfig], seconds: Iterable[GemmConfig]) -> list[LaunchConfig]:
    """Pairs by which every kernel of every pair is compiled.

    The first GEMM's depends on how the second scales; the second's on whether blocks begin with one for every expert;
    align's on both blocks.
    """
    one_of = {(gemm.block_tokens, gemm.scaling, gemm.programs > 0, gemm.split): gemm for gemm in seconds}
    by_first = [LaunchConfig(first, second) for first in firsts for second in one_of.values()]
    blocks = {(gemm.block_tokens, gemm.guess, gemm.scaling): gemm for gemm in firsts}
    by_second = [LaunchConfig(first, second) for second in seconds for first in blocks.values()]
    return list(dict.fromkeys([*by_first, *by_second]))
