"""Tune the Triton experts on this GPU: time each GEMM's candidates alone, keep the best of each, write the table.

    vllm-ext bench tune-moe --shape DiffusionGemma --tokens 1 8 64 256

Candidates are compiled by several processes before anything is timed. The table goes where `choose` reads it
(vllm_ext/ops/moe/triton/configs/<GPU>.json); rows of other shapes in it are kept.
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
from dataclasses import dataclass
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
    routings,
)

from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import backend, config
from vllm_ext.ops.moe.triton.align import align
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
ROUTINGS = 6
# (rows, warps, stages) worth trying for a block of so many tokens, and where the scale may be applied.
_TILES: dict[int, tuple[tuple[tuple[int, int, int], ...], tuple[str, ...]]] = {
    16: (((32, 4, 4), (64, 4, 3), (64, 4, 4), (64, 4, 6), (128, 4, 3), (128, 4, 4), (128, 8, 4)), ("sum",)),
    32: (
        ((64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (256, 8, 3)),
        ("sum",),
    ),
    64: (((64, 4, 3), (128, 4, 3), (128, 4, 4), (128, 8, 3), (128, 8, 4), (256, 8, 3)), ("sum", "operand")),
    128: (((64, 4, 3), (128, 4, 3), (128, 8, 3), (128, 8, 4), (256, 8, 3)), ("sum", "operand")),
    256: (((64, 4, 3), (128, 8, 3)), ("operand",)),
}


@dataclass(frozen=True)
class Candidate:
    """One way to run one of the two GEMMs ("gate_up" or "down"), on weights laid out in planes of `plane` columns."""

    gemm: str
    block_tokens: int
    plane: int
    config: GemmConfig


def candidates(planes13: list[int], planes2: list[int]) -> list[Candidate]:
    """Every candidate of both GEMMs."""
    made = []
    for tokens, (tiles, scalings) in _TILES.items():
        for (rows, warps, stages), scaling in itertools.product(tiles, scalings):
            gemm = GemmConfig(rows, warps, stages, scaling)
            made += [Candidate("gate_up", tokens, plane, gemm) for plane in planes13]
            made += [Candidate("down", tokens, plane, gemm) for plane in planes2]
    return made


def block_tokens_for(slots_per_expert: float) -> tuple[int, ...]:
    """Token blocks worth trying for a mean number of slots an expert."""
    for limit, blocks in ((2.5, (16,)), (10, (16, 32)), (24, (16, 32, 64)), (100, (32, 64, 128))):
        if slots_per_expert <= limit:
            return blocks
    return (64, 128, 256)


class Layer:
    """Experts of one shape, a few routings of one batch size, and each GEMM of the layer as a call to time."""

    def __init__(self, shape: Shape, experts: PreparedExperts, tokens: int, block_tokens: int, count: int) -> None:
        device = experts.tensors["w13_words"].device
        meta = experts.meta
        self.experts = experts
        self.options = CallOptions(activation=shape.activation)
        self.x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        self.routings = routings(shape, tokens, count, device)
        self.aligned = [
            align(self.x, ids % meta.num_experts, None, meta.num_experts, block_tokens, shape.group_w13)
            for _, ids in self.routings
        ]
        self.block_tokens = block_tokens
        self.inner: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gate_up(self, gemm: GemmConfig) -> list[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        """One call a routing."""
        launch = LaunchConfig(self.block_tokens, gemm, gemm)
        return [
            partial(backend.gate_up, launch, self.x, self.experts, weights, aligned, weights.shape[1], self.options)
            for aligned, (weights, _) in zip(self.aligned, self.routings, strict=True)
        ]

    def down(self, gemm: GemmConfig) -> list[Callable[[], torch.Tensor]]:
        """One call a routing; the first GEMM has run once, before."""
        launch = LaunchConfig(self.block_tokens, GemmConfig(128, 4, 1), gemm)
        if not self.inner:
            self.inner = [call() for call in self.gate_up(launch.gate_up)]
        return [
            partial(backend.down, launch, inner, sums, self.experts, aligned)
            for aligned, (inner, sums) in zip(self.aligned, self.inner, strict=True)
        ]


_WORKER: dict[str, Any] = {}


def _compile(task: tuple[Shape, Candidate]) -> str | None:
    """Compile one candidate in a worker; the reason when it cannot run."""
    shape, candidate = task
    device = torch.device("cuda", 0)
    key = f"{shape.name} {candidate.gemm} {candidate.plane} {candidate.block_tokens}"
    try:
        if key not in _WORKER:
            planes = (candidate.plane, None) if candidate.gemm == "gate_up" else (None, candidate.plane)
            experts = prepare_with_planes(*random_experts(shape, "float", device, experts=2), planes)
            _WORKER[key] = Layer(shape, experts, 1, candidate.block_tokens, 1)
        getattr(_WORKER[key], candidate.gemm)(candidate.config)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return None


def compile_all(shape: Shape, wanted: list[Candidate], workers: int) -> dict[Candidate, str]:
    """Compile in `workers` processes; returns the candidates that cannot run, with reasons."""
    started = time.time()
    failed: dict[Candidate, str] = {}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap(_compile, [(shape, candidate) for candidate in wanted])
        for number, (candidate, reason) in enumerate(zip(wanted, results, strict=True), 1):
            if reason:
                failed[candidate] = reason
            print(f"\rcompiled {number} of {len(wanted)}, {time.time() - started:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr, flush=True)
    return failed


def sweep(
    shape: Shape, wanted: list[Candidate], tokens: tuple[int, ...], device: torch.device, replays: int = 5
) -> list[dict[str, Any]]:
    """Milliseconds of every candidate at every batch size: one row each."""
    w13, w2 = random_experts(shape, "float", device)
    rows: list[dict[str, Any]] = []
    planes = sorted({(c.gemm, c.plane) for c in wanted})
    for gemm, plane in planes:
        experts = prepare_with_planes(w13, w2, (plane, None) if gemm == "gate_up" else (None, plane))
        for count in tokens:
            blocks = block_tokens_for(count * shape.top_k / shape.experts)
            for block in blocks:
                layer = Layer(shape, experts, count, block, ROUTINGS)
                for candidate in wanted:
                    if (candidate.gemm, candidate.plane, candidate.block_tokens) != (gemm, plane, block):
                        continue
                    milliseconds = graph_milliseconds(getattr(layer, gemm)(candidate.config), replays)
                    rows.append(
                        {"gemm": gemm, "plane": plane, "tokens": count, "block_tokens": block}
                        | {"ms": milliseconds, "config": vars(candidate.config)}
                    )
            print(f"\r{shape.name} {gemm} plane {plane} M={count}   ", end="", file=sys.stderr)
    print(file=sys.stderr, flush=True)
    return rows


def best(rows: list[dict[str, Any]], tokens: int, planes: tuple[int, int]) -> tuple[LaunchConfig, float] | None:
    """The pair of GEMM configurations, on one block size, with the least total time."""
    found = None
    for block in sorted({row["block_tokens"] for row in rows}):
        pair = []
        for gemm, plane in zip(("gate_up", "down"), planes, strict=True):
            fit = [
                r
                for r in rows
                if (r["gemm"], r["plane"], r["tokens"], r["block_tokens"]) == (gemm, plane, tokens, block)
            ]
            pair.append(min(fit, key=lambda r: float(r["ms"]), default=None))
        if pair[0] is None or pair[1] is None:
            continue
        total = pair[0]["ms"] + pair[1]["ms"]
        if found is None or total < found[1]:
            launch = LaunchConfig(block, GemmConfig(**pair[0]["config"]), GemmConfig(**pair[1]["config"]))
            found = (launch, total)
    return found


def main(argv: list[str]) -> int:
    """`vllm-ext bench tune-moe`."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench tune-moe", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--planes-w13", nargs="+", type=int, default=[])
    parser.add_argument("--planes-w2", nargs="+", type=int, default=[])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--raw", type=Path, help="also write every timing here, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="time and print, but leave the table as it is")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise RuntimeError("tune-moe: a CUDA device is needed, torch sees none")
    device = torch.device("cuda", 0)
    raw: dict[str, Any] = {}
    path = Path(config.__file__).parent / "configs" / config.table_name(torch.cuda.get_device_name(device))
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"shapes": {}}
    for name in args.shape:
        shape = SHAPES[name]
        default = prepare_with_planes(*random_experts(shape, "float", device, experts=1), (None, None))
        natural = tuple(default.tensors[f"{w}_words"].shape[3] for w in ("w13", "w2"))
        blocks = {b for m in args.tokens for b in block_tokens_for(m * shape.top_k / shape.experts)}
        wanted = [
            c
            for c in candidates(args.planes_w13 or [natural[0]], args.planes_w2 or [natural[1]])
            if c.block_tokens in blocks
        ]
        failed = compile_all(shape, wanted, args.workers)
        for candidate, reason in failed.items():
            print(f"cannot run {candidate}: {reason}")
        rows = sweep(shape, [c for c in wanted if c not in failed], tuple(args.tokens), device)
        raw[name] = rows
        entries = {}
        for tokens in args.tokens:
            for planes in itertools.product(args.planes_w13 or [natural[0]], args.planes_w2 or [natural[1]]):
                chosen = best(rows, tokens, planes)
                if chosen is not None:
                    print(f"{name} M={tokens} planes {planes}: {chosen[1]:.4f} ms {chosen[0].to_json()}")
                    if planes == natural:
                        entries[f"{tokens * shape.top_k / shape.experts:g}"] = chosen[0].to_json()
        table["shapes"][config.shape_key(default.meta, shape.top_k).replace("_E1_", f"_E{shape.experts}_")] = entries
    if args.raw:
        args.raw.write_text(json.dumps(raw), encoding="utf-8")
    if not args.dry_run:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    return 0
