"""4-bit experts through real vLLM's engine features on one GPU, or over two: each engine against a plain one.

    python benchmarks/gpu_checks/serve_engines.py features [--out FILE]     # one GPU
    python benchmarks/gpu_checks/serve_engines.py parallel [--ray] [--out FILE]     # two GPUs

Tiny random models, quantised at load. Engines run side by side, --at-once of them, each in processes of its own. An
engine's prompt log-probabilities are compared with those of the plain engine of its model; its greedy tokens too, up to
the first that hung on a small margin. FILE is written after every engine. The last line printed is JSON; exit status 0
when every engine agrees. The plugin must be installed, or its entry points be on the path: workers register it
themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_processes
from engine_models import options_of_model, write_adapter, write_models
from vllm_ext.benchmarks.engine_children import end, skip_autotuning

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 5, 63, 64, 65, 130, 300, 700)
# Nats. Rounding moves a log-probability by 0.01 to 0.05 on average, and by up to 0.7 where it changes an expert.
TOLERANCE, MARGIN = 0.08, 0.7
OTHER_GROUPS = QUANTISED = 0.25  # what quantising random weights moves
PACKED_ON_CPU = 0.03  # its sums are rounded otherwise than those of quantising at load on a GPU
MAX_TOKENS = 24
Answer = dict[str, Any]
EAGER = {"enforce_eager": True}
TWO = {"tensor_parallel_size": 2}


@dataclass(frozen=True)
class Engine:
    """One engine: its model, vLLM's options, what is done to it before it is asked, the engine it must equal, to
    what mean difference, and what its log must say."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    action: str | None = None
    like: str | None = None
    tolerance: float = TOLERANCE
    says: str = ""


EPLB = {
    **TWO,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"window_size": 8, "step_interval": 8, "num_redundant_experts": 2, "use_async": False},
}
LORA = {"enable_lora": True, "max_lora_rank": 8}
ALL_TOKENS = {"max_logprobs": -1}
ADAPTED = {**LORA, **ALL_TOKENS}
BF16: dict[str, Any] = {"quantization": None, "additional_config": {}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "disable_log_stats": False}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FEATURES = {
    "plain": Engine("qwen3", EAGER),
    "graphs": Engine("qwen3", like="plain"),
    "chunked prefill, graphs": Engine("qwen3", {"max_num_batched_tokens": 128}, like="plain"),
    "prefixes cached, graphs": Engine("qwen3", {"enable_prefix_caching": True}, "cached", "plain"),
    "n-gram speculation, graphs": Engine("qwen3", {"speculative_config": SPECULATION}, like="plain"),
    "slept and woken, graphs": Engine("qwen3", {"enable_sleep_mode": True}, "sleep", "plain"),
    "weights discarded and reloaded, graphs": Engine("qwen3", {"enable_sleep_mode": True}, "reload", "plain"),
    "FP16, graphs": Engine("qwen3", {"dtype": "float16"}, like="plain"),
    "LoRA enabled, graphs": Engine("qwen3", LORA, like="plain"),
    "LoRA adapter merged": Engine("qwen3 merged", {**EAGER, **ALL_TOKENS}, "next tokens"),
    "LoRA adapter, graphs": Engine("qwen3", ADAPTED, "adapter", "LoRA adapter merged"),
    "LoRA adapter, BF16": Engine("qwen3", {**ADAPTED, **EAGER, **BF16}, "adapter", "LoRA adapter merged", QUANTISED),
    "hybrid": Engine("hybrid", EAGER),
    "hybrid, shared expert overlapped, graphs": Engine("hybrid", like="hybrid"),
    "a draft, unused": Engine("hybrid with a draft", EAGER),
    "MTP": Engine("hybrid with a draft", {**EAGER, **MTP}, "count drafts", "a draft, unused"),
    "MTP, packed": Engine("hybrid with a draft packed", {**EAGER, **MTP}, "count drafts", "a draft, unused"),
}
EP2 = {**TWO, "enable_expert_parallel": True}
# In the order of what is to be known first: fewer may fit into the time.
PARALLEL = {
    "one rank": Engine("qwen3", EAGER),
    "TP2": Engine("qwen3", {**EAGER, **TWO}, like="one rank"),
    "EP2": Engine("qwen3", {**EAGER, **EP2}, like="one rank"),
    "DP2": Engine("qwen3", {**EAGER, "data_parallel_size": 2}, like="one rank"),
    "Ray, TP2": Engine("qwen3", {**EAGER, **TWO, "distributed_executor_backend": "ray"}, like="one rank"),
    "EP2, EPLB": Engine("qwen3", {**EAGER, **EPLB}, "ask twice", "one rank", says="Rearranged experts   in"),
    "DP2, EP2": Engine("qwen3", {**EAGER, "data_parallel_size": 2, "enable_expert_parallel": True}, like="one rank"),
    "PP2": Engine("qwen3", {**EAGER, "pipeline_parallel_size": 2}, like="one rank"),
    "TP2, graphs": Engine("qwen3", TWO, like="one rank"),
    "Gemma 4, one rank": Engine("gemma4", EAGER),
    "Gemma 4, TP2": Engine("gemma4", {**EAGER, **TWO}, like="Gemma 4, one rank", tolerance=OTHER_GROUPS),
    "hybrid, one rank": Engine("hybrid", EAGER),
    "hybrid, TP2, ha_npu": Engine("hybrid", {**EAGER, **TWO, "attention_backend": "ha_npu"}, like="hybrid, one rank"),
    "EP2, graphs": Engine("qwen3", EP2, like="one rank"),
    "Kimi, one rank": Engine("kimi", EAGER),
    "Kimi, packed": Engine("kimi packed", EAGER, like="Kimi, one rank", tolerance=PACKED_ON_CPU),
    "Kimi, packed, TP2": Engine("kimi packed", {**EAGER, **TWO}, like="Kimi, one rank"),
    "Kimi, EP2": Engine("kimi", {**EAGER, **EP2}, like="Kimi, one rank"),
}


def prompts() -> list[dict[str, list[int]]]:
    """The same token ids for every engine."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [{"prompt_token_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in LENGTHS]


def options_of(engine: Engine) -> dict[str, Any]:
    """vLLM's arguments."""
    return {
        "quantization": "w4a16-grouped",
        "worker_extension_cls": "vllm_ext.benchmarks.untuned_worker.UntunedWorker",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 30,  # engines side by side would count each other as used
        **({} if "enforce_eager" in engine.options else {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}),
        **options_of_model(engine.model),
        **engine.options,
    }


def answer_of(outputs: Any) -> Answer:
    """Prompt log-probabilities, tokens and the margins by which each was chosen."""
    answer: Answer = {"log_probs": [], "tokens": [], "margins": []}
    for output in outputs:
        if output.prompt_logprobs:
            pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
            answer["log_probs"] += [entry[token].logprob for token, entry in pairs]
        answer["tokens"].append(list(output.outputs[0].token_ids))
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in output.outputs[0].logprobs]
        answer["margins"].append([first - second for first, second, *_ in best])
    return answer


def through_the_cache(cached: Any, read: Any) -> Answer:
    """Tokens of requests whose prompts were found in the cache, and the prompts' log-probabilities, for which vLLM
    reads a prompt whatever the cache holds. Raises RuntimeError where nothing was found."""
    found = [int(output.num_cached_tokens or 0) for output in cached]
    if not any(found):
        raise RuntimeError("serve_engines: no prompt was found in the prefix cache")
    return {**answer_of(cached), "log_probs": answer_of(read)["log_probs"], "cached_tokens": sum(found)}


def next_tokens(outputs: Any) -> Answer:
    """Of answers with every token's log-probability: those of what follows the prompts, in place of the prompts' own,
    which vLLM does not give for a request with an adapter."""
    follows = [output.outputs[0].logprobs[0] for output in outputs]
    return {**answer_of(outputs), "log_probs": [entry[token].logprob for entry in follows for token in sorted(entry)]}


def through_an_adapter(llm: Any, model: Path) -> Answer:
    """The answers of requests with an adapter. Raises RuntimeError where it changes too little to be noticed."""
    from vllm.lora.request import LoRARequest

    without = next_tokens(llm.generate(prompts(), sampling(**WHOLE), use_tqdm=False))
    with tempfile.TemporaryDirectory() as folder:
        adapter = LoRARequest("adapter", 1, str(write_adapter(model, Path(folder) / "adapter")))
        found = next_tokens(llm.generate(prompts(), sampling(**WHOLE), use_tqdm=False, lora_request=adapter))
    moved = float(compare(without, found, 0.0)["mean"])
    if moved < 2 * QUANTISED:
        raise RuntimeError(f"serve_engines: the adapter moves log-probabilities by {moved:.3f} only")
    return {**found, "moved by the adapter": moved}


def drafts_of(metrics: Any) -> Answer:
    """How many tokens a speculating engine has drafted, and accepted. Raises RuntimeError where either is none: then
    what was compared is no speculation."""
    counts = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
    found = {one: int(counts.get(f"vllm:spec_decode_num_{one}_tokens", 0)) for one in ("draft", "accepted")}
    if not all(found.values()):
        raise RuntimeError(f"serve_engines: {found['draft']} tokens were drafted, {found['accepted']} accepted")
    return {"drafts": found}


WHOLE = {"prompt_logprobs": None, "logprobs": -1}


def sampling(**changed: Any) -> Any:
    """Greedy, with the log-probabilities that are compared."""
    from vllm import SamplingParams

    asked = {"prompt_logprobs": 0, "logprobs": 2, **changed}
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **asked)


def ask(engine: Engine, model: str) -> Answer:
    """Start the engine in this process, do its action, and ask it."""
    from vllm_ext.plugin import register

    register()
    from vllm import LLM

    if "data_parallel_size" in engine.options:
        return asyncio.run(ask_async(engine, model))
    llm = LLM(model=model, **options_of(engine))
    if engine.action == "ask twice":  # experts move between ranks after a few steps
        llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
        llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
    elif engine.action == "cached":
        llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
        again = llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
        return through_the_cache(again, llm.generate(prompts(), sampling(), use_tqdm=False))
    elif engine.action == "sleep":
        llm.generate(prompts(), sampling(), use_tqdm=False)
        llm.sleep(level=1)
        llm.wake_up()
    elif engine.action == "reload":
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    elif engine.action == "next tokens":
        return next_tokens(llm.generate(prompts(), sampling(**WHOLE), use_tqdm=False))
    elif engine.action == "adapter":
        return through_an_adapter(llm, Path(model))
    answer = answer_of(llm.generate(prompts(), sampling(), use_tqdm=False))
    return {**answer, **drafts_of(llm.get_metrics())} if engine.action == "count drafts" else answer


async def ask_async(engine: Engine, model: str) -> Answer:
    """The same with an engine of several cores, all prompts at once."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    served = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options_of(engine)))

    async def one(index: int, prompt: dict[str, list[int]]) -> Any:
        from vllm.sampling_params import RequestOutputKind

        last = None
        asked = sampling(output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in served.generate(prompt, asked, str(index)):
            last = output
        return last

    outputs = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts())))
    served.shutdown()
    return answer_of(outputs)


def child(engine: Engine, model: str, result: Path) -> None:
    """One engine's process: its answer, as JSON."""
    os.environ["VLLM_CACHE_ROOT"] = str(result.with_suffix(""))
    sys.path.insert(0, str(ROOT))
    skip_autotuning()
    result.write_text(json.dumps(ask(engine, model)))


# Multicast is switched off where GPUs are shared with others; vLLM must not ask for it by itself.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0"}


@dataclass
class Running:
    """An engine that has not answered yet."""

    process: Any
    log: Path
    result: Path
    begin: float = field(default_factory=time.monotonic)

    def answer(self, wanted: str, deadline: float) -> Answer | None:
        """The engine's answer once its process has ended or is past `deadline`, and killed then; None before."""
        if self.process.is_alive() and time.monotonic() < deadline:
            return None
        end(self.process)
        text = self.log.read_text(errors="replace")
        if not self.result.exists():
            telling = [line[-300:] for line in text.splitlines() if "Error" in line]
            return {"error": "\n".join([*telling[-4:], text[-700:]])}
        found: Answer = json.loads(self.result.read_text())
        return found if wanted in text else {"error": f"its log does not say {wanted!r}"}


def side_by_side(
    jobs: dict[str, tuple[Any, ...]], says: dict[str, str], folder: Path, args: argparse.Namespace, record: Any
) -> None:
    """Call each job's (function, *arguments, where its answer goes as JSON) in a process of its own, in order, at most
    --at-once side by side; `record` is called with all answers after each.

    One that fails or runs out of time answers {"error": the end of its log}.
    """
    begin = time.monotonic()
    server = engine_processes.context(ENVIRONMENT)
    waiting, running, answers = list(jobs), dict[str, Running](), dict[str, Answer]()
    while waiting or running:
        while waiting and len(running) < args.at_once:
            name = waiting.pop(0)
            log, result = folder / f"{len(answers) + len(running)}.log", folder / f"{name.replace(' ', '_')}.json"
            process = engine_processes.start(server, jobs[name][0], (*jobs[name][1:], result), log)
            running[name] = Running(process, log, result)
        for name, one in list(running.items()):
            deadline = min(begin + args.timeout, one.begin + args.each)
            if (answer := one.answer(says.get(name, ""), deadline)) is None:
                continue
            del running[name]
            answers[name] = answer
            word = f"failed: {answer['error'][:300]}" if "error" in answer else "answered"
            print(f"{time.monotonic() - begin:.0f} s: {name}: {word}", flush=True)
            record(answers)
        if time.monotonic() > begin + args.timeout:
            waiting.clear()
        time.sleep(0.1)


def compare(expected: Answer, answer: Answer, tolerance: float) -> Answer:
    """How far two engines' answers are apart; "ok" where the mean is below `tolerance`."""
    failed = [one["error"] for one in (expected, answer) if "error" in one]
    if failed:
        return {"ok": False, "error": failed[-1]}
    gaps = [abs(a - b) for a, b in zip(expected["log_probs"], answer["log_probs"], strict=True)]
    parted = []
    for a, b, margins in zip(expected["tokens"], answer["tokens"], expected["margins"], strict=True):
        parted += [margin for x, y, margin in zip(a, b, margins, strict=True) if x != y][:1]
    mean = sum(gaps) / len(gaps)
    ok = mean < tolerance and max(parted, default=0.0) < MARGIN
    noted: Answer = {key: answer[key] for key in ("drafts", "moved by the adapter") if key in answer}
    return {"ok": ok, "mean": mean, "max": max(gaps), "margins where tokens part": parted, **noted}


def add_limits(parser: argparse.ArgumentParser) -> None:
    """The options of `side_by_side`, and where results go."""
    parser.add_argument("--at-once", type=int, default=6, help="engines side by side")
    parser.add_argument("--each", type=float, default=90, help="seconds for one engine")
    parser.add_argument("--timeout", type=float, default=170, help="seconds for all engines together")
    parser.add_argument("--out", type=Path)


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=("features", "parallel"))
    parser.add_argument("--ray", action="store_true", help="also over Ray")
    parser.add_argument("--only", nargs="+", help="names of engines")
    add_limits(parser)
    args = parser.parse_args()
    engines = {"features": FEATURES, "parallel": PARALLEL}[args.plan]
    wanted = args.only or [name for name in engines if args.ray or "Ray" not in name]
    engines = {name: engine for name, engine in engines.items() if name in wanted}
    sys.path.insert(0, str(ROOT))
    from vllm_ext.benchmarks.registry import describe_run

    result: dict[str, Any] = {"plan": args.plan, "ok": False, "pairs": {}, "run": describe_run()}
    begin = time.monotonic()

    def record(answers: dict[str, Answer]) -> None:
        pairs = [(name, engine.like) for name, engine in engines.items() if engine.like]
        known = [(name, like) for name, like in pairs if name in answers and like in answers]
        result["pairs"] = {
            f"{name} / {like}": compare(answers[like], answers[name], engines[name].tolerance) for name, like in known
        }
        result["ok"] = len(known) == len(pairs) and all(pair["ok"] for pair in result["pairs"].values())
        result["seconds"] = round(time.monotonic() - begin)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        models = write_models({engine.model for engine in engines.values()}, Path(folder))
        jobs = {name: (child, engine, models[engine.model]) for name, engine in engines.items()}
        side_by_side(jobs, {name: engine.says for name, engine in engines.items()}, Path(folder), args, record)
    print(json.dumps({key: value for key, value in result.items() if key != "run"}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
