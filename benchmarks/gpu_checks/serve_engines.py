"""4-bit experts through real vLLM's engine features on one GPU, or over two: each engine against a plain one.

    python benchmarks/gpu_checks/serve_engines.py features [--out FILE]     # one GPU
    python benchmarks/gpu_checks/serve_engines.py parallel [--ray] [--out FILE]     # two GPUs

Tiny random models, quantised at load. All engines start side by side, each in processes of its own, which takes about a
minute and a half. An engine's prompt log-probabilities are compared with those of the plain engine of its model; its
greedy tokens too, up to the first that hung on a small margin. The last line printed is JSON; exit status 0 when every
engine agrees. The plugin must be installed, or its entry points be on the path: workers register it themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 5, 63, 64, 65, 130, 300, 700)
TOLERANCE = 0.05
MAX_TOKENS = 24
Answer = dict[str, Any]
EAGER = {"enforce_eager": True}
TWO = {"tensor_parallel_size": 2}


@dataclass(frozen=True)
class Engine:
    """One engine: its model, vLLM's options, what is done to it before it is asked, and the engine it must equal."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    action: str | None = None
    like: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


# 704 is DiffusionGemma's and Gemma 4's size: 352 a rank, in groups of 64 that no longer divide it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3-moe", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 704}),
    "gemma4": ("gemma4-moe", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 704}),
    "hybrid": ("qwen3-next", {"hidden_size": 512, "num_experts": 16, "moe_intermediate_size": 256}),
}
EPLB = {
    **TWO,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"window_size": 8, "step_interval": 8, "num_redundant_experts": 2, "use_async": False},
}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FEATURES = {
    "plain": Engine("qwen3", EAGER),
    "graphs": Engine("qwen3", like="plain"),
    "chunked prefill, graphs": Engine("qwen3", {"max_num_batched_tokens": 128}, like="plain"),
    "prefixes cached, graphs": Engine("qwen3", {"enable_prefix_caching": True}, "ask twice", "plain"),
    "n-gram speculation, graphs": Engine("qwen3", {"speculative_config": SPECULATION}, like="plain"),
    "slept and woken, graphs": Engine("qwen3", {"enable_sleep_mode": True}, "sleep", "plain"),
    "weights discarded and reloaded, graphs": Engine("qwen3", {"enable_sleep_mode": True}, "reload", "plain"),
    "FP16, graphs": Engine("qwen3", {"dtype": "float16"}, like="plain"),
    "LoRA enabled, graphs": Engine("qwen3", {"enable_lora": True, "max_lora_rank": 8}, like="plain"),
    "hybrid": Engine("hybrid", EAGER),
    "hybrid, shared expert overlapped, graphs": Engine("hybrid", like="hybrid"),
}
PARALLEL = {
    "one rank": Engine("qwen3", EAGER),
    "TP2": Engine("qwen3", {**EAGER, **TWO}, like="one rank"),
    "TP2, graphs": Engine("qwen3", TWO, like="one rank"),
    "EP2": Engine("qwen3", {**EAGER, **TWO, "enable_expert_parallel": True}, like="one rank"),
    "EP2, EPLB": Engine("qwen3", {**EAGER, **EPLB}, "ask twice", "one rank"),
    "DP2": Engine("qwen3", {**EAGER, "data_parallel_size": 2}, like="one rank"),
    "DP2, EP2": Engine("qwen3", {**EAGER, "data_parallel_size": 2, "enable_expert_parallel": True}, like="one rank"),
    "Gemma 4, one rank": Engine("gemma4", EAGER),
    "Gemma 4, TP2": Engine("gemma4", {**EAGER, **TWO}, like="Gemma 4, one rank"),
    "hybrid, one rank": Engine("hybrid", EAGER),
    "hybrid, TP2, ha_npu, graphs": Engine("hybrid", {**TWO, "attention_backend": "ha_npu"}, like="hybrid, one rank"),
}
RAY = {"Ray, TP2": Engine("qwen3", {**EAGER, **TWO, "distributed_executor_backend": "ray"}, like="one rank")}


def prompts() -> list[dict[str, list[int]]]:
    """The same token ids for every engine."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [{"prompt_token_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in LENGTHS]


def options_of(engine: Engine) -> dict[str, Any]:
    """vLLM's arguments."""
    return {
        "quantization": "w4a16-grouped",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 1 << 30,  # engines side by side would count each other as used
        **({} if "enforce_eager" in engine.options else {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}),
        **engine.options,
    }


def answer_of(outputs: Any) -> Answer:
    """Prompt log-probabilities, tokens and the margins by which each was chosen."""
    answer: Answer = {"log_probs": [], "tokens": [], "margins": []}
    for output in outputs:
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
        answer["log_probs"] += [entry[token].logprob for token, entry in pairs]
        answer["tokens"].append(list(output.outputs[0].token_ids))
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in output.outputs[0].logprobs]
        answer["margins"].append([first - second for first, second, *_ in best])
    return answer


def sampling(**changed: Any) -> Any:
    """Greedy, with the log-probabilities that are compared."""
    from vllm import SamplingParams

    asked = {"prompt_logprobs": 0, "logprobs": 2, **changed}
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, **asked)


def ask(engine: Engine, model: str) -> Answer:
    """Start the engine in this process, do its action, and ask it."""
    from vllm import LLM

    if "data_parallel_size" in engine.options:
        return asyncio.run(ask_async(engine, model))
    llm = LLM(model=model, **options_of(engine))
    if engine.action == "ask twice":  # fills the cache; and experts move between ranks after a few steps
        llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
        llm.generate(prompts(), sampling(prompt_logprobs=None), use_tqdm=False)
    elif engine.action == "sleep":
        llm.generate(prompts(), sampling(), use_tqdm=False)
        llm.sleep(level=1)
        llm.wake_up()
    elif engine.action == "reload":
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    return answer_of(llm.generate(prompts(), sampling(), use_tqdm=False))


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


def start(name: str, index: int, plan: str, models: dict[str, str], engine: Engine, folder: Path) -> Any:
    """The engine's process and its log."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / f"cache{index}"),
        # Multicast is switched off where GPUs are shared with others; vLLM must not ask for it by itself.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "NCCL_NVLS_ENABLE": "0",
        **engine.environment,
    }
    log = (folder / f"{index}.log").open("w")
    command = [sys.executable, __file__, plan, "--child", name, models[engine.model], str(folder / f"{index}.json")]
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def run(plan: str, engines: dict[str, Engine], folder: Path, timeout: float) -> dict[str, Answer]:
    """Answers by engine; one that fails or runs out of time answers {"error": the end of its log}."""
    import signal

    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_models import write_tiny_model

    used = {engine.model for engine in engines.values()}
    models = {}
    for key in used:
        kind, fields = MODELS[key]
        layers = {"num_hidden_layers": 4 if key == "hybrid" else 2}
        models[key] = str(write_tiny_model(kind, folder / key, **layers, **fields))
    started = {name: start(name, i, plan, models, engine, folder) for i, (name, engine) in enumerate(engines.items())}
    deadline = time.monotonic() + timeout
    answers: dict[str, Answer] = {}
    for index, (name, process) in enumerate(started.items()):
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        result, text = folder / f"{index}.json", (folder / f"{index}.log").read_text(errors="replace")
        telling = [line[-300:] for line in text.splitlines() if "Error" in line]
        failed = {"error": "\n".join([*telling[-4:], text[-700:]])}
        answers[name] = json.loads(result.read_text()) if result.exists() else failed
        print(f"{name}: {'failed' if 'error' in answers[name] else 'answered'}", flush=True)
    return answers


def compare(expected: Answer, answer: Answer) -> Answer:
    """How far two engines' answers are apart; "ok" against the tolerances."""
    failed = [one["error"] for one in (expected, answer) if "error" in one]
    if failed:
        return {"ok": False, "error": failed[-1]}
    gaps = [abs(a - b) for a, b in zip(expected["log_probs"], answer["log_probs"], strict=True)]
    parted = []
    for a, b, margins in zip(expected["tokens"], answer["tokens"], expected["margins"], strict=True):
        parted += [margin for x, y, margin in zip(a, b, margins, strict=True) if x != y][:1]
    mean = sum(gaps) / len(gaps)
    ok = mean < TOLERANCE and max(parted, default=0.0) < 4 * TOLERANCE
    return {"ok": ok, "mean": mean, "max": max(gaps), "margins where tokens part": parted}


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=("features", "parallel"))
    parser.add_argument("--ray", action="store_true", help="also over Ray")
    parser.add_argument("--only", nargs="+", help="names of engines")
    parser.add_argument("--timeout", type=float, default=170, help="seconds for all engines together")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    engines = {"features": FEATURES, "parallel": {**PARALLEL, **(RAY if args.ray or args.child else {})}}[args.plan]
    if args.child:
        name, model, result = args.child
        Path(result).write_text(json.dumps(ask(engines[name], model)))
        return 0
    if args.only:
        engines = {name: engine for name, engine in engines.items() if name in args.only}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answers = run(args.plan, engines, Path(folder), args.timeout)
    pairs = {
        f"{name} / {engine.like}": compare(answers[engine.like], answers[name])
        for name, engine in engines.items()
        if engine.like in answers
    }
    result = {"plan": args.plan, "ok": all(pair["ok"] for pair in pairs.values()), "pairs": pairs}
    result["seconds"] = round(time.monotonic() - begin)
    if args.out:
        from vllm_ext.benchmarks.registry import describe_run

        args.out.write_text(json.dumps({**result, "run": describe_run()}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
