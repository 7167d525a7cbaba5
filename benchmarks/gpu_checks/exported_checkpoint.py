"""A checkpoint exported as compressed-tensors, served by stock vLLM on a GPU, which knows nothing of this package.

    python benchmarks/gpu_checks/exported_checkpoint.py [--out FILE] [--compiled]

A tiny Qwen3-MoE is exported with integer zero points and without any. For each, three engines answer the same prompts:
stock vLLM on the exported folder (Marlin there), stock vLLM on a BF16 checkpoint of the dequantised weights, and this
package's `w4a16-grouped` on the exported folder. The last line printed is JSON: mean and largest difference of prompt
log-probabilities, beside how far quantising itself moved them. Exit status 0 when every pair agrees.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_processes

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 33, 64, 130, 300)
MEAN_TOLERANCE = 0.05  # BF16 rounding alone moves this model's log-probabilities by 0.01 to 0.03 on average
SIZES = {"hidden_size": 512, "moe_intermediate_size": 256}
KINDS: dict[str, dict[str, Any]] = {"integer zero points": {"zero_point": "int"}, "symmetric": {"symmetric": True}}
Answer = dict[str, Any]
Jobs = dict[str, tuple[Path, dict[str, Any]]]


def child(model: str, options: dict[str, Any], result: Path) -> None:
    """Run one engine and write its log-probabilities; the plugin only where options ask for it."""
    if options.get("quantization") == "w4a16-grouped":
        from vllm_ext.plugin import register

        register()
    import torch
    from vllm import LLM, SamplingParams

    if torch.cuda.is_available():
        options = {"attention_backend": "TRITON_ATTN", **options}
    generator = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in LENGTHS]
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,  # engines side by side would count each other as used
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
        found += [entry[token].logprob for token, entry in pairs]
    plugin = "vllm_ext.plugin" in sys.modules
    result.write_text(json.dumps({"log_probs": found, "plugin": plugin}))


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """The BF16 model, and for each kind its export and the BF16 checkpoint of the dequantised weights."""
    sys.path.insert(0, str(ROOT / "examples"))
    from safetensors.torch import load_file, save_file
    from tiny_models import write_tiny_model

    from vllm_ext.quantization import Scheme
    from vllm_ext.quantization.cli import quantize_main

    found = {"bf16": Path(write_tiny_model("qwen3-moe", folder / "bf16", **SIZES))}
    for kind, keys in KINDS.items():
        exported, dense = folder / f"{kind}-exported".replace(" ", "-"), folder / f"{kind}-dense".replace(" ", "-")
        flags = ["--symmetric"] if keys.get("symmetric") else []
        command = [str(found["bf16"]), str(exported), "--quiet", "--format", "compressed-tensors", *flags]
        if quantize_main(command):
            raise RuntimeError(f"exported_checkpoint: exporting with {kind} failed")
        config = json.loads((exported / "config.json").read_text())["quantization_config"]
        group = config["config_groups"]["group_0"]["weights"]["group_size"]
        scheme = Scheme(**keys, group_size_w13=group, group_size_w2=group)
        shutil.copytree(found["bf16"], dense)
        for file in dense.glob("*.safetensors"):
            tensors = load_file(file)
            for name in tensors:
                if ".experts." in name:
                    shard = "w2" if "down_proj" in name else "w13"
                    tensors[name] = scheme.quantize(tensors[name], shard).dequantize(tensors[name].dtype)
            save_file(tensors, file, {"format": "pt"})
        found[f"{kind}, exported"], found[f"{kind}, dequantised"] = exported, dense
    return found


def run_engines(
    jobs: dict[str, tuple[Path, dict[str, Any]]],
    folder: Path,
    timeout: float,
    told: Callable[[dict[str, Answer]], None],
) -> dict[str, Answer]:
    """Start every engine at once, each in a process of its own; a failed one answers {"error": its last lines}.

    `told` gets the answers so far whenever one has come: what ends the check from outside loses the others' only. Stock
    Marlin's first call takes about 50 s on a GPU for which the driver has to compile its kernels.
    """
    server = engine_processes.context({"VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"})
    started = {}
    for name, (model, options) in jobs.items():
        log, result = folder / f"{name}.log", folder / f"{name}.json"
        process = engine_processes.start(server, child, (str(model), options, result), log)
        started[name] = (process, log, result)
    begun = time.monotonic()
    answers: dict[str, Answer] = {}
    while len(answers) < len(started):
        late = time.monotonic() > begun + timeout
        for name, (process, log, result) in started.items():
            if name in answers or (process.is_alive() and not late):
                continue
            engine_processes.join(process, time.monotonic())
            text = log.read_text(errors="replace")
            answers[name] = json.loads(result.read_text()) if result.exists() else {"error": text[-2500:]}
            kernels = {line.split("] ")[-1] for line in text.splitlines() if "MoE" in line and "arlin" in line}
            answers[name]["kernels"] = sorted(kernels)[:3]
            word = "failed" if "error" in answers[name] else "answered"
            print(f"{name}: {word} after {time.monotonic() - begun:.0f} s", flush=True)
            told(answers)
        time.sleep(0.2)
    return answers


def compare(one: Answer, other: Answer) -> dict[str, Any]:
    """Mean and largest difference of log-probabilities; "ok" against the tolerance."""
    failed = [answer["error"] for answer in (one, other) if "error" in answer]
    if failed:
        return {"ok": False, "error": failed[0]}
    gaps = [abs(a - b) for a, b in zip(one["log_probs"], other["log_probs"], strict=True)]
    mean = sum(gaps) / len(gaps)
    return {"ok": mean < MEAN_TOLERANCE, "mean": mean, "max": max(gaps)}


def judge(answers: dict[str, Answer]) -> dict[str, Any]:
    """Every pair's comparison, and "ok" where all agree and no engine but ours had the plugin."""
    silent: Answer = {"error": "no answer yet"}

    def between(one: str, other: str) -> dict[str, Any]:
        return compare(answers.get(one, silent), answers.get(other, silent))

    pairs = {
        f"{one} on the export / BF16 of its weights, {kind}": between(f"{one}, {kind}", f"dequantised, {kind}")
        for kind in KINDS
        for one in ("stock", "w4a16")
    }
    moved = {kind: between("stock, bf16", f"dequantised, {kind}") for kind in KINDS}
    foreign = [name for name, answer in answers.items() if not name.startswith("w4a16") and answer.get("plugin")]
    return {
        "ok": all(pair["ok"] for pair in pairs.values()) and not foreign,
        "pairs": pairs,
        "moved by quantising": moved,
        "kernels": {name: answer["kernels"] for name, answer in answers.items() if answer["kernels"]},
    }


def main() -> int:
    """Command line; see the module."""
    from vllm_ext.benchmarks.registry import describe_run, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true", help="torch.compile and CUDA graphs instead of eager")
    parser.add_argument("--out", type=Path, help="also write the result, with the machine's description, here")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for all engines together")
    args = parser.parse_args()
    eager = {"enforce_eager": not args.compiled}

    def told(answers: dict[str, Answer]) -> None:
        if args.out:
            write_json(args.out, {**judge(answers), "compiled": args.compiled, "machine": describe_run()})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_checkpoints(folder)
        jobs: Jobs = {"stock, bf16": (models["bf16"], eager)}
        for kind in KINDS:
            jobs[f"stock, {kind}"] = (models[f"{kind}, exported"], eager)
            jobs[f"dequantised, {kind}"] = (models[f"{kind}, dequantised"], eager)
            jobs[f"w4a16, {kind}"] = (models[f"{kind}, exported"], {**eager, "quantization": "w4a16-grouped"})
        result = judge(run_engines(jobs, folder, args.timeout, told))
    print(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
