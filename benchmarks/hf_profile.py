"""`vllm-ext bench profile`: where a denoising step's time goes, and what Amdahl's law allows each component.

GPU time by component comes from the profiler: every kernel counts for the innermost module that launched it. A step's
wall time is measured without the profiler. On a machine without a GPU, CPU time takes the kernels' place.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm_ext.benchmarks.ab import device
from vllm_ext.benchmarks.hf_arms import ARMS, Switch, check_counts, check_runnable
from vllm_ext.benchmarks.hf_model import SIZES, random_model
from vllm_ext.benchmarks.hf_steps import prompt_ids, step_milliseconds
from vllm_ext.benchmarks.registry import Benchmark

from vllm_ext.integrations.quantized_experts import QuantizedExperts

_MARK = "component: "
_REST = "sampler and rest"


def component(name: str, module: nn.Module) -> str | None:
    """The component a module begins, None where it belongs to the one around it."""
    kind = type(module).__name__
    if isinstance(module, QuantizedExperts) or name.endswith(".experts"):
        return "experts"
    if kind.endswith("RMSNorm"):
        return "norms"
    leaf = name.rpartition(".")[2]
    known = {"self_attn": "attention", "mlp": "dense MLP", "router": "router", "lm_head": "vocabulary head"}
    known |= {"self_conditioning": "self-conditioning", "encoder": "encoder", "decoder": "decoder, between modules"}
    return known.get(leaf)


class _Marked:
    """Names the components of a model in a profile while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            label = component(name, module)
            if label is not None:
                self._mark(module, label)

    def _mark(self, module: nn.Module, label: str) -> None:
        open_ranges: list[Any] = []

        def before(*_: Any) -> None:
            record = torch.profiler.record_function(_MARK + label)
            record.__enter__()  # type: ignore[no-untyped-call]
            open_ranges.append(record)

        def after(*_: Any) -> None:
            open_ranges.pop().__exit__(None, None, None)

        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after)):
            self.stack.callback(handle.remove)

    def __exit__(self, *_: Any) -> None:
        self.stack.close()


def shares(model: Any, ids: torch.Tensor, steps: int) -> dict[str, float]:
    """Milliseconds a step by component, GPU time (CPU time without a GPU); the encoder's part is left out."""
    on_gpu = ids.is_cuda
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])
    options = {"max_new_tokens": model.config.canvas_length, "eos_token_id": None}
    options |= {"stability_threshold": None, "confidence_threshold": None}
    with _Marked(model):
        model.generate(ids, max_denoising_steps=1, **options)
        with torch.profiler.profile(activities=activities) as profile:
            model.generate(ids, max_denoising_steps=steps, **options)
    found: dict[str, float] = defaultdict(float)
    for event in profile.events():
        time = sum(kernel.duration for kernel in event.kernels) if on_gpu else event.self_cpu_time_total
        if time and event.device_type.name == "CPU":
            found[_owner(event)] += time / 1e3 / steps
    found.pop("encoder", None)
    return dict(found)


def _owner(event: Any) -> str:
    """The innermost component around an event, "encoder" for all that runs within it."""
    inner = None
    while event is not None:
        if event.name.startswith(_MARK):
            label = event.name.removeprefix(_MARK)
            if label == "encoder":
                return "encoder"
            inner = inner or label
        event = event.cpu_parent
    return inner or _REST


def measure(switch: Switch, arm: str, steps: int) -> list[dict[str, Any]]:
    """A row per component of one arm: time, share of the busy time and Amdahl's bound if it cost nothing."""
    switch.to(ARMS[arm])
    ids = prompt_ids(switch.model)
    wall = step_milliseconds(switch.model, ids, steps)["step_ms"]
    parts = shares(switch.model, ids, steps)
    busy = sum(parts.values())
    rows = []
    for name, time in sorted(parts.items(), key=lambda item: -item[1]):
        # A host that is slower than its GPU hides what kernels save: a step is never shorter than the host takes.
        free = max(wall - time, 1e-9) if wall <= 1.1 * busy else None
        rows.append(
            {
                "arm": arm,
                "component": name,
                "ms": time,
                "share_of_busy": time / busy,
                "bound_if_free": busy / max(busy - time, 1e-9),
                "bound_of_wall": None if free is None else wall / free,
                "busy_ms": busy,
                "wall_ms": wall,
            }
        )
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--size", choices=SIZES, help="of the model (default: true on a GPU, tiny without)")
    # The profiler does not tell which module replayed a graph: experts are launched kernel by kernel here.
    default = ["stock", "experts-launched"]
    parser.add_argument("--arms", nargs="+", default=default, choices=ARMS, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps to profile (default: %(default)s)")


def check(args: argparse.Namespace) -> None:
    """There is something to time, and this machine can run every arm."""
    check_counts(steps=args.steps)
    check_runnable(args.arms)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every arm."""
    size = SIZES[args.size or ("true" if device().type == "cuda" else "tiny")]
    switch = Switch(random_model(size, device()))
    return [row for arm in args.arms for row in measure(switch, arm, args.steps)]


def table(rows: list[dict[str, Any]]) -> str:
    """Components by arm."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        lines.append(f"{arm}: a step {mine[0]['wall_ms']:.1f} ms, busy {mine[0]['busy_ms']:.1f} ms")
        lines += [
            f"  {row['component']:26} {row['ms']:8.2f} ms {row['share_of_busy']:7.1%}"
            f"  if free: {row['bound_if_free']:.2f}x"
            for row in mine
        ]
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Busy time by component, one bar an arm; the wall time as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = list(dict.fromkeys(row["arm"] for row in rows))
    names = list(dict.fromkeys(row["component"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 2.2 + 0.7 * len(arms)), layout="constrained")
    left = [0.0] * len(arms)
    for index, name in enumerate(names):
        values = [next((r["ms"] for r in rows if r["arm"] == arm and r["component"] == name), 0.0) for arm in arms]
        axes.barh(arms, values, left=left, label=name, color=pyplot.get_cmap("tab20")(index))
        left = [a + b for a, b in zip(left, values, strict=True)]
    wall = [next(r["wall_ms"] for r in rows if r["arm"] == arm) for arm in arms]
    axes.plot(wall, arms, "k|", markersize=14, label="wall time of a step")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a denoising step")
    figure.legend(fontsize=8, ncols=3, loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    "profile",
    "where a denoising step's time goes, with Amdahl's bound per component",
    arguments,
    check,
    run,
    table,
    chart,
)
