"""Mixed requests against a running engine with both of the plugin's flags: none lost, none changed by the others.

    python benchmarks/gpu_checks/serve_soak.py [--model hybrid|moe] [--requests 1000] [--longest 4096] [--out FILE]

`AsyncLLM`, vLLM's server without its HTTP front, or with --http `vllm serve` itself serves random weights: `hybrid` has
Gated DeltaNet and MoE layers, `moe` full attention and MoE; --full takes the layers of Qwen3-30B-A3B for the latter.
Every kind of request is answered alone. Then requests of 1 to `--longest` tokens come 64 at a time: greedy and seeded,
one and several samples, with stop tokens, streamed and not, some aborted after a few tokens. In the middle the engine
is shut down and started again. Each answer in the mix must be that alone, an aborted answer its beginning. With
--batch-invariant they must be equal token by token (vLLM has that mode on GPUs, and not for Gated DeltaNet); without
it, a greedy sequence may differ from a token on whose rival was within --near nats. FILE is written after each half.
The last line printed is JSON; exit status 0 when nothing is lost, changed or leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soak_requests import Request, ask, ask_alone, differs, draw_requests

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 64
CAPTURED = {"cudagraph_capture_sizes": [1, 4, 16, AT_ONCE]}


async def memory(engine: Any) -> dict[str, float]:
    """MiB in use: private memory of this process and its children, and what the worker holds on its device."""
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listing.splitlines()[1:])
    parents = {int(pid): int(parent) for pid, parent in rows}
    family = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    total = 0
    for pid in family:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return {"host": total / 1024, "device": sum(await engine.collective_rpc("device_mib"))}


def start_server(model: str, args: argparse.Namespace) -> Any:
    """A fresh `vllm serve` with both flags."""
    from soak_server import Server
    from vllm_ext.benchmarks.serve_engine import EXTENSION

    flags = ["--quantization", "w4a16-grouped", "--attention-backend", "ha_npu", "--no-enable-prefix-caching"]
    flags += ["--max-model-len", str(args.longest + 32), "--max-num-seqs", str(AT_ONCE)]
    flags += ["--worker-extension-cls", EXTENSION]
    flags += ["--enforce-eager"] if args.eager else ["--compilation-config", json.dumps(CAPTURED)]
    if args.whole_prompts:
        flags += ["--max-num-batched-tokens", str(4 * (args.longest + 32)), "--no-enable-chunked-prefill"]
    if args.kv_cache_mib:
        flags += ["--kv-cache-memory-bytes", str(args.kv_cache_mib << 20), "--gpu-memory-utilization", "0.05"]
    return Server(model, flags, Path(model).with_name("server.log"))


def start_engine(model: str, args: argparse.Namespace) -> Any:
    """A fresh engine with both flags."""
    if args.http:
        return start_server(model, args)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm_ext.benchmarks.serve_engine import DRAWN, EXTENSION

    config = json.loads((Path(model) / "config.json").read_text())
    options: dict[str, Any] = {
        "quantization": "w4a16-grouped",
        "attention_backend": "ha_npu",
        "load_format": DRAWN,
        "model_loader_extra_config": {"kind": MODELS[args.model].kind, "config": config, "seed": 0, "group": None},
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        "max_model_len": args.longest + 32,
        "max_num_seqs": AT_ONCE,
        "enable_prefix_caching": False,
        "enforce_eager": args.eager,
        "disable_log_stats": True,
    }
    if not args.eager:
        options["compilation_config"] = CAPTURED
    if args.whole_prompts:
        options |= {"max_num_batched_tokens": 4 * (args.longest + 32), "enable_chunked_prefill": False}
    if args.kv_cache_mib:
        options |= {"kv_cache_memory_bytes": args.kv_cache_mib << 20, "gpu_memory_utilization": 0.05}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options))


async def run_mixed(
    engine: Any, plan: list[tuple[str, Request, int | None]], samples: list[dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """All of `plan` with AT_ONCE in flight, in the order given; memory is sampled along the way."""
    free = asyncio.Semaphore(AT_ONCE)
    answers: dict[str, dict[str, Any]] = {}

    async def one(name: str, request: Request, abort_after: int | None) -> None:
        async with free:
            try:
                answers[name] = await ask(engine, request, name, abort_after)
            except Exception as error:
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
            if len(answers) % max(1, len(plan) // 8) == 0:
                samples.append(await memory(engine))
                print(f"{len(answers)} of {len(plan)} answered", flush=True)

    await asyncio.gather(*(one(*item) for item in plan))
    return answers


async def soak(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The whole check; see the module."""
    from vllm_ext.benchmarks.registry import describe_run

    kinds = draw_requests(max(1, args.requests // args.repeats), args.longest)
    draw = random.Random(1)
    plan = []
    for number in range(args.requests):
        request = kinds[number % len(kinds)]
        abort_after = draw.randint(1, 4) if draw.random() < 0.1 and request.max_tokens > 4 else None
        plan.append((f"mixed-{number}", request, abort_after))
    draw.shuffle(plan)
    middle = len(plan) // 2
    answers: dict[str, dict[str, Any]] = {}
    alone: dict[int, dict[str, Any]] = {}
    samples: list[list[dict[str, float]]] = []
    result: dict[str, Any] = {}
    run = describe_run()
    for half in (plan[:middle], plan[middle:]):
        begin = time.monotonic()
        engine = start_engine(model, args)
        print(f"engine ready after {time.monotonic() - begin:.0f} s", flush=True)
        if not alone:
            for kind in kinds:
                alone[kind.seed] = await ask_alone(engine, kind, f"alone-{kind.seed}")
            print(f"{len(kinds)} answered alone after {time.monotonic() - begin:.0f} s", flush=True)
        samples.append([])
        answers |= await run_mixed(engine, half, samples[-1])
        samples[-1].append(await memory(engine))
        engine.shutdown()
        del engine
        asked = [item for item in plan if item[0] in answers]
        result = {"model": args.model, "planned": len(plan), **judge(asked, answers, alone, samples, args)}
        print(json.dumps({key: value for key, value in result.items() if key != "memory, MiB"}), flush=True)
        result["run"] = run
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def judge(
    plan: list[tuple[str, Request, int | None]],
    answers: dict[str, dict[str, Any]],
    alone: dict[int, dict[str, Any]],
    samples: list[list[dict[str, float]]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Counts, and what is wrong; "ok" when nothing is."""
    lost = {
        name: answers.get(name, {}).get("error", "no answer")
        for name, _, _ in plan
        if "tokens" not in answers.get(name, {})
    }
    near = None if args.batch_invariant else args.near
    changed = {}
    for name, request, _ in plan:
        if name not in lost and (why := differs(alone[request.seed], answers[name], near, request.temperature > 0)):
            changed[name] = {"why": why, **asdict(request), "stop_tokens": len(request.stop_tokens)}
    # A half's first sample comes when its caches are warm.
    first, last = samples[-1][0], samples[-1][-1]
    growth = {key: last[key] - first[key] for key in first}
    leaked = {key: grown for key, grown in growth.items() if grown > args.leak_mib}
    return {
        "ok": not lost and not changed and not leaked,
        "requests": len(plan),
        "aborted": sum(abort is not None for _, _, abort in plan),
        "several samples": sum(request.samples > 1 for _, request, _ in plan),
        "streamed": sum(request.streamed for _, request, _ in plan),
        "ended by a stop token": sum("stop" in answer.get("ends", ()) for answer in answers.values()),
        "batch_invariant": args.batch_invariant,
        "over HTTP": args.http,
        "lost": lost,
        "changed": changed,
        "memory growth, MiB": growth,
        "memory, MiB": samples,
    }


@dataclass(frozen=True)
class Model:
    """A family of examples/tiny_models.py, config fields, and those that --full adds."""

    kind: str
    fields: dict[str, Any]
    full: dict[str, Any]


MODELS = {
    # Every token goes to every expert: where two experts nearly tie, rounding would move an answer by 0.7 nats.
    "hybrid": Model("qwen3-next", {"full_attention_interval": 2, "num_experts_per_tok": 8}, {"hidden_size": 512}),
    "moe": Model(
        "qwen3-moe",
        {},
        {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}


def write_config(args: argparse.Namespace, folder: Path) -> None:
    """The model's config.json; the weights are drawn in the engine, or written for a server."""
    from vllm_ext.benchmarks.serve_checkpoints import families

    model = MODELS[args.model]
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": args.longest + 32}
    fields = {**model.fields, **(model.full if args.full else {}), **sizes}
    config = {**families()[model.kind][0], **fields}
    if args.http:
        from tiny_models import write_tiny_model

        write_tiny_model(model.kind, folder, **fields)
        return
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module."""
    # Otherwise looking for a GPU leaves a driver that the engine's process, forked from this one, cannot use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="hybrid")
    parser.add_argument("--full", action="store_true", help="layers of a real model's size")
    parser.add_argument("--http", action="store_true", help="through `vllm serve` and its OpenAI API")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=4, help="times that each kind of request comes")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    parser.add_argument("--batch-invariant", action="store_true", help="VLLM_BATCH_INVARIANT=1")
    parser.add_argument(
        "--whole-prompts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="never cut a prompt: its state would pass from piece to piece in the cache's precision, so that bits "
        "depend on where it is cut; and vLLM's CPU worker dies of a cut prompt that is sampled with a seed",
    )
    parser.add_argument("--near", type=float, default=0.2, help="nats; see above")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--kv-cache-mib", type=int, default=4096 if on_gpu else 0)
    parser.add_argument("--leak-mib", type=float, default=256, help="growth of memory that counts as a leak")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if args.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    sys.path.insert(0, str(ROOT))
    from vllm_ext.plugin import register

    register()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(folder) / "cache"))
        write_config(args, Path(folder) / "model")
        result = asyncio.run(soak(str(Path(folder) / "model"), args))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
