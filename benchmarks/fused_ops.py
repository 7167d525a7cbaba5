"""`vllm-ext bench fused`: each fused operation against plain torch and torch.compile, at DiffusionGemma's shapes.

Every form is checked against the FP64 definition before it is timed; all are timed in CUDA graphs, so that launches
from Python do not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ops.fused import (
    activation_and_mul,
    add_rms_norm,
    confidence_argmax,
    norm_chain,
    norm_rope_heads,
    reference,
    rms_norm,
    softmax_topk,
)

TOKENS, HIDDEN, VOCABULARY, EXPERTS, TOP_K = 256, 2816, 262144, 128, 8
HEADS, KV_HEADS, DIM, DENSE = 16, 8, 256, 2112


@dataclass(frozen=True)
class Case:
    """An operation in our form and in torch's; `error(output)` is the relative error of what either returns.

    nbytes  bytes that must move: inputs read and outputs written once
    """

    name: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    error: Callable[[Any], float]
    nbytes: int
    tolerance: float = 2e-2


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _norm(x: torch.Tensor, weight: torch.Tensor | None, offset: float = 0.0) -> torch.Tensor:
    """As transformers writes it."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y if weight is None else y * (weight.float() + offset)).type_as(x)


def cases(device: torch.device, small: bool = False) -> list[Case]:
    """All operations; `small` shapes for a CPU."""
    tokens, hidden, vocabulary = (8, 96, 1000) if small else (TOKENS, HIDDEN, VOCABULARY)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)

    x, residual, other = draw(tokens, hidden), draw(tokens, hidden), draw(tokens, hidden)
    w, w1, w2, w3 = (draw(hidden) for _ in range(4))
    row = x.nbytes
    found = [
        Case("RMSNorm", lambda: rms_norm(x, w), lambda: _norm(x, w),
             lambda out: _relative(out, reference.rms_norm(x, w, 1e-6)), 2 * row),
        Case("RMSNorm, 1 + w", lambda: rms_norm(x, w, weight_offset=1.0), lambda: _norm(x, w, 1.0),
             lambda out: _relative(out, reference.rms_norm(x, w, 1e-6, 1.0)), 2 * row),
    ]  # fmt: skip

    def add_norm() -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return _norm(total, w), total

    found.append(Case("RMSNorm of a sum", lambda: add_rms_norm(x, residual, w), add_norm,
                      lambda out: _relative(out[0], reference.rms_norm(x + residual, w, 1e-6)), 4 * row))  # fmt: skip

    def chain() -> tuple[torch.Tensor, ...]:
        h = residual + _norm(_norm(x, w1) + _norm(other, w2), w)
        return h, _norm(h, w3)

    def chain_exact() -> torch.Tensor:
        value = reference.rms_norm(x, w1, 1e-6) + reference.rms_norm(other, w2, 1e-6)
        return residual.double() + reference.rms_norm(value, w, 1e-6)

    found.append(Case("layer's end (four norms, two sums)",
                      lambda: norm_chain(x, residual, w, (w3,), branches=(w1, other, w2)), chain,
                      lambda out: _relative(out[0], chain_exact()), 5 * row))  # fmt: skip
    found += _attention_cases(draw, tokens, hidden, small)
    found += _router_and_mlp(draw, tokens, small)
    logits = draw(tokens, vocabulary) * 3

    def naive() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        probs = torch.softmax(logits.float(), dim=-1)
        confidence, index = probs.max(dim=-1)
        return confidence, index, -(probs * probs.clamp(min=1e-30).log()).sum(-1)

    def statistics_error(out: Any) -> float:
        confidence, _, entropy = reference.statistics(logits)
        # torch's max names any index of a tie; the value there must be the maximum.
        at = logits.gather(-1, out[1][:, None])[:, 0]
        wrong = float((at != logits.amax(-1)).sum())
        return wrong + max(_relative(out[0], confidence), _relative(out[2], entropy))

    found.append(Case("confidence, argmax, entropy", lambda: confidence_argmax(logits), naive, statistics_error,
                      logits.nbytes, 1e-3))  # fmt: skip
    return found


def _attention_cases(draw: Callable[..., torch.Tensor], tokens: int, hidden: int, small: bool) -> list[Case]:
    heads, kv, dim = (4, 2, 16) if small else (HEADS, KV_HEADS, DIM)
    x = draw(tokens, hidden)
    joined = draw((heads + 2 * kv) * dim, hidden) / hidden**0.5
    split = [part.clone() for part in joined.split([heads * dim, kv * dim, kv * dim])]
    exact = x.double() @ joined.double().T
    qkv = F.linear(x, joined)
    q_weight, k_weight = draw(dim), draw(dim)
    angles = draw(1, tokens, dim), draw(1, tokens, dim)
    query = torch.empty(1, heads, tokens, dim, dtype=x.dtype, device=x.device)
    key, value = (torch.empty(1, kv, tokens, dim, dtype=x.dtype, device=x.device) for _ in range(2))

    def ours() -> tuple[torch.Tensor, ...]:
        norm_rope_heads(qkv, query, key, value, q_weight, k_weight, *angles)
        return query, key, value

    def rotate(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * angles[0][:, :, None] + torch.cat((-second, first), dim=-1) * angles[1][:, :, None]

    def plain() -> tuple[torch.Tensor, ...]:
        q, k, v = torch.split(qkv.view(1, tokens, -1, dim), [heads, kv, kv], dim=2)
        return tuple(
            t.transpose(1, 2).contiguous()
            for t in (rotate(_norm(q, q_weight)), rotate(_norm(k, k_weight)), _norm(v, None))
        )

    def error(out: Any) -> float:
        q = qkv.view(1, tokens, -1, dim)[:, :, :heads]
        wanted = reference.rotate(reference.rms_norm(q, q_weight, 1e-6), *(a[:, :, None] for a in angles))
        return _relative(out[0], wanted.transpose(1, 2))

    return [
        Case("q, k, v as one product", lambda: F.linear(x, joined),
             lambda: torch.cat([F.linear(x, part) for part in split], -1) if small else [F.linear(x, p) for p in split],
             lambda out: _relative(torch.cat(out, -1) if isinstance(out, list) else out, exact),
             joined.nbytes + x.nbytes + qkv.nbytes),
        Case("heads: norm, rotary, place", ours, plain, error, 2 * qkv.nbytes),
    ]  # fmt: skip


def _router_and_mlp(draw: Callable[..., torch.Tensor], tokens: int, small: bool) -> list[Case]:
    experts, inner = (16, 48) if small else (EXPERTS, DENSE)
    logits, scale, gate_up = draw(tokens, experts), draw(experts).abs(), draw(tokens, 2 * inner)

    def route() -> tuple[torch.Tensor, torch.Tensor]:
        p = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(p, TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True) * scale[ids], ids

    def route_error(out: Any) -> float:
        best = torch.sort(logits.double(), dim=-1, descending=True).values[:, :TOP_K]
        wanted = torch.softmax(best, -1) * scale.double()[out[1].long()]
        return _relative(out[0], wanted) + float((logits.gather(1, out[1].long()).double() != best).sum())

    def gate() -> torch.Tensor:
        left, right = gate_up.chunk(2, dim=-1)
        return F.gelu(left, approximate="tanh") * right

    def gate_error(out: Any) -> float:
        left, right = gate_up.double().chunk(2, dim=-1)
        return _relative(out, F.gelu(left, approximate="tanh") * right)

    return [
        Case("router: softmax, top-8", lambda: softmax_topk(logits, TOP_K, scale), route, route_error, logits.nbytes),
        Case("gelu(gate) * up", lambda: activation_and_mul(gate_up, "gelu_tanh"), gate, gate_error,
             3 * gate_up.nbytes // 2),
    ]  # fmt: skip


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


def check(args: argparse.Namespace) -> None:
    """Every form of every operation against FP64."""
    device = _device()
    for case in cases(device, device.type == "cpu"):
        for form, call in (("ours", case.ours), ("torch", case.torch)):
            error = case.error(call())
            if not error <= case.tolerance:
                raise CheckFailed(f"{case.name}, {form}: relative error {error:.2e} > {case.tolerance:.0e}")


def milliseconds(call: Callable[[], Any]) -> float:
    """Median of one call: in a CUDA graph of twenty on a GPU."""
    if torch.cuda.is_available():
        from vllm_ext.benchmarks.moe_common import graph_milliseconds

        return graph_milliseconds([call] * 20)
    from torch.utils.benchmark import Timer

    return 1e3 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.05).median


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an operation."""
    device = _device()
    rows = []
    for case in cases(device, device.type == "cpu"):
        row: dict[str, Any] = {"operation": case.name, "bytes": case.nbytes, "error": case.error(case.ours())}
        row["ours_ms"], row["torch_ms"] = milliseconds(case.ours), milliseconds(case.torch)
        if not args.no_compile:
            compiled = torch.compile(case.torch, dynamic=False)
            try:
                compiled()
                row["compile_ms"] = milliseconds(compiled)
            except Exception as error:
                row["compile_failed"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
        print(f"{case.name:36} {row['ours_ms']:.4f} ms", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line an operation."""
    lines = [
        f"{'operation':36} {'ours ms':>9} {'torch ms':>9} {'compile ms':>10}  over torch  over compile   GB/s  error"
    ]
    for row in rows:
        compiled = row.get("compile_ms")
        ratio = "-" if compiled is None else f"{compiled / row['ours_ms']:.2f}x"
        lines.append(
            f"{row['operation']:36} {row['ours_ms']:9.4f} {row['torch_ms']:9.4f} "
            f"{'-' if compiled is None else f'{compiled:.4f}':>10} {row['torch_ms'] / row['ours_ms']:10.2f}x "
            f"{ratio:>12} "
            f"{row['bytes'] / row['ours_ms'] / 1e6:7.0f} {row['error']:.1e}"
        )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Times side by side, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.4), layout="constrained")
    forms = {
        "torch_ms": ("torch", "tab:gray"),
        "compile_ms": ("torch.compile", "tab:orange"),
        "ours_ms": ("ours", "tab:blue"),
    }
    for offset, (key, (label, colour)) in enumerate(forms.items()):
        values = [1e3 * row[key] if key in row else 0 for row in rows]
        axes.barh([i + 0.27 * (offset - 1) for i in range(len(rows))], values, 0.25, label=label, color=colour)
    axes.set_yticks(range(len(rows)), [row["operation"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    name="fused",
    help="fused norms, QKV, heads, routing and confidence against torch and torch.compile",
    arguments=arguments,
    check=check,
    run=run,
    table=table,
    chart=chart,
)
