"""`vllm-ext bench ascend-accuracy`: the Ascend C prefill kernels, on the simulator, against FP64 over realistic cases.

NMSE is the squared error relative to the squared reference, of outputs (FP16) and final states (FP32), against two
references: the definition in FP64 on the kernels' FP16 operands, and the same arithmetic with operands rounded to FP16
where the kernels round them (`ascend_rounded`), which leaves FP32 sums and the rounding of the output itself. GDN is
measured with operands in two halves as well, against the definition. "floor" is the definition's own output in FP16:
no kernel with FP16 outputs can be closer.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from vllm_ext.benchmarks.ascend_problems import make_call
from vllm_ext.benchmarks.ascend_rounded import rounded_reference
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda, cpu
from vllm_ext.ops.linear_attention.ascend_sim import build
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.problem import Call

TOKENS = (1, 2, 7, 16, 31, 63, 64, 65, 100, 128, 130, 200, 256, 333, 512, 777, 1024, 1500, 2048, 4096, 6000, 8192)
HEADS = (1, 2, 4, 8, 16, 32, 48)
CHUNK_HEADS = 192
"""Cases of more chunks times heads are left out: long sequences come with few heads."""
PAPER = {"o": 5.23e-8, "state": 9.38e-12}
"""Largest NMSE of 360 GDN cases in the paper (arXiv 2609.32114, section 7.4)."""
LIMITS = {"o": 1e-6, "state": 1e-6, "o_rounded": 1e-7, "state_rounded": 1e-7, "state_split": PAPER["state"]}


def cases(op: str, count: int) -> list[dict[str, Any]]:
    """`count` seeded cases; the sizes take turns, the options are drawn."""
    sizes = [(heads, tokens) for tokens in TOKENS for heads in HEADS if heads * -(-tokens // 64) <= CHUNK_HEADS]
    draw = random.Random(op)
    result = []
    for index in range(count):
        heads, tokens = sizes[index * 37 % len(sizes)]
        group = draw.choice([g for g in (1, 2, 4) if heads % g == 0])
        result.append(
            {
                "op": op,
                "tokens": tokens,
                "value_heads": heads,
                "key_heads": heads // group,
                "key_dim": draw.choice((64, 128, 128)),
                "value_dim": draw.choice((64, 128, 128)),
                "steep": draw.choice((0.0, 0.02, 0.05, 0.3, 1.0)),
                "normalise": draw.random() < 0.5,
                "state_v_first": draw.random() < 0.5,
                "initial": draw.random() < 0.75,
                "seed": index,
            }
        )
    return result


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Squared error relative to the squared reference; infinite where it is not finite."""
    error = (got.double() - wanted).square().sum().item() / wanted.square().sum().item()
    return error if error == error else float("inf")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The row of one case."""
    torch.set_num_threads(1)
    options = dict(case)
    op = options.pop("op")
    call = make_call(op, **options)
    result = run_prefill(op, call, threads=1)
    assert result.final_state is not None
    o, state = definition(op, call)
    rounded, rounded_state = rounded_reference(op, call)
    split = {}
    if op == "gdn":
        halves = run_prefill(op, call, threads=1, split_operands=True)
        assert halves.final_state is not None
        split = {"o_split": nmse(halves.o, o), "state_split": nmse(halves.final_state, state)}
    return {
        **case,
        **split,
        "o_floor": nmse(o.half(), o),
        "o": nmse(result.o, o),
        "state": nmse(result.final_state, state),
        "o_rounded": nmse(result.o, rounded),
        "state_rounded": nmse(result.final_state, rounded_state),
    }


def definition(op: str, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in FP64, by the chunked torch backend, which keeps FP64 operands in FP64."""
    wide = dataclasses.replace(call, **{name: getattr(call, name).double() for name in ("q", "k", "v", "g", "beta")})
    o, state = (cpu.chunk_gated_delta_rule if op == "gdn" else cpu.chunk_kda)(wide)
    assert state is not None
    return o, state


def arguments(parser: argparse.ArgumentParser) -> None:
    """--cases, --jobs."""
    parser.add_argument("--cases", type=int, default=360, help="cases of each operator (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    """The FP64 side itself, against the token recurrence."""
    if build.missing():
        raise CheckFailed(build.missing())
    for op, function in (("gdn", chunk_gated_delta_rule), ("kda", chunk_kda)):
        call = make_call(op, tokens=150, value_heads=2)
        operands = (x.double() for x in (call.q, call.k, call.v, call.g, call.beta))
        wanted, _ = function(*operands, backend="reference", initial_state=call.initial_state, state_v_first=True)
        error = nmse(definition(op, call)[0], wanted)
        if error > 1e-20:
            raise CheckFailed(f"{op}: the FP64 reference of this benchmark is off by an NMSE of {error:.1e}")
    build.build()


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, with a line of progress every 20."""
    todo = [case for op in ("gdn", "kda") for case in cases(op, args.cases)]
    rows = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(measure, todo):
            rows.append(row)
            if len(rows) % 20 == 0:
                print(f"{len(rows)} of {len(todo)} cases", flush=True)
    return rows


COLUMNS = ("o", "state", "o_rounded", "state_rounded", "o_split", "state_split", "o_floor")


def table(rows: list[dict[str, Any]]) -> str:
    """Largest NMSE by operator and by number of heads, medians, and the paper's."""
    lines = [f"{'largest':14}{'cases':>6}" + "".join(f"{name.replace('_', ' '):>15}" for name in COLUMNS)]
    for op in ("gdn", "kda"):
        mine = [row for row in rows if row["op"] == op]
        if not mine:
            continue
        groups = [(op, mine)] + [(f"  {h} heads", [r for r in mine if r["value_heads"] == h]) for h in HEADS]
        for name, group in groups:
            if group:
                lines.append(f"{name:14}{len(group):6}" + _cells(group, max))
        lines.append(f"{op + ', median':14}{len(mine):6}" + _cells(mine, median_high))
    lines.append(
        f"paper, GDN: outputs up to {PAPER['o']:.2e}, states up to {PAPER['state']:.2e}; it does not say against which"
    )
    gdn = [row for row in rows if row["op"] == "gdn"]
    for key in ("o_rounded", "o_split", "o_floor", "state_rounded", "state_split"):
        limit = PAPER[key.split("_")[0]]
        count = sum(row[key] <= limit for row in gdn)
        lines.append(f"{count} of {len(gdn)} GDN cases have {key.replace('_', ' ')} within the paper's {limit:.2e}")
    bad = [row for row in rows if any(key in row and not row[key] < limit for key, limit in LIMITS.items())]
    lines.append(f"{len(bad)} cases beyond the limits {LIMITS}" + "".join(f"\n  {row}" for row in bad[:5]))
    return "\n".join(lines)


def _cells(group: list[dict[str, Any]], pick: Callable[[list[float]], float]) -> str:
    values = [[row[key] for row in group if key in row] for key in COLUMNS]
    return "".join(f"{format(pick(column), '.1e') if column else '-':>15}" for column in values)


SERIES = (
    ("", "-", "definition"),
    ("_rounded", "--", "operands rounded alike"),
    ("_split", ":", "operands in two halves, definition"),
)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Every case's NMSE, sorted, beside the paper's largest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for axis, what, title in zip(axes, ("o", "state"), ("outputs", "final states"), strict=True):
        for op, colour in (("gdn", "tab:blue"), ("kda", "tab:orange")):
            for suffix, style, against in SERIES:
                mine = [row[what + suffix] for row in rows if what + suffix in row and row["op"] == op]
                values = sorted(max(value, 1e-18) for value in mine)
                if values:
                    axis.semilogy(values, style, color=colour, label=f"{op.upper()}, {against}")
        axis.axhline(PAPER[what], color="grey", linewidth=1, label="paper, largest of 360 GDN cases")
        axis.set(title=f"NMSE of {title} against FP64", xlabel="cases, sorted")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


BENCHMARK = Benchmark(
    "ascend-accuracy", "The simulated Ascend C prefill kernels against FP64.", arguments, check, run, table, chart
)
