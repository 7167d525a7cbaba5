"""Random request mixes through real vLLM on a GPU, with and without `ha_npu`: GDN + MoE, and KDA + MoE + MLA.

    python benchmarks/gpu_checks/linear_attention_serving.py [--mixes 540] [--more 100] [--seconds 150]
        [--processes 8 4] [--devices 0 1] [--only "two ranks"] [--out F]

Each kind of model is served by several processes at once, each with a pair of engines (stock and ha_npu) without prefix
caching, one with it, and one with speculation where vLLM has it for the layer. `--more` mixes go to a pair with
torch.compile and CUDA graphs, and as many to a pair of two ranks where there are two devices, in processes of their
own. Mixes and comparison are those of `request_mixes`; a mix's number is its seed, and no two of a kind are the same.
What does not fit the time is not run, and the result says how many were.
The first process of a kind and the one with two ranks also check that the comparison notices a wrong kernel, and that
a sequence which the kernel refuses ends its own request only. Exit status 0 when everything agrees.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_processes
from vllm_ext.benchmarks.registry import describe_run

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("qwen3-next", "kimi-linear")
NUM_SPEC = 2
# Layer 0 sees equal inputs in both engines, and its state is held to two BF16 kernels' rounding; behind it the inputs
# differ by that. States further apart are judged against FP64 (`Judge`). One of another request is off by 1 or more.
TOLERANCE = {"states": (1e-2, 4e-2, 8e-2), "log_prob": 0.15}
COMMON: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,
    "skip_tokenizer_init": True,
    "async_scheduling": False,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 29,
    "worker_extension_cls": "vllm_ext.benchmarks.request_mix_worker.WorkerExtension",
}
BY_KIND: dict[str, dict[str, Any]] = {
    "qwen3-next": {"gdn_prefill_backend": "triton"},  # vLLM 0.23's first choice on this GPU is compiled at run time
    "kimi-linear": {"attention_config": {"backend": "TRITON_MLA"}},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix": {"enable_prefix_caching": True},
    "speculative": {
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": NUM_SPEC,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    },
    "graphs": {
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    },
    "two ranks": {"enable_prefix_caching": True, "tensor_parallel_size": 2},
}
# These need a minute before their first mix, so each has processes of its own.
BY_THEMSELVES = ("graphs", "two ranks")
# Every expert serves every token: where two experts tie, rounding would swap them and move a log-probability by 0.7.
SIZES: dict[str, dict[str, int]] = {
    "qwen3-next": {"num_experts": 4, "num_experts_per_tok": 4},
    "kimi-linear": {"num_experts": 4, "num_experts_per_token": 4},
}
UNSUPPORTED = {("kimi-linear", "speculative"): "vLLM 0.23's Kimi layer has no speculative decoding"}
# What a further configuration takes before its first mix is done.
STARTING_UP = 10
Pair = tuple[Any, Any]


def start_engine(model: str, left_behind: float, **options: Any) -> Any:
    """An engine that runs mixes."""
    from vllm import LLM
    from vllm_ext.benchmarks.request_mixes import MixEngine

    return MixEngine(LLM(model=model, **options), left_behind=left_behind)


def shares(kind: str, mixes: int, more: int, devices: int) -> dict[str, range]:
    """The mixes of each configuration of a kind, by their seeds."""
    common = [name for name in CONFIGURATIONS if name not in BY_THEMSELVES and (kind, name) not in UNSUPPORTED]
    found = {
        name: range(mixes * index // len(common), mixes * (index + 1) // len(common))
        for index, name in enumerate(common)
    }
    for index, name in enumerate(BY_THEMSELVES[: None if devices > 1 else 1]):
        found[name] = range(mixes + more * index, mixes + more * (index + 1))
    return found


@dataclass
class Child:
    """One process: some configurations of a kind one after another, each with its mixes and its part of the time.

    first: whether this process does the checks that one of a kind does. A file keeps up with what it has found.
    """

    kind: str
    model: str
    seeds: dict[str, range]
    first: bool
    seconds: float
    result: Path
    found: dict[str, Any] = field(
        default_factory=lambda: {"errors": {}, "checks": {}, "configurations": {}, "bad": [], "seconds": {}}
    )
    plain: Any = None
    judging: Any = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + self.seconds

    def run(self) -> None:
        """Everything; an error ends its configuration only."""
        self.found["asked"] = list(self.seeds)
        for index, (name, seeds) in enumerate(self.seeds.items()):
            try:
                self.configuration(name, seeds, len(self.seeds) - index)
            except Exception as error:
                traceback.print_exc()
                self.found["errors"][name] = f"{type(error).__name__}: {error}"[:600]
            self.write()
        self.found["finished"] = True
        self.note("end")

    def run_exactly(self, mix: Any) -> Any:
        """The mix through a plain ha_npu engine in this process, for the judge; started when it is first needed."""
        if self.judging is None:
            options = {**COMMON, **BY_KIND[self.kind], **CONFIGURATIONS["plain"]}
            self.judging = start_engine(self.model, -1.0, attention_backend="ha_npu", **options)
        return self.judging.run(mix)

    def note(self, event: str) -> None:
        """Say when something came about, so that an end by force shows how far things were."""
        self.found["seconds"][event] = round(time.monotonic() - self.began, 1)
        print(f"{event}: {self.found['seconds'][event]} s", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file by what is known now."""
        part = self.result.with_suffix(".part")
        part.write_text(json.dumps(self.found))
        part.replace(self.result)

    def configuration(self, name: str, seeds: range, left: int) -> None:
        """Start the pair, check refusals and wrong kernels, then run the mixes, or those for which there is time.

        left: configurations for which the time that is left must do.
        """
        from vllm_ext.benchmarks import request_mixes as rm
        from vllm_ext.benchmarks.request_mix_comparison import Comparison, Judge, Tolerance

        tolerance = Tolerance(**TOLERANCE)
        options = {**COMMON, **BY_KIND[self.kind], **CONFIGURATIONS[name]}
        logging.getLogger("vllm").setLevel(logging.DEBUG)
        stock = start_engine(self.model, 1.0, **options)
        self.note(f"{name}: stock started")
        ours = start_engine(self.model, -1.0, attention_backend="ha_npu", **options)
        self.note(f"{name}: ha_npu started")
        # Layers have said who serves them. At each step DEBUG would print tensors, which takes longer than the step.
        logging.getLogger("vllm").setLevel(logging.INFO)
        if name == "plain":
            self.plain, self.judging = stock, ours
        aligned = stock.cache_mode == "align"
        block = stock.mamba_block_size() if aligned else 128
        least = block if aligned else 16 if stock.num_spec else 8
        comparison, judge, seen = Comparison(), Judge(self.run_exactly), []

        def one_mix(seed: int) -> None:
            mix = rm.draw_mix(random.Random(seed).randint, block=block, num_spec=stock.num_spec, least_budget=least)
            known = self.plain.run(mix) if stock.num_spec else None
            one, other = stock.run(mix, known=known), ours.run(mix, known=known)
            apart = comparison.disagreements(one, other, tolerance)
            why = judge.failures(mix, one, other, apart, tolerance) if apart else []
            comparison.failures += why
            seen.append((mix, other))
            if why and len(self.found["bad"]) < 5:
                self.found["bad"].append({"seed": seed, "configuration": name, **mix.describe(), "why": why[:3]})
            self.found["configurations"][name] = {
                "mixes": len(seen),
                "failures": comparison.failures[:20],
                "judged": judge.verdicts,
                "state_errors": comparison.state_errors,
                "log_prob_gaps": comparison.log_prob_gaps,
                "tokens": comparison.tokens,
                "diverged": comparison.diverged,
                "situations": rm.situations(seen, stock.num_spec),
            }

        one_mix(seeds[0])
        self.note(f"{name}: first mix")
        if name in ("plain", "prefix", "two ranks") and self.first:
            self.found["checks"][name] = final_checks((stock, ours), tolerance, Judge(self.run_exactly))
            self.note(f"{name}: checks")
        now = time.monotonic()
        until = now + (self.deadline - now - STARTING_UP * (left - 1)) / left
        for count, seed in enumerate(seeds[1:]):
            if time.monotonic() > until:
                break
            one_mix(seed)
            if count % 10 == 0:
                self.write()


def final_checks(pair: Pair, tolerance: Any, judge: Any) -> dict[str, Any]:
    """Whether wrong kernels are noticed, and what is wrong with how a refusal ends."""
    from vllm_ext.benchmarks import request_mix_faults as faults

    stock, ours = pair
    checks: dict[str, Any] = {}
    try:
        checks["refusal"] = faults.check_refusal(ours, tolerance)
        checks["noticed"] = faults.wrong_kernels_noticed(stock, ours, tolerance, judge)
    except Exception as error:
        traceback.print_exc()
        checks["error"] = f"{type(error).__name__}: {error}"[:600]
    return checks


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes' findings as one, by configuration."""
    from vllm_ext.benchmarks.request_mix_comparison import Comparison, judged

    merged: dict[str, Any] = {}
    for name in CONFIGURATIONS:
        found = [part["configurations"][name] for part in parts if name in part.get("configurations", {})]
        if not found:
            continue
        comparison = Comparison(
            [errors for part in found for errors in part["state_errors"]],
            [gap for part in found for gap in part["log_prob_gaps"]],
            sum(part["tokens"] for part in found),
            sum(part["diverged"] for part in found),
            [failure for part in found for failure in part["failures"]],
        )
        situations = {key: sum(part["situations"][key] for part in found) for key in found[0]["situations"]}
        merged[name] = {
            "mixes": sum(part["mixes"] for part in found),
            "situations": situations,
            **comparison.summary(),
            "judged": judged([verdict for part in found for verdict in part["judged"]]),
        }
    return merged


def judge(parts: list[dict[str, Any]], merged: dict[str, Any]) -> bool:
    """Whether something ran, everything agreed, wrong kernels were noticed and refusals ended as they should."""
    checks = [check for part in parts for check in part.get("checks", {}).values()]
    return (
        all("failed" not in part and not part["errors"] for part in parts)
        and {name for part in parts for name in part.get("asked", ())} == set(merged)
        and all(entry["mixes"] and not entry["failures"] for entry in merged.values())
        and bool(checks)
        and all(check.get("refusal") == [] for check in checks)
        and all("noticed" in check and all(check["noticed"].values()) for check in checks)
    )


def child(device: str | None, *job: Any) -> None:
    """One process's part (`Child`), on one or several of the machine's devices."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    process = Child(*job)
    process.note("begin")
    from vllm_ext.plugin import register

    register()
    process.run()


def launch(kinds: list[str], args: argparse.Namespace, folder: Path) -> list[tuple[str, str, Any]]:
    """Start every process of every kind: (kind, name, process)."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tiny_models import write_tiny_model

    # Workers of two ranks take functions by name, and start where CUDA may be in use.
    workers = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    server = engine_processes.context({"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "1", **workers})
    started: list[tuple[str, str, Any]] = []
    devices = args.devices or [None]
    for kind, processes in zip(kinds, args.processes * len(kinds), strict=False):
        model = str(write_tiny_model(kind, folder / kind, **SIZES[kind]))
        seeds = shares(kind, args.mixes, args.more, len(devices))
        seeds = {name: mixes for name, mixes in seeds.items() if name in args.only}
        alone = [{name: seeds.pop(name)} for name in BY_THEMSELVES if name in seeds]
        count = processes if seeds else 0
        parts = [{name: mixes[index::count] for name, mixes in seeds.items()} for index in range(count)]
        for index, part in enumerate([*alone, *parts]):
            name = f"{kind}-{index}"
            device = ",".join(devices) if "two ranks" in part else devices[len(started) % len(devices)]
            first = "two ranks" in part or index == len(alone)
            job = (device, kind, model, part, first, args.seconds, folder / f"{name}.json")
            patience = args.seconds - 10
            started.append((kind, name, engine_processes.start(server, child, job, folder / f"{name}.log", patience)))
    return started


def watch(started: list[tuple[str, str, Any]], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Wait for the processes, writing what they have found so far every few seconds; end those that take too long."""
    limit = time.monotonic() + args.seconds + 5
    while any(process.is_alive() for _, _, process in started) and time.monotonic() < limit:
        time.sleep(3)
        record(collect(started, folder), args.out)
    for _, _, process in started:
        engine_processes.join(process, 0)
    results = collect(started, folder)
    record(results, args.out)
    for _, name, _ in started:
        text = (folder / f"{name}.log").read_text(errors="replace")
        if "Traceback" in text:
            last = text.rindex("Traceback")
            print(f"{name}: its last traceback:\n{text[last : last + 6000][-1500:]}", file=sys.stderr, flush=True)
    return results


def collect(started: list[tuple[str, str, Any]], folder: Path) -> dict[str, Any]:
    """What the processes have found so far, by kind."""
    results: dict[str, Any] = {}
    for kind in dict.fromkeys(kind for kind, _, _ in started):
        parts, served = [], set()
        for name in (name for other, name, _ in started if other == kind):
            text = (folder / f"{name}.log").read_text(errors="replace")
            file = folder / f"{name}.json"
            parts.append(json.loads(file.read_text()) if file.exists() else {"failed": text[-1500:]})
            served |= {line.split("] ")[-1] for line in text.splitlines() if "prefill by vllm_ext" in line}
        merged = merge(parts)
        results[kind] = {
            "ok": judge(parts, merged),
            "mixes": sum(entry["mixes"] for entry in merged.values()),
            "configurations": merged,
            "served": sorted(served),
            "checks": [part.get("checks") for part in parts],
            "errors": [part.get("failed") or part.get("errors") for part in parts],
            "not_run": {name: why for (unsupported, name), why in UNSUPPORTED.items() if unsupported == kind},
            "finished": [part.get("finished", False) for part in parts],
            "seconds": [part.get("seconds") for part in parts],
            "bad": [entry for part in parts for entry in part.get("bad", [])][:5],
        }
    return results


def record(results: dict[str, Any], out: Path | None) -> None:
    """Write the results, with the machine's description, where they were asked for."""
    if out is not None:
        content = {"kinds": results, "tolerance": TOLERANCE, "machine": describe_run()}
        part = out.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(out)


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="one kind of model only; may be repeated")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--mixes", type=int, default=540, help="of each kind (default: %(default)s)")
    parser.add_argument("--more", type=int, default=100, help="with graphs, and over two ranks (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=150, help="for all of it (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[3], help="of each kind, or of all (default: 3)")
    parser.add_argument("--devices", nargs="+", help="CUDA devices the processes are placed on in turns")
    parser.add_argument("--out", type=Path, help="also write the result, with the machine's description, here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = launch(args.kind or list(KINDS), args, Path(folder))
        results = watch(started, args, Path(folder))
    print(json.dumps(results, indent=1))
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
