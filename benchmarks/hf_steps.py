"""`vllm-ext bench steps`: one denoising step inside DiffusionGemma's own `generate()`, by arm.

Beside the swap of the experts alone stands what Amdahl's law allows it, eager and with the decoder captured in both
arms; CUDA graphs on and off are pairs of arms; a model by byte count says what a machine of less bandwidth would gain.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.ab import device
from vllm_ext.benchmarks.gpu_readings import memory_used, readings
from vllm_ext.benchmarks.hf_arms import ARMS, Switch, check_counts, check_runnable, runnable
from vllm_ext.benchmarks.hf_bounds import BOUNDS, amdahl, best, by_byte_count
from vllm_ext.benchmarks.hf_model import SIZES, random_model
from vllm_ext.benchmarks.registry import Benchmark

PROMPT_TOKENS = 128


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


@contextmanager
def stamped_steps(model: Any) -> Iterator[list[float]]:
    """Collects when each denoising step of `generate()` begins. A step ends with a question that the GPU answers."""
    stamps: list[float] = []
    own = model.__dict__.get("_denoising_step")
    step = model._denoising_step

    def stamped(*args: Any, **inputs: Any) -> Any:
        stamps.append(time.perf_counter())
        return step(*args, **inputs)

    model._denoising_step = stamped
    try:
        yield stamps
    finally:
        del model._denoising_step
        if own is not None:
            model._denoising_step = own


def warm_up(model: Any, ids: torch.Tensor) -> None:
    """Until kernels are compiled and graphs recorded (layer_graphs.py): three calls of a prompt, seven of a canvas."""
    for steps in (7, 1, 1):
        _seconds(model, ids, steps, 0)


def one_run(model: Any, ids: torch.Tensor, steps: int, seed: int) -> tuple[float, float]:
    """(median of a step after the first, whole `generate()`), milliseconds, of `steps` + 1 steps."""
    # A collector that walks all that packing has left behind would do so in the middle of a run.
    gc.collect()
    gc.freeze()
    try:
        with stamped_steps(model) as stamps:
            whole = _seconds(model, ids, 1 + steps, seed)
    finally:
        gc.unfreeze()
    times = [1e3 * (end - start) for start, end in itertools.pairwise(stamps)]
    return statistics.median(times[1:] or times), 1e3 * whole


def step_milliseconds(model: Any, ids: torch.Tensor, steps: int, repeats: int = 1) -> dict[str, Any]:
    """A step's time and the whole `generate()`'s, medians of `repeats` runs after a warm-up; `runs_ms` lists them."""
    warm_up(model, ids)
    return _row([one_run(model, ids, steps, seed) for seed in range(repeats)])


def _row(found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    runs, whole = [step for step, _ in found], [whole for _, whole in found]
    return {"step_ms": statistics.median(runs), "generate_ms": statistics.median(whole), "runs_ms": runs}


def run_arms(switch: Switch, names: Sequence[str], steps: int, repeats: int = 1) -> list[dict[str, Any]]:
    """One row an arm.

    Arms that change nothing but the experts wait for a host whose speed drifts: they take turns, forwards and
    backwards, in twice as many rounds as there are repeats. The other arms run one after another.
    """
    ids = prompt_ids(switch.model)
    taking_turns = [name for name in dict.fromkeys(names) if not ARMS[name].patched]
    rows = _take_turns(switch, taking_turns, ids, steps, 2 * repeats) if taking_turns else []
    for name in names:
        if name in taking_turns:
            continue
        switch.to(ARMS[name])
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        row = {"arm": name, "steps": steps, **step_milliseconds(switch.model, ids, steps, repeats), **readings()}
        if ids.is_cuda:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        rows.append(row)
        _print(row)
    return rows


def _take_turns(
    switch: Switch, names: Sequence[str], ids: torch.Tensor, steps: int, rounds: int
) -> list[dict[str, Any]]:
    for name in names:
        switch.to(ARMS[name])
        warm_up(switch.model, ids)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            switch.to(ARMS[name])
            found[name].append(one_run(switch.model, ids, steps, turn))
        print(f"round {turn + 1}: {', '.join(f'{name} {found[name][-1][0]:.2f}' for name in names)} ms", flush=True)
    rows = [{"arm": name, "steps": steps, **_row(found[name]), **readings()} for name in names]
    for row in rows:
        _print(row)
    return rows


def _print(row: dict[str, Any]) -> None:
    print(f"{row['arm']:20} {row['step_ms']:9.2f} ms a step, generate() {row['generate_ms']:9.1f} ms", flush=True)


def layer_inputs(switch: Switch) -> list[tuple[torch.Tensor, ...]]:
    """What each layer's experts are called with in a step of the stock model: the experts hit decide the times."""
    switch.to(ARMS["stock"])
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(index: int) -> Any:
        return lambda module, given: found.__setitem__(index, tuple(tensor.clone() for tensor in given))

    layers = switch.model.model.decoder.layers
    hooks = [layer.experts.register_forward_pre_hook(keep(index)) for index, layer in enumerate(layers)]
    _seconds(switch.model, prompt_ids(switch.model), 3, 0)
    for hook in hooks:
        hook.remove()
    return [found[index] for index in range(len(layers))]


def layer_milliseconds(switch: Switch, given: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """One layer's experts alone, transformers' (grouped_mm) and ours, all layers one after another in a CUDA graph, on
    a step's own rows and routing; and the time to read the packed weights of the experts hit once.
    """
    from vllm_ext.benchmarks.moe_common import graph_milliseconds, memory_bandwidth

    found = {}
    with torch.no_grad():
        for name, arm in (("stock", "stock"), ("ours", "experts")):
            switch.to(ARMS[arm])
            modules = [layer.experts for layer in switch.model.model.decoder.layers]
            calls = [lambda m=m, x=x: m(*x) for m, x in zip(modules, given, strict=True)]
            found[name] = graph_milliseconds(calls, replays=5)
    seconds = switch.experts_bytes[1] / memory_bandwidth(given[0][0].device) / len(given)
    found["floor"] = 1e3 * seconds * experts_hit(given) / switch.model.config.text_config.num_experts
    return found


def experts_hit(given: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Experts that a layer's rows choose, on average over layers."""
    return statistics.mean(torch.unique(ids).numel() for _, ids, _ in given)


def host_microseconds(switch: Switch, given: Sequence[tuple[torch.Tensor, ...]]) -> list[dict[str, Any]]:
    """What an eager call of one layer's experts costs the host: all layers once, timed until the last is enqueued.

    `recording_mb` is what recording all layers takes of the GPU's memory.
    """
    rows = []
    for name in ("stock", "experts-launched", "experts", "free"):
        switch.to(ARMS[name])
        layers = [layer.experts for layer in switch.model.model.decoder.layers]
        before = memory_used()
        times = []
        with torch.no_grad():
            for turn in range(12):
                start = time.perf_counter()
                for module, call in zip(layers, given, strict=True):
                    module(*call)
                if turn >= 4:
                    times.append(1e6 * (time.perf_counter() - start) / len(layers))
                if given[0][0].is_cuda:
                    torch.cuda.synchronize()
        row: dict[str, Any] = {"arm": name, "us": statistics.median(times)}
        if name == "experts" and before is not None:
            row["recording_mb"] = ((memory_used() or 0) - before) / 1e6
        rows.append(row)
    return rows


DEFAULT_ARMS = (
    "stock", "experts", "free", "experts-launched", "stock-captured", "experts-captured", "free-captured",
    "kit", "kit-encoder", "kit-no-capture", "kit-no-sampler", "kit-no-layers", "kit-bf16",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--size", choices=SIZES, help="of the model (default: true on a GPU, tiny without)")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), choices=ARMS, help="in order")
    parser.add_argument("--steps", type=int, default=12, help="denoising steps timed (default: %(default)s)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="median of as many runs, twice as many where arms take turns (default: %(default)s)",
    )


def check(args: argparse.Namespace) -> None:
    """There is something to time, and an arm this machine can run."""
    check_counts(steps=args.steps, repeats=args.repeats)
    if not runnable(args.arms):
        check_runnable(args.arms)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an arm, then the bounds, then the model by byte count."""
    size = SIZES[args.size or ("true" if device().type == "cuda" else "tiny")]
    names = runnable(args.arms)
    left_out = [name for name in args.arms if name not in names]
    if left_out:
        print(f"left out, for CUDA graphs need a CUDA device: {', '.join(left_out)}", flush=True)
    return measure(Switch(random_model(size, device())), names, args.steps, args.repeats)


def measure(switch: Switch, arms: Sequence[str], steps: int, repeats: int = 1) -> list[dict[str, Any]]:
    """The rows of a loaded model."""
    return with_bounds(switch, run_arms(switch, arms, steps, repeats))


def with_bounds(switch: Switch, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of arms, the layers alone, the bounds, and the model by byte count."""
    given = layer_inputs(switch)
    alone = layer_milliseconds(switch, given) if device().type == "cuda" else {}
    host = host_microseconds(switch, given)
    return [
        *({"kind": "arm", **row} for row in rows),
        *({"kind": "layer alone", "experts": name, "ms": ms} for name, ms in alone.items()),
        {"kind": "routing", "experts_hit": experts_hit(given)},
        *({"kind": "host", **row} for row in host),
        *({"kind": "bound", **row} for row in amdahl(rows, alone, len(given))),
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
        elif row["kind"] == "routing":
            lines.append(f"a step's rows choose {row['experts_hit']:.1f} experts a layer")
        elif row["kind"] == "host":
            memory = f", {row['recording_mb']:.0f} MB by recording all" if "recording_mb" in row else ""
            lines.append(f"the host's time for one layer's experts, {row['arm']}: {row['us']:.0f} us{memory}")
        elif row["kind"] == "bound":
            shares = [
                f"{row[f'bound_{name}']:.3f}x {what} ({row[f'share_of_{name}']:.1%} of it reached)"
                for name, what in BOUNDS.items()
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
    axes.set_xlabel("milliseconds a denoising step of generate(), median of an arm's runs")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    name="steps",
    help="one denoising step of DiffusionGemma's generate() by arm, with Amdahl's bounds",
    arguments=arguments,
    check=check,
    run=run,
    table=table,
    chart=chart,
)
