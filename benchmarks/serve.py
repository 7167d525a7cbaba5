"""Tokens per second of real vLLM on a GPU: a model of a published shape in BF16, in 4 bits by the plugin and by Marlin.

Every arm serves the same random weights: in BF16, quantised by the plugin while they load, and rounded to the packed
format with integer zero points that the plugin and stock vLLM's Marlin both read. The weights are drawn in the engine,
or written once as checkpoints (--files). Every arm of every shape has an engine in processes of its own; all start
together and then take turns, A, B, C, D, D, C, B, A, ..., while the others are idle. A round compares each arm with the
BF16 of the same round; the figures are medians over the rounds. Arms are checked before they are timed: those of the
same bits must agree on a prompt's log-probabilities, the plugin's must be near BF16's, and what an arm decodes at each
batch must be what it reads. Marlin needs a GPU: on a CPU its arm is refused, and the exit status is 1.

    vllm-ext bench serve --shape Qwen3-30B-A3B Gemma-4-26B-A4B
    vllm-ext bench serve --shape tiny --eager --rounds 2 --batches 1 2 --prefill 64      # on a CPU
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import RESULTS, describe_run, write_json
from vllm_ext.benchmarks.serve_arms import ARMS, BASE, LAYOUTS, Serving, await_arms, cells, start_arms
from vllm_ext.benchmarks.serve_checkpoints import (
    BF16,
    PACKED,
    SHAPES,
    ServedShape,
    write_checkpoints,
    write_configs,
)
from vllm_ext.benchmarks.serve_engine import cores_apart, import_vllm_once, inspect_models
from vllm_ext.benchmarks.serve_loading import measure_loading
from vllm_ext.benchmarks.serve_profile import chart as profile_chart
from vllm_ext.benchmarks.serve_profile import mark_own, profile
from vllm_ext.benchmarks.serve_profile import table as profile_table
from vllm_ext.benchmarks.serve_report import add_bounds, chart, table

ANSWER_TIMEOUT = 120.0
LAYERS = 12
# Nats a token. Quantising random weights moves a log-probability by about a tenth to a half (it is reported); a kernel
# that computes something else moves it by the spread of the logits, 2.
FAR_FROM_BF16 = 1.0
# (tokens of a prompt, prompts) that are checked besides --checked-tokens: steps as decoding has them.
SHORT_CHECKS = ((8, 8), (64, 2))
# Requests of a batch whose decoding is checked: all run, these are read again.
DECODED_REQUESTS = 4
# Nats a token between what an arm decodes and what it reads: rounding, as much as the model amplifies BF16's.
# Experts' outputs halved in decoding alone are 0.33 apart (four small layers).
DECODING_ROUNDS, TIMES_BF16 = 0.3, 3.0
# Cells of so few requests take a fraction of a second, and scatter most by what the host does.
QUICK_BATCH = 8
# Steps of a traced cell: the later half is looked at.
TRACED_OUTPUTS = 20


def check(
    log_probs: dict[str, list[float]], tokens: int, far: float = FAR_FROM_BF16
) -> tuple[dict[str, float], dict[str, str]]:
    """Mean difference of log-probabilities by pair of arms, in steps of `tokens`, and why an arm is no right one."""

    def gap(one: str, other: str) -> float:
        return statistics.fmean(abs(a - b) for a, b in zip(log_probs[one], log_probs[other], strict=True))

    wrong: dict[str, str] = {}
    gaps = {f"{name} / {BASE}": gap(name, BASE) for name in log_probs if name != BASE and BASE in log_probs}
    said = f"check failed in steps of {tokens} tokens"
    for pair, found in gaps.items():
        if not found < far:
            why = f"{said}: {pair}: log-probabilities {found:.2f} nats a token apart; allowed {far}"
            wrong[pair.removesuffix(f" / {BASE}")] = why
    twins = [name for name in log_probs if ARMS[name].same_bits]
    if len(twins) == 2:
        pair = " / ".join(twins)
        gaps[pair] = gap(*twins)
        limit = max((gaps[f"{name} / {BASE}"] for name in twins if BASE in log_probs), default=FAR_FROM_BF16)
        if not gaps[pair] < limit:
            why = f"{said}: {pair}: the same bits are {gaps[pair]:.3f} nats a token apart, BF16 only {limit:.3f}"
            wrong.setdefault(next(name for name in twins if ARMS[name].options), why)
    return gaps, wrong


def check_arms(serving: Serving, longest: int, far: float = FAR_FROM_BF16) -> None:
    """Drop the arms that compute something else than their weights say, at sizes that different kernels serve."""
    serving.document["gaps"] = {}
    for tokens, count in (*SHORT_CHECKS, (longest, 1)):
        log_probs = {}
        for name, engine in list(serving.engines.items()):
            try:
                log_probs[name] = engine.ask("score", ANSWER_TIMEOUT, length=tokens, seed=7, count=count)["log_probs"]
            except RuntimeError as error:
                serving.drop(name, str(error))
        gaps, wrong = check(log_probs, tokens, far)
        serving.document["gaps"][f"steps of {tokens}"] = gaps
        print(f"log-probabilities apart in steps of {tokens}, nats a token: {gaps}", flush=True)
        for name, why in wrong.items():
            serving.drop(name, why)
    compared = {name for gaps in serving.document["gaps"].values() for pair in gaps for name in pair.split(" / ")}
    if alone := [name for name in serving.engines if name not in compared]:
        serving.document["not compared"] = alone
        print(f"bench serve: nothing to compare the answers of {alone} with", file=sys.stderr, flush=True)


def check_decoding(serving: Serving, args: argparse.Namespace) -> None:
    """Drop the arms that decode, at a batch that is timed, something else than they read."""
    tokens = min(args.decoded_tokens, args.output_tokens)
    for batch in args.batches if tokens else ():
        gaps: dict[str, float] = {}
        request = {"batch": batch, "inputs": args.input_tokens, "outputs": tokens, "looked_at": DECODED_REQUESTS}
        for name, engine in list(serving.engines.items()):
            try:
                gaps[name] = engine.ask("decode", ANSWER_TIMEOUT, seed=11, **request)["gap"]
            except RuntimeError as error:
                serving.drop(name, str(error))
        for name in gaps.keys() & serving.engines.keys():
            allowed = max(DECODING_ROUNDS, TIMES_BF16 * gaps.get(BASE, 0.0))
            if not gaps[name] < min(allowed, args.far):
                why = f"{gaps[name]:.2f} nats a token from what it reads; allowed {allowed:.2f}"
                serving.drop(name, f"check failed: decoding at batch {batch} is {why}")
        serving.document["gaps"][f"decoding at batch {batch}, from reading"] = gaps
        print(f"decoding at batch {batch}, nats a token from reading: {gaps}", flush=True)


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
        done = [found[cell["cell"]] for found in rounds if cell["cell"] in found]
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
    """One more round of a shape; its document is written with what is known so far.

    Of the quick cells a round has --repeats, in orders that alternate too.
    """
    names = list(serving.engines)
    plan = cells(args)
    short = [cell for cell in plan if cell["outputs"] > 1 or cell["inputs"] in args.prompts]
    quick = [cell for cell in short if cell["batch"] <= QUICK_BATCH]
    for repeat in range(args.repeats if quick else 1):
        order = names if (number + repeat) % 2 == 0 else names[::-1]
        serving.rounds.append(one_round(serving, order, plan if repeat == 0 else quick, seed=number))
        serving.document["orders"].append(order)
    rows = summarise(plan, serving.rounds, args.arms)
    serving.document["rows"] = add_bounds(rows, serving.shape, args.layers)
    write_json(serving.output, serving.document)
    print(f"{serving.label}: round {number + 1} of {args.rounds}", flush=True)


def trace_arms(serving: Serving, args: argparse.Namespace, deadline: float) -> None:
    """Trace each cell in each arm, cell by cell, until `deadline` of time.monotonic(): one request and the long prompts
    before what lies between. After the rounds: what traces may leave behind in a process is not timed.
    """
    first, *others = cells(args)
    for cell in (first, *others[-1:], *others[:-1]):
        outputs = min(cell["outputs"], TRACED_OUTPUTS)
        found: dict[str, dict[str, Any]] = {}
        for name, engine in list(serving.engines.items()):
            left = deadline - time.monotonic()
            if left < 1:
                return
            request = {"batch": cell["batch"], "inputs": cell["inputs"], "outputs": outputs, "seed": 0}
            try:
                kernels = engine.ask("trace", min(left, ANSWER_TIMEOUT), **request)["kernels"]
            except RuntimeError as error:
                serving.drop(name, str(error))
                continue
            steps = outputs if outputs > 1 else cell["batch"]
            found[name] = profile(
                [(str(one), float(begin), float(end)) for one, begin, end in kernels], args.layers, steps
            )
        mark_own(found)
        serving.document.setdefault("profile", {})[cell["cell"]] = found
        write_json(serving.output, serving.document)


def measure(args: argparse.Namespace, servings: list[Serving], folder: Path) -> None:
    """Start, check and time the arms of all shapes; documents are written after every round."""
    begin = time.monotonic()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    paths = {}
    try:
        for serving in servings:
            own = folder / serving.label.replace(" ", "_")
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
            start_arms(args, serving, context, found, own, args.start_apart)
        deadline = time.monotonic() + args.start_timeout
        for serving in servings:
            await_arms(serving, deadline)
        for serving in servings:
            check_arms(serving, args.checked_tokens, args.far)
            check_decoding(serving, args)
        for number in range(args.rounds):
            for serving in servings:
                if serving.engines and not (number and time.monotonic() - begin > args.seconds):
                    time_arms(serving, number, args)
        for serving in servings if args.profile else ():
            trace_arms(serving, args, time.monotonic() + args.profile)
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
    parser.add_argument("--layers", type=int, default=LAYERS, help="default: %(default)s")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), metavar="ARM", help=f"of {list(ARMS)}; default: all")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--input-tokens", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--checked-tokens", type=int, default=256, help="tokens whose log-probabilities are compared")
    parser.add_argument(
        "--far", type=float, default=FAR_FROM_BF16, help="nats a token from BF16 that an arm must be below"
    )
    parser.add_argument("--decoded-tokens", type=int, default=8, help="of a request whose decoding is checked; 0: none")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a long prompt; 0: none")
    parser.add_argument(
        "--prompts", nargs="*", type=int, default=[], metavar="TOKENS", help="shorter prompts, alone and four at once"
    )
    parser.add_argument("--rounds", type=int, default=6, help="times that every arm is measured; even")
    parser.add_argument(
        "--repeats", type=int, default=1, help="times a round has batches of up to 8, and --prompts; odd"
    )
    parser.add_argument("--profile", type=float, default=0, metavar="SECONDS", help="trace kernels, so long a shape")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no round, but the first, later than this")
    parser.add_argument("--files", action="store_true", help="write checkpoints, and load them; default: draw weights")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--attention-backend", help="default: vLLM's choice")
    parser.add_argument(
        "--layout",
        nargs="+",
        choices=LAYOUTS,
        help="of an engine on the host: vLLM's default, or with one group of the KV cache and its newer model runner "
        "(v1: the older; long: blocks of 128 tokens) in one process or in three; several take turns like shapes. "
        "Default: one on a GPU, or vLLM's",
    )
    parser.add_argument("--loading", action="store_true", help="also measure loading: time and peak memory; --files")
    parser.add_argument(
        "--start-apart", type=float, default=0, help="seconds from one engine's start to the next one's"
    )
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for all engines to be ready")
    parser.add_argument("--workdir", type=Path, help="where checkpoints and logs go; default: a temporary folder")
    parser.add_argument("--output-dir", type=Path, default=RESULTS, help="for serve_SHAPE.json; default: results")
    args = parser.parse_args(argv)
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"--arms: no {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    if args.rounds < 1 or args.layers < 1 or min(args.batches) < 1:
        parser.error("--rounds, --layers and --batches are at least 1")
    if args.repeats < 1 or args.repeats % 2 == 0:
        parser.error("--repeats is odd: an even number would let the same arm begin every round")
    if args.profile and args.files:
        parser.error("--profile asks the loader that draws weights; drop --files")
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
    # Where a run kept its files says nothing about what it measured.
    options = {name: value for name, value in vars(args).items() if name not in ("workdir", "output_dir")}
    described = describe_run()
    layouts = args.layout or ["one" if described["gpus"] else "default"]
    servings = []
    apart = cores_apart()
    cores = {"asked": len(apart[0]), "waiting": len(apart[1])} if apart else None
    for name, layout in itertools.product(args.shape, layouts):
        document = {
            "benchmark": "serve",
            "run": described,
            "options": {**options, "shape": name, "layout": layout},
            "host": {**LAYOUTS[layout], "cores": cores},
            "model": {**SHAPES[name].fields, "note": SHAPES[name].note},
            "failed": {},
            "ready_seconds": {},
            "orders": [],
            "rows": [],
        }
        depth = "" if args.layers == LAYERS else f"_{args.layers}_layers"
        several = f"_{layout}" if len(layouts) > 1 else ""
        output = args.output_dir / f"serve_{name.lower()}{depth}{several}.json"
        servings.append(Serving(SHAPES[name], output, document))
    try:
        measure(args, servings, folder)
    finally:
        if args.workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        for serving in servings:
            write_json(serving.output, serving.document)
            print(f"{table(serving.document)}\nWrote {serving.output}", flush=True)
            if "profile" in serving.document:
                print(profile_table(serving.document), flush=True)
                profile_chart(serving.document, serving.output.with_name(f"{serving.output.stem}_profile.png"))
            if serving.document["rows"]:
                picture = serving.output.with_suffix(".png")
                chart(serving.document, picture)
                print(f"Wrote {picture}", flush=True)
    return 1 if any(serving.document["failed"] for serving in servings) else 0
