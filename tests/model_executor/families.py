"""What each model family does through real vLLM: the engines to run, how they are judged, and the table in the docs.

    python tests/model_executor/families.py --out benchmarks/results/model_families.json

runs every family on the CPU, in one process and over two ranks (about ten minutes), writes what it saw, and puts the
table into docs/vllm.md. `test_model_families` runs the single-process columns for all and two ranks for some.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "model_families.json"
DOCS = ROOT / "docs" / "vllm.md"
START, END = "<!-- model families: begin -->", "<!-- model families: end -->"
W4 = {"quantization": "w4a16-grouped"}
PARALLEL = {"TP2": {"tensor_parallel_size": 2}, "EP2": {"tensor_parallel_size": 2, "enable_expert_parallel": True}}
COLUMNS = ("loads", "at load", "packed", *PARALLEL)
# Rounding alone moves these models' log-probabilities by 0.01 to 0.03 on average, quantising them by 0.04 to 0.2.
TOLERANCE = 0.03
# Two ranks round their halves of every sum besides; quantising in other groups is 0.12 off (Gemma 4 on two ranks).
RANKS_TOLERANCE = 0.04
LENGTHS = (5, 33, 64, 130)
Answer = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One family: its name for people, examples/tiny_models.py's kind, fields of config.json, and where it runs."""

    name: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


# An intermediate size of 96 is 48 a rank, which begins inside a group of 64 columns.
FAMILIES = (
    Family("Mixtral", "mixtral", {"intermediate_size": 96}),
    Family("Qwen3-MoE", "qwen3-moe", {"moe_intermediate_size": 96}),
    Family("Qwen3-Next", "qwen3-next", {"moe_intermediate_size": 96, "full_attention_interval": 2}),
    Family("Qwen3.5-MoE", "qwen3.5-moe", {"moe_intermediate_size": 96, "full_attention_interval": 2}),
    Family("OLMoE", "olmoe", {"intermediate_size": 96}),
    Family("DeepSeek-V2-Lite", "deepseek-v2", {"moe_intermediate_size": 96}),
    Family("GLM-4.5", "glm4-moe", {"moe_intermediate_size": 96}),
    Family("Gemma-4-MoE", "gemma4-moe", {"moe_intermediate_size": 96}),
    Family("gpt-oss", "gpt-oss", {"intermediate_size": 96}),
)

# What does not run on a CPU. Kimi-Linear: kda_model_h200.json, serve_families_h200.json and serve_parallel_h200x2.json.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "Kimi-Linear": {
        "loads": {"ok": True, "where": "H200"},
        "at load": {"ok": True, "where": "H200", "note": "at full layer size, 0.050 nats a token from BF16"},
        "packed": {"ok": True, "where": "H200", "note": "the bits of those quantised at load"},
        "TP2": {"ok": True, "where": "two H200s", "note": "packed, 0.024 nats a token from one rank"},
        "EP2": {"ok": True, "where": "two H200s", "note": "0.024"},
    },
    "DiffusionGemma": {},
}


def prompts() -> list[list[int]]:
    """Token ids, the same for every engine."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]


def write_checkpoints(family: Family, folder: Path) -> dict[str, str]:
    """The family's tiny model in BF16, packed, and in BF16 with the values that its 4-bit weights stand for."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_models import write_tiny_model

    from vllm_ext.quantization.cli import quantize_main

    plain = write_tiny_model(family.kind, folder / "plain", num_hidden_layers=2, **family.fields)
    assert quantize_main([str(plain), str(folder / "packed"), "--quiet"]) == 0
    shutil.copytree(plain, folder / "dequantised")
    file = folder / "dequantised" / "model.safetensors"
    save_file({name: dequantised(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return {name: str(folder / name) for name in ("plain", "packed", "dequantised")}


def dequantised(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An expert's weight after rounding to 4 bits and back; every other tensor as it is."""
    from vllm_ext.quantization import Scheme

    if ".experts." not in name or name.endswith("_bias"):
        return tensor
    shard = "w2" if "down_proj" in name or name.endswith("w2.weight") else "w13"
    hidden = 256
    columns = 96 if shard == "w2" else hidden
    turned = tensor.shape[-1] != columns  # gpt-oss stores [E, columns, rows]
    weight = tensor.transpose(-1, -2).contiguous() if turned else tensor
    weight = Scheme().quantize(weight, shard).dequantize(tensor.dtype)
    return weight.transpose(-1, -2).contiguous() if turned else weight


def single_jobs(paths: dict[str, str]) -> list[dict[str, Any]]:
    """Engines of one process: BF16, dequantised, at load, packed."""
    asked = {"prompts": prompts(), "max_tokens": 2}
    return [
        {"model": paths["plain"], **asked},
        {"model": paths["dequantised"], **asked},
        {"model": paths["plain"], "options": W4, **asked},
        {"model": paths["packed"], **asked},
    ]


def parallel_job(paths: dict[str, str], column: str) -> dict[str, Any]:
    """An engine of two ranks: by tensor with the packed checkpoint, by expert quantised at load.

    The other way round, ranks by tensor would form their groups after slicing, and differ from one rank by that.
    """
    by_expert = column == "EP2"
    options = {**PARALLEL[column], **(W4 if by_expert else {})}
    model = paths["plain" if by_expert else "packed"]
    return {"model": model, "prompts": prompts(), "max_tokens": 2, "options": options}


def gap(one: Answer, other: Answer) -> float:
    """Mean difference of prompt log-probabilities; NaN where an engine gave none."""
    if "log_probs" not in one or "log_probs" not in other:
        return math.nan
    a, b = (torch.tensor([value for prompt in answer["log_probs"] for value in prompt]) for answer in (one, other))
    return float((a - b).abs().mean())


def judge_single(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """{column: {"ok", "gap" or "error"}} from the answers to `single_jobs`."""
    plain, exact, at_load, packed = answers
    from_plain = gap(plain, at_load)
    found = {"loads": {"ok": math.isfinite(gap(plain, plain)), "gap": 0.0}}
    for column, answer in (("at load", at_load), ("packed", packed)):
        apart = gap(exact, answer)
        # Nearer to the dequantised weights than to BF16: the forward went through the quantised experts.
        found[column] = {"ok": apart < min(TOLERANCE, from_plain), "gap": apart}
    for column, answer in zip(found, (plain, at_load, packed), strict=True):
        if "error" in answer:
            found[column] = {"ok": False, "error": answer["error"]}
    return found


def judge_parallel(one_rank: Answer, answer: Answer, stock: Answer | None = None) -> dict[str, Any]:
    """Two ranks against one with the same 4-bit weights.

    stock  vLLM's own answer with the dequantised weights on two ranks, for families whose ranks do not sum to one
           rank's answer without us either
    """
    if "error" in answer:
        return {"ok": False, "error": answer["error"]}
    apart = gap(one_rank, answer)
    if apart < RANKS_TOLERANCE or stock is None:
        return {"ok": apart < RANKS_TOLERANCE, "gap": apart}
    from_stock = gap(stock, answer)
    found = {"gap": apart, "gap to vLLM's two ranks": from_stock}
    if from_stock < RANKS_TOLERANCE:
        return {
            "ok": True,
            **found,
            "note": f"as vLLM's own two ranks, which differ from one by {gap(one_rank, stock):.2f}",
        }
    if gap(one_rank, stock) < RANKS_TOLERANCE:
        return {"ok": False, **found}
    return {**found, "undecided": "vLLM's own two ranks differ from one, and from run to run"}


def table(document: dict[str, Any]) -> str:
    """The results as the Markdown table of docs/vllm.md."""
    lines = [
        "| family | loads | quantises at load | loads packed | TP2 | EP2 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in document["families"].items():
        cells = []
        for column in COLUMNS:
            found = row.get(column, {})
            mark = "undecided" if "undecided" in found else "not run" if "ok" not in found else "no"
            if found.get("ok"):
                mark = found.get("where", document["where"])
            cells.append(mark + (f" ({found['note']})" if "note" in found else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put_into_docs(document: dict[str, Any]) -> None:
    """Replace the table between the marks in docs/vllm.md."""
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{START}\n{table(document)}\n{END}{after}", encoding="utf-8")


def run_jobs(jobs: list[dict[str, Any]], folder: Path, **environment: str) -> list[Answer]:
    """Answers from one fresh process; jobs it did not reach are errors."""
    from engine_environment import ENVIRONMENT

    (folder / "jobs.json").write_text(json.dumps(jobs))
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    runner = Path(__file__).with_name("engine_runner.py")
    with (folder / "log").open("w") as log:
        try:
            subprocess.run(
                [sys.executable, str(runner), str(folder / "jobs.json"), str(results)],
                env={**os.environ, **ENVIRONMENT, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=300,
            )
        except subprocess.TimeoutExpired:
            print(f"timed out, log in {log.name}", file=sys.stderr)
    answers: list[Answer] = json.loads(results.read_text()) if results.exists() else []
    return answers + [{"error": f"did not finish: {(folder / 'log').read_text()[-500:]}"}] * (len(jobs) - len(answers))


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    from importlib.metadata import version

    from vllm_ext.benchmarks.registry import describe_run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", help="names of families; the others keep their rows")
    args = parser.parse_args(argv)
    document: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"families": {}}
    document |= {"vllm": version("vllm"), "where": "CPU", "run": describe_run()}
    for family in FAMILIES:
        if args.only and family.name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            paths = write_checkpoints(family, Path(folder))
            answers = run_jobs(single_jobs(paths), Path(folder))
            row = judge_single(answers)
            for column in PARALLEL:
                binding = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
                job = parallel_job(paths, column)
                (answer,) = run_jobs([job], Path(folder), **binding)
                row[column] = judge_parallel(answers[3], answer)
                # Unquantised expert parallelism ends vLLM's CPU worker: by tensor is the yardstick of both. Where its
                # ranks differ from one (MLA on a CPU), they differ from run to run too.
                by_tensor = {**job, "model": paths["dequantised"], "options": PARALLEL["TP2"]}
                for _ in range(3):
                    if row[column].get("ok"):
                        break
                    (stock,) = run_jobs([by_tensor], Path(folder), **binding)
                    row[column] = judge_parallel(answers[3], answer, stock)
        document["families"][family.name] = row
        print(family.name, row, flush=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    document["families"] |= ELSEWHERE
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    put_into_docs(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
