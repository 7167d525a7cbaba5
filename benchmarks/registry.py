"""`vllm-ext bench NAME ...`: the benchmarks there are, and the way a benchmark goes: check, measure, record.

A benchmark's module is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# name: (module and attribute, a `Benchmark` or a main(argv); help)
BENCHMARKS = {
    "ab": ("vllm_ext.benchmarks.ab:BENCHMARK", "two arms of Hugging Face generate() on one loaded model"),
    "ascend-accuracy": (
        "vllm_ext.benchmarks.ascend_accuracy:BENCHMARK",
        "the simulated Ascend C prefill kernels against FP64, 720 cases",
    ),
    "ascend-traffic": (
        "vllm_ext.benchmarks.ascend_traffic:BENCHMARK",
        "what the simulated Ascend C kernels move, beside the plan and the paper",
    ),
    "fused": ("vllm_ext.benchmarks.fused_ops:BENCHMARK", "fused operations against torch and torch.compile"),
    "linear-attention": (
        "vllm_ext.benchmarks.linear_attention:BENCHMARK",
        "GDN and KDA prefill on a GPU against fla-core and FlashQLA",
    ),
    "moe": (
        "vllm_ext.benchmarks.moe:BENCHMARK",
        "4-bit experts on a GPU against vLLM's Marlin, WNA16 and BF16 experts",
    ),
    "moe-cpu": ("vllm_ext.benchmarks.moe_cpu:BENCHMARK", "4-bit experts on this CPU against vLLM's BF16 experts"),
    "negatives": (
        "vllm_ext.benchmarks.hf_negatives:BENCHMARK",
        "what does not pay: 2-bit experts, dense layers in 4 bits",
    ),
    "perplexity": ("vllm_ext.benchmarks.perplexity:main", "perplexity of a real model, by quantiser and group size"),
    "quantizer-quality": (
        "vllm_ext.benchmarks.quantizer_quality:main",
        "loss and divergence by quantiser, on a model trained on the spot",
    ),
    "quantizer-speed": (
        "vllm_ext.benchmarks.quantizer_speed:main",
        "how fast quantising and packing are, against copying",
    ),
    "serve": (
        "vllm_ext.benchmarks.serve:main",
        "vLLM's tokens per second on a GPU: BF16, 4 bits, and the same bits through Marlin",
    ),
    "probes": ("vllm_ext.benchmarks.probes:BENCHMARK", "what this GPU reaches: matrix product, streaming reads, ridge"),
    "profile": ("vllm_ext.benchmarks.hf_profile:BENCHMARK", "where a denoising step goes, Amdahl's bound by component"),
    "roofline": ("vllm_ext.benchmarks.roofline:BENCHMARK", "this GPU's roofline with each of our kernels on it"),
    "serve-cpu": ("vllm_ext.benchmarks.serve_cpu:main", "vLLM's tokens per second on this CPU, BF16 and 4 bits"),
    "steps": ("vllm_ext.benchmarks.hf_steps:BENCHMARK", "a denoising step of generate() by arm, with Amdahl's bounds"),
    "tune-moe": ("vllm_ext.benchmarks.tune_moe:main", "choose launch configurations of the Triton experts on this GPU"),
}


class CheckFailed(Exception):
    """What is to be timed computes something else than its reference; the message gives the numbers."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    arguments  adds its options to a parser
    check      raises CheckFailed where a result is wrong; nothing is timed then
    run        measures and returns rows, each a flat dict
    table      the rows as text to print
    chart      draws the rows into a PNG, where a picture says more than the table
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    run: Callable[[argparse.Namespace], list[dict[str, Any]]]
    table: Callable[[list[dict[str, Any]]], str]
    chart: Callable[[list[dict[str, Any]], Path], None] | None = None


def commit() -> str | None:
    """The commit these sources are at, with a plus sign where they differ from it; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def describe_run() -> dict[str, Any]:
    """The machine, its GPUs, the versions, the date (UTC) and the commit."""
    import torch
    from vllm_ext.benchmarks.environment import describe_machine

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {**describe_machine(), "gpus": gpus, "date": date, "commit": commit()}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write `document` so that a reader finds the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def run_benchmark(benchmark: Benchmark, argv: list[str]) -> int:
    """Check, measure, print and record one benchmark; the exit status."""
    parser = argparse.ArgumentParser(prog=f"vllm-ext bench {benchmark.name}", description=benchmark.help)
    benchmark.arguments(parser)
    recorded = RESULTS / f"{benchmark.name.replace('-', '_')}.json"
    partial = recorded.with_name(f"{recorded.stem}_partial.json")
    text = f"results file (default: {recorded}, or {partial.name} beside it when any other option is given)"
    parser.add_argument("--output", type=Path, help=text)
    args = parser.parse_args(argv)
    options = {name: value for name, value in vars(args).items() if name != "output"}
    # A quick look or a part of the rows must not take the place of the whole run's results.
    whole = all(value == parser.get_default(name) for name, value in options.items())
    output = args.output or (recorded if whole else partial)
    try:
        benchmark.check(args)
    except CheckFailed as failure:
        print(f"vllm-ext bench {benchmark.name}: not timed, the check failed: {failure}", file=sys.stderr)
        return 1
    rows = benchmark.run(args)
    print(benchmark.table(rows))
    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    write_json(output, {"benchmark": benchmark.name, "run": describe_run(), "options": options, "rows": rows})
    print(f"Wrote {output}")
    if benchmark.chart:
        picture = output.with_suffix(".png")
        benchmark.chart(rows, picture)
        print(f"Wrote {picture}")
    return 0


def usage() -> str:
    """The list of benchmarks."""
    rows = "\n".join(f"  {name:20}{text}" for name, (_, text) in sorted(BENCHMARKS.items()))
    return f"usage: vllm-ext bench NAME ...\n\n{rows}\n\n`vllm-ext bench NAME --help` tells a benchmark's options.\n"


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a benchmark; 0 on success, 1 where a check fails, 2 on a wrong command line."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if args else 2
    if args[0] not in BENCHMARKS:
        print(f"vllm-ext bench: unknown benchmark {args[0]!r}\n\n{usage()}", end="", file=sys.stderr)
        return 2
    module, _, attribute = BENCHMARKS[args[0]][0].partition(":")
    found = getattr(import_module(module), attribute)
    return run_benchmark(found, args[1:]) if isinstance(found, Benchmark) else int(found(args[1:]))


if __name__ == "__main__":
    sys.exit(main())
