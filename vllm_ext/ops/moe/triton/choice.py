"""Which configuration a call is launched with: a table's row, or a rule for the GPUs and shapes that tables lack.

For calls that the persistent kernels serve (stream.py) the rule takes those wherever they cover the weights: what is
fast for most of the tuned shapes at so many slots an expert (docs/moe_kernels.md). For others it takes tiles (gemm.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from vllm_ext.ops.moe.experts import ExpertsMeta
from vllm_ext.ops.moe.triton import stream
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig, group_key, load_table, shape_key
from vllm_ext.ops.moe.triton.layout import plane_width

# One block size for every batch, so that no row's bits can depend on how many others there are.
_BATCH_INVARIANT_TOKENS = 32
# FP32 activations are for checking: a ring of few and small tiles, which fits into every GPU's shared memory.
_FP32 = LaunchConfig(GemmConfig(16, 64, 4, 2), GemmConfig(16, 64, 4, 2))
# The rule changes at the batch sizes at which tables do: a batch half of padding is launched as without it, and a model
# compiles no more kernels than with a table. And above them, for the few that have under 72 slots an expert at 4096.
RULE_TOKENS = (1, 8, 32, 64, 256, 1024, 4096, 16384, 65536)


def streamed(
    tokens: int, rows: int, warps: int, programs: int, split: bool = False, guess: bool = False, apart: bool = False
) -> GemmConfig:
    """Persistent programs, scales applied to sums."""
    return GemmConfig(tokens, rows, warps, 12, programs=programs, split=split, guess=guess, apart=apart)


def wide(tokens: int, rows: int, warps: int, programs: int) -> GemmConfig:
    """Persistent programs, scales applied to codes."""
    return GemmConfig(tokens, rows, warps, 24, "operand", programs=programs)


# One program a tile, scales applied to codes.
_OPERAND_TILES = GemmConfig(64, 128, 4, 3, "operand", 168)
_Preferred = tuple[tuple[float, tuple[GemmConfig, ...]], ...]
# Up to so many slots an expert: what to take, best first; the first that suits the weights is taken.
_GATE_UP: _Preferred = (
    (1.5, (streamed(8, 64, 4, 4),)),
    (6, (streamed(8, 128, 4, 4), streamed(8, 64, 4, 4))),
    (12, (streamed(16, 128, 4, 2), streamed(16, 64, 4, 4))),
    (48, (GemmConfig(32, 128, 4, 4),)),
    (72, (wide(64, 128, 4, 2), wide(64, 256, 8, 1), _OPERAND_TILES)),
    (float("inf"), (wide(128, 128, 8, 1), wide(64, 256, 8, 1), _OPERAND_TILES)),
)
_DOWN: _Preferred = (
    (0.2, (streamed(8, 64, 4, 4),)),
    (6, (streamed(8, 256, 4, 2), streamed(8, 128, 4, 4), streamed(8, 64, 4, 4))),
    (12, (streamed(16, 256, 4, 2), streamed(16, 128, 4, 3), streamed(16, 64, 4, 4))),
    (48, (wide(32, 256, 8, 2), streamed(16, 256, 4, 2), streamed(32, 128, 4, 3), GemmConfig(32, 128, 4, 4))),
    (72, (wide(64, 256, 8, 1), _OPERAND_TILES)),
    (float("inf"), (wide(128, 256, 8, 1), _OPERAND_TILES)),
)
# Two and a half pieces of work a multiprocessor of an H200: with fewer, rows are better shared by more programs. With
# more than so many slots an expert its one block is often two.
_LEAST_PIECES, _ONE_BLOCK = 330, 12
# Down in fewer pieces than that, of at least so many columns: programs share K tiles instead. Of 1792 it lost up to 8%.
_SHARED_COLUMNS = 3584
_SHARED = ((6, streamed(8, 256, 4, 2, split=True)), (24, streamed(16, 256, 4, 2, split=True)))
# A wide kernel keeps the sums of a block's activations beside the ring, and takes the zero points' term from them.
_MOST_SUMS = 128


def portable(slots_per_expert: float) -> LaunchConfig:
    """The rule for any GPU, from the mean number of slots an expert gets: tiles."""
    if slots_per_expert <= 8:
        config = LaunchConfig(GemmConfig(16, 64, 4, 4), GemmConfig(16, 64, 4, 4))
    elif slots_per_expert <= 24:
        config = LaunchConfig(GemmConfig(32, 128, 4, 3), GemmConfig(32, 128, 4, 3))
    else:
        config = LaunchConfig(GemmConfig(64, 64, 4, 3), GemmConfig(64, 64, 4, 3))
    return config


def persistent(meta: ExpertsMeta, num_tokens: int, top_k: int, num_global: int) -> LaunchConfig:
    """The rule for calls that the persistent kernels serve: those wherever they cover a weight, else as `portable`."""
    tokens = max(size for size in RULE_TOKENS if size <= max(num_tokens, 1))
    slots, tiles = tokens * top_k / num_global, portable(_step(num_tokens) * top_k / num_global)
    first, second = sizes_of(meta)
    hit = meta.num_experts * (1 - (1 - min(1, top_k / num_global)) ** tokens)
    down = _shared(slots, second, hit) or _preferred(_DOWN, slots, second, hit) or tiles.down
    return LaunchConfig(_preferred(_GATE_UP, slots, first, hit) or tiles.gate_up, down)


def _step(num_tokens: int) -> int:
    """The power of two, or middle between two, at or below: of the sizes that an engine runs while it starts.

    Where one GEMM is tiles and the other not, tiles that changed in between would be pairs that no such size has.
    """
    power = 1 << max(num_tokens, 1).bit_length() - 1
    return power + power // 2 if num_tokens >= power + power // 2 else power


def rule(meta: ExpertsMeta, num_tokens: int, top_k: int, num_global: int, plain: bool) -> LaunchConfig:
    """What is launched where no table has the shape; plain: whether the persistent kernels serve the call."""
    return persistent(meta, num_tokens, top_k, num_global) if plain else portable(num_tokens * top_k / num_global)


def sizes_of(meta: ExpertsMeta) -> tuple[stream.Sizes, stream.Sizes]:
    """Both GEMMs of experts as `backend.prepare` lays them out."""
    planes = (
        plane_width(meta.hidden_size, meta.group_size_w13),
        plane_width(meta.intermediate_size, meta.group_size_w2),
    )
    return stream.layer_sizes(meta, planes)


def _preferred(table: _Preferred, slots: float, sizes: stream.Sizes, hit: float) -> GemmConfig | None:
    """The best for so many slots an expert, `hit` experts having any; none where no configuration suits the weight."""
    configs = next(configs for limit, configs in table if slots <= limit)
    suit = [gemm for gemm in configs if _suits(gemm, sizes)]
    full = [gemm for gemm in suit if _pieces(gemm, sizes, slots, hit) >= _LEAST_PIECES]
    return next(iter(full or suit[-1:]), None)


def _shared(slots: float, sizes: stream.Sizes, hit: float) -> GemmConfig | None:
    """Programs that share down's K tiles, where its pieces are few and long."""
    gemm = next((gemm for limit, gemm in _SHARED if slots <= limit), None)
    if gemm is None or sizes.columns < _SHARED_COLUMNS or not sizes.covered(gemm):
        return None
    # An expert's last block is half full.
    blocks = hit * max(1, slots / gemm.block_tokens + 0.5)
    return gemm if blocks * sizes.rows / gemm.block_rows < _LEAST_PIECES else None


def _suits(gemm: GemmConfig, sizes: stream.Sizes) -> bool:
    if not gemm.programs:
        return gemm.scaling == "sum" or sizes.group % sizes.plane == 0
    return sizes.covered(gemm) and not (stream.wide(gemm) and sizes.columns // sizes.sum_width > _MOST_SUMS)


def _pieces(gemm: GemmConfig, sizes: stream.Sizes, slots: float, hit: float) -> float:
    """Pieces of work of streaming programs for few slots; the others are chosen by slots alone."""
    if not gemm.programs or stream.wide(gemm) or slots > _ONE_BLOCK:
        return float("inf")
    return hit * sizes.rows / gemm.block_rows


def row(rows: dict[str, Any], slots_per_expert: float) -> str:
    """The key of a shape's row for so many slots an expert: the nearest at or below, or the lowest."""
    tuned = sorted(rows, key=float)
    below = [key for key in tuned if float(key) <= slots_per_expert * 1.001]
    return below[-1] if below else tuned[0]


@lru_cache(maxsize=64)
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@lru_cache(maxsize=4096)
def choose(
    meta: ExpertsMeta,
    num_tokens: int,
    top_k: int,
    num_global: int,
    batch_invariant: bool,
    device_index: int,
    plain: bool,
) -> LaunchConfig:
    """The configuration for a call.

    num_global    experts that slots are spread over: all ranks', of which meta has this one's
    device_index  -1 is the interpreter
    plain         whether the persistent kernels serve the call

    The table is looked up by the number of slots an expert gets on average, nearest below in its rows; a shape that it
    lacks takes the rows of no other shape but a rule. A rank that holds some of a shape's experts takes the shape's.
    Rows for given group sizes go before those of the shape. A batch-invariant call takes one configuration for all
    sizes, and so does every call in FP32.
    """
    if meta.dtype == torch.float32:
        return _FP32
    if batch_invariant:
        return portable(_BATCH_INVARIANT_TOKENS / 2)
    table = load_table(_device_name(device_index)) if device_index >= 0 else {}
    key = shape_key(meta, num_global, top_k)
    rows = table.get(key, {}) | table.get(f"{key}_{group_key(meta)}", {})
    if rows:
        return LaunchConfig.from_json(rows[row(rows, num_tokens * top_k / num_global)])
    return rule(meta, num_tokens, top_k, num_global, plain)
