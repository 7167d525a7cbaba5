"""Tokens per second of real vLLM on a GPU: a model of a published shape in BF16, in 4 bits by the plugin and by Marlin.

Random weights are written once and served by every arm: from BF16, quantised while they load, and packed with integer
zero points, which the plugin and stock vLLM's Marlin both read. Every arm has engines in processes of its own; all
start together and then take turns, A, B, C, D, D, C, B, A, ..., while the others are idle. A round compares each arm
with the BF16 of the same round; the figures are medians over the rounds. Arms are checked before they are timed: those
of the same bits must agree on a prompt's log-probabilities, and the plugin's must be near BF16's.

    vllm-ext bench serve --shape Qwen3-30B-A3B
    vllm-ext bench serve --shape tiny --eager --rounds 2 --batches 1 2 --prefill 64 --kv-cache-mib 64   # on a CPU
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import RESULTS, CheckFailed, describe_run, write_json
from vllm_ext.benchmarks.serve_checkpoints import BF16, PACKED, SHAPES, ServedShape, write_checkpoints, write_configs
from vllm_ext.benchmarks.serve_engine import OUR_METHOD, EngineProcess
from vllm_ext.benchmarks.serve_loading import measure_loading
from vllm_ext.benchmarks.serve_report import add_bounds, chart, table

ANSWER_TIMEOUT = 120.0
# Nats a token. Quantising random weights moves a log-probability by about a tenth to a half (it is reported); a kernel
# that computes something else moves it by the spread of the logits, 2.
FAR_FROM_BF16 = 1.0
BASE = "BF16"


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


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What all arms have in common."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # rounds repeat their prompts
        "max_model_len": max(args.prefill, args.checked_tokens, args.input_tokens + args.output_tokens) + 1,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": max(args.prefill, 2048),
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": args.kv_cache_mib << 20,  # engines side by side would count each other as used
        "enforce_eager": args.eager,
    }
    if args.attention_backend:
        options["attention_backend"] = args.attention_backend
    if not args.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted(set(args.batches))}
    if args.dummy:
        options["load_format"] = "dummy"
    return options


def start_arms(
    args: argparse.Namespace, shape: ServedShape, paths: dict[str, Path], folder: Path
) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """Start every arm's engine at once; (those that are ready, why the others are not)."""
    vocabulary = int(shape.fields.get("vocab_size", 256))
    engines = {}
    for name in args.arms:
        arm = ARMS[name]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache" / name.replace(" ", "_")),
        }
        if arm.options.get("quantization") != OUR_METHOD:
            environment["VLLM_PLUGINS"] = ""
        options = {**engine_options(args), **arm.options}
        spec = {"model": str(paths[arm.checkpoint]), "options": options, "vocabulary": vocabulary}
        spec["random_codes"] = args.dummy and arm.checkpoint == PACKED
        engines[name] = EngineProcess(name, spec, folder, environment)
    ready, failed = {}, {}
    deadline = time.monotonic() + args.start_timeout
    for name, engine in engines.items():
        try:
            seconds = engine.answer(max(1.0, deadline - time.monotonic()))["ready_seconds"]
            print(f"{name}: ready after {seconds:.0f} s", flush=True)
            ready[name] = engine
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            failed[name] = str(error)
            engine.close()
    return ready, failed


def check(engines: dict[str, EngineProcess], length: int) -> dict[str, float]:
    """Mean difference of log-probabilities, by pair of arms. Raises CheckFailed where it means a wrong model."""
    answers = {name: engine.ask("score", ANSWER_TIMEOUT, length=length, seed=7) for name, engine in engines.items()}
    log_probs = {name: answer["log_probs"] for name, answer in answers.items()}

    def gap(one: str, other: str) -> float:
        return statistics.fmean(abs(a - b) for a, b in zip(log_probs[one], log_probs[other], strict=True))

    gaps = {f"{name} / {BASE}": gap(name, BASE) for name in engines if name != BASE and BASE in engines}
    for pair, found in gaps.items():
        if not found < FAR_FROM_BF16:
            raise CheckFailed(f"{pair}: log-probabilities {found:.2f} nats a token apart; allowed {FAR_FROM_BF16}")
    twins = [name for name in engines if ARMS[name].same_bits]
    if len(twins) == 2 and BASE in engines:
        pair = " / ".join(twins)
        gaps[pair] = gap(*twins)
        limit = max(gaps[f"{name} / {BASE}"] for name in twins)
        if not gaps[pair] < limit:
            raise CheckFailed(f"{pair}: the same bits are {gaps[pair]:.3f} nats a token apart, BF16 only {limit:.3f}")
    return gaps


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is timed: decoding at each batch size, and one long prefill. `warm` calls precede the first round."""
    decode = [
        {"cell": f"batch {batch}", "batch": batch, "inputs": args.input_tokens, "outputs": args.output_tokens}
        for batch in args.batches
    ]
    prefill = {"cell": f"prefill {args.prefill}", "batch": 1, "inputs": args.prefill, "outputs": 1}
    return [*decode, prefill] if args.prefill else decode


def rate(cell: dict[str, Any], answer: dict[str, Any]) -> float:
    """Output tokens a second of a decode cell, input tokens a second of the prefill."""
    tokens = cell["inputs"] if cell["outputs"] == 1 else answer["tokens"]
    return float(tokens / answer["seconds"])


def one_round(
    engines: dict[str, EngineProcess], order: list[str], plan: list[dict[str, Any]], seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Rates and token variety by cell and arm."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for cell in plan:
        request = {key: cell[key] for key in ("batch", "inputs", "outputs")}
        for name in order:
            answer = engines[name].ask("generate", ANSWER_TIMEOUT, seed=seed, **request)
            figures = {"rate": rate(cell, answer), "distinct": answer["distinct"]}
            found.setdefault(cell["cell"], {})[name] = figures
    return found


def summarise(
    plan: list[dict[str, Any]], rounds: list[dict[str, dict[str, dict[str, float]]]], names: list[str]
) -> list[dict[str, Any]]:
    """One row a cell and arm: the median rate, its ratio to the other arms' of the same round, every sample."""
    rows = []
    for cell in plan:
        samples = {name: [done[cell["cell"]][name]["rate"] for done in rounds] for name in names}
        for name in names:
            row: dict[str, Any] = {**cell, "arm": name, "tokens_per_second": statistics.median(samples[name])}
            row["distinct"] = statistics.median(done[cell["cell"]][name]["distinct"] for done in rounds)
            for other in names:
                if other != name:
                    pairs = zip(samples[name], samples[other], strict=True)
                    row[f"times {other}"] = statistics.median(mine / theirs for mine, theirs in pairs)
            rows.append({**row, "samples": samples[name]})
    return rows


def _write(args: argparse.Namespace, shape: ServedShape, folder: Path) -> dict[str, Path]:
    start = time.monotonic()
    needed = {ARMS[name].checkpoint for name in args.arms} | ({BF16, PACKED} if args.loading else set())
    paths = write_checkpoints(shape, args.layers, folder, packed=PACKED in needed)
    print(f"checkpoints written in {time.monotonic() - start:.0f} s", flush=True)
    return paths


def measure(args: argparse.Namespace, document: dict[str, Any], folder: Path) -> None:
    """Write the checkpoints, start, check and time the arms; `document` is written after every round."""
    shape = SHAPES[args.shape]
    paths = write_configs(shape, args.layers, folder) if args.dummy else _write(args, shape, folder)
    if args.loading:
        document["loading"] = measure_loading(paths, folder)
        write_json(args.output, document)
        print("\n".join(f"loading {key}: {value}" for key, value in document["loading"].items()), flush=True)
    engines, document["failed"] = start_arms(args, shape, paths, folder)
    try:
        if not args.dummy:
            document["gaps"] = check(engines, args.checked_tokens)
            print(f"log-probabilities apart, nats a token: {document['gaps']}", flush=True)
        plan, rounds, names = cells(args), [], list(engines)
        one_round(engines, names, plan, seed=99)  # the first call of a shape pays for compiling and allocations
        document["orders"] = []
        begin = time.monotonic()
        for number in range(args.rounds):
            if number and time.monotonic() - begin > args.seconds:
                break
            order = names if number % 2 == 0 else names[::-1]
            document["orders"].append(order)
            rounds.append(one_round(engines, order, plan, seed=number))
            document["rows"] = add_bounds(summarise(plan, rounds, names), shape, args.layers)
            write_json(args.output, document)
            print(f"round {number + 1} of {args.rounds}", flush=True)
    finally:
        for engine in engines.values():
            engine.close()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-ext bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all that the weights allow")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--input-tokens", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--checked-tokens", type=int, default=256, help="tokens whose log-probabilities are compared")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt; 0: none")
    parser.add_argument("--rounds", type=int, default=6, help="times that every arm is measured; even")
    parser.add_argument("--seconds", type=float, default=600, help="begin no round later than this after the first")
    parser.add_argument(
        "--dummy", action="store_true", help="no checkpoints: vLLM's random weights; quicker, and nothing is checked"
    )
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--attention-backend", help="default: vLLM's choice")
    parser.add_argument("--loading", action="store_true", help="also measure loading: time and peak memory")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for all engines to be ready")
    parser.add_argument("--kv-cache-mib", type=int, default=4096)
    parser.add_argument("--workdir", type=Path, help="where checkpoints and logs go; default: a temporary folder")
    parser.add_argument("--output", type=Path, help="results file; default: benchmarks/results/serve_SHAPE.json")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.layers < 1 or min(args.batches) < 1:
        parser.error("--rounds, --layers and --batches are at least 1")
    args.arms = args.arms or [name for name, arm in ARMS.items() if not (args.dummy and arm.options and arm.same_bits)]
    if args.dummy and (args.loading or any(ARMS[name].options and ARMS[name].same_bits for name in args.arms)):
        parser.error("--dummy has no checkpoint to load or to read packed experts from")
    args.output = args.output or RESULTS / f"serve_{args.shape.lower()}.json"
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure, print and record; 1 where the check refuses or an arm does not start."""
    folder = args.workdir or Path(tempfile.mkdtemp(prefix="vllm_ext_serve_"))
    folder.mkdir(parents=True, exist_ok=True)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    fields = {**SHAPES[args.shape].fields, "note": SHAPES[args.shape].note}
    document = {"benchmark": "serve", "run": describe_run(), "options": options, "model": fields, "rows": []}
    try:
        measure(args, document, folder)
    except (CheckFailed, RuntimeError) as failure:
        document["refused"] = str(failure)
        print(f"vllm-ext bench serve: {failure}", file=sys.stderr)
    finally:
        if args.workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
    write_json(args.output, document)
    print(f"{table(document)}\nWrote {args.output}")
    if document["rows"]:
        picture = args.output.with_suffix(".png")
        chart(document, picture)
        print(f"Wrote {picture}")
    return 1 if "refused" in document or document.get("failed") else 0
