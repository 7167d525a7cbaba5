"""Engines in processes of their own, asked one thing at a time: what `vllm-ext bench serve` times.

The engine is `vllm.LLM` as users start it, its core in yet another process. All are forked from one process that has
imported vLLM, and read what vLLM must know of a model's class from a cache: importing it twice in each of several
processes at once takes longer than all else that an engine does before it is ready.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.engine_children import PRELOAD, begin, confine, end, inspect_models_in_process

Answer = dict[str, Any]
OUR_METHOD = "w4a16-grouped"
# The load format of serve_weights, and the worker extension by which workers know it. Names: that module imports more
# of vLLM than the process may that an engine's core is forked from.
DRAWN = "vllm_ext_drawn"
EXTENSION = "vllm_ext.benchmarks.serve_weights.DrawsWeights"
_MODEL_INFOS = "modelinfos"
# With fewer cores an engine that is asked needs them all.
_LEAST_CORES = 4


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
        extension = {"worker_extension_cls": EXTENSION} if spec["options"].get("load_format") == DRAWN else {}
        self.llm = LLM(model=spec["model"], **extension, **spec["options"])
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

    def trace(self, **request: int) -> Answer:
        """Every kernel that `generate` with these arguments runs on the GPU."""
        self.llm.collective_rpc("start_trace")
        self.generate(**request)
        (kernels,) = self.llm.collective_rpc("stop_trace")
        return {"kernels": kernels}

    def warm(self, cells: list[dict[str, int]], lengths: list[int]) -> None:
        """Everything that is timed once, and single prompts of `lengths`: a batch's prompts come in steps of any size,
        and kernels of some sizes are compiled when they are first met."""
        for length in lengths:
            self.generate(1, length, 1, seed=99)
        for cell in cells:
            self.generate(**cell, seed=99)

    def score(self, length: int, seed: int, count: int = 1) -> Answer:
        """Log-probabilities of the own tokens of `count` random prompts, one after the other: steps of `length`."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = []
        for prompt in prompts(count, length, self.vocabulary, seed):
            (answer,) = self.llm.generate([prompt], sampling, use_tqdm=False)
            pairs = list(zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True))[1:]
            found += [entry[token].logprob for token, entry in pairs]
        return {"log_probs": found}

    def decode(self, batch: int, inputs: int, outputs: int, seed: int, looked_at: int) -> Answer:
        """Mean distance of greedy tokens' log-probabilities as decoding at `batch` gave them from those of the same
        tokens read as a prompt, over `looked_at` requests: decoding runs other kernels, from graphs."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, logprobs=0, detokenize=False)
        answers = self.llm.generate(prompts(batch, inputs, self.vocabulary, seed), sampling, use_tqdm=False)
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        gaps: list[float] = []
        for answer in answers[:looked_at]:
            made = answer.outputs[0]
            whole = {"prompt_token_ids": [*answer.prompt_token_ids, *made.token_ids]}
            (read,) = self.llm.generate([whole], sampling, use_tqdm=False)
            pairs = zip(made.token_ids, made.logprobs, read.prompt_logprobs[-outputs:], strict=True)
            gaps += [abs(one[token].logprob - other[token].logprob) for token, one, other in pairs]
        return {"gap": sum(gaps) / len(gaps)}


def cores_apart() -> tuple[set[int], set[int]] | None:
    """Of this process's cores, those of the engine that is asked and the one where the others wait; None if they are
    too few, or the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    *asked, waiting = sorted(os.sched_getaffinity(0))
    return (set(asked), {waiting}) if len(asked) >= _LEAST_CORES else None


def import_vllm_once() -> ForkServerContext:
    """Start the process that engines are forked from; without the plugin, which an engine registers itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    before = os.environ.get("VLLM_PLUGINS")
    os.environ["VLLM_PLUGINS"] = ""
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["VLLM_PLUGINS"]
        if before is not None:
            os.environ["VLLM_PLUGINS"] = before
    return context


def inspect_models(context: ForkServerContext, models: list[str], cache: Path, timeout: float = 60) -> None:
    """Have vLLM look at the models' classes once, and keep what it found in `cache` for the engines."""
    arguments = (_inspect, (models,), str(cache / "inspection.log"), {"VLLM_CACHE_ROOT": str(cache)})
    cache.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_in_child, args=arguments)
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()


def _inspect(models: list[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    inspect_models_in_process()
    for model in models:
        EngineArgs(model=model, skip_tokenizer_init=True).create_model_config()


def _in_child(function: Any, arguments: tuple[Any, ...], log: str, environment: dict[str, str]) -> None:
    begin(log)
    os.environ.update(environment)
    function(*arguments)


def _serve(connection: Any, spec: dict[str, Any]) -> None:
    """Answer until the other side closes. An error is an answer; the engine goes on."""
    try:
        served = Served(spec)
        served.warm(**spec.get("warm", {"cells": [], "lengths": []}))
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})
        raise
    connection.send({"ready_seconds": served.ready_seconds})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(served, request.pop("op"))(**request))
        except Exception as error:
            connection.send({"error": f"{type(error).__name__}: {error}"})


class EngineProcess:
    """The asking side. Raises RuntimeError, with the end of the engine's log, when the engine fails or is late.

    `cache` is what `inspect_models` filled; the engine gets a folder of its own for what it compiles.
    """

    def __init__(
        self,
        context: ForkServerContext,
        name: str,
        spec: dict[str, Any],
        folder: Path,
        environment: dict[str, str],
        cache: Path | None = None,
    ) -> None:
        self.name = name
        label = name.replace(" ", "_").replace(",", "")
        self.log = folder / f"{label}.log"
        own = folder / "cache" / label
        if cache is not None and (cache / _MODEL_INFOS).exists():
            shutil.copytree(cache / _MODEL_INFOS, own / _MODEL_INFOS, dirs_exist_ok=True)
        self._connection, theirs = context.Pipe()
        arguments = (_serve, (theirs, spec), str(self.log), {"VLLM_CACHE_ROOT": str(own), **environment})
        self._process = context.Process(target=_in_child, args=arguments)
        self._process.start()
        theirs.close()

    def answer(self, timeout: float) -> Answer:
        """The next answer, within `timeout` seconds."""
        late = f"gave no answer in {timeout:.0f} s"
        try:
            found: Answer | None = self._connection.recv() if self._connection.poll(timeout) else None
        except (EOFError, ConnectionResetError):
            found, late = None, "ended"
        if found is None:
            raise RuntimeError(f"bench serve: the engine {self.name!r} {late}:\n{self._log_end()}")
        if "error" in found:
            raise RuntimeError(f"bench serve: the engine {self.name!r}: {found['error']}\n{self._log_end()}")
        return found

    def ask(self, op: str, timeout: float, **arguments: Any) -> Answer:
        """Send a request to a method of `Served` and wait for its answer. Engines that have been asked wait on a core
        of their own until they are asked again.
        """
        apart = cores_apart()
        session = self._process.pid
        if apart and session:
            confine(session, apart[0])
        try:
            self._connection.send({"op": op, **arguments})
            return self.answer(timeout)
        except OSError:
            raise RuntimeError(f"bench serve: the engine {self.name!r} ended:\n{self._log_end()}") from None
        finally:
            if apart and session:
                confine(session, apart[1])

    def _log_end(self) -> str:
        if not self.log.exists():
            return "no log"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line][-6:]
        return "\n".join([*telling, "...", *lines[-12:]])

    def stop(self) -> None:
        """Ask the engine to end, and do not wait for it."""
        self._connection.close()

    def close(self, timeout: float = 20) -> None:
        """End the engine: it stops when its requests end, and is killed with its own processes when it does not."""
        self.stop()
        self._process.join(timeout)
        end(self._process)
