"""Tokens per second of real vLLM on a GPU: a model of a published shape in BF16, in 4 bits by the plugin and by Marlin.

Every arm serves the same random weights: in BF16, quantised by the plugin while they load, and rounded to the packed
format with integer zero points that the plugin and stock vLLM's Marlin both read. The weights are drawn in the engine,
or written once as checkpoints (--files). Every arm of every shape has an engine in processes of its own; all start
together and then take turns, A, B, C, D, D, C, B, A, ..., while the others are idle. A round compares each arm with the
BF16 of the same round; the figures are medians over the rounds. Arms are checked before they are timed: those of the
same bits must agree on a prompt's log-probabilities, and the plugin's must be near BF16's.

    vllm-ext bench serve --shape Qwen3-30B-A3B Gemma-4-26B-A4B
    vllm-ext bench serve --shape tiny --eager --rounds 2 --batches 1 2 --prefill 64      # on a CPU
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import RESULTS, describe_run, write_json
from vllm_ext.benchmarks.serve_checkpoints import (
    BF16,
    PACKED,
    SHAPES,
    ServedShape,
    config_of,
    write_checkpoints,
    write_configs,
)
from vllm_ext.benchmarks.serve_engine import DRAWN, OUR_METHOD, EngineProcess, import_vllm_once, inspect_models
from vllm_ext.benchmarks.serve_loading import measure_loading
from vllm_ext.benchmarks.serve_report import add_bounds, chart, table

ANSWER_TIMEOUT = 120.0
# Nats a token. Quantising random weights moves a log-probability by about a tenth to a half (it is reported); a kernel
# that computes something else moves it by the spread of the logits, 2.
FAR_FROM_BF16 = 1.0
BASE = "BF16"
# Long prompts asked at once, each a step of its own: one alone would time the request's way through the engine too.
PREFILLS = 4
# Near the sizes by which vLLM's BF16 experts choose their launch.
WARM_LENGTHS = (300, 500, 1000, 1500, 2000, 3000, 4000, 6000)


@dataclass(frozen=True)
class Arm:
    """One way to serve: which checkpoint, with which engine options. `same_bits` arms share their weights' bits."""

    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)
    same_bits: bool = False


ARMS = {
    BASE: Arm(BF16),
    "w4a16-grouped": Arm(BF16, {"quantization": OUR_METHOD}),
    "w4a16-grouped, packed": Arm(PACKED, {"quantization": OUR_METHOD}, same_bits=True),
    "Marlin, packed": Arm(PACKED, same_bits=True),
}


def kv_cache_bytes(config: dict[str, Any], args: argparse.Namespace) -> int:
    """What all requests of the largest batch, or the long prompts, take in 16 bits, and a fifth more."""
    heads, size = config["num_key_value_heads"], config["head_dim"]
    tokens = max(PREFILLS * args.prefill, max(args.batches) * (args.input_tokens + args.output_tokens), 4096)
    return int(1.2 * tokens * config["num_hidden_layers"] * 2 * heads * size * 2)


def engine_options(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What all arms of a shape have in common: vLLM's defaults, but for what the requests that are timed ask for."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # rounds repeat their prompts
        "max_model_len": max(args.prefill, args.checked_tokens, args.input_tokens + args.output_tokens) + 1,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": max(args.prefill, 2048),
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": kv_cache_bytes(config, args),  # engines side by side would count each other as used
        "enforce_eager": args.eager,
    }
    if args.attention_backend:
        options["attention_backend"] = args.attention_backend
    if not args.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted(set(args.batches))}
    return options


@dataclass
class Serving:
    """One shape's run: its engines by arm, its document, and what was measured."""

    shape: ServedShape
    output: Path
    document: dict[str, Any]
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    rounds: list[dict[str, dict[str, dict[str, float]]]] = field(default_factory=list)

    def drop(self, name: str, reason: str) -> None:
        """Go on without an arm, and keep its log beside the document."""
        print(f"{self.document['options']['shape']}, {name}: {reason}", file=sys.stderr, flush=True)
        self.document["failed"][name] = reason
        engine = self.engines.pop(name)
        engine.close(1)
        if engine.log.exists():
            self.output.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engine.log, self.output.with_name(f"{self.output.stem}.{engine.log.name}"))
        write_json(self.output, self.document)


def start_arms(args: argparse.Namespace, serving: Serving, context: Any, paths: dict[str, Path], folder: Path) -> None:
    """Start every arm's engine, without waiting for it."""
    config = config_of(serving.shape, args.layers)
    for name in args.arms:
        arm = ARMS[name]
        plugins = "vllm_ext" if arm.options.get("quantization") == OUR_METHOD else ""
        options = {**engine_options(config, args), **arm.options}
        if not args.files:
            group = serving.shape.group if arm.checkpoint == PACKED else None
            drawn = {"kind": serving.shape.kind, "config": config, "seed": 0, "group": group}
            options |= {"load_format": DRAWN, "model_loader_extra_config": drawn}
        spec = {"model": str(paths[arm.checkpoint]), "options": options, "vocabulary": config["vocab_size"]}
        spec["warm"] = {
            "cells": [{key: cell[key] for key in ("batch", "inputs", "outputs")} for cell in cells(args)],
            "lengths": [length for length in WARM_LENGTHS if length < args.prefill],
        }
        serving.engines[name] = EngineProcess(
            context, name, spec, folder, {"VLLM_PLUGINS": plugins}, folder.parent / "inspected"
        )


def await_arms(serving: Serving, deadline: float) -> None:
    """Drop the engines that are not ready by `deadline`, of time.monotonic()."""
    for name, engine in list(serving.engines.items()):
        try:
            seconds = engine.answer(max(1.0, deadline - time.monotonic()))["ready_seconds"]
        except RuntimeError as error:
            serving.drop(name, str(error))
        else:
            serving.document["ready_seconds"][name] = seconds
            print(f"{serving.document['options']['shape']}, {name}: ready after {seconds:.0f} s", flush=True)


def check(log_probs: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, str]]:
    """Mean difference of log-probabilities by pair of arms, and why an arm is no right one."""

    def gap(one: str, other: str) -> float:
        return statistics.fmean(abs(a - b) for a, b in zip(log_probs[one], log_probs[other], strict=True))

    wrong: dict[str, str] = {}
    gaps = {f"{name} / {BASE}": gap(name, BASE) for name in log_probs if name != BASE and BASE in log_probs}
    for pair, found in gaps.items():
        if not found < FAR_FROM_BF16:
            why = f"check failed: {pair}: log-probabilities {found:.2f} nats a token apart; allowed {FAR_FROM_BF16}"
            wrong[pair.removesuffix(f" / {BASE}")] = why
    twins = [name for name in log_probs if ARMS[name].same_bits]
    if len(twins) == 2 and BASE in log_probs:
        pair = " / ".join(twins)
        gaps[pair] = gap(*twins)
        limit = max(gaps[f"{name} / {BASE}"] for name in twins)
        if not gaps[pair] < limit:
            why = f"check failed: {pair}: the same bits are {gaps[pair]:.3f} nats a token apart, BF16 only {limit:.3f}"
            wrong.setdefault(twins[0], why)
    return gaps, wrong


def check_arms(serving: Serving, length: int) -> None:
    """Drop the arms that compute something else than their weights say."""
    log_probs = {}
    for name, engine in list(serving.engines.items()):
        try:
            log_probs[name] = engine.ask("score", ANSWER_TIMEOUT, length=length, seed=7)["log_probs"]
        except RuntimeError as error:
            serving.drop(name, str(error))
    serving.document["gaps"], wrong = check(log_probs)
    print(f"log-probabilities apart, nats a token: {serving.document['gaps']}", flush=True)
    for name, why in wrong.items():
        serving.drop(name, why)


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is timed: decoding at each batch size, and a few long prompts."""
    decode = [
        {"cell": f"batch {batch}", "batch": batch, "inputs": args.input_tokens, "outputs": args.output_tokens}
        for batch in args.batches
    ]
    prefill = {"cell": f"prefill {args.prefill}", "batch": PREFILLS, "inputs": args.prefill, "outputs": 1}
    return [*decode, prefill] if args.prefill else decode


def rate(cell: dict[str, Any], answer: dict[str, Any]) -> float:
    """Output tokens a second of a decode cell, input tokens a second of the prefill."""
    tokens = cell["batch"] * cell["inputs"] if cell["outputs"] == 1 else answer["tokens"]
    return float(tokens / answer["seconds"])


def one_round(
    serving: Serving, order: list[str], plan: list[dict[str, Any]], seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Rates and token variety by cell and arm; an engine that fails is dropped, and lacks in the round."""
    found: dict[str, dict[str, dict[str, float]]] = {cell["cell"]: {} for cell in plan}
    for cell in plan:
        request = {key: cell[key] for key in ("batch", "inputs", "outputs")}
        for name in order:
            if name not in serving.engines:
                continue
            try:
                answer = serving.engines[name].ask("generate", ANSWER_TIMEOUT, seed=seed, **request)
            except RuntimeError as error:
                serving.drop(name, str(error))
                continue
            found[cell["cell"]][name] = {"rate": rate(cell, answer), "distinct": answer["distinct"]}
    return found


def summarise(
    plan: list[dict[str, Any]], rounds: list[dict[str, dict[str, dict[str, float]]]], names: list[str]
) -> list[dict[str, Any]]:
    """One row a cell and arm: the median rate, its ratio to the other arms' of the same round, every sample.

    An arm that failed keeps the rounds it was in; a cell that it never reached has no row.
    """
    rows = []
    for cell in plan:
        done = [found[cell["cell"]] for found in rounds]
        for name in names:
            mine = [found[name] for found in done if name in found]
            if not mine:
                continue
            row: dict[str, Any] = {**cell, "arm": name}
            row["tokens_per_second"] = statistics.median(one["rate"] for one in mine)
            row["distinct"] = statistics.median(one["distinct"] for one in mine)
            for other in names:
                ratios = [found[name]["rate"] / found[other]["rate"] for found in done if {name, other} <= found.keys()]
                if other != name and ratios:
                    row[f"times {other}"] = statistics.median(ratios)
            rows.append({**row, "samples": [one["rate"] for one in mine]})
    return rows


def _paths(args: argparse.Namespace, shape: ServedShape, folder: Path) -> dict[str, Path]:
    if not args.files:
        return write_configs(shape, args.layers, folder)
    start = time.monotonic()
    needed = {ARMS[name].checkpoint for name in args.arms} | ({BF16, PACKED} if args.loading else set())
    paths = write_checkpoints(shape, args.layers, folder, packed=PACKED in needed)
    print(f"checkpoints written in {time.monotonic() - start:.0f} s", flush=True)
    return paths


def time_arms(serving: Serving, number: int, args: argparse.Namespace) -> None:
    """One more round of a shape; its document is written with what is known so far."""
    names = list(serving.engines)
    order = names if number % 2 == 0 else names[::-1]
    plan = cells(args)
    serving.rounds.append(one_round(serving, order, plan, seed=number))
    serving.document["orders"].append(order)
    rows = summarise(plan, serving.rounds, args.arms)
    serving.document["rows"] = add_bounds(rows, serving.shape, args.layers)
    write_json(serving.output, serving.document)
    print(f"{serving.document['options']['shape']}: round {number + 1} of {args.rounds}", flush=True)


def measure(args: argparse.Namespace, servings: list[Serving], folder: Path) -> None:
    """Start, check and time the arms of all shapes; documents are written after every round."""
    begin = time.monotonic()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    paths = {}
    try:
        for serving in servings:
            own = folder / str(serving.document["options"]["shape"])
            own.mkdir(parents=True, exist_ok=True)
            paths[own] = _paths(args, serving.shape, own)
            if args.loading:
                serving.document["loading"] = measure_loading(paths[own], own)
                write_json(serving.output, serving.document)
                for key, value in serving.document["loading"].items():
                    print(f"loading {key}: {value}", flush=True)
        if not args.arms:
            return
        context = import_vllm_once()
        inspect_models(context, [str(found[BF16]) for found in paths.values()], folder / "inspected")
        print(f"models inspected after {time.monotonic() - begin:.0f} s", flush=True)
        for serving, (own, found) in zip(servings, paths.items(), strict=True):
            start_arms(args, serving, context, found, own)
        deadline = time.monotonic() + args.start_timeout
        for serving in servings:
            await_arms(serving, deadline)
        for serving in servings:
            check_arms(serving, args.checked_tokens)
        for number in range(args.rounds):
            for serving in servings:
                if number and time.monotonic() - begin > args.seconds:
                    return
                if serving.engines:
                    time_arms(serving, number, args)
    finally:
        engines = [engine for serving in servings for engine in serving.engines.values()]
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.close(5)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-ext bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["Qwen3-30B-A3B"])
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), metavar="ARM", help=f"of {list(ARMS)}; default: all")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--input-tokens", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--checked-tokens", type=int, default=256, help="tokens whose log-probabilities are compared")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=6, help="times that every arm is measured; even")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no round, but the first, later than this")
    parser.add_argument("--files", action="store_true", help="write checkpoints, and load them; default: draw weights")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--attention-backend", help="default: vLLM's choice")
    parser.add_argument("--loading", action="store_true", help="also measure loading: time and peak memory; --files")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for all engines to be ready")
    parser.add_argument("--workdir", type=Path, help="where checkpoints and logs go; default: a temporary folder")
    parser.add_argument("--output-dir", type=Path, default=RESULTS, help="for serve_SHAPE.json; default: results")
    args = parser.parse_args(argv)
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"--arms: no {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if args.rounds < 1 or args.layers < 1 or min(args.batches) < 1:
        parser.error("--rounds, --layers and --batches are at least 1")
    if args.loading and not args.files:
        parser.error("--loading measures how checkpoints load; add --files")
    signal.signal(signal.SIGTERM, _end)
    return run(args)


def _end(number: int, frame: Any) -> None:
    """Asked to end: engines end too, and what was measured is written."""
    raise SystemExit(128 + number)


def run(args: argparse.Namespace) -> int:
    """Measure, print and record; 1 where an arm is refused or does not start."""
    folder = args.workdir or Path(tempfile.mkdtemp(prefix="vllm_ext_serve_"))
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    described = describe_run()
    servings = []
    for name in args.shape:
        document = {
            "benchmark": "serve",
            "run": described,
            "options": {**options, "shape": name},
            "model": {**SHAPES[name].fields, "note": SHAPES[name].note},
            "failed": {},
            "ready_seconds": {},
            "orders": [],
            "rows": [],
        }
        servings.append(Serving(SHAPES[name], args.output_dir / f"serve_{name.lower()}.json", document))
    try:
        measure(args, servings, folder)
    finally:
        if args.workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        for serving in servings:
            write_json(serving.output, serving.document)
            print(f"{table(serving.document)}\nWrote {serving.output}", flush=True)
            if serving.document["rows"]:
                picture = serving.output.with_suffix(".png")
                chart(serving.document, picture)
                print(f"Wrote {picture}", flush=True)
    return 1 if any(serving.document["failed"] for serving in servings) else 0
