"""`vllm-ext bench ascend-traffic`: paper, plan and simulator side by side, for the kernels and for every baseline.

Baselines run on the simulator as the planner cuts them (`ascend_sim.planned`), so that both sides of a ratio are
measured. Heads are whole, and everything counted is a multiple of the heads; so two of them stand for many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.ascend_problems import make_call
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ha_npu import Plan, make_plan
from vllm_ext.ha_npu.ascend_tiles import KERNEL_STRATEGY
from vllm_ext.ops.linear_attention.ascend_sim import build
from vllm_ext.ops.linear_attention.ascend_sim.planned import run_planned
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.session import Counters
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Task

CHIP, MIB, KIB = "310p1", 2**20, 2**10
OPS = ("gdn", "kda")
BASELINES = ("fla", "fla-megakernel", "flash-qla", "vllm-ascend")
SWEEP = (1, 2, 4, 8, 16, 32)
COLUMNS = ("paper", "plan", "plan simulated", "kernels' plan", "kernels simulated")
"""HA-NPU's plan as published, that plan run step by step, the plan of this project's kernels, and these kernels."""

# What is counted: the planner's and the simulator's side of it.
FIGURES: dict[str, tuple[str, Callable[[Plan], float], Callable[[Counters], float]]] = {
    "global memory": ("MiB", lambda p: p.traffic.gm_bytes / MIB, lambda c: c.gm_bytes / MIB),
    "L1 to L0": ("MiB", lambda p: p.traffic.l1_to_l0_bytes / MIB, lambda c: c.l1_to_l0_bytes / MIB),
    "MACs": ("G", lambda p: p.macs / 1e9, lambda c: c.macs / 1e9),
    "UB peak": ("KiB", lambda p: p.peak_bytes["ub"] / KIB, lambda c: c.peak_ub / KIB),
}
PAPER = {
    ("gdn", "global memory"): 21.41,
    ("kda", "global memory"): 31.33,
    ("gdn", "L1 to L0"): 64.53,
    ("kda", "L1 to L0"): 74.53,
    ("gdn", "UB peak"): 244.0,
}
PAPER_RATIOS = {
    ("gdn", "global memory", "fla"): -81.7,
    ("gdn", "global memory", "flash-qla"): -21.2,
    ("kda", "global memory", "fla"): -84.8,
    ("kda", "global memory", "flash-qla"): -40.8,
    ("gdn", "L1 to L0", "fla"): -46.4,
    ("gdn", "L1 to L0", "flash-qla"): -39.2,
    ("kda", "L1 to L0", "fla"): -30.5,
    ("kda", "L1 to L0", "flash-qla"): -44.0,
    ("gdn", "MACs", "fla"): -17.5,
    ("gdn", "MACs", "flash-qla"): -12.9,
    ("gdn", "device memory", "fla"): -52.6,
    ("gdn", "device memory", "flash-qla"): -6.0,
    ("kda", "device memory", "fla"): -54.6,
    ("kda", "device memory", "flash-qla"): -22.8,
}
"""Percent; traffic at 8192 tokens and 32 heads, MACs at 4096 tokens, device memory at 65536 tokens and 32 heads."""
VLLM_ASCEND_TOKENS = 2048
"""Its 28 operators a chunk, each a launch, take long to simulate; the paper gives no traffic of it."""


@cache
def simulate(op: str, heads: int, tokens: int) -> Counters:
    """The kernels, whole heads on up to ten cores."""
    call = make_call(op, tokens=tokens, key_heads=heads, value_heads=heads, steep=0.0, seed=1)
    blocks = [
        [Task(0, tokens, 0, head, 0, 128, 0) for head in range(core, heads, 10)] for core in range(min(10, heads))
    ]
    return run_prefill(op, call, blocks=blocks).counters


@cache
def simulate_plan(op: str, strategy: str, heads: int, tokens: int) -> tuple[Counters, int]:
    """A strategy's plan, step by step: counters, and device memory in bytes."""
    call = make_call(op, tokens=tokens, key_heads=heads, value_heads=heads, steep=0.0, seed=1)
    result = run_planned(op, call, strategy)
    return result.counters, result.device_bytes


def planned(op: str, strategy: str, heads: int, tokens: int, chip: str = CHIP) -> Plan:
    return make_plan(op, chip=chip, num_heads=heads, num_tokens=tokens, strategy=strategy)


def arguments(parser: argparse.ArgumentParser) -> None:
    """--quick."""
    parser.add_argument("--quick", action="store_true", help="an eighth of the lengths; states weigh more then")


def check(args: argparse.Namespace) -> None:
    """Counters equal plans to the unit, for the kernels and for every strategy, or there is nothing to compare."""
    if build.missing():
        raise CheckFailed(build.missing())
    for op in OPS:
        for strategy in (KERNEL_STRATEGY, "ha-npu", *BASELINES):
            plan = planned(op, strategy, 2, 128)
            counters = simulate(op, 2, 128) if strategy == KERNEL_STRATEGY else simulate_plan(op, strategy, 2, 128)[0]
            # The one figure off: exp(G_last) of GDN, a float a plan counts as 4 bytes, moves as a block of 32.
            padded = 4 * 2 * 28 if (op, strategy) == ("gdn", "vllm-ascend") else 0
            found = (counters.gm_bytes - padded, counters.l1_to_l0_bytes, counters.macs, counters.peaks)
            wanted = (plan.traffic.gm_bytes, plan.traffic.l1_to_l0_bytes, plan.macs, plan.peak_bytes)
            if found != wanted:
                raise CheckFailed(f"{op}, {strategy}: the simulator counts {found}, the plan says {wanted}")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Absolute figures, ratios to every baseline, then the head sweep."""
    shorten = 8 if args.quick else 1
    rows = []
    for op in OPS:
        print(f"{op}: figures at {2048 // shorten} tokens, 10 heads", flush=True)
        rows += _figures(op, 10, 2048 // shorten)
    for op in OPS:
        for baseline in BASELINES:
            print(f"{op}: against {baseline}", flush=True)
            tokens = VLLM_ASCEND_TOKENS if baseline == "vllm-ascend" else 8192
            rows += _ratios(op, baseline, ("global memory", "L1 to L0"), 32, tokens // shorten)
            rows += _ratios(op, baseline, ("MACs",), 16, min(tokens, 4096) // shorten)
            if baseline != "vllm-ascend":
                rows += _device_memory(op, baseline, 1024 // shorten)
    for chip in (CHIP, "310b1"):
        for op in OPS:
            for heads in SWEEP:
                rows += _sweep(op, chip, heads, 1024 // shorten)
            print(f"{op}: heads {SWEEP} on {chip}", flush=True)
    if args.quick:  # the paper's figures are of the full lengths
        rows = [row if row["kind"] == "device memory" else {**row, "paper": None} for row in rows]
    return rows


def _row(item: str, unit: str, paper: float | None, *values: float | None, **more: Any) -> dict[str, Any]:
    return {"item": item, "unit": unit, **dict(zip(COLUMNS, (paper, *values), strict=True)), **more}


def _figures(op: str, heads: int, tokens: int) -> list[dict[str, Any]]:
    plans = [planned(op, strategy, heads, tokens) for strategy in ("ha-npu", KERNEL_STRATEGY)]
    published, kernels = simulate_plan(op, "ha-npu", heads, tokens)[0], simulate(op, heads, tokens)
    rows = []
    for item, (unit, said, counted) in FIGURES.items():
        values = (said(plans[0]), counted(published), said(plans[1]), counted(kernels))
        rows.append(
            _row(
                f"{op.upper()} {item}, {tokens} tokens, {heads} heads",
                unit,
                PAPER.get((op, item)),
                *values,
                kind="figure",
            )
        )
    relaid = (plans[0].traffic.relaid_fractals, None, plans[1].traffic.relaid_fractals, kernels.relaid_fractals)
    chunks = heads * -(-tokens // 64)
    per_chunk = [None if value is None else value / chunks for value in relaid]
    rows.append(_row(f"{op.upper()} 16x16 tiles relaid a chunk of a head", "", None, *per_chunk, kind="figure"))
    return rows


def _ratios(op: str, baseline: str, items: tuple[str, ...], heads: int, tokens: int) -> list[dict[str, Any]]:
    few = 1 if baseline == "vllm-ascend" else 2
    base, ours, kernels = (planned(op, s, few, tokens) for s in (baseline, "ha-npu", KERNEL_STRATEGY))
    counted_base = simulate_plan(op, baseline, few, tokens)[0]
    counted_ours, counted_kernels = simulate_plan(op, "ha-npu", few, tokens)[0], simulate(op, few, tokens)
    rows = []
    for item in items:
        _, said, counted = FIGURES[item]
        values = (
            100 * (said(ours) / said(base) - 1),
            100 * (counted(counted_ours) / counted(counted_base) - 1),
            100 * (said(kernels) / said(base) - 1),
            100 * (counted(counted_kernels) / counted(counted_base) - 1),
        )
        name = f"{op.upper()} {item} against {baseline}, {tokens} tokens, {heads} heads"
        rows.append(_row(name, "%", PAPER_RATIOS.get((op, item, baseline)), *values, kind="ratio"))
    return rows


def _device_memory(op: str, baseline: str, tokens: int) -> list[dict[str, Any]]:
    """At 65536 tokens as planned; what the simulator's runs held is compared with the plan at a shorter length."""
    for strategy in (baseline, "ha-npu"):
        held, said = simulate_plan(op, strategy, 2, tokens)[1], planned(op, strategy, 2, tokens).traffic.device_bytes
        if held != said:
            raise CheckFailed(f"{op}, {strategy}: the run held {held} bytes of device memory, the plan says {said}")
    base, ours = (planned(op, strategy, 32, 65536).traffic.device_bytes for strategy in (baseline, "ha-npu"))
    name = f"{op.upper()} device memory against {baseline}, 65536 tokens, 32 heads"
    paper = PAPER_RATIOS.get((op, "device memory", baseline))
    return [_row(name, "%", paper, 100 * (ours / base - 1), None, None, None, kind="device memory")]


def _sweep(op: str, chip: str, heads: int, tokens: int) -> list[dict[str, Any]]:
    """As the planner deals heads to the chip's cores, tails cut."""
    call = make_call(op, tokens=tokens, key_heads=heads, value_heads=heads, seed=1)
    begin = time.monotonic()
    counters = run_prefill(op, call, chip=chip, threads=2).counters
    seconds = time.monotonic() - begin
    plan = planned(op, KERNEL_STRATEGY, heads, tokens, chip)
    traffic, tail = plan.traffic, plan.traffic.tail
    wanted = (traffic.total_gm_bytes, traffic.l1_to_l0_bytes + tail.l1_to_l0_bytes, plan.macs + tail.macs)
    if (counters.gm_bytes, counters.l1_to_l0_bytes, counters.macs) != wanted:
        raise CheckFailed(f"{op} on {chip}, {heads} heads: the simulator's counters are not the plan's {wanted}")
    values = (None, None, traffic.total_gm_bytes / MIB, counters.gm_bytes / MIB)
    name = f"{op.upper()} on {chip}, {tokens} tokens, {heads} heads: global memory"
    return [_row(name, "MiB", None, *values, kind="sweep", seconds=round(seconds, 2))]


def table(rows: list[dict[str, Any]]) -> str:
    """Paper, plans and simulator side by side."""
    lines = [f"{'':68}{'unit':5}" + "".join(f"{name:>19}" for name in COLUMNS) + f"{'simulated in, s':>17}"]
    for row in rows:
        cells = "".join(f"{'-' if row[name] is None else format(row[name], '.2f'):>19}" for name in COLUMNS)
        lines.append(
            f"{row['item']:68}{row['unit']:5}{cells}" + (f"{row['seconds']:17.1f}" if "seconds" in row else "")
        )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """The ratios to the baselines as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [row for row in rows if row["kind"] == "ratio" and "megakernel" not in row["item"]]
    figure, axis = pyplot.subplots(figsize=(10, 7))
    series = (("paper", 0.27), ("plan simulated", 0.0), ("kernels simulated", -0.27))
    for name, shift in series:
        places = [index + shift for index, row in enumerate(bars) if row[name] is not None]
        axis.barh(places, [row[name] for row in bars if row[name] is not None], 0.26, label=name)
    axis.set_yticks(range(len(bars)), [row["item"] for row in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("percent against the baseline, both counted on the simulator; less is better")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCHMARK = Benchmark(
    "ascend-traffic",
    "What the Ascend C prefill kernels and the baselines move, counted on the simulator.",
    arguments,
    check,
    run,
    table,
    chart,
)
