"""The Triton experts under compute-sanitizer: every pair of configurations that the tables hold, on layers so small
that racecheck, which makes kernels some hundred times slower, comes to its end.

    python benchmarks/gpu_checks/moe_sanitizer.py                              racecheck and memcheck of every layer
    python benchmarks/gpu_checks/moe_sanitizer.py --tools synccheck --only 0   one tool, one layer
    python benchmarks/gpu_checks/moe_sanitizer.py --list                       the layers

Each layer runs in a process of its own: right against FP64, bit-equal when called again, and nothing reported. The GPU
is taken to have one multiprocessor, so that a persistent program does several pieces of work and its ring goes round,
as at full size. For racecheck the streaming kernels are assembled so that it can follow them (`_every_reader.py`). Exit
status 0 when every run ended and reported nothing; a hazard of the hand-over of work by Triton's warp specialisation,
told apart by machine code (`_sanitizer_reports.py`), is counted by itself and does not fail.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _every_reader import compiled_so
from _sanitizer_reports import HandOver, hand_over, hazards, summary
from moe_checks import STREAMED, TOLERANCE, Built, Case, poison
from vllm_ext.benchmarks.moe_common import FAMILIES, SHAPES, Shape, relative_error

from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta
from vllm_ext.ops.moe.triton import backend, choice, config, stream
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
KERNELS = (
    "stream_kernel", "wide_kernel", "gate_up_kernel", "down_kernel",
    "align_kernel", "count_kernel", "offset_kernel", "place_kernel", "_combine_kernel",
)  # fmt: skip
_HIDDEN, _INTER, _EXPERTS, _TOP_K = 512, 256, 4, 2
_FIRST_PORT, _PORTS = 49152, 20


@dataclass(frozen=True)
class Layer:
    """A pair of configurations and what it runs on."""

    name: str
    launch: LaunchConfig
    group_w13: int = 128
    group_w2: int = 128
    activation: str = "silu"
    dtype: torch.dtype = torch.bfloat16


def layers() -> list[Layer]:
    """The tables' pairs, each once a group size, the rule's, and the persistent kernels that `moe_checks` asks for."""
    made: dict[tuple[Any, ...], Layer] = {}
    for path in sorted((Path(config.__file__).parent / "configs").glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))["shapes"]
        for shape, (key, rows) in itertools.product((SHAPES | FAMILIES).values(), table.items()):
            groups = _groups(shape, key)
            if groups is None:
                continue
            for slots, row in rows.items():
                launch = LaunchConfig.from_json(row)
                name = f"{shape.name}, groups of {groups[1]}, {slots} slots an expert"
                layer = Layer(name, launch, *groups, shape.activation)
                made.setdefault((launch, *groups), layer)
    many = ExpertsMeta("triton", 64, 2048, 1536, 128, 64, True, "float", torch.bfloat16)
    few = ExpertsMeta("triton", 8, 4096, 7168, 128, 64, True, "float", torch.bfloat16)
    for untuned, top_k, name in ((many, 8, "the rule"), (few, 2, "the rule, few experts")):
        for tokens in choice.RULE_TOKENS:
            launch = choice.persistent(untuned, tokens, top_k, untuned.num_experts)
            layer = Layer(f"{name}, {tokens * top_k / untuned.num_experts:g} slots an expert", launch, 128, 64)
            made.setdefault((launch, 128, 64), layer)
    for name, launch in STREAMED.items():
        made.setdefault((launch, 128, 64), Layer(name, launch, 128, 64))
        made[launch, "fp16"] = Layer(f"{name}, FP16", launch, dtype=torch.float16)
    return list(made.values())


def _groups(shape: Shape, key: str) -> tuple[int, int] | None:
    """The group sizes of a table's rows, which its key may name; none where they are another shape's."""
    name, _, groups = key.partition("_G")
    if name != f"H{shape.hidden}_I{shape.inter}_E{shape.experts}_K{shape.top_k}":
        return None
    w13, w2 = map(int, groups.split("_")) if groups else (shape.group_w13, shape.group_w2)
    return w13, w2


def routed(launch: LaunchConfig, device: torch.device) -> torch.Tensor:
    """ids [tokens, 2] with full blocks, blocks for a shorter product, one of three slots and an expert of few.

    Most second ids are -1.
    """
    most = max(launch.gate_up.block_tokens, launch.down.block_tokens)
    least = min(launch.gate_up.block_tokens, launch.down.block_tokens)
    counts = torch.tensor([most + most // 8 + 1, least, 3, 0])
    first = torch.repeat_interleave(torch.arange(_EXPERTS), counts)
    first = first[torch.randperm(len(first), generator=torch.Generator().manual_seed(3))]
    ids = torch.stack([first, torch.full_like(first, -1)], 1)
    ids[:5, 1] = _EXPERTS - 1
    return ids.to(torch.int32).to(device)


def _pieces(gemm: GemmConfig, sizes: stream.Sizes, counts: list[int]) -> dict[str, int]:
    """How much a persistent program does: pieces of work, tiles of all of them, tiles that its ring holds."""
    blocks = sum(-(-count // gemm.block_tokens) for count in counts)
    pieces = blocks * -(-sizes.rows // gemm.block_rows)
    each = -(-pieces // gemm.programs)
    tiles = sizes.columns // (4 * sizes.plane)
    return {"pieces": each, "tiles": each * tiles, "ring": stream.stages(gemm, sizes)}


def run_layer(layer: Layer, folder: Path) -> None:
    """Run one layer beneath the tool; leaves what was seen and the kernels' code in `folder`."""
    device = torch.device("cuda", 0)
    ids = routed(layer.launch, device)
    shape = Shape("small", _HIDDEN, _INTER, _EXPERTS, _TOP_K, layer.group_w13, layer.group_w2, layer.activation)
    built = Built(Case(shape, len(ids), dtype=layer.dtype), device)
    built.ids = ids
    experts, options = built.experts(backend.NAME), CallOptions(layer.activation)
    launch = backend.served(layer.launch, experts, built.x, options)
    if bool(launch.gate_up.programs) != bool(layer.launch.gate_up.programs):
        raise RuntimeError(f"moe_sanitizer: {layer.name}: the small layer is not served by the persistent kernels")
    expected = built.call(built.experts("reference"))
    poison(device, 64)
    with mock.patch.object(stream, "_multiprocessors", return_value=1):
        outs = [backend.run(launch, built.x, experts, built.topk_weights, ids, None, options).clone() for _ in range(2)]
    torch.cuda.synchronize()
    counts = torch.bincount(ids[ids >= 0], minlength=_EXPERTS).tolist()
    gemms = zip((launch.gate_up, launch.down), backend.sizes(experts), strict=True)
    work = [_pieces(gemm, sizes, counts) if gemm.programs else None for gemm, sizes in gemms]
    # What serves the call: a table's row is by shape alone, and groups of 64 have kernels of their own.
    seen: dict[str, Any] = {"served": launch.to_json()}
    seen |= {"error": relative_error(outs[0], expected), "equal": torch.equal(*outs), "work": work}
    for number, binary in enumerate(_binaries()):
        (folder / f"{number}.cubin").write_bytes(binary)
    (folder / "seen.json").write_text(json.dumps(seen), encoding="utf-8")


def _binaries() -> Iterator[bytes]:
    """The persistent kernels that this process has launched."""
    from vllm_ext.ops.moe.triton.stream_kernel import stream_kernel
    from vllm_ext.ops.moe.triton.wide_kernel import wide_kernel

    for kernel in (stream_kernel, wide_kernel):
        for cached in kernel.device_caches.values():
            yield from (compiled.asm["cubin"] for compiled in cached[0].values())


def _hand_overs(folder: Path) -> list[HandOver]:
    import triton

    found = []
    for path in sorted(folder.glob("*.cubin")):
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        handed = hand_over(text.splitlines())
        found += [handed] if handed else []
    return found


def run_under(tool: str, number: int, layer: Layer, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    """One layer under one tool, in a process of its own that is ended when it takes too long."""
    command = [args.sanitizer, "--tool", tool, "--show-backtrace", "no", "--print-limit", "2000"]
    command += ["--port", str(_FIRST_PORT + turn * _PORTS % 8000)]
    command += [word for name in KERNELS for word in ("--kernel-name", f"kernel_name={name}")]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += args.options.split()
    as_compiled = ["--as-compiled"] if args.as_compiled or tool != "racecheck" else []
    row: dict[str, Any] = {"tool": tool, "layer": layer.name, "launch": layer.launch.to_json()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        command += [sys.executable, __file__, "--run", str(number), "--folder", name, *as_compiled]
        with (folder / "log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status: int | None = process.wait(min(args.seconds, max(1.0, args.until - time.monotonic())))
            except subprocess.TimeoutExpired:
                status = None
            # Ended as a group: what it has started would go on using the GPU.
            if status is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = (folder / "log").read_text(encoding="utf-8", errors="replace")
        row |= {"seconds": round(time.monotonic() - start, 1), "exit": status, "reports": summary(text)}
        if (folder / "seen.json").exists():
            row |= json.loads((folder / "seen.json").read_text(encoding="utf-8"))
        found = hazards(text)
        handed = _hand_overs(folder) if found else []
        pairs = Counter((h.kind, h.kernel, h.first, h.second) for h in found)
        row["hazards"] = [[*pair, count] for pair, count in pairs.most_common()]
        row["explained"] = sum(any(one.explains(hazard) for one in handed) for hazard in found)
    right = row.get("equal") and row["error"] <= TOLERANCE[layer.dtype]
    row["clean"] = status == 0 and right and row["reports"] is not None and row["reports"] == row["explained"]
    if not row["clean"]:
        row["text"] = [line for line in text.splitlines() if line.strip()][-40:]
    return row


def main() -> int:
    """Run the layers asked for; 0 when all are clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["racecheck", "memcheck"])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the layers, from 0")
    parser.add_argument("--workers", type=int, default=min(10, os.cpu_count() or 1), help="layers run at once")
    parser.add_argument("--seconds", type=float, default=180.0, help="a run is ended after so many")
    parser.add_argument("--total-seconds", type=float, default=3600.0, help="all runs are ended after so many")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the tool's program")
    parser.add_argument("--options", default="", help="more options for the tool, in one word")
    parser.add_argument("--as-compiled", action="store_true", help="racecheck too: it reports each reader but one")
    parser.add_argument("--output", type=Path, help="a file for the rows, one JSON a line, each as it comes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    every = layers()
    if args.list:
        print("\n".join(f"{number:3} {layer.name}" for number, layer in enumerate(every)))
        return 0
    if args.run is not None:
        with contextlib.nullcontext() if args.as_compiled else compiled_so():
            run_layer(every[args.run], args.folder)
        return 0
    if shutil.which(args.sanitizer) is None:
        print(
            f"moe_sanitizer: {args.sanitizer} is not here, so nothing was shown: it is in the CUDA toolkit, or: "
            "pip install nvidia-cuda-sanitizer-api, and --sanitizer PATH",
            file=sys.stderr,
        )
        return 1
    wanted = [(tool, number) for tool in args.tools for number in args.only or range(len(every))]
    failures = 0
    args.until = time.monotonic() + args.total_seconds
    with ThreadPoolExecutor(args.workers) as pool:
        tasks = [pool.submit(run_under, tool, n, every[n], turn, args) for turn, (tool, n) in enumerate(wanted)]
        for task in as_completed(tasks):
            row = task.result()
            failures += not row["clean"]
            print(_line(row), flush=True)
            if args.output:
                with args.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{failures} failures in {len(wanted)} runs")
    return 1 if failures else 0


def _line(row: dict[str, Any]) -> str:
    reports = "did not end" if row["reports"] is None else f"{row['reports']} reports"
    if row["explained"]:
        reports += f" ({row['explained']} of them the hand-over of work)"
    seen = "no result"
    if "error" in row:
        seen = f"error {row['error']:.2e}, rerun {'equal' if row['equal'] else 'DIFFERS'}"
    verdict = "ok  " if row["clean"] else "FAIL"
    return f"{verdict} {row['tool']}: {row['layer']}: {reports}, {seen}, {row['seconds']} s"


if __name__ == "__main__":
    sys.exit(main())
