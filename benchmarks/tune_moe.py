"""Tune the Triton experts on this GPU: time whole layers, keep the best pair of configurations, write the table.

    vllm-ext bench tune-moe --shape DiffusionGemma --tokens 1 8 64 256
    vllm-ext bench tune-moe --shape 4096,1536,128,8

A shape is one of those known by name, or hidden,intermediate,experts,top_k of a rank, with the groups of both weights
behind them where they are not 128,64. Kernels are compiled by several processes before anything is timed. Each
layer is checked against FP64 and for equal bits before it is timed. A row goes into the table as soon as it is found
(vllm_ext/ops/moe/triton/configs/<GPU>.json, which `choose` reads; other rows are kept), so that a run that is cut off
keeps what it had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.moe_common import (
    FAMILIES,
    SHAPES,
    Shape,
    graph_milliseconds,
    prepare_triton,
    random_biases,
    random_experts,
    relative_error,
    routings,
    shape_of,
)
from vllm_ext.benchmarks.registry import write_json
from vllm_ext.benchmarks.tune_moe_candidates import candidates, every_kernel

from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import backend, choice, config, stream
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
ROUTINGS = 6
CHECK_ROWS = 64
TOLERANCE = 6e-3  # of BF16 in, between and out: two roundings of 2^-9 and one of the output land near 3e-3
_TOGETHER = 14  # batch sizes whose kernels are compiled in no order
_AGAIN, _ROUNDS = 3, 6  # the fastest few are timed in turns, as often in either order


class Layer:
    """Experts of one shape, and a few routings of one batch size."""

    def __init__(self, shape: Shape, experts: PreparedExperts, tokens: int, count: int) -> None:
        device = experts.tensors["w13_words"].device
        self.experts = experts
        self.options = CallOptions(activation=shape.activation)
        self.x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        self.weights, ids = zip(*routings(shape, tokens, count, device), strict=True)
        self.ids = [i % experts.tensors["w13_words"].shape[0] for i in ids]

    def whole(self, launch: LaunchConfig) -> list[Callable[[], torch.Tensor]]:
        """The whole layer, one call a routing."""
        return [
            partial(backend.run, launch, self.x, self.experts, weights, ids, None, self.options)
            for weights, ids in zip(self.weights, self.ids, strict=True)
        ]


@dataclass
class Cell:
    """The search for one batch size of one shape.

    layer      what is timed
    expected   its first rows, in FP64
    report     is given every timing as it comes
    replays    of a graph, whose median a timing is
    """

    layer: Layer
    expected: torch.Tensor
    report: Callable[[dict[str, Any]], None]
    replays: int
    seen: dict[LaunchConfig, float] = field(default_factory=dict)

    def refusal(self, launch: LaunchConfig) -> str | None:
        """Why a configuration may not be chosen: others would run in its place, it fails, its error, changing bits."""
        layer = self.layer
        if backend.served(launch, layer.experts, layer.x, layer.options) != launch:
            return "the kernels it asks for do not serve this layer here"
        try:
            call = layer.whole(launch)[0]
            out = call().clone()
            same = all(torch.equal(out, call()) for _ in range(2))
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[-200:]}"
        off = relative_error(out[: self.expected.shape[0]], self.expected)
        if not off <= TOLERANCE:
            return f"relative error {off:.1e} above {TOLERANCE:.1e}"
        return None if same else "bits change from call to call"

    def time(self, launch: LaunchConfig, what: str = "layer") -> float:
        """Milliseconds of the layer; infinite where the configuration is refused."""
        if launch not in self.seen:
            refused = self.refusal(launch)
            milliseconds = float("inf") if refused else graph_milliseconds(self.layer.whole(launch), self.replays)
            self.seen[launch] = milliseconds
            row = {"refused": refused} if refused else {"ms": milliseconds}
            self.report({"what": what, **row, **launch.to_json()})
        return self.seen[launch]

    def search(self, start: LaunchConfig, firsts: list[GemmConfig], seconds: list[GemmConfig]) -> LaunchConfig | None:
        """The fastest pair: every first GEMM beside `start`'s second, then every second beside the two fastest firsts.

        A GEMM alone finds its weights in the L2 cache more often than in a layer, so only layers are timed.
        """
        self.time(start, "start")
        for first in firsts:
            self.time(LaunchConfig(first, start.down))
        best_firsts = list(dict.fromkeys(launch.gate_up for launch in self.fastest(len(self.seen))))[:2]
        for first, second in itertools.product(best_firsts, seconds):
            self.time(LaunchConfig(first, second))
        return self.in_turns(self.fastest(_AGAIN))

    def fastest(self, count: int) -> list[LaunchConfig]:
        """The `count` fastest so far, none that was refused."""
        timed = [launch for launch, milliseconds in self.seen.items() if milliseconds < float("inf")]
        return sorted(timed, key=lambda launch: self.seen[launch])[:count]

    def in_turns(self, launches: list[LaunchConfig]) -> LaunchConfig | None:
        """The fastest, if there is any, by the median of several rounds, each timing all of them.

        Every other round runs backwards: clocks fall within a round, and which of two won has followed their order.
        """
        if not launches:
            return None
        times: dict[LaunchConfig, list[float]] = {launch: [] for launch in launches}
        for turn in range(_ROUNDS):
            for launch in launches[:: -1 if turn % 2 else 1]:
                times[launch].append(graph_milliseconds(self.layer.whole(launch), self.replays))
        for launch, taken in times.items():
            self.seen[launch] = statistics.median(taken)
            self.report({"what": "in turns", "ms": self.seen[launch], "all": taken, **launch.to_json()})
        return min(times, key=lambda launch: self.seen[launch])


@dataclass(frozen=True)
class Plan:
    """What is tried for one batch size of one shape.

    start            what is launched now
    rule             what would be if the table lacked the shape
    firsts, seconds  candidates for gate and up, and for down
    """

    shape: Shape
    tokens: int
    start: LaunchConfig
    rule: LaunchConfig
    firsts: list[GemmConfig]
    seconds: list[GemmConfig]

    def layers(self) -> list[LaunchConfig]:
        """The layers by which every kernel is compiled that `Cell.search` may ask for."""
        pairs = every_kernel([*self.firsts, self.start.gate_up], [*self.seconds, self.start.down])
        return [choice.portable(self.slots), self.rule, self.start, *pairs]

    @property
    def slots(self) -> float:
        """Mean number of slots an expert gets."""
        return self.tokens * self.shape.top_k / self.shape.experts


def _few_experts(shape: Shape, device: torch.device) -> PreparedExperts:
    """Two experts' weights that say they are all: enough to compile with."""
    weights = random_experts(shape, "float", device, experts=2)
    made = prepare_triton(*weights, random_biases(shape, device, experts=2))
    return PreparedExperts(replace(made.meta, num_experts=shape.experts), made.tensors)


def plan(shape: Shape, tokens: int, experts: PreparedExperts, device_index: int) -> Plan:
    """A search that starts with the table's configuration, or the rule's."""
    device = experts.tensors["w13_words"].device
    plain = not shape.bias and stream.usable(device)
    start = choice.choose(experts.meta, tokens, shape.top_k, shape.experts, False, device_index, plain)
    rule = choice.rule(experts.meta, tokens, shape.top_k, shape.experts, plain)
    firsts, seconds = candidates(tokens * shape.top_k / shape.experts, backend.sizes(experts), plain)
    return Plan(shape, tokens, start, rule, firsts, seconds)


_WORKER: dict[str, PreparedExperts] = {}


def _compile(task: tuple[int, Shape, int, LaunchConfig]) -> tuple[int, str | None]:
    """Compile one layer in a worker; the plan's number, and the reason when it cannot run."""
    number, shape, tokens, launch = task
    try:
        if shape.name not in _WORKER:
            _WORKER[shape.name] = _few_experts(shape, torch.device("cuda", 0))
        Layer(shape, _WORKER[shape.name], tokens, 1).whole(launch)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return number, f"{type(error).__name__}: {str(error)[-200:]}"
    return number, None


def compile_all(plans: list[Plan], workers: int, seconds: float) -> list[Plan]:
    """Compile in `workers` processes; the plans that were ready in time."""
    started, tasks = time.time(), []
    for first in range(0, len(plans), _TOGETHER):
        some = range(first, min(first + _TOGETHER, len(plans)))
        found = [(n, plans[n].shape, plans[n].tokens, launch) for n in some for launch in plans[n].layers()]
        # Neighbours need the same kernels: side by side, several workers would compile each.
        random.Random(0).shuffle(found)
        tasks += found
    left = [sum(task[0] == number for task in tasks) for number in range(len(plans))]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.imap_unordered(_compile, tasks)
        for done in range(1, len(tasks) + 1):
            try:
                number, refused = results.next(max(0.1, started + seconds - time.time()))
            except multiprocessing.TimeoutError:
                _say(f"compiling took longer than {seconds:.0f} s; what is not ready is left out")
                break
            left[number] -= 1
            if refused:
                _say(f"{plans[number].shape.name} M={plans[number].tokens}: cannot compile a layer: {refused}")
            if done % 50 == 0 or done == len(tasks):
                _say(f"compiled {done} of {len(tasks)} layers, {time.time() - started:.0f} s")
        pool.terminate()
    return [wanted for wanted, missing in zip(plans, left, strict=True) if not missing]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report_of(where: dict[str, Any], report: Callable[[dict[str, Any]], None], row: dict[str, Any]) -> None:
    report(where | row)


def _short(gemm: GemmConfig) -> str:
    flags = "".join(f" {name}" for name in ("split", "guess", "apart") if getattr(gemm, name))
    kind = "tiles" if not gemm.programs else "wide" if stream.wide(gemm) else "streamed"
    return f"{kind} {gemm.block_tokens}x{gemm.block_rows} w{gemm.num_warps} p{gemm.programs}{flags}"


def tune(
    plans: list[Plan], until: float, report: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(shape's key, slots an expert, entry) of each plan in turn until the time is up; all timings go to `report`."""
    device = torch.device("cuda", 0)
    for name, group in itertools.groupby(plans, key=lambda wanted: wanted.shape.name):
        weights = None
        for wanted in group:
            if time.time() > until:
                _say(f"{name} M={wanted.tokens}: no time left")
                continue
            shape = wanted.shape
            if weights is None:
                weights = random_experts(shape, "float", device)
                biases = random_biases(shape, device)
                experts = prepare_triton(*weights, biases)
                reference = prepare_experts(*weights, **biases, backend="reference", dtype=torch.bfloat16)
            layer = Layer(shape, experts, wanted.tokens, ROUTINGS)
            rows = slice(0, CHECK_ROWS)
            expected = fused_moe_w4a16(
                layer.x[rows], reference, layer.weights[0][rows], layer.ids[0][rows], activation=shape.activation
            )
            replays = 9 if wanted.tokens <= 256 else 4
            where = {"shape": name, "tokens": wanted.tokens}
            cell = Cell(layer, expected, partial(_report_of, where, report), replays)
            tiles = choice.portable(wanted.slots)
            cell.time(wanted.rule, "rule")
            cell.time(tiles, "portable")
            start = backend.served(wanted.start, experts, layer.x, layer.options)
            best = cell.search(start, wanted.firsts, wanted.seconds)
            if best is None:
                _say(f"{name} M={wanted.tokens}: every configuration was refused, the rule's too; no row")
                continue
            _say(
                f"{name} M={wanted.tokens}: {cell.seen[best]:.4f} ms, start {cell.seen[start]:.4f}, rule "
                f"{cell.seen[wanted.rule]:.4f}, portable {cell.seen[tiles]:.4f}: "
                f"{_short(best.gate_up)} | {_short(best.down)}"
            )
            yield config.shape_key(experts.meta, shape.experts, shape.top_k), f"{wanted.slots:g}", best.to_json()
        torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    """`vllm-ext bench tune-moe`."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench tune-moe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", nargs="+", type=shape_of, default=list(SHAPES.values()), metavar="SHAPE",
        help=f"{', '.join([*SHAPES, *FAMILIES])}, or hidden,intermediate,experts,top_k[,group_w13,group_w2]",
    )  # fmt: skip
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="0: compile when timing")
    parser.add_argument("--compile-seconds", type=float, default=600.0, help="leave out what is not compiled by then")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no batch size after so long")
    parser.add_argument("--raw", type=Path, help="also write every timing here as it comes, a line of JSON each")
    parser.add_argument("--table", type=Path, help="the table to write; default: the package's for this GPU")
    parser.add_argument("--no-search", action="store_true", help="only time what is launched now beside both rules")
    parser.add_argument("--dry-run", action="store_true", help="time and print, but leave the table as it is")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("vllm-ext bench tune-moe: needs a CUDA device, torch sees none", file=sys.stderr)
        return 1
    until, device = time.time() + args.seconds, torch.device("cuda", 0)
    path = args.table or config.table_path(torch.cuda.get_device_name(device))
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"shapes": {}}
    plans = []
    for shape in args.shape:
        experts = _few_experts(shape, device)
        found = [plan(shape, tokens, experts, device.index) for tokens in args.tokens]
        plans += [replace(wanted, firsts=[], seconds=[]) for wanted in found] if args.no_search else found
    if args.workers:
        plans = compile_all(plans, args.workers, args.compile_seconds)

    def report(row: dict[str, Any]) -> None:
        if args.raw:
            with args.raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    for key, slots, entry in tune(plans, until, report):
        table["shapes"].setdefault(key, {})[slots] = entry
        if not (args.dry_run or args.no_search):
            write_json(path, table)
    return 0
