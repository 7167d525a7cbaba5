"""Tune the Triton experts on this GPU: time each GEMM's candidates alone, keep the best of each, write the table.

    vllm-ext bench tune-moe --shape DiffusionGemma --tokens 1 8 64 256
    vllm-ext bench tune-moe --shape 4096,1536,128,8

A shape is one of the benchmark's by name, or hidden,intermediate,experts,top_k of a rank, with the groups of both
weights behind them where they are not 128,64. Candidates are compiled by several processes before anything is timed.
The table goes where `choose` reads it (vllm_ext/ops/moe/triton/configs/<GPU>.json); other shapes' rows in it are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.moe_common import (
    SHAPES,
    Shape,
    graph_milliseconds,
    prepare_with_planes,
    random_experts,
    relative_error,
    routings,
)

from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import backend, config
from vllm_ext.ops.moe.triton.align import Alignment
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
ROUTINGS = 6
_SAME = 1e-2  # configurations round differently, by some 5e-3
# For a block of so many tokens, what is worth trying: GemmConfig's fields from block_rows on. Fewer registers mean more
# programs on a multiprocessor.
_Tile = tuple[int, int, int, str, "int | None", int, int, int, bool, bool, bool]


def _tiles(rows: int, warps: int, stages: int, scaling: str, registers: int | None, unroll: int, tiles: int) -> _Tile:
    """One program a tile."""
    return (rows, warps, stages, scaling, registers, unroll, tiles, 0, False, False, False)


def streamed(rows: int, warps: int, programs: int, split: bool = False, apart: bool = False) -> _Tile:
    """Persistent programs, scales applied to sums; a guess is tried with pairs (`choose_pair`)."""
    return (rows, warps, 12, "sum", None, 1, 1, programs, split, False, apart)


def wide(rows: int, warps: int, programs: int) -> _Tile:
    """Persistent programs, scales applied to codes."""
    return (rows, warps, 24, "operand", None, 1, 1, programs, False, False, False)


_TILES: dict[int, tuple[_Tile, ...]] = {
    8: (
        streamed(64, 4, 4),
        streamed(64, 4, 4, True),
        streamed(64, 4, 3),
        streamed(128, 4, 3),
        streamed(128, 4, 4),
        streamed(128, 4, 4, True),
        streamed(256, 4, 2),
        streamed(256, 4, 2, apart=True),
        streamed(256, 8, 2),
        streamed(256, 8, 2, True),
    ),
    16: (
        _tiles(64, 4, 4, "sum", None, 1, 1),
        _tiles(64, 4, 3, "sum", None, 2, 1),
        _tiles(128, 4, 4, "sum", 128, 1, 1),
        _tiles(128, 4, 4, "sum", 128, 1, 2),
        streamed(128, 4, 2),
        streamed(128, 4, 3),
        streamed(256, 4, 2),
        streamed(256, 4, 2, apart=True),
        streamed(256, 8, 2),
    ),
    32: (
        _tiles(128, 4, 4, "sum", None, 1, 1),
        _tiles(128, 4, 3, "sum", 168, 1, 1),
        streamed(128, 4, 2),
        streamed(128, 4, 3),
        streamed(256, 8, 1),
        wide(128, 4, 2),
        wide(256, 8, 2),
    ),
    64: (
        _tiles(128, 4, 3, "operand", 168, 1, 1),
        _tiles(256, 8, 3, "operand", 128, 1, 1),
        wide(128, 4, 2),
        wide(128, 8, 2),
        wide(256, 8, 1),
    ),
    128: (
        _tiles(128, 8, 3, "operand", 128, 1, 1),
        _tiles(256, 16, 3, "operand", 128, 1, 1),
        wide(128, 8, 1),
        wide(256, 8, 1),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """One way to run one of the two GEMMs ("gate_up" or "down"), on weights laid out in planes of `plane` columns."""

    gemm: str
    plane: int
    config: GemmConfig


def parse_shape(text: str) -> Shape:
    """A shape of the benchmark by its name, or any by its numbers."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 6) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(SHAPES)}, or hidden,intermediate,experts,top_k[,group_w13,group_w2]; "
            f"got {text!r}"
        )
    hidden, inter, experts, top_k, *groups = sizes
    return Shape(text, hidden, inter, experts, top_k, *(groups or (128, 64)), "silu")


def gemm_configs() -> list[GemmConfig]:
    """Every configuration worth trying."""
    made = []
    for tokens, tiles in _TILES.items():
        made += [GemmConfig(tokens, *tile) for tile in tiles]
    return made


def block_tokens_for(slots_per_expert: float) -> tuple[int, ...]:
    """Token blocks worth trying for a mean number of slots an expert."""
    for limit, blocks in ((6, (8, 16)), (12, (8, 16, 32)), (24, (16, 32)), (48, (32, 64)), (100, (64, 128))):
        if slots_per_expert <= limit:
            return blocks
    return (64, 128)


class Layer:
    """Experts of one shape, a few routings of one batch size, and each GEMM of the layer as a call to time."""

    def __init__(self, shape: Shape, experts: PreparedExperts, tokens: int, count: int) -> None:
        device = experts.tensors["w13_words"].device
        self.experts = experts
        self.options = CallOptions(activation=shape.activation)
        self.x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        self.weights, ids = zip(*routings(shape, tokens, count, device), strict=True)
        self.ids = [i % experts.meta.num_experts for i in ids]

    def gate_up(self, gemm: GemmConfig) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        """One call a routing."""
        launch = LaunchConfig(gemm, gemm)
        return [
            partial(backend.gate_up, launch, self.experts, weights, aligned, weights.shape[1], self.options)
            for aligned, weights in zip(self._aligned(launch), self.weights, strict=True)
        ]

    def down(self, gemm: GemmConfig) -> list[Callable[[], torch.Tensor]]:
        """One call a routing; the first GEMM has run once, before."""
        launch = LaunchConfig(GemmConfig(max(16, gemm.block_tokens), 128, 8, 1, gemm.scaling), gemm)
        calls: list[Callable[[], torch.Tensor]] = []
        for aligned, weights in zip(self._aligned(launch), self.weights, strict=True):
            inner, sums = backend.gate_up(launch, self.experts, weights, aligned, weights.shape[1], self.options)
            calls.append(partial(backend.down, launch, inner, sums, self.experts, aligned))
        return calls

    def _aligned(self, launch: LaunchConfig) -> list[Alignment]:
        return [backend.align_call(launch, self.x, ids, None, self.experts) for ids in self.ids]

    def whole(self, launch: LaunchConfig) -> list[Callable[[], torch.Tensor]]:
        """The whole layer, one call a routing."""
        return [
            partial(backend.run, launch, self.x, self.experts, weights, ids, None, self.options)
            for weights, ids in zip(self.weights, self.ids, strict=True)
        ]


_WORKER: dict[str, Any] = {}


def _compile(task: tuple[Shape, Candidate]) -> str | None:
    """Compile one candidate in a worker; the reason when it cannot run."""
    shape, candidate = task
    device = torch.device("cuda", 0)
    key = f"{shape.name} {candidate.gemm} {candidate.plane}"
    try:
        if key not in _WORKER:
            planes = (candidate.plane, None) if candidate.gemm == "gate_up" else (None, candidate.plane)
            experts = prepare_with_planes(*random_experts(shape, "float", device, experts=2), planes)
            _WORKER[key] = Layer(shape, experts, 1, 1)
        getattr(_WORKER[key], candidate.gemm)(candidate.config)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def compile_all(wanted: list[tuple[Shape, Candidate]], workers: int) -> dict[tuple[str, Candidate], str]:
    """Compile in `workers` processes; returns the candidates that cannot run, with reasons."""
    started = time.time()
    failed: dict[tuple[str, Candidate], str] = {}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap(_compile, wanted)
        for number, ((shape, candidate), reason) in enumerate(zip(wanted, results, strict=True), 1):
            if reason:
                failed[shape.name, candidate] = reason
            print(f"\rcompiled {number} of {len(wanted)}, {time.time() - started:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr, flush=True)
    return failed


def sweep(
    shape: Shape, wanted: list[Candidate], tokens: tuple[int, ...], device: torch.device, replays: int = 4
) -> list[dict[str, Any]]:
    """Milliseconds of every candidate at every batch size: one row each."""
    w13, w2 = random_experts(shape, "float", device)
    rows: list[dict[str, Any]] = []
    for gemm, plane in sorted({(c.gemm, c.plane) for c in wanted}):
        experts = prepare_with_planes(w13, w2, (plane, None) if gemm == "gate_up" else (None, plane))
        for count in tokens:
            blocks = block_tokens_for(count * shape.top_k / shape.experts)
            layer = Layer(shape, experts, count, ROUTINGS)
            for candidate in wanted:
                gemm_config = candidate.config
                if (candidate.gemm, candidate.plane) == (gemm, plane) and gemm_config.block_tokens in blocks:
                    milliseconds = graph_milliseconds(getattr(layer, gemm)(gemm_config), replays)
                    rows.append(
                        {"gemm": gemm, "plane": plane, "tokens": count, "ms": milliseconds, "config": vars(gemm_config)}
                    )
            print(f"\r{shape.name} {gemm} plane {plane} M={count}   ", end="", file=sys.stderr)
    print(file=sys.stderr, flush=True)
    return rows


def fastest(rows: list[dict[str, Any]], gemm: str, plane: int, tokens: int, count: int) -> list[dict[str, Any]]:
    """The `count` fastest rows of one GEMM at one batch size."""
    fit = [row for row in rows if (row["gemm"], row["plane"], row["tokens"]) == (gemm, plane, tokens)]
    return sorted(fit, key=lambda row: float(row["ms"]))[:count]


def _can_guess(launch: LaunchConfig) -> bool:
    return launch.gate_up.programs > 0 and launch.gate_up.scaling == "sum" and not launch.gate_up.split


def choose_pair(
    layer: Layer, rows: list[dict[str, Any]], planes: tuple[int, int], tokens: int
) -> tuple[LaunchConfig, float]:
    """The best of the pairs of each GEMM's three fastest, by the time of the whole layer.

    Alone, a GEMM finds its weights in the L2 cache more often than in a layer. A pair whose output is not that of the
    rule's configuration is left out. First weights may be asked for before the slots are known ("guess").
    """
    pairs = itertools.product(
        *(fastest(rows, gemm, plane, tokens, 3) for gemm, plane in zip(("gate_up", "down"), planes, strict=True))
    )
    launches = [LaunchConfig(*(GemmConfig(**row["config"]) for row in pair)) for pair in pairs]
    # Only in a layer is there a time, while slots are listed, to ask for weights in.
    launches += [LaunchConfig(replace(pair.gate_up, guess=True), pair.down) for pair in launches if _can_guess(pair)]
    slots = tokens * layer.weights[0].shape[1] / layer.experts.meta.num_experts
    expected = layer.whole(config.rule(slots))[0]()
    timed = []
    for launch in launches:
        error = relative_error(layer.whole(launch)[0](), expected)
        if error <= _SAME:
            timed.append((graph_milliseconds(layer.whole(launch)), launch))
        else:
            print(f"left out, error {error:.1e}: {launch}", file=sys.stderr)
    milliseconds, launch = min(timed, key=lambda pair: pair[0])
    return launch, milliseconds


def main(argv: list[str]) -> int:
    """`vllm-ext bench tune-moe`."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench tune-moe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", type=parse_shape, default=list(SHAPES.values()), metavar="SHAPE",
        help=f"{', '.join(SHAPES)}, or hidden,intermediate,experts,top_k[,group_w13,group_w2]; all three",
    )  # fmt: skip
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--planes-w13", nargs="+", type=int, default=[])
    parser.add_argument("--planes-w2", nargs="+", type=int, default=[])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--raw", type=Path, help="also write every timing here, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="time and print, but leave the table as it is")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("vllm-ext bench tune-moe: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0)
    raw: dict[str, Any] = {}
    path = Path(config.__file__).parent / "configs" / config.table_name(torch.cuda.get_device_name(device))
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"shapes": {}}
    wanted: dict[str, list[Candidate]] = {}
    shapes = {shape.name: shape for shape in args.shape}
    for name, shape in shapes.items():
        natural = prepare_with_planes(*random_experts(shape, "float", device, experts=1), (None, None))
        planes = {
            "gate_up": args.planes_w13 or [natural.tensors["w13_words"].shape[3]],
            "down": args.planes_w2 or [natural.tensors["w2_words"].shape[3]],
        }
        blocks = {b for m in args.tokens for b in block_tokens_for(m * shape.top_k / shape.experts)}
        configs = [gemm for gemm in gemm_configs() if gemm.block_tokens in blocks]
        wanted[name] = [Candidate(g, plane, c) for g in planes for plane in planes[g] for c in configs]
    failed = compile_all([(shapes[name], c) for name in wanted for c in wanted[name]], args.workers)
    for (name, candidate), reason in failed.items():
        print(f"cannot run {name} {candidate}: {reason}", file=sys.stderr)
    for name, tried in wanted.items():
        shape = shapes[name]
        rows = sweep(shape, [c for c in tried if (name, c) not in failed], tuple(args.tokens), device)
        raw[name] = rows
        experts = prepare_with_planes(*random_experts(shape, "float", device), (None, None))
        own = (experts.tensors["w13_words"].shape[3], experts.tensors["w2_words"].shape[3])
        entries = {}
        for tokens in args.tokens:
            for gemm in ("gate_up", "down"):
                for plane in sorted({c.plane for c in tried if c.gemm == gemm}):
                    row = fastest(rows, gemm, plane, tokens, 1)[0]
                    config_text = tuple(row["config"].values())
                    print(f"{name} M={tokens} {gemm} plane {plane}: {row['ms']:.4f} ms {config_text}")
            if own[0] in (args.planes_w13 or [own[0]]) and own[1] in (args.planes_w2 or [own[1]]):
                launch, total = choose_pair(Layer(shape, experts, tokens, ROUTINGS), rows, own, tokens)
                chosen = [tuple(vars(gemm_config).values()) for gemm_config in (launch.gate_up, launch.down)]
                print(f"{name} M={tokens}: layer {total:.4f} ms {chosen}", flush=True)
                entries[f"{tokens * shape.top_k / shape.experts:g}"] = launch.to_json()
        table["shapes"].setdefault(config.shape_key(experts.meta, shape.top_k), {}).update(entries)
    if args.raw:
        args.raw.write_text(json.dumps(raw), encoding="utf-8")
    if not args.dry_run:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0
