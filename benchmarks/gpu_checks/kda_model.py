"""A tiny KDA or GDN model through real vLLM on a GPU, with and without `ha_npu`, in 16 bits and with `w4a16-grouped`.

    python benchmarks/gpu_checks/kda_model.py [--kind olmo-hybrid] [--compiled] [--mla-backend TRITON_MLA] [--out FILE]

vLLM's Kimi-Linear and OLMo-hybrid do not run on a CPU by themselves, so this is where the whole models are checked.
Five engines (three of a model without experts) start side by side, each in its own process; the plugin is registered by
hand, so nothing needs to be installed. The last line printed is JSON: for each pair the mean, 90th percentile and
largest difference of prompt log-probabilities, and whether greedy tokens agree wherever the margin exceeds the
tolerance. A pair "stock, small budget" against stock is the yardstick: both are vLLM's own kernels, only the prompts
are cut differently. Exit status 0 when every pair agrees.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import engine_processes
from vllm_ext.benchmarks.registry import describe_run

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 5, 63, 64, 65, 130, 300, 700)
MAX_TOKENS = 16
MEAN_TOLERANCE = 0.05
PERCENTILE_90_TOLERANCE = 0.1
HA_NPU = {"attention_backend": "ha_npu"}
KINDS = ("kimi-linear", "qwen3-next", "qwen3.5-moe", "olmo-hybrid")
WITHOUT_EXPERTS = ("olmo-hybrid",)
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock, small budget": {"max_num_batched_tokens": 192},
    "ha_npu": {**HA_NPU, "max_num_batched_tokens": 192},
    "w4a16": {"quantization": "w4a16-grouped"},
    "w4a16 + ha_npu": {"quantization": "w4a16-grouped", **HA_NPU},
}
PAIRS = (("stock", "stock, small budget"), ("stock", "ha_npu"), ("w4a16", "w4a16 + ha_npu"))
Answer = dict[str, Any]


def child(model: str, options: dict[str, Any], result: Path) -> None:
    """Run one engine in this process and write its answers."""
    from vllm_ext.plugin import register

    register()
    import torch
    from vllm import LLM, SamplingParams

    generator = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in LENGTHS]
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,  # engines side by side would count each other as used
        **options,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=2, detokenize=False
    )
    answer: Answer = {"log_probs": [], "tokens": [], "margins": []}
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
        answer["log_probs"] += [entry[token].logprob for token, entry in pairs]
        answer["tokens"].append(list(output.outputs[0].token_ids))
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in output.outputs[0].logprobs]
        answer["margins"].append([first - second for first, second, *_ in best])
    result.write_text(json.dumps(answer))


def run_engines(
    engines: dict[str, dict[str, Any]], model: str, common: dict[str, Any], folder: Path, timeout: float
) -> dict[str, Answer]:
    """Start every engine at once; an engine that fails or runs out of time answers {"error": last lines}."""
    server = engine_processes.context({"VLLM_LOGGING_LEVEL": "DEBUG"})
    started = {}
    for index, (name, options) in enumerate(engines.items()):
        log, result = folder / f"{index}.log", folder / f"{index}.json"
        process = engine_processes.start(server, child, (model, {**common, **options}, result), log)
        started[name] = (process, log, result)
    deadline = time.monotonic() + timeout
    answers: dict[str, Answer] = {}
    for name, (process, log, result) in started.items():
        engine_processes.join(process, deadline)
        text = log.read_text(errors="replace")
        answers[name] = json.loads(result.read_text()) if result.exists() else {"error": text[-3000:]}
        served = {line.split("] ")[-1] for line in text.splitlines() if "prefill by vllm_ext" in line}
        answers[name]["served"] = sorted(served)
        print(f"{name}: {'failed' if 'error' in answers[name] else 'answered'}", flush=True)
    return answers


def compare(one: Answer, other: Answer) -> dict[str, Any]:
    """How far two engines' answers are apart; "ok" against the tolerances."""
    failed = [answer["error"] for answer in (one, other) if "error" in answer]
    if failed:
        return {"ok": False, "error": failed[0]}
    gaps = sorted(abs(a - b) for a, b in zip(one["log_probs"], other["log_probs"], strict=True))
    mean, high = sum(gaps) / len(gaps), gaps[int(0.9 * len(gaps))]
    firsts = [
        next((m for x, y, m in zip(a, b, margins, strict=True) if x != y), None)
        for a, b, margins in zip(one["tokens"], other["tokens"], one["margins"], strict=True)
    ]
    margins = [margin for margin in firsts if margin is not None]
    ok = (
        mean < MEAN_TOLERANCE
        and high < PERCENTILE_90_TOLERANCE
        and max(margins, default=0) < 2 * PERCENTILE_90_TOLERANCE
    )
    return {"ok": ok, "mean": mean, "p90": high, "max": gaps[-1], "margins_at_first_difference": margins}


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="kimi-linear", choices=KINDS)
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs instead of eager")
    parser.add_argument("--mla-backend", help="full-attention backend, where vLLM's own choice is not installed")
    parser.add_argument("--out", type=Path, help="also write the result, with the machine's description, here")
    parser.add_argument("--timeout", type=float, default=170, help="seconds for all engines together")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_models import write_tiny_model

    common: dict[str, Any] = {"enforce_eager": not args.compiled}
    if args.kind != "kimi-linear":
        common["gdn_prefill_backend"] = "triton"  # vLLM's first choice on a Hopper GPU is compiled at run time
    if args.mla_backend:
        common["attention_config"] = {"backend": args.mla_backend}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(args.kind, Path(folder) / "model"))
        dense = args.kind in WITHOUT_EXPERTS
        engines = {name: options for name, options in ENGINES.items() if not (dense and "quantization" in options)}
        answers = run_engines(engines, model, common, Path(folder), args.timeout)
    pairs = {f"{one} / {other}": compare(answers[one], answers[other]) for one, other in PAIRS if one in answers}
    served = answers["ha_npu"].get("served", [])
    ok = all(pair["ok"] for pair in pairs.values()) and bool(served)
    result = {"kind": args.kind, "compiled": args.compiled, "ok": ok, "pairs": pairs, "served": served}
    if args.out:
        args.out.write_text(json.dumps({**result, "machine": describe_run()}, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
