"""Experts on a CPU: ours in 4 bits against vLLM's BF16 experts, same process, same routings, arms in turn.

Weights are rotated over layers, as in a model, because a layer that stays in the cache hides what 4 bits save; `hot`
repeats one layer for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ops.moe import CallOptions, PreparedExperts, cpu_native, fused_moe_w4a16, prepare_experts
from vllm_ext.ops.moe.custom_op import call_experts, encode_call
from vllm_ext.quantization import quantize_weight

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A model's experts and how many layers of them are held at once."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    groups: tuple[int, int]
    layers: int


SHAPES = {
    "smollm2-g32": Shape(576, 192, 8, 8, (32, 32), 30),
    "smollm2-g128": Shape(576, 192, 8, 8, (128, 64), 30),
    "qwen3-moe-32": Shape(2048, 768, 32, 8, (128, 64), 2),
}
TOKENS = (1, 2, 4, 8, 64, 256)
# Relative error (Frobenius): a rounding to BF16 costs up to 2^-9; PyTorch's kernel has four of them on the way.
TOLERANCE = 8e-3


def vllm_layer(w13: torch.Tensor, w2: torch.Tensor) -> Call:
    """vLLM's own BF16 experts, packed for the instruction set that vLLM would choose here."""
    import vllm._custom_ops as ops

    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    w13, w2 = ops.cpu_prepack_moe_weight(w13, isa), ops.cpu_prepack_moe_weight(w2, isa)

    def call(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.cpu_fused_moe(out, x, w13, w2, None, None, weights, ids, "silu", isa)
        return out

    return call


def our_layer(experts: PreparedExperts) -> Call:
    """Our experts, called as the vLLM layer calls them."""
    tensors, meta = encode_call(experts, CallOptions())
    return lambda x, weights, ids: call_experts(x, weights, ids, None, tensors, meta)


def without_native_kernel() -> Any:
    """Weights packed inside this context are served by PyTorch's kernel."""
    return mock.patch.object(cpu_native, "load", return_value=(None, "left out to be compared"))


def arms(shape: Shape, seed: int) -> dict[str, list[Call]]:
    """Every arm's layers, one list of calls an arm."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, list[Call]] = {"vllm_bf16": [], "ours": [], "ours_pytorch_kernel": []}
    for _ in range(shape.layers):
        w13 = (
            torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden, generator=generator).mul_(0.02).bfloat16()
        )
        w2 = torch.randn(shape.experts, shape.hidden, shape.intermediate, generator=generator).mul_(0.02).bfloat16()
        q13, q2 = (quantize_weight(w, g, method="minmax") for w, g in zip((w13, w2), shape.groups, strict=True))
        made["vllm_bf16"].append(vllm_layer(w13, w2))
        made["ours"].append(our_layer(prepare_experts(q13, q2, backend="cpu", top_k=shape.top_k)))
        with without_native_kernel():
            made["ours_pytorch_kernel"].append(
                our_layer(prepare_experts(q13, q2, backend="cpu", top_k=shape.top_k)),
            )
    return made


def operands(shape: Shape, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, router weights (normalised) and distinct expert ids of each token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, shape.experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(shape.top_k, dim=-1)
    x = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    return x, weights / weights.sum(-1, keepdim=True), ids.int()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over the expected one's."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check(args: argparse.Namespace) -> None:
    """Every arm against FP64, on one layer of each shape (at most 8 experts' worth of rows are multiplied)."""
    for name in args.shape:
        shape = SHAPES[name]
        generator = torch.Generator().manual_seed(0)
        size = (shape.experts, 2 * shape.intermediate, shape.hidden)
        w13 = torch.randn(size, generator=generator).mul_(0.02).bfloat16()
        w2 = torch.randn(shape.experts, shape.hidden, shape.intermediate, generator=generator).mul_(0.02).bfloat16()
        q13, q2 = (quantize_weight(w, g, method="minmax") for w, g in zip((w13, w2), shape.groups, strict=True))
        rounded = [q.dequantize(torch.bfloat16) for q in (q13, q2)]
        layers = {"ours": our_layer(prepare_experts(q13, q2, backend="cpu", top_k=shape.top_k))}
        with without_native_kernel():
            layers["ours_pytorch_kernel"] = our_layer(prepare_experts(q13, q2, backend="cpu", top_k=shape.top_k))
        layers["vllm_bf16"] = vllm_layer(*rounded)
        reference = prepare_experts(q13, q2, backend="reference")
        for tokens in (1, 8, 65):
            x, weights, ids = operands(shape, tokens)
            expected = fused_moe_w4a16(x, reference, weights, ids)
            for arm, call in layers.items():
                error = relative_error(call(x, weights, ids), expected)
                if not error < TOLERANCE:
                    raise CheckFailed(f"{name}, {arm}, M={tokens}: relative error {error:.1e}, allowed {TOLERANCE:.0e}")


def microseconds(calls: list[Call], inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """Mean time of a layer over one pass through `calls`."""
    start = time.perf_counter()
    for call in calls:
        call(*inputs)
    return (time.perf_counter() - start) / len(calls) * 1e6


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over rounds in which the arms take turns; speed-ups are medians of the rounds' ratios."""
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.shape:
        print(f"{name}: preparing {SHAPES[name].layers} layers", flush=True)
        layers = arms(SHAPES[name], seed=0)
        for tokens in args.tokens:
            inputs = operands(SHAPES[name], tokens)
            rounds = max(3, args.rounds if tokens <= 8 else args.rounds // 4)
            for cache in ("rotated", "hot") if tokens <= 8 else ("rotated",):
                calls = {arm: made if cache == "rotated" else made[:1] * 10 for arm, made in layers.items()}
                times: dict[str, list[float]] = {arm: [] for arm in calls}
                for _ in range(rounds + 1):
                    for arm, made in calls.items():
                        times[arm].append(microseconds(made, inputs))
                kept = {arm: values[1:] for arm, values in times.items()}
                row: dict[str, Any] = {"shape": name, "tokens": tokens, "weights": cache, "rounds": rounds}
                for arm, values in kept.items():
                    row[f"{arm}_us"] = round(statistics.median(values), 1)
                for arm in ("ours", "ours_pytorch_kernel"):
                    ratios = [b / a for a, b in zip(kept[arm], kept["vllm_bf16"], strict=True)]
                    row[f"{arm}_speedup"] = round(statistics.median(ratios), 2)
                rows.append(row)
                print(f"  M={tokens} {cache}: {row['ours_speedup']}x of vLLM's BF16", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| shape | M | weights | vLLM BF16, us | ours, us | PyTorch's kernel, us | ours / BF16 | PyTorch's / BF16 |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        times = (f"{row[f'{arm}_us']:.0f}" for arm in ("vllm_bf16", "ours", "ours_pytorch_kernel"))
        gains = (f"{row[f'{arm}_speedup']:.2f}x" for arm in ("ours", "ours_pytorch_kernel"))
        lines.append(f"| {' | '.join((row['shape'], str(row['tokens']), row['weights'], *times, *gains))} |")
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed against vLLM's BF16 experts over the number of tokens, weights rotated."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rotated = [row for row in rows if row["weights"] == "rotated"]
    names = list(dict.fromkeys(row["shape"] for row in rotated))
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        shown = [row for row in rotated if row["shape"] == name]
        places = range(len(shown))
        axis.bar([p - 0.2 for p in places], [row["ours_speedup"] for row in shown], 0.4, label="AVX-512 BF16 kernel")
        axis.bar(
            [p + 0.2 for p in places],
            [row["ours_pytorch_kernel_speedup"] for row in shown],
            0.4,
            label="PyTorch's kernel",
        )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(list(places), [str(row["tokens"]) for row in shown])
        axis.set_xlabel("tokens (M)")
        axis.set_title(name)
    axes[0][0].set_ylim(0, 1.25 * max(row["ours_speedup"] for row in rotated))
    axes[0][0].set_ylabel("speed, vLLM's BF16 experts = 1")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="M")
    parser.add_argument("--rounds", type=int, default=20, help="rounds a median is taken over (a quarter for M > 8)")
    parser.add_argument("--threads", type=int, default=1)


BENCHMARK = Benchmark(
    name="moe-cpu",
    help="4-bit experts on this CPU against vLLM's BF16 experts.",
    arguments=arguments,
    check=check,
    run=run,
    table=table,
    chart=chart,
)
