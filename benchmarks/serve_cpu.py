"""Tokens per second of real vLLM on the CPU: the same model with its experts in BF16 and in 4 bits, in one run.

Every arm runs in a process of its own, in the order A, B, C, C, B, A, so that a machine that slows down or warms up
favours none; an arm's figure is the median over both of its processes. An arm whose log-probabilities of a fixed text
stray from BF16's is refused: a fast wrong kernel has no speed.

    python examples/smollm2_as_moe.py .demo/smollm2-moe
    vllm-ext bench serve-cpu --model .demo/smollm2-moe
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import describe_run, write_json

RESULTS = Path(__file__).parent / "results" / "serve_cpu.json"
STREAMS = (1, 8)
REPEATS = 3
# Nats a token by which a 4-bit arm may miss BF16. Groups of 128 cost 0.12 on this text's kind; noise costs several.
TOLERANCE = 0.4
CHECKED_TEXT = (
    "The sea covers most of the Earth. Rain falls on the mountains, rivers carry the water down to the plains, "
    "and the sun lifts it into the clouds again. Fishermen know the tides, farmers know the seasons, and both "
    "look at the sky in the morning before they decide what to do with the day."
)
PROMPT = "Tell me what you know about the number {}."
ARMS: dict[str, dict[str, Any]] = {
    "BF16": {},
    "4-bit, default groups": {"quantization": "w4a16-grouped"},
    "4-bit, group 32": {
        "quantization": "w4a16-grouped",
        "additional_config": {"vllm_ext": {"group_size_w13": 32, "group_size_w2": 32}},
    },
}


def run_worker(model: Path, arm: str, new_tokens: int, target: Path) -> None:
    """Measure one arm in this process and write what was seen to `target` as JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(model), enforce_eager=True, max_model_len=1024, max_num_seqs=max(STREAMS), **ARMS[arm])
    scored = llm.generate([CHECKED_TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    values = [next(iter(position.values())).logprob for position in scored.prompt_logprobs if position]
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    rates: dict[str, list[float]] = {}
    for streams in STREAMS:
        prompts = [PROMPT.format(number) for number in range(streams)]
        llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
        for _ in range(REPEATS):
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates.setdefault(str(streams), []).append(tokens / seconds)
    target.write_text(json.dumps({"logprob": statistics.fmean(values), "tokens_per_second": rates}), encoding="utf-8")


def run_arm(model: Path, arm: str, new_tokens: int) -> dict[str, Any]:
    """Run `run_worker` in a fresh process. Raises RuntimeError with the output's end when it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "seen.json"
        command = [sys.executable, "-m", "vllm_ext.benchmarks.serve_cpu", "--model", str(model)]
        command += ["--worker", arm, "--new-tokens", str(new_tokens), "--output", str(target)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            tail = "\n".join(([line for line in lines if "Error" in line] or lines)[-10:])
            raise RuntimeError(f"serve-cpu: the arm {arm!r} failed (exit {done.returncode}):\n{tail}")
        return json.loads(target.read_text(encoding="utf-8"))


def check(seen: dict[str, list[dict[str, Any]]]) -> None:
    """Raise RuntimeError when an arm does not compute the model: it must not be timed."""
    base = seen["BF16"][0]["logprob"]
    for arm, runs in seen.items():
        for run in runs:
            if not base - run["logprob"] < TOLERANCE:
                raise RuntimeError(
                    f"serve-cpu: {arm!r} gives the checked text {run['logprob']:.3f} nats a token, BF16 {base:.3f}: "
                    f"more than {TOLERANCE} apart, so its speed means nothing"
                )


def measure(model: Path, new_tokens: int) -> dict[str, Any]:
    """Run every arm twice and return medians, ratios to BF16 and the machine."""
    order = [*ARMS, *reversed(ARMS)]
    seen: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number, arm in enumerate(order, 1):
        start = time.monotonic()
        print(f"[{number}/{len(order)}] {arm}", end="", flush=True)
        seen[arm].append(run_arm(model, arm, new_tokens))
        check({name: runs for name, runs in seen.items() if runs})
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    rows = []
    for arm, runs in seen.items():
        samples = {s: [rate for run in runs for rate in run["tokens_per_second"][str(s)]] for s in STREAMS}
        rows.append(
            {
                "arm": arm,
                "logprob": runs[0]["logprob"],
                "samples": samples,
                "tokens_per_second": {s: statistics.median(values) for s, values in samples.items()},
            }
        )
    base = rows[0]["tokens_per_second"]
    for row in rows:
        row["ratio"] = {s: rate / base[s] for s, rate in row["tokens_per_second"].items()}
    return {
        "benchmark": "serve-cpu",
        "model": "SmolLM2-135M-Instruct as 8 experts of 192",
        "mode": "eager",
        "new_tokens": new_tokens,
        "order": order,
        "rows": rows,
        "machine": describe_run(),
    }


def markdown(results: dict[str, Any]) -> str:
    """The results as the table that README shows."""
    lines = [
        "| experts | 1 stream, tokens/s | against BF16 | 8 streams, tokens/s | against BF16 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in results["rows"]:
        cells = [row["arm"]]
        for streams in row["tokens_per_second"]:
            cells += [f"{row['tokens_per_second'][streams]:.1f}", f"{row['ratio'][streams]:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench serve-cpu", description="vLLM's speed on the CPU, both ways.")
    parser.add_argument("--model", type=Path, default=Path(".demo/smollm2-moe"), help="the Mixtral-style checkpoint")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated by each stream")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results (JSON)")
    parser.add_argument("--worker", choices=list(ARMS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        remedy = f"make it with `python examples/smollm2_as_moe.py {args.model}`"
        print(f"error: no model in {args.model}; {remedy}", file=sys.stderr)
        return 1
    if args.worker:
        run_worker(args.model, args.worker, args.new_tokens, args.output)
        return 0
    try:
        results = measure(args.model, args.new_tokens)
    except RuntimeError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    write_json(args.output, results)
    print(markdown(results))
    print(f"Wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
