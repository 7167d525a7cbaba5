"""`vllm-ext bench ascend-traffic`: what the Ascend C prefill kernels move and multiply, counted on the simulator.

Beside it the paper's figures (arXiv 2609.32114) and the planner's: "plan" is the strategy "ha-npu", which reproduces
the paper; "kernel plan" counts the products the way these kernels do them (tiles above a diagonal left out, diagonal
tiles inverted on the vector unit), and the simulator must agree with it exactly. Baselines are the planner's, but one:
flash-linear-attention's GDN in six launches runs on the simulator too, and those ratios are of counted to counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.ascend_problems import make_call
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.operators import build_graph
from vllm_ext.ha_npu.products import ProductCounts, ProductPolicy, cheapest_product_order, count_products
from vllm_ext.ha_npu.rewrite import gemm_first
from vllm_ext.ops.linear_attention.ascend_sim import build
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.session import Counters
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Task, staged_launches

CHIP, MIB, KIB = "310p1", 2**20, 2**10
KDA_DIAGONAL_PRODUCTS = 2 * 4 * 8
"""Products of 16x16x16 a chunk that KDA does on the vector unit instead: the diagonal tiles of K K^T and Q K^T."""

# What is counted; the planner's and the simulator's side of it.
FIGURES: dict[str, tuple[str, Callable[[Any], float], Callable[[Counters], float]]] = {
    "global memory": ("MiB", lambda plan: plan.traffic.gm_bytes / MIB, lambda c: c.gm_bytes / MIB),
    "L1 to L0": ("MiB", lambda plan: plan.traffic.l1_to_l0_bytes / MIB, lambda c: c.l1_to_l0_bytes / MIB),
    "MACs": ("G", lambda plan: plan.macs / 1e9, lambda c: c.macs / 1e9),
    "UB peak": ("KiB", lambda plan: plan.peak_bytes["ub"] / KIB, lambda c: c.peak_ub / KIB),
}
PAPER = {
    ("gdn", "global memory"): 21.41,
    ("kda", "global memory"): 31.33,
    ("gdn", "L1 to L0"): 64.53,
    ("kda", "L1 to L0"): 74.53,
    ("gdn", "UB peak"): 244.0,
}
RATIOS = {
    ("gdn", "global memory"): (-81.7, -21.2),
    ("kda", "global memory"): (-84.8, -40.8),
    ("gdn", "L1 to L0"): (-46.4, -39.2),
    ("kda", "L1 to L0"): (-30.5, -44.0),
    ("gdn", "MACs"): (-17.5, -12.9),
}
"""Percent against FLA and FlashQLA; traffic at 8192 tokens and 32 heads, MACs at 4096 tokens."""


def kernel_counts(op: str) -> ProductCounts:
    """Products and fractals of a chunk of a head under the kernels' own policy, by the planner's model."""
    graph, _ = gemm_first(build_graph(op))
    policy = ProductPolicy(keep=True, capacity=64 * KIB, skip_zero=True, inversion="vector-merge")
    return count_products(graph, cheapest_product_order(graph, policy), policy)


def simulate(op: str, heads: int, tokens: int) -> Counters:
    """Whole heads on ten cores."""
    call = make_call(op, tokens=tokens, key_heads=heads, value_heads=heads, seed=1)
    blocks = [
        [Task(0, tokens, 0, head, 0, 128, 0) for head in range(core, heads, 10)] for core in range(min(10, heads))
    ]
    return run_prefill(op, call, blocks=blocks).counters


def simulate_staged(heads: int, tokens: int) -> Counters:
    """GDN in the six launches of flash-linear-attention."""
    call = make_call("gdn", tokens=tokens, key_heads=heads, value_heads=heads, seed=1)
    tasks = [Task(0, tokens, 0, head, 0, 128, 0) for head in range(heads)]
    return run_prefill("fla_gdn", call, launches=staged_launches(tasks, 10)).counters


def arguments(parser: argparse.ArgumentParser) -> None:
    """--quick."""
    parser.add_argument("--quick", action="store_true", help="ratios at an eighth of the length: seconds, same ratios")


def check(args: argparse.Namespace) -> None:
    """The counters equal the planner's predictions, or there is nothing to compare."""
    if build.missing():
        raise CheckFailed(build.missing())
    for op in ("gdn", "kda"):
        counters, counts = simulate(op, 10, 256), kernel_counts(op)
        plan = make_plan(op, chip=CHIP, num_heads=10, num_tokens=256)
        products = counts.products - (KDA_DIAGONAL_PRODUCTS if op == "kda" else 0)
        found = (counters.gm_bytes, counters.l1_to_l0_bytes, counters.mac_fractals)
        planned = (plan.traffic.gm_bytes, 40 * counts.fractals * 512, 40 * products)
        if found != planned:
            raise CheckFailed(f"{op}: global memory, L1 to L0 and products are {found}, planned {planned}")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Absolute figures at 2048 tokens and 10 heads, then ratios to the baselines."""
    rows = []
    for op in ("gdn", "kda"):
        counters, counts = simulate(op, 10, 2048), kernel_counts(op)
        plan = make_plan(op, chip=CHIP, num_heads=10, num_tokens=2048)
        for item, (unit, planned, counted) in FIGURES.items():
            own = {"L1 to L0": 320 * counts.fractals * 512 / MIB, "MACs": 320 * counts.products * 4096 / 1e9}.get(item)
            row = {"item": f"{op.upper()} {item}, 2048 tokens, 10 heads", "unit": unit, "paper": PAPER.get((op, item))}
            rows.append({**row, "plan": planned(plan), "kernel plan": own, "simulator": counted(counters)})
    for op in ("gdn", "kda"):
        for tokens, heads, items in ((8192, 32, ("global memory", "L1 to L0")), (4096, 16, ("MACs",))):
            length = tokens // 8 if args.quick else tokens
            print(f"simulating {op}, {length} tokens, {heads} heads", flush=True)
            counters = simulate(op, heads, length)
            staged = simulate_staged(heads, length) if op == "gdn" else None
            for item in items:
                counted = FIGURES[item][2]
                rows += _ratios(op, item, heads, length, counted(counters))
                if staged is not None:
                    name = f"GDN {item} against fla simulated, {length} tokens, {heads} heads"
                    measured = {"simulator": 100 * (counted(counters) / counted(staged) - 1)}
                    rows.append(
                        {"item": name, "unit": "%", "paper": None, "plan": None, "kernel plan": None, **measured}
                    )
    return rows


def _ratios(op: str, item: str, heads: int, tokens: int, counted: float) -> list[dict[str, Any]]:
    paper = RATIOS.get((op, item), (None, None))
    rows = []
    for baseline, said in zip(("fla", "flash-qla"), paper, strict=True):
        other, ours = (
            FIGURES[item][1](make_plan(op, chip=CHIP, num_heads=heads, num_tokens=tokens, strategy=strategy))
            for strategy in (baseline, "ha-npu")
        )
        name = f"{op.upper()} {item} against {baseline}, {tokens} tokens, {heads} heads"
        percent = {"plan": 100 * (ours / other - 1), "kernel plan": None, "simulator": 100 * (counted / other - 1)}
        rows.append({"item": name, "unit": "%", "paper": said, **percent})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Paper, plan, the kernels' own plan and the simulator side by side."""
    columns = ("paper", "plan", "kernel plan", "simulator")
    lines = [f"{'':66}{'unit':5}" + "".join(f"{name:>13}" for name in columns)]
    for row in rows:
        cells = "".join(f"{'-' if row[name] is None else format(row[name], '.2f'):>13}" for name in columns)
        lines.append(f"{row['item']:66}{row['unit']:5}{cells}")
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """The ratios as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [row for row in rows if row["unit"] == "%" and row["plan"] is not None]
    figure, axis = pyplot.subplots(figsize=(9, 5))
    for shift, name in ((0.25, "paper"), (0.0, "plan"), (-0.25, "simulator")):
        places = [index + shift for index, row in enumerate(bars) if row[name] is not None]
        axis.barh(places, [row[name] for row in bars if row[name] is not None], 0.24, label=name)
    axis.set_yticks(range(len(bars)), [row["item"] for row in bars], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("percent against the baseline, less is better")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCHMARK = Benchmark(
    "ascend-traffic",
    "What the Ascend C prefill kernels move, counted on the simulator.",
    arguments,
    check,
    run,
    table,
    chart,
)
