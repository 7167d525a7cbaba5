"""Runs vLLM engines one after another in this process and writes what they answered; started by `conftest.run_engines`.

    python engine_runner.py JOBS.json RESULTS.json

A job: {"model": dir, "options": {...LLM arguments}, "prompts": [[token ids]], "max_tokens": n, "before": "name"};
`before` is a function below, called before the engine starts; what it changes stays changed for the jobs after it,
unless it returns a function that undoes it.
More keys: "reload": a checkpoint whose weights replace the model's before it is asked; "lora": an adapter's folder;
"cached": the prompts are asked once before. With the latter two the prompts' log-probabilities are left out.
"used_slots": the caches of linear attention hold states of requests that are gone.
A result: {"log_probs": [[prompt log-probabilities]], "tokens": [[...]], "margins": [[gap between the best two
tokens]]}, with "refused": [why a request ended with an error], or {"error": message}.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_peak_private_bytes = 0


def watch_private_memory() -> None:
    """Keep the largest RssAnon: pages of a mapped checkpoint count in the resident size, but are not the process's."""
    global _peak_private_bytes
    while True:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                _peak_private_bytes = max(_peak_private_bytes, int(line.split()[1]) * 1024)
        time.sleep(0.05)


def forget_half_as_fast() -> None:
    """A wrong kernel: for checking that a comparison notices one."""
    import vllm_ext.model_executor.linear_attention as module

    right = module.chunk_gated_delta_rule
    module.chunk_gated_delta_rule = lambda q, k, v, g, beta, **options: right(q, k, v, g * 0.5, beta, **options)


def refuse_every_call() -> None:
    """A kernel that refuses its input."""
    import vllm_ext.model_executor.linear_attention as module

    def refuse(*operands: Any, **options: Any) -> None:
        raise ValueError("refused for a test")

    module.chunk_gated_delta_rule = refuse


def tell_decodes_by_length() -> Callable[[], None]:
    """What vLLM 0.23 does: a first chunk of one token counts as a decode. Returns what undoes it."""
    from vllm.v1.attention.backends import gdn_attn

    split = gdn_attn.split_decodes_and_prefills

    def by_length(metadata: Any, decode_threshold: int = 1, **options: Any) -> Any:
        return split(metadata, decode_threshold=decode_threshold)

    gdn_attn.split_decodes_and_prefills = by_length
    return lambda: setattr(gdn_attn, "split_decodes_and_prefills", split)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start the job's engine, ask it, and let it go."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    undo = globals()[job["before"]]() if job.get("before") else None
    defaults = {"max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": False, "enforce_eager": True}
    llm = LLM(model=job["model"], **{**defaults, **job.get("options", {})})
    if job.get("reload"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
    if job.get("used_slots"):
        from vllm_ext.benchmarks.request_mixes import fill_slots

        llm.collective_rpc(fill_slots, args=(1.0,))
    adapter = LoRARequest("adapter", 1, job["lora"]) if job.get("lora") else None
    sampling = SamplingParams(temperature=0, max_tokens=job.get("max_tokens", 8), prompt_logprobs=0, logprobs=2)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    if job.get("cached") or adapter:
        # A request for the prompt's own log-probabilities does not read the cache, and fails with an adapter.
        sampling.prompt_logprobs = None
    if job.get("cached"):
        llm.generate(prompts, sampling, use_tqdm=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    result: dict[str, Any] = {"log_probs": [], "tokens": [], "margins": [], "refused": []}
    result["peak_private_bytes"] = _peak_private_bytes
    for output in outputs:
        if output.outputs[0].finish_reason == "error":
            result["refused"].append(output.outputs[0].stop_reason)
            continue
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs or [None] * 99999, strict=False))[1:]
        result["log_probs"].append([entry[token].logprob for token, entry in pairs if entry])
        result["tokens"].append(list(output.outputs[0].token_ids))
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in output.outputs[0].logprobs]
        result["margins"].append([first - second for first, second, *_ in best])
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    if undo:
        undo()
    return result


def main(jobs_path: str, results_path: str) -> None:
    """Run every job; a failed one leaves its error. Put jobs meant to fail last: vLLM may not start again after one."""
    results = []
    threading.Thread(target=watch_private_memory, daemon=True).start()
    for job in json.loads(Path(jobs_path).read_text()):
        print(f"engine_runner: {Path(job['model']).name} {job.get('options', {})}", flush=True)
        try:
            results.append(run(job))
        except Exception as error:
            traceback.print_exc()
            results.append({"error": f"{type(error).__name__}: {error}"})
        Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
