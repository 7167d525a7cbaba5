"""4-bit experts on a GPU: ours against vLLM's Marlin, humming, WNA16 and BF16 experts, one process, one run (humming,
which may crash, in a process of its own).

The whole layer is timed (sort, both GEMMs, combine) in a CUDA graph over several routings. Every layer is checked
against FP64 first: a peer that fails, or cannot be built, is reported with the reason and left out; ours failing stops
the run. Both ceilings, memory and tensor cores, are measured in the run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks import moe_peers, probes
from vllm_ext.benchmarks.apart import CallFailed, reason, run_apart
from vllm_ext.benchmarks.moe_common import (
    SHAPES,
    Shape,
    graph_milliseconds,
    matrix_rate,
    memory_bandwidth,
    random_experts,
    relative_error,
    routings,
    shape_name,
    shape_of,
)
from vllm_ext.benchmarks.moe_peers import Call
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
from vllm_ext.ops.moe.triton.grouped_v1 import ExpertsV1, grouped_v1
from vllm_ext.quantization import QuantizedWeight

TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
ROUTINGS = 6
CHECK_TOKENS = 64
LARGE_CHECK_TOKENS = 4096
OURS_TOLERANCE = 6e-3
PEER_TOLERANCE = 1.5e-2
# What is to be reached: times faster than the peer, by batch size.
TARGETS = {
    "Marlin, zero points": {1: 1.1, 8: 1.2, 32: 1.3, 64: 1.4, 256: 1.6, 1024: 1.6, 4096: 1.6},
    "BF16": {1: 1.1, 8: 2.0, 32: 2.4, 64: 2.5, 256: 2.2, 1024: 1.3, 4096: 1.05},
    "ours, v1": {256: 1.28},
}


@dataclass(frozen=True)
class Arm:
    """One layer: its builder, the zero points of its weights, the batch sizes it is timed at (all, when empty)."""

    name: str
    build: Callable[[Shape, QuantizedWeight, QuantizedWeight], Call]
    zero: str | None
    ours: bool
    tokens: tuple[int, ...] = ()
    compiles: bool = True  # kernels of its own, at the first call
    asked: bool = False  # timed only when named
    apart: bool = False  # in a process of its own, which compiles for itself


def _ours(batch_invariant: bool, shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    experts = prepare_experts(w13, w2, backend="triton", dtype=torch.bfloat16)
    return lambda x, weights, ids: fused_moe_w4a16(
        x, experts, weights, ids, activation=shape.activation, batch_invariant=batch_invariant
    )


def _v1(shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    experts = ExpertsV1(w13, w2)
    return lambda x, weights, ids: grouped_v1(x, experts, weights, ids, shape.activation)


ARMS = (
    Arm("ours", functools.partial(_ours, False), "float", True),
    Arm("ours, symmetric", functools.partial(_ours, False), None, True, compiles=False),
    Arm("ours, batch-invariant", functools.partial(_ours, True), "float", True),
    Arm("ours, v1", _v1, "float", True, (256,)),
    Arm("BF16", moe_peers.bf16, "float", False),
    Arm("Marlin, zero points", moe_peers.marlin, "int", False, compiles=False),
    Arm("Marlin, symmetric", moe_peers.marlin, None, False, compiles=False),
    Arm("humming", functools.partial(moe_peers.humming, TOKENS), "float", False, asked=True, apart=True),
    Arm("WNA16", moe_peers.wna16, "int", False, (1, 64, 256, 4096)),
)


@contextlib.contextmanager
def _vllm_context() -> Iterator[None]:
    """vLLM's layers read a current configuration; without vLLM its arms fail on their own."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config

        context = set_current_vllm_config(VllmConfig())
    except Exception:
        context = contextlib.nullcontext()
    with context:
        yield


def _warm(task: tuple[str, str, tuple[int, ...]]) -> None:
    """Compile an arm's kernels in a worker; what goes wrong is reported by the run itself."""
    name, arm_name, tokens = task
    shape, arm = shape_of(name), next(a for a in ARMS if a.name == arm_name)
    device = torch.device("cuda", 0)
    with contextlib.suppress(Exception), contextlib.nullcontext() if arm.ours else _vllm_context():
        call = arm.build(shape, *random_experts(shape, arm.zero, device))
        for count in tokens:
            x = torch.randn(count, shape.hidden, device=device, dtype=torch.bfloat16)
            call(x, *routings(shape, count, 1, device)[0])
        torch.cuda.synchronize()


def _timed_at(arm: Arm, tokens: list[int]) -> list[int]:
    return [count for count in tokens if not arm.tokens or count in arm.tokens]


@dataclass(frozen=True)
class Checked:
    """Weights of one kind of zero point, and what the layer gives for the first CHECK_TOKENS rows of a large batch."""

    weights: tuple[QuantizedWeight, QuantizedWeight]
    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expected: torch.Tensor

    def error(self, arm: Arm, call: Call, tokens: list[int]) -> float:
        """The arm's largest relative error against FP64, NaN where any is: on a small batch, and, for ours, on the same
        rows in batches of every size that is timed, each of which may be launched otherwise."""
        counts = {CHECK_TOKENS, *(min(count, LARGE_CHECK_TOKENS) for count in tokens if arm.ours)}
        errors = []
        for count in sorted(counts):
            out = call(self.x[:count], self.topk_weights[:count], self.topk_ids[:count])[:CHECK_TOKENS]
            errors.append(relative_error(out, self.expected[: out.shape[0]]))
        return max(errors, key=lambda error: (math.isnan(error), error))


def _checked(shape: Shape, zero: str | None, device: torch.device) -> Checked:
    weights = random_experts(shape, zero, device)
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(LARGE_CHECK_TOKENS, shape.hidden, device=device, generator=generator).to(torch.bfloat16)
    topk_weights, ids = routings(shape, LARGE_CHECK_TOKENS, 1, device)[0]
    reference = prepare_experts(*weights, backend="reference", dtype=torch.bfloat16)
    rows = slice(0, CHECK_TOKENS)
    expected = fused_moe_w4a16(x[rows], reference, topk_weights[rows], ids[rows], activation=shape.activation)
    return Checked(weights, x, topk_weights, ids, expected)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument(
        "--shapes", nargs="+", type=shape_name, default=list(SHAPES), help="by name, or as tune-moe takes them"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=None)
    parser.add_argument("--workers", type=int, default=min(15, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--apart-seconds", type=float, default=240.0, help="for a layer in a process of its own")


def _arms(args: argparse.Namespace) -> list[Arm]:
    return [arm for arm in ARMS if (arm.name in args.arms if args.arms else not arm.asked)]


def check(args: argparse.Namespace) -> None:
    """A GPU, and kernels compiled by several processes; each layer is checked when it is built (`run`)."""
    probes.check(args)
    biased = [name for name in args.shapes if shape_of(name).bias]
    if biased:
        raise CheckFailed(f"{', '.join(biased)} has biases, which the peers are not given here; leave it out")
    tasks = [
        (shape, arm.name, (*_timed_at(arm, args.tokens), CHECK_TOKENS, *([LARGE_CHECK_TOKENS] if arm.ours else [])))
        for arm in _arms(args)
        if arm.compiles and not arm.apart
        for shape in args.shapes
    ]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for number, _ in enumerate(pool.imap_unordered(_warm, tasks), 1):
            print(f"\rcompiled {number} of {len(tasks)} layers", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _show(text: str) -> None:
    """Each figure as it is measured: what a run that is cut off leaves."""
    print(text, file=sys.stderr, flush=True)


Routing = tuple[torch.Tensor, torch.Tensor]
Inputs = dict[int, tuple[torch.Tensor, list[Routing]]]
Floors = dict[int, tuple[float, str]]


def _inputs(shape: Shape, tokens: list[int], device: torch.device) -> Inputs:
    """Activations and routings by batch size, the same in every process."""
    generator = torch.Generator(device).manual_seed(6)
    return {
        count: (
            torch.randn(count, shape.hidden, device=device, generator=generator).to(torch.bfloat16),
            routings(shape, count, ROUTINGS, device),
        )
        for count in tokens
    }


def _measure_arm(
    shape: Shape, arm: Arm, args: argparse.Namespace, floors: Floors, inputs: Inputs, checked: dict[str | None, Checked]
) -> list[dict[str, Any]]:
    """One layer's rows; its failure is a row as well, unless it is ours that fails the check."""
    rows: list[dict[str, Any]] = []
    common = {"shape": shape.name, "arm": arm.name}
    try:
        if arm.zero not in checked:
            checked[arm.zero] = _checked(shape, arm.zero, torch.device("cuda", 0))
        call = arm.build(shape, *checked[arm.zero].weights)
        error = checked[arm.zero].error(arm, call, _timed_at(arm, args.tokens))
        tolerance = OURS_TOLERANCE if arm.ours else PEER_TOLERANCE
        if not error <= tolerance:
            raise CheckFailed(f"{shape.name}, {arm.name}: relative error {error:.2e} above {tolerance:.1e}")
        for count in _timed_at(arm, args.tokens):
            x, drawn = inputs[count]
            calls = [functools.partial(call, x, topk_weights, ids) for topk_weights, ids in drawn]
            milliseconds = graph_milliseconds(calls, args.replays)
            floor, bound = floors[count]
            row = common | {"tokens": count, "ms": milliseconds, "floor_ms": floor, "bound": bound}
            rows.append(row | {"share": floor / milliseconds, "error": error, "failed": None})
            _show(f"{shape.name}, {arm.name}, {count} tokens: {milliseconds:.4f} ms")
    except Exception as failure:
        if arm.ours and isinstance(failure, CheckFailed):
            raise
        rows.append(common | {"tokens": None, "failed": reason(failure)})
        _show(f"{shape.name}, {arm.name}: {rows[-1]['failed']}")
    return rows


def _measure_apart(name: str, arm_name: str, args: argparse.Namespace, floors: Floors) -> list[dict[str, Any]]:
    """`_measure_arm` in a process that holds nothing yet."""
    shape, arm = shape_of(name), next(a for a in ARMS if a.name == arm_name)
    with _vllm_context():
        return _measure_arm(shape, arm, args, floors, _inputs(shape, args.tokens, torch.device("cuda", 0)), {})


def _measure_shape(
    shape: Shape, args: argparse.Namespace, bandwidth: float, rate: float, device: torch.device
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    inputs = _inputs(shape, args.tokens, device)
    checked: dict[str | None, Checked] = {}
    floors: Floors = {}
    for count, (_, drawn) in inputs.items():
        hit = sum(len(torch.unique(ids)) for _, ids in drawn) / len(drawn)
        memory, compute = shape.layer_bytes(1) * hit / bandwidth * 1e3, shape.flops(count) / rate * 1e3
        floors[count] = (max(memory, compute), "memory" if memory >= compute else "tensor cores")
    for arm in _arms(args):
        if arm.apart:
            try:
                rows += run_apart(_measure_apart, shape.name, arm.name, args, floors, seconds=args.apart_seconds)
            except CallFailed as failure:
                rows.append({"shape": shape.name, "arm": arm.name, "tokens": None, "failed": str(failure)})
                _show(f"{shape.name}, {arm.name}: {failure}")
        else:
            rows += _measure_arm(shape, arm, args, floors, inputs, checked)
        torch.cuda.empty_cache()
    return rows


def _ratios(rows: list[dict[str, Any]]) -> None:
    """Add to the rows of "ours" how many times faster they are than each peer, and whether that reaches TARGETS."""
    times = {(r["shape"], r["arm"], r["tokens"]): r["ms"] for r in rows if r["failed"] is None}
    for row in rows:
        if row["failed"] is not None or row["arm"] != "ours":
            continue
        for peer in ("BF16", "Marlin, zero points", "Marlin, symmetric", "humming", "WNA16", "ours, v1"):
            peer_ms = times.get((row["shape"], peer, row["tokens"]))
            if peer_ms is not None:
                row[f"times {peer}"] = peer_ms / row["ms"]
        wanted = [(peer, by[row["tokens"]]) for peer, by in TARGETS.items() if row["tokens"] in by]
        got = [(row.get(f"times {peer}"), least) for peer, least in wanted]
        row["reached"] = all(ratio >= least for ratio, least in got if ratio is not None) if got else None


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a shape, layer and batch size; the two measured ceilings come first."""
    device = torch.device("cuda", 0)
    with _vllm_context():
        bandwidth, rate = memory_bandwidth(device), matrix_rate(device)
        rows: list[dict[str, Any]] = []
        for name in args.shapes:
            rows += _measure_shape(shape_of(name), args, bandwidth, rate, device)
    _ratios(rows)
    ceilings = {"arm": "ceilings", "failed": None, "tokens": None, "bytes_per_s": bandwidth, "flop_per_s": rate}
    return [ceilings, *rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds by layer and batch size; then ours against the peers, with the share of the ceiling."""
    lines = [f"copy {rows[0]['bytes_per_s'] / 1e12:.2f} TB/s, BF16 product {rows[0]['flop_per_s'] / 1e12:.0f} TFLOP/s"]
    done = [row for row in rows[1:] if row["failed"] is None]
    counts = sorted({row["tokens"] for row in done})
    for shape in dict.fromkeys(row["shape"] for row in rows[1:]):
        lines += ["", f"{shape + ', ms':24}" + "".join(f"{count:>9}" for count in counts)]
        mine = [row for row in done if row["shape"] == shape]
        for arm in dict.fromkeys(row["arm"] for row in mine):
            by = {row["tokens"]: row["ms"] for row in mine if row["arm"] == arm}
            lines.append(f"{arm:24}" + "".join(f"{by[c]:9.4f}" if c in by else f"{'':9}" for c in counts))
        ours = {row["tokens"]: row for row in mine if row["arm"] == "ours"}
        for peer in TARGETS:
            cells = [ours[c].get(f"times {peer}") if c in ours else None for c in counts]
            lines.append(f"{'ours / ' + peer:24}" + "".join(f"{v:8.2f}x" if v else f"{'':9}" for v in cells))
            least = "".join(f"{TARGETS[peer][c]:8.2f}x" if c in TARGETS[peer] else f"{'':9}" for c in counts)
            lines.append(f"{'  wanted':24}" + least)
        shares = "".join(f"{ours[c]['share']:8.0%} " if c in ours else f"{'':9}" for c in counts)
        lines.append(f"{'share of the ceiling':24}" + shares)
    lines += [f"failed: {row['shape']}, {row['arm']}: {row['failed']}" for row in rows[1:] if row["failed"] is not None]
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over batch size, one panel a shape, with the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [row for row in rows[1:] if row["failed"] is None]
    shapes = list(dict.fromkeys(row["shape"] for row in done))
    figure, axes = plt.subplots(1, max(1, len(shapes)), figsize=(5.2 * max(1, len(shapes)), 4.6), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=False):
        mine = [row for row in done if row["shape"] == shape]
        for arm in dict.fromkeys(row["arm"] for row in mine):
            points = sorted((row["tokens"], row["ms"]) for row in mine if row["arm"] == arm)
            style = {"marker": "o", "linewidth": 2.4 if arm == "ours" else 1.2, "markersize": 4}
            axis.plot(*zip(*points, strict=True), label=arm, **style)
        floor = sorted({(row["tokens"], row["floor_ms"]) for row in mine})
        axis.plot(*zip(*floor, strict=True), "k--", label="floor", linewidth=1)
        axis.set(xscale="log", yscale="log", title=shape, xlabel="tokens", ylabel="ms a layer")
        axis.grid(True, which="major", alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


BENCHMARK = Benchmark("moe", "4-bit experts on a GPU against vLLM's experts", arguments, check, run, table, chart)
