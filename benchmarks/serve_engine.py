"""An engine in a process of its own, asked line by line: what `vllm-ext bench serve` times.

    python -m vllm_ext.benchmarks.serve_engine FD SPEC.json

A request and an answer are one line of JSON each: requests on standard input, answers on file descriptor FD, so that
whatever vLLM prints goes to the engine's log. The engine is `vllm.LLM` as users start it, its core in yet another
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
OUR_METHOD = "w4a16-grouped"
MODULE = "vllm_ext.benchmarks.serve_engine"
DRAWN = "vllm_ext_drawn"


def prompts(count: int, length: int, vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """`count` prompts of `length` random token ids, the same in every engine."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(length)]} for _ in range(count)]


class Served:
    """The engine's side: answers requests with an `LLM`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        if spec["options"].get("quantization") == OUR_METHOD:
            from vllm_ext.plugin import register

            register()
        from vllm import LLM

        start = time.perf_counter()
        options = dict(spec["options"])
        if options.get("load_format") == DRAWN:
            from vllm_ext.benchmarks.serve_weights import DrawsWeights

            options["worker_extension_cls"] = f"{DrawsWeights.__module__}.{DrawsWeights.__name__}"
        self.llm = LLM(model=spec["model"], **options)
        self.vocabulary = spec["vocabulary"]
        self.ready_seconds = time.perf_counter() - start

    def generate(self, batch: int, inputs: int, outputs: int, seed: int) -> Answer:
        """Time greedy generation; `distinct` is the mean share of different tokens among the batch at a step."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        asked = prompts(batch, inputs, self.vocabulary, seed)
        start = time.perf_counter()
        answers = self.llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [answer.outputs[0].token_ids for answer in answers]
        distinct = [len(set(step)) / batch for step in zip(*tokens, strict=True)]
        return {
            "seconds": seconds,
            "tokens": sum(map(len, tokens)),
            "distinct": sum(distinct) / max(1, len(distinct)),
        }

    def score(self, length: int, seed: int) -> Answer:
        """Log-probabilities of a random prompt's own tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = self.llm.generate(prompts(1, length, self.vocabulary, seed), sampling, use_tqdm=False)
        pairs = list(zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True))[1:]
        return {"log_probs": [entry[token].logprob for token, entry in pairs]}


def serve(descriptor: int, spec: dict[str, Any]) -> None:
    """Answer until standard input ends. An error is an answer; the engine goes on."""
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:

        def say(answer: Answer) -> None:
            print(json.dumps(answer), file=answers, flush=True)

        try:
            served = Served(spec)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({"ready_seconds": served.ready_seconds})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                say(getattr(served, request.pop("op"))(**request))
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})


class EngineProcess:
    """The asking side. Raises RuntimeError, with the end of the engine's log, when the engine fails or is late."""

    def __init__(self, name: str, spec: dict[str, Any], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name.replace(' ', '_').replace(',', '')}.log"
        spec_path = self.log.with_suffix(".json")
        spec_path.write_text(json.dumps(spec), encoding="utf-8")
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, encoding="utf-8")
        with self.log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(writer), str(spec_path)],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)

    def answer(self, timeout: float) -> Answer:
        """The next answer, within `timeout` seconds."""
        ready, _, _ = select.select([self._answers], [], [], timeout)
        line = self._answers.readline() if ready else ""
        if not line:
            late = f"gave no answer in {timeout:.0f} s" if not ready else "ended"
            raise RuntimeError(f"bench serve: the engine {self.name!r} {late}:\n{self._log_end()}")
        found: Answer = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"bench serve: the engine {self.name!r}: {found['error']}\n{self._log_end()}")
        return found

    def ask(self, op: str, timeout: float, **arguments: Any) -> Answer:
        """Send a request to a method of `Served` and wait for its answer."""
        assert self._process.stdin is not None
        print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
        return self.answer(timeout)

    def _log_end(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line][-6:]
        return "\n".join([*telling, "...", *lines[-12:]])

    def stop(self) -> None:
        """Ask the engine to end, and do not wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self, timeout: float = 20) -> None:
        """End the engine: it stops when its requests end, and is killed with its own processes when it does not."""
        self.stop()
        try:
            self._process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._answers.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
