"""Tokens per second of real vLLM on the CPU: the same model with its experts in BF16 and in 4 bits, in one run.

Every arm has an engine in a process of its own; all are loaded first and then take turns, A, B, C, C, B, A, ..., while
the others are idle. A round compares each arm with the BF16 of the same round, so that other work on the machine, or a
machine that slows down, favours none; the figures are medians over the rounds. An arm whose log-probabilities of a
fixed text stray from BF16's is refused: a fast wrong kernel has no speed.

    python examples/smollm2_as_moe.py .demo/smollm2-moe
    vllm-ext bench serve-cpu --model .demo/smollm2-moe
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import describe_run, write_json

RESULTS = Path(__file__).parent / "results" / "serve_cpu.json"
STREAMS = (1, 8)
MARK = "serve-cpu: "
# Nats a token by which a 4-bit arm may miss BF16. Groups of 128 cost 0.12 on this text's kind; noise costs several.
TOLERANCE = 0.4
CHECKED_TEXT = (
    "The sea covers most of the Earth. Rain falls on the mountains, rivers carry the water down to the plains, "
    "and the sun lifts it into the clouds again. Fishermen know the tides, farmers know the seasons, and both "
    "look at the sky in the morning before they decide what to do with the day."
)
# Seconds for an engine to load and be checked, or to answer; a demo's model takes 20, and 8 streams a few.
LOADING, ANSWER = 600.0, 300.0
PROMPT = "Tell me what you know about the number {}."
ARMS: dict[str, dict[str, Any]] = {
    "BF16": {},
    "4-bit, default groups": {"quantization": "w4a16-grouped"},
    "4-bit, group 32": {
        "quantization": "w4a16-grouped",
        "additional_config": {"vllm_ext": {"group_size_w13": 32, "group_size_w2": 32}},
    },
}


def run_worker(model: Path, arm: str) -> None:
    """Serve one arm: for each request, a line of JSON on standard input, answer with a line that begins with `MARK`."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(model), enforce_eager=True, max_model_len=1024, max_num_seqs=max(STREAMS), **ARMS[arm])
    scored = llm.generate([CHECKED_TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    values = [next(iter(position.values())).logprob for position in scored.prompt_logprobs if position]
    print(MARK + json.dumps({"logprob": statistics.fmean(values)}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [PROMPT.format(number) for number in range(request["streams"])]
        sampling = SamplingParams(max_tokens=request["new_tokens"], temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(MARK + json.dumps({"tokens_per_second": tokens / seconds}), flush=True)


class Worker:
    """A process that runs `run_worker`."""

    def __init__(self, model: Path, arm: str) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self.arm = arm
        command = [sys.executable, "-m", "vllm_ext.benchmarks.serve_cpu", "--model", str(model), "--worker", arm]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self.logprob = float(self._answer(LOADING)["logprob"])
        except BaseException:
            self.close()
            raise

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        errors: list[str] = []
        late = threading.Timer(timeout, self._kill)
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
                if "Error" in line:
                    errors = [*errors[-9:], line.rstrip()]
        finally:
            in_time = not late.finished.is_set()
            late.cancel()
        how = "ended" if in_time else f"gave no answer in {timeout:.0f} s"
        raise RuntimeError(f"serve-cpu: the arm {self.arm!r} {how}:\n" + "\n".join(errors))

    def rate(self, streams: int, new_tokens: int) -> float:
        """Tokens per second over `streams` sequences of `new_tokens`. RuntimeError when the engine dies or hangs."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # an engine that has ended says why in what it printed
            print(json.dumps({"streams": streams, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        return float(self._answer(ANSWER)["tokens_per_second"])

    def close(self) -> None:
        """End the engine: it stops when its requests end, and is killed with its own processes when it does not."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def check(logprobs: dict[str, float]) -> None:
    """Raise RuntimeError when an arm does not compute the model: it must not be timed."""
    base = logprobs["BF16"]
    for arm, seen in logprobs.items():
        if not abs(base - seen) < TOLERANCE:
            raise RuntimeError(
                f"serve-cpu: {arm!r} gives the checked text {seen:.3f} nats a token, BF16 {base:.3f}: "
                f"more than {TOLERANCE} apart, so its speed means nothing"
            )


Samples = dict[str, dict[int, list[float]]]


def take_turns(workers: list[Worker], rounds: int, new_tokens: int) -> Iterator[Samples]:
    """Tokens per second by arm and number of streams, one value a round: what is known after each round."""
    samples: Samples = {worker.arm: {s: [] for s in STREAMS} for worker in workers}
    for worker in workers:
        for streams in STREAMS:
            worker.rate(streams, 4)  # the first call of a shape pays for allocations
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        for streams in STREAMS:
            for worker in workers if number % 2 == 0 else reversed(workers):
                samples[worker.arm][streams].append(worker.rate(streams, new_tokens))
        yield samples


def measure(model: Path, rounds: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    """Load every arm, check it and time it; after each round medians, ratios to BF16 and the machine."""
    machine = describe_run()
    workers: list[Worker] = []
    try:
        for number, arm in enumerate(ARMS, 1):
            print(f"[{number}/{len(ARMS)}] loading {arm}", flush=True)
            workers.append(Worker(model, arm))
        logprobs = {worker.arm: worker.logprob for worker in workers}
        check(logprobs)
        for samples in take_turns(workers, rounds, new_tokens):
            yield summarise(samples, logprobs, new_tokens, machine)
    finally:
        for worker in workers:
            worker.close()


def summarise(samples: Samples, logprobs: dict[str, float], new_tokens: int, machine: dict[str, Any]) -> dict[str, Any]:
    """The rounds so far as a document."""
    rows = [
        {
            "arm": arm,
            "logprob": logprobs[arm],
            "samples": {str(s): values for s, values in by_streams.items()},
            "tokens_per_second": {str(s): statistics.median(values) for s, values in by_streams.items()},
            "ratio": {str(s): median_ratio(values, samples["BF16"][s]) for s, values in by_streams.items()},
        }
        for arm, by_streams in samples.items()
    ]
    return {
        "benchmark": "serve-cpu",
        "model": "SmolLM2-135M-Instruct as 8 experts of 192",
        "mode": "eager",
        "new_tokens": new_tokens,
        "rounds": len(samples["BF16"][STREAMS[0]]),
        "rows": rows,
        "machine": machine,
    }


def median_ratio(values: list[float], base: list[float]) -> float:
    """The median over the rounds of an arm's rate to BF16's in the same round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


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
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens generated by each stream")
    parser.add_argument("--rounds", type=int, default=10, help="times that every arm is measured")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the results (JSON)")
    parser.add_argument("--worker", choices=list(ARMS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        remedy = f"make it with `python examples/smollm2_as_moe.py {args.model}`"
        print(f"error: no model in {args.model}; {remedy}", file=sys.stderr)
        return 1
    if args.worker:
        run_worker(args.model, args.worker)
        return 0
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    results: dict[str, Any] = {}
    # A run that is cut short keeps its rounds, and not in the place of a whole run's results.
    partial = args.output.with_name(f"{args.output.stem}_partial.json")
    try:
        for results in measure(args.model, args.rounds, args.new_tokens):
            write_json(partial, results)
    except RuntimeError as error:
        kept = f"; {results['rounds']} of {args.rounds} rounds are kept in {partial}" if results else ""
        print(f"\nerror: {error}{kept}", file=sys.stderr)
        return 1
    os.replace(partial, args.output)
    print(markdown(results))
    print(f"Wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
