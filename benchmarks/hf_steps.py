"""`vllm-ext bench steps`: one denoising step inside DiffusionGemma's own `generate()`, by arm.

Beside the swap of the experts alone stands what Amdahl's law allows it, eager and with the decoder captured in both
arms; CUDA graphs on and off are pairs of arms; a model by byte count says what a machine of less bandwidth would gain.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.ab import device
from vllm_ext.benchmarks.gpu_readings import readings
from vllm_ext.benchmarks.hf_arms import ARMS, Switch
from vllm_ext.benchmarks.hf_model import SIZES, random_model
from vllm_ext.benchmarks.registry import Benchmark

PROMPT_TOKENS = 128
# Bytes a second of the machine the published experiment ran on (GB10), for the model by byte count.
SMALL_MACHINE = 250e9


def prompt_ids(model: Any, tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    """A prompt [1, T] of fixed ids."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    return ((torch.arange(tokens, device=device) * 7919 + 13) % (vocabulary - 16))[None]


def _seconds(model: Any, ids: torch.Tensor, steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    if ids.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids, max_new_tokens=model.config.canvas_length, max_denoising_steps=steps, eos_token_id=None,
        # Random weights never grow confident; a trained model must not stop early while it is timed.
        stability_threshold=None, confidence_threshold=None,
    )  # fmt: skip
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def step_milliseconds(model: Any, ids: torch.Tensor, steps: int, repeats: int = 1) -> dict[str, Any]:
    """A step's time, from `steps` + 1 steps less one step, after a warm-up; and that of the whole `generate()`.

    Medians of `repeats` runs, whose steps `runs_ms` lists.
    """
    # Layers are recorded (layer_graphs.py) at the third call: of a canvas, and of a prompt.
    for warmup in (5, 1, 1):
        _seconds(model, ids, warmup, 0)
    # The collector walks all that packing has left behind, in the middle of a run.
    gc.collect()
    gc.freeze()
    found = []
    try:
        for seed in range(repeats):
            first, all_steps = _seconds(model, ids, 1, seed), _seconds(model, ids, 1 + steps, seed)
            found.append((1e3 * (all_steps - first) / steps, 1e3 * all_steps))
    finally:
        gc.unfreeze()
    runs = [step for step, _ in found]
    whole = statistics.median(whole for _, whole in found)
    return {"step_ms": statistics.median(runs), "generate_ms": whole, "runs_ms": runs}


def run_arms(switch: Switch, names: Sequence[str], steps: int, repeats: int = 1) -> list[dict[str, Any]]:
    """One row an arm, in the order given (an arm may come twice: then it ran early and late)."""
    ids = prompt_ids(switch.model)
    rows = []
    for name in names:
        switch.to(ARMS[name])
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        row = {"arm": name, "steps": steps, **step_milliseconds(switch.model, ids, steps, repeats), **readings()}
        if ids.is_cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        rows.append(row)
        print(f"{name:20} {row['step_ms']:9.2f} ms a step, generate() {row['generate_ms']:9.1f} ms", flush=True)
    return rows


def best(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The median time of all runs of an arm, early and late, None where it did not run."""
    times = [time for row in rows if row["arm"] == name for time in row.get("runs_ms", [row["step_ms"]])]
    return statistics.median(times) if times else None


def amdahl(rows: Sequence[dict[str, Any]], layer_ms: dict[str, float], layers: int) -> list[dict[str, Any]]:
    """Speed-up of the swap beside its bounds, eager and captured.

    layer_ms  of one layer's experts alone: "stock", "ours", and "floor", the time to read the packed weights once

    bound_free      experts cost nothing: stock / free, both measured
    bound_floor     experts cost the time to read them once: stock / (free + layers * floor); captured only
    bound_kernel    experts cost what our layer costs alone and everything else stays: stock / (stock - layers *
                    (their layer - our layer)), the layers measured alone in a CUDA graph
    """
    found = []
    for arm, suffix in (("experts", ""), ("experts-launched", ""), ("experts", "-captured")):
        stock, free, experts = (best(rows, f"{name}{suffix}") for name in ("stock", "free", arm))
        if stock is None or experts is None:
            continue
        row: dict[str, Any] = {"arm": arm, "mode": suffix.lstrip("-") or "eager", "speedup": stock / experts}
        if free is not None:
            row["bound_free"] = stock / free
            # What the swap adds to a forward without experts can be hidden behind nothing but itself.
            row["share_of_free"] = row["speedup"] / row["bound_free"]
        if layer_ms:
            saved = layers * (layer_ms["stock"] - layer_ms["ours"])
            if suffix:
                row["bound_kernel"] = stock / (stock - saved)
                if free is not None and "floor" in layer_ms:
                    row["bound_floor"] = stock / (free + layers * layer_ms["floor"])
                    row["share_of_floor"] = row["speedup"] / row["bound_floor"]
            elif free is not None:
                # Eager is bound by the host: experts can save what they keep it busy, stock less free, and no more.
                row["bound_kernel"] = stock / max(free, stock - saved)
            if "bound_kernel" in row:
                row["share_of_kernel"] = row["speedup"] / row["bound_kernel"]
        found.append(row)
    return found


def by_byte_count(model: Any, experts_bytes: tuple[int, int], bandwidth: float = SMALL_MACHINE) -> dict[str, Any]:
    """A model, no measurement: a step as the time to read every byte it reads once at `bandwidth`.

    All experts are read (at 256 tokens and 8 of 128 every expert is hit), the decoder's dense weights once, the
    embedding twice (self-conditioning and head), and the logits' passes are left out.
    """
    decoder = model.model.decoder
    embed = decoder.embed_tokens.weight.nbytes
    unique = {p.data_ptr(): p.nbytes for name, p in decoder.named_parameters() if "experts" not in name}
    dense = sum(unique.values()) - embed
    stock, ours = (size + dense + 2 * embed for size in experts_bytes)
    return {
        "model_only": True,
        "bytes_per_second": bandwidth,
        "stock_gb": stock / 1e9,
        "experts_swapped_gb": ours / 1e9,
        "stock_ms": 1e3 * stock / bandwidth,
        "experts_swapped_ms": 1e3 * ours / bandwidth,
        "speedup": stock / ours,
    }


def layer_milliseconds(switch: Switch, tokens: int) -> dict[str, float]:
    """One layer's experts alone, transformers' (grouped_mm) and ours, all layers one after another in a CUDA graph; and
    the time to read ours once.
    """
    from vllm_ext.benchmarks.moe_common import graph_milliseconds, memory_bandwidth

    text = switch.model.config.text_config
    place = next(switch.model.parameters()).device
    x = torch.randn(tokens, text.hidden_size, device=place).to(torch.bfloat16)
    logits = torch.randn(len(switch.original), tokens, text.num_experts, device=place)
    weights, ids = torch.softmax(logits, -1).topk(text.top_k_experts, dim=-1)
    found = {}
    with torch.no_grad():
        for name, arm in (("stock", "stock"), ("ours", "experts")):
            switch.to(ARMS[arm])
            # Tied experts come once: their second turn would find the weights in the cache.
            modules = list({id(m): m for m in map(switch.model.get_submodule, switch.original) if _owned(m)}.values())
            modules = modules[: text.num_hidden_layers]
            calls = [lambda m=m, i=i: m(x, ids[i], weights[i]) for i, m in enumerate(modules)]
            found[name] = graph_milliseconds(calls, replays=5)
    found["floor"] = 1e3 * switch.experts_bytes[1] / memory_bandwidth(place) / len(modules)
    return found


def host_microseconds(switch: Switch, tokens: int) -> list[dict[str, Any]]:
    """What an eager call of one layer's experts costs the host: all layers once, timed until the last is enqueued.

    `recording_mb` is what recording all layers takes of the GPU's memory.
    """
    text = switch.model.config.text_config
    place = next(switch.model.parameters()).device
    x = torch.randn(tokens, text.hidden_size, device=place).to(torch.bfloat16)
    weights, ids = torch.randn(tokens, text.num_experts, device=place).softmax(-1).topk(text.top_k_experts, dim=-1)
    rows = []
    for name in ("stock", "experts-launched", "experts", "free"):
        switch.to(ARMS[name])
        layers = [layer.experts for layer in switch.model.model.decoder.layers]
        before = _memory_used()
        times = []
        with torch.no_grad():
            for turn in range(12):
                start = time.perf_counter()
                for module in layers:
                    module(x, ids, weights)
                if turn >= 4:
                    times.append(1e6 * (time.perf_counter() - start) / len(layers))
                if place.type == "cuda":
                    torch.cuda.synchronize()
        row: dict[str, Any] = {"arm": name, "us": statistics.median(times)}
        if name == "experts" and before is not None:
            row["recording_mb"] = ((_memory_used() or 0) - before) / 1e6
        rows.append(row)
    return rows


def _memory_used() -> float | None:
    """Bytes of the GPU that are taken, those of its driver too."""
    if device().type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


def _owned(module: torch.nn.Module) -> bool:
    return next(module.buffers(), None) is not None or next(module.parameters(), None) is not None


_BOUNDS = {
    "free": "were experts free",
    "floor": "were they read once at this GPU's bandwidth",
    "kernel": "at our layer's own speed",
}
# Pairs run early and late, so that a host or a GPU that changes speed shows.
DEFAULT_ARMS = (
    "stock", "experts", "free", "experts-launched", "free", "experts", "stock",
    "stock-captured", "experts-captured", "free-captured", "experts-captured", "stock-captured",
    "kit", "kit-encoder", "kit-no-capture", "kit-no-sampler", "kit-no-layers", "kit-bf16", "kit",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--size", choices=SIZES, help="of the model (default: true on a GPU, tiny without)")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), choices=ARMS, help="in order")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps timed (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="median of as many runs (default: %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an arm, then the bounds, then the model by byte count."""
    size = SIZES[args.size or ("true" if device().type == "cuda" else "tiny")]
    return measure(Switch(random_model(size, device())), args.arms, args.steps, args.repeats)


def measure(switch: Switch, arms: Sequence[str], steps: int, repeats: int = 1) -> list[dict[str, Any]]:
    """The rows of a loaded model."""
    rows = run_arms(switch, arms, steps, repeats)
    layers = switch.model.config.text_config.num_hidden_layers
    alone = layer_milliseconds(switch, switch.model.config.canvas_length) if device().type == "cuda" else {}
    host = host_microseconds(switch, switch.model.config.canvas_length)
    bounds = amdahl(rows, alone, layers)
    return [
        *({"kind": "arm", **row} for row in rows),
        *({"kind": "layer alone", "experts": name, "ms": ms} for name, ms in alone.items()),
        *({"kind": "host", **row} for row in host),
        *({"kind": "bound", **row} for row in bounds),
        {"kind": "model by byte count, not measured", **by_byte_count(switch.model, switch.experts_bytes)},
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Arms, bounds and the model."""
    arms = [row for row in rows if row["kind"] == "arm"]
    stock = best(arms, "stock")
    lines = [f"{'arm':20} {'ms a step':>10} {'generate ms':>12}  over stock"]
    for row in arms:
        ratio = f"{stock / row['step_ms']:9.2f}x" if stock else ""
        lines.append(f"{row['arm']:20} {row['step_ms']:10.2f} {row['generate_ms']:12.1f} {ratio}")
    for row in rows:
        if row["kind"] == "layer alone":
            lines.append(f"one layer's experts alone, {row['experts']}: {row['ms']:.4f} ms")
        elif row["kind"] == "host":
            memory = f", {row['recording_mb']:.0f} MB by recording all" if "recording_mb" in row else ""
            lines.append(f"the host's time for one layer's experts, {row['arm']}: {row['us']:.0f} us{memory}")
        elif row["kind"] == "bound":
            shares = [
                f"{row[f'bound_{name}']:.3f}x {what} ({row[f'share_of_{name}']:.1%} of it reached)"
                for name, what in _BOUNDS.items()
                if f"bound_{name}" in row
            ]
            what = "experts alone" + (", launched kernel by kernel" if row["arm"] == "experts-launched" else "")
            lines.append(f"{what}, {row['mode']}: {row['speedup']:.3f}x; Amdahl: {'; '.join(shares)}")
        elif "bytes_per_second" in row:
            lines.append(
                f"MODEL by byte count at {row['bytes_per_second'] / 1e9:.0f} GB/s, not measured: {row['stock_ms']:.0f} "
                f"-> {row['experts_swapped_ms']:.0f} ms a step, {row['speedup']:.2f}x for the experts alone"
            )
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar an arm; runs of one arm beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = [row for row in rows if row["kind"] == "arm"]
    stock = best(arms, "stock")
    figure, axes = pyplot.subplots(figsize=(8, 0.36 * len(arms) + 1.2), layout="constrained")
    colours = ["tab:gray" if r["arm"].startswith(("stock", "free")) else "tab:blue" for r in arms]
    bars = axes.barh(range(len(arms)), [row["step_ms"] for row in arms], color=colours)
    texts = [f"{r['step_ms']:.1f} ms" + (f" ({stock / r['step_ms']:.2f}x)" if stock else "") for r in arms]
    axes.bar_label(bars, texts, fontsize=8, padding=3)
    axes.set_yticks(range(len(arms)), [row["arm"] for row in arms], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("milliseconds a denoising step of generate(), median of an arm's runs, in the order they ran")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    name="steps",
    help="one denoising step of DiffusionGemma's generate() by arm, with Amdahl's bounds",
    arguments=arguments,
    check=lambda args: None,
    run=run,
    table=table,
    chart=chart,
)
