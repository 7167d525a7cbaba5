"""`vllm-ext bench roofline`: this GPU's measured roofline, and where each of our kernels lies under it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.probes import check
from vllm_ext.benchmarks.registry import Benchmark

TOKENS = (1, 8, 32, 64, 256, 1024, 4096)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="of the experts (default: %(default)s)"
    )


def expert_rows(tokens: list[int], device: torch.device) -> list[dict[str, Any]]:
    """DiffusionGemma's expert layer at several numbers of tokens: useful FLOP and packed bytes of the experts hit."""
    from vllm_ext.benchmarks.moe_common import SHAPES, graph_milliseconds, random_experts, routings

    from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts

    shape = SHAPES["DiffusionGemma"]
    # Several layers, so that one layer's weights do not wait in the cache for its next turn.
    layers = [prepare_experts(*random_experts(shape, "float", device, seed=i), dtype=torch.bfloat16) for i in range(4)]
    rows = []
    for count in tokens:
        x = torch.randn(count, shape.hidden, device=device).to(torch.bfloat16)
        given = routings(shape, count, 4, device)
        calls = [
            lambda x=x, layer=layer, w=w, ids=ids: fused_moe_w4a16(x, layer, w, ids, activation=shape.activation)
            for layer, (w, ids) in zip(layers, given, strict=True)
        ]
        hit = sum(len(torch.unique(ids)) for _, ids in given) / len(given)
        rows.append(
            {
                "kernel": f"experts, {count} tokens",
                "family": "4-bit experts",
                "flop": shape.flops(count),
                "bytes": shape.layer_bytes(1) * hit,
                "ms": graph_milliseconds(calls),
            }
        )
    return rows


def small_rows(device: torch.device) -> list[dict[str, Any]]:
    """The fused operations: bytes that must move; a handful of FLOP a value."""
    from vllm_ext.benchmarks.fused_ops import cases, milliseconds

    rows = []
    for case in cases(device):
        joined = case.name.startswith("q, k, v")
        flop = 2 * 256 * 2816 * 8192 if joined else 4 * case.nbytes // 2
        family = "products (cuBLAS)" if joined else "fused operations"
        rows.append(
            {"kernel": case.name, "family": family, "flop": flop, "bytes": case.nbytes, "ms": milliseconds(case.ours)}
        )
    return rows


def linear_attention_rows(device: torch.device) -> list[dict[str, Any]]:
    """Prefill of GDN and KDA, one sequence of 8,192 tokens."""
    from vllm_ext.benchmarks.linear_attention_common import FUNCTIONS, Row, make_call
    from vllm_ext.benchmarks.moe_common import graph_milliseconds

    rows = []
    for row in (Row("gdn", 16, 32, (8192,)), Row("kda", 16, 16, (8192,))):
        call = make_call(row, device)
        ms = graph_milliseconds([lambda row=row, call=call: FUNCTIONS[row.op](**call, backend="triton")])
        name = f"{row.op.upper()} prefill, {row.heads}/{row.value_heads} heads"
        family = "linear attention"
        rows.append({"kernel": name, "family": family, "flop": row.flops(), "bytes": row.bytes(), "ms": ms})
    return rows


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The roofline's row first, then a row a kernel with its share of the ceiling."""
    from vllm_ext.benchmarks.probes import measure

    device = torch.device("cuda")
    roof = measure(device)
    rows = expert_rows(args.tokens, device) + small_rows(device) + linear_attention_rows(device)
    for row in rows:
        floor = max(row["bytes"] / roof["bandwidth"], row["flop"] / roof["flops"]) * 1e3
        row["floor_ms"], row["share_of_ceiling"] = floor, floor / row["ms"]
    return [{"kernel": "roofline", **roof}, *rows]


def table(rows: list[dict[str, Any]]) -> str:
    """Kernels with their intensity, rate and share."""
    lines = [f"{'kernel':38} FLOP/byte   TFLOP/s    GB/s   share of ceiling"]
    for row in rows[1:]:
        lines.append(
            f"{row['kernel']:38} {row['flop'] / row['bytes']:9.1f} {row['flop'] / row['ms'] / 1e9:9.1f} "
            f"{row['bytes'] / row['ms'] / 1e6:7.0f} {row['share_of_ceiling']:10.1%}"
        )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """The classic picture: FLOP/s over FLOP per byte, both logarithmic (Williams, Waterman and Patterson, 2009)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    roof, kernels = rows[0], rows[1:]
    intensity = [row["flop"] / row["bytes"] for row in kernels]
    low, high = min(intensity) / 3, max(*intensity, roof["ridge"]) * 4
    figure, axes = pyplot.subplots(figsize=(8, 5.2), layout="constrained")
    axes.plot(
        [low, roof["ridge"], high],
        [low * roof["bandwidth"] / 1e12, roof["flops"] / 1e12, roof["flops"] / 1e12],
        "k-",
        label=f"measured: {roof['bandwidth'] / 1e12:.2f} TB/s, {roof['flops'] / 1e12:.0f} TFLOP/s, "
        f"ridge {roof['ridge']:.0f} FLOP/byte",
    )
    colours = {
        "4-bit experts": "tab:blue",
        "linear attention": "tab:green",
        "products (cuBLAS)": "tab:gray",
        "fused operations": "tab:orange",
    }
    for family, colour in colours.items():
        mine = [(x, row) for x, row in zip(intensity, kernels, strict=True) if row["family"] == family]
        axes.plot(
            [x for x, _ in mine], [row["flop"] / row["ms"] / 1e9 for _, row in mine], "o", color=colour, label=family
        )
        _name(axes, mine, 0.8 * low if family == "fused operations" else None)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=low / 30)
    axes.set_xlabel("useful FLOP per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3, which="both", linewidth=0.4)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _name(axes: Any, points: list[tuple[float, dict[str, Any]]], column: float | None) -> None:
    """Names beside the points, or in a column of their own, apart from each other, where points lie on one line."""
    lowest = 0.0
    for x, row in sorted(points, key=lambda item: item[1]["flop"] / item[1]["ms"]):
        rate = row["flop"] / row["ms"] / 1e9
        height = max(rate, lowest)
        lowest = 1.35 * height
        where: dict[str, Any] = {"xytext": (6, -9), "textcoords": "offset points"}
        if column is not None:
            where = {"xytext": (column, height), "textcoords": "data", "ha": "right", "va": "center"}
            where["arrowprops"] = {"arrowstyle": "-", "linewidth": 0.4, "color": "gray"}
        axes.annotate(row["kernel"].removeprefix("experts, "), (x, rate), fontsize=7, **where)


BENCHMARK = Benchmark(
    "roofline", "this GPU's roofline with each of our kernels on it", arguments, check, run, table, chart
)
