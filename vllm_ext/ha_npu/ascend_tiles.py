"""Where the Ascend C prefill kernels keep what: every tile of a core's buffers, with its size and its lifetime.

The kernels of `csrc_ascend/kernels` take all their offsets from here, through `header.emit_header`. Sizes are functions
of the key and value dimension. A tile is in use from its first to its last step of a chunk. Where a buffer has room for
all of its tiles, each has a place of its own, so that no pipe waits for another to be done with it; where it has not,
tiles that are never in use together share. Standard library only: builds of the kernels run this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_ext.ha_npu.chips import BUFFERS, Chip
from vllm_ext.ha_npu.first_fit import Placement, place_tiles

KERNEL_STRATEGY = "ha-npu-kernel"
KERNEL_DIMS = (64, 128)
FAMILIES: Mapping[str, str] = {"dav-2002": "310p1", "dav-3002": "310b1"}
"""Compiler targets there are kernels for, each with a chip that has its buffers."""

CHUNK, TILE = 64, 16
TILES = CHUNK // TILE
FRACTAL = TILE * TILE
SQUARE = CHUNK * CHUNK
SPREAD = CHUNK * 8
"""A number for each token, in a block of 32 bytes of its own."""
LOWER_FRACTALS = TILES * (TILES + 1) // 2
BELOW_FRACTALS = LOWER_FRACTALS - TILES

GDN_STEPS = ("stage", "read", "gates", "decays", "query_key", "solve", "new_values", "output", "update")
KDA_STEPS = ("gates", "operands", "read", "diagonal_pairs", "solve", "new_values", "output", "update")


@dataclass(frozen=True)
class Tile:
    """`elements` of a type in a buffer; `steps` are the first and the last of its lifetime, or all of them."""

    name: str
    buffer: str
    dtype: str
    elements: int
    steps: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        return self.elements * {"fp16": 2, "fp32": 4}[self.dtype]


def _in(buffer: str, dtype: str, sizes: Mapping[str, int]) -> list[Tile]:
    return [Tile(name, buffer, dtype, elements) for name, elements in sizes.items()]


def _shared_tiles(keys: int, values: int, state: int) -> list[Tile]:
    """Inputs as they come, and the operands both kernels have in L1."""
    rows = _in("ub", "fp16", {"key_rows": keys, "query_rows": keys, "value_rows": values})
    operands = {
        "state_l1": state,
        "negative_a": SQUARE - CHUNK * TILE,  # its last strip is a diagonal tile
        "inverse": SQUARE,
        "p": SQUARE,
        "sums": 3 * FRACTAL,
        "right_side": values,
        "new_values": values,
    }
    return [*rows, *_in("l1", "fp16", operands)]


def _accumulators(values: int, state: int, scores: Tile) -> list[Tile]:
    """A place in L0C for each product of a chunk."""
    return [
        Tile("read", "l0c", "fp32", 2 * values, ("read", "output")),
        scores,
        Tile("merged", "l0c", "fp32", 6 * FRACTAL, ("solve", "solve")),
        Tile("values", "l0c", "fp32", values, ("new_values", "new_values")),
        Tile("attended", "l0c", "fp32", values, ("output", "output")),
        Tile("change", "l0c", "fp32", state, ("update", "update")),
    ]


def gdn_tiles(key_dim: int, value_dim: int) -> list[Tile]:
    """The tiles of `gdn_prefill`."""
    keys, values, state = CHUNK * key_dim, CHUNK * value_dim, key_dim * value_dim
    floats = {
        "state": state,
        "x": values,
        "y": max(keys, values, 2 * SQUARE, state // 2),  # 2 SQUARE: multipliers of the diagonal tiles, spread
        "decay": SQUARE,
        "a": SQUARE,
        "swap": SQUARE,
        **dict.fromkeys(
            ("local", "tail", "beta_spread", "key_norm", "query_scale", "from_start", "minus_beta"), SPREAD
        ),
        **dict.fromkeys(("gate", "beta_compact", "behind", "norm_columns", "norm_scratch", "minus_columns"), CHUNK),
        **dict.fromkeys(("lower_mask", "upper_mask", "identity"), FRACTAL),
        "across": 6 * TILE,
        "edges": 9 * 8,
    }
    scores = Tile("scores", "l0c", "fp32", 2 * SQUARE, ("read", "query_key"))
    return [
        *_in("ub", "fp32", floats),
        *_shared_tiles(keys, values, state),
        *_in("l1", "fp16", {"keys": keys, "queries": keys, "tail_values": values}),
        # What rounding takes from an operand, where the host asks for operands in two halves.
        *_in("l1", "fp16", {"state_low": state, "negative_low": SQUARE - CHUNK * TILE, "inverse_low": SQUARE}),
        *_in("l1", "fp16", {"p_low": SQUARE, "sums_low": 3 * FRACTAL}),
        *_in("l1", "fp16", dict.fromkeys(("right_low", "new_low", "tail_low"), values)),
        # [K; Q], later the transposed left operand of the update.
        *_in("l0a", "fp16", {"kq_left": 2 * keys, "t_left": SQUARE, "p_left": SQUARE, "small_left": 6 * FRACTAL}),
        # The state, later the update's right operand; K^T, later V'; the inversion's tiles, later the right-hand side.
        *_in("l0b", "fp16", {"state_right": state, "key_right": max(keys, values)}),
        Tile("wide_right", "l0b", "fp16", values),
        *_accumulators(values, state, scores),
    ]


def kda_tiles(key_dim: int, value_dim: int) -> list[Tile]:
    """The tiles of `kda_prefill`. Between updates the float state waits in L1; with `query` `key` holds all of it."""
    keys, values, state, column = CHUNK * key_dim, CHUNK * value_dim, key_dim * value_dim, CHUNK * TILE
    tile = max(keys, values, state // 2, 2 * SQUARE)
    pairs = BELOW_FRACTALS * TILE * key_dim
    floats = {
        "local": tile,
        "key_query": 2 * tile,
        "decay": tile,
        "product": tile,
        "attention": 2 * column,
        "columns": 2 * column,
        "beta_compact": CHUNK,
        "beta_spread": SPREAD,
        "minus_beta": SPREAD,
        "minus_columns": CHUNK,
        "last": key_dim,
        "last_spread": 8 * key_dim,
        "norms": 3 * CHUNK,
        "identity": FRACTAL,
        "edges": BELOW_FRACTALS * key_dim,
    }
    operands = ("read_keys", "read_queries", "later_keys", "later_queries", "tail_keys")
    # Left operands of the pairs, later T and P; right ones, later V' and the right-hand side.
    pair_left, triangles = 3 * 2 * TILE * key_dim, 2 * SQUARE
    pair_right, later = pairs, 2 * values
    scores = Tile("pairs", "l0c", "fp32", 2 * BELOW_FRACTALS * FRACTAL, ("read", "solve"))
    return [
        *_in("ub", "fp32", floats),
        *_shared_tiles(keys, values, state),
        Tile("parked", "l1", "fp32", state),
        *_in("l1", "fp16", dict.fromkeys(operands, keys)),
        Tile("earlier_keys", "l1", "fp16", pairs),
        *_in("l0a", "fp16", {"kq_left": 2 * keys, "pair_left": max(pair_left, triangles), "small_left": 3 * FRACTAL}),
        *_in("l0b", "fp16", {"state_right": state, "pair_right": max(pair_right, later)}),
        *_accumulators(values, state, scores),
    ]


INVENTORIES: Mapping[str, tuple[tuple[str, ...], Callable[[int, int], list[Tile]]]] = {
    "gdn": (GDN_STEPS, gdn_tiles),
    "kda": (KDA_STEPS, kda_tiles),
}
"""By operator: the steps of a chunk, and the tiles of a kernel for a key and a value dimension."""


def tile_places(op: str, key_dim: int, value_dim: int, chip: Chip) -> tuple[dict[str, Placement], dict[str, int]]:
    """(places by tile, highest byte in use by buffer). Raises ValueError when a buffer of the chip is too small."""
    steps, inventory = INVENTORIES[op]
    places: dict[str, Placement] = {}
    peaks: dict[str, int] = {}
    tiles = inventory(key_dim, value_dim)
    for buffer in BUFFERS:
        mine = [tile for tile in tiles if tile.buffer == buffer]
        spans = {t.name: _span(t, steps) for t in mine}
        sizes = {t.name: chip.buffers[buffer].align(t.nbytes) for t in mine}
        usable = chip.buffers[buffer].usable
        if sum(sizes.values()) <= usable:
            offsets, peak = _one_after_another(sizes)
        else:
            offsets, peak = place_tiles(sizes, spans)
        if peak > usable:
            raise ValueError(
                f"ha_npu: {op} kernel: key_dim {key_dim}, value_dim {value_dim} need {peak} bytes of {buffer.upper()}, "
                f"{chip.name} has {usable} usable; take smaller heads, or another chip"
            )
        peaks[buffer] = peak
        for name, offset in offsets.items():
            places[name] = Placement(f"{buffer}:{name}", buffer, offset, sizes[name], *spans[name])
    return places, peaks


def _one_after_another(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[name] = at
        at += size
    return offsets, at


def _span(tile: Tile, steps: Sequence[str]) -> tuple[int, int]:
    if tile.steps is None:
        return 0, len(steps) - 1
    return steps.index(tile.steps[0]), steps.index(tile.steps[1])
