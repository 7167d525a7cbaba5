"""Calls of the experts that are launched as ones before them: their bits, and what they save the host.

    python benchmarks/gpu_checks/moe_launches.py --output FILE             needs a GPU and Triton 3.6
    python benchmarks/gpu_checks/moe_launches.py --peers --output FILE     vLLM's BF16 experts and Marlin beside them

Each result is compared bit by bit with that of the usual launches: with other experts than those that were launched
first, on another stream, from a CUDA graph, free memory filled with NaN. Then, arms in turns: the host's time of a call
in a row of 20 whose GPU is not waited for, of one call after a sum over 64 MiB, which leaves nothing of a call in the
core's caches, and the GPU's time of a call in a graph of twelve. Exit status 1 where bits differ, or fewer than
half of the calls repeat (the first of a kind cannot).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from moe_checks import poison
from vllm_ext.benchmarks import moe, moe_peers
from vllm_ext.benchmarks.moe_common import SHAPES, prepare_triton, random_experts, routings
from vllm_ext.benchmarks.registry import describe_run, write_json

from vllm_ext.ops.moe import CallOptions, PreparedExperts
from vllm_ext.ops.moe.custom_op import call_experts, encode_call
from vllm_ext.ops.moe.triton import backend, direct_launch, replay

SHAPE = replace(SHAPES["Qwen3-30B-A3B"], group_w2=64)
# Both sides of each size at which other kernels serve or sort, and sizes between.
CHECKED = sorted(
    {*range(1, 10), 24, 48, 96, 200, 384, 683, 768, 1365, 1366, 1536, 3072, 4095, 4096}
    | {(16 << power) + more for power in range(8) for more in (-1, 0, 1)}
)
MAPPED, CAPTURED = (1, 65, 513, 2049), (1, 8, 64, 256, 2048)
TIMED, LAYERS, IN_A_ROW, TURNS = (64, 600, 2048), 12, 20, 12
Call = Callable[[int], object]  # of a layer


_SERVES = direct_launch.serves


def _never(tensor: torch.Tensor) -> bool:
    return False


def usual() -> Any:
    """Within it, every call is launched through Triton."""
    return mock.patch.object(direct_launch, "serves", _never)


def moved(experts: PreparedExperts) -> PreparedExperts:
    """The same experts elsewhere."""
    return PreparedExperts(experts.meta, {name: tensor.clone() for name, tensor in experts.tensors.items()})


def check(experts: PreparedExperts, sizes: Iterable[int], device: torch.device) -> dict[str, Any]:
    """How many calls were compared, how many of them repeated launches, and which gave other bits."""
    other, side = moved(experts), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    expert_map = torch.arange(SHAPE.experts, dtype=torch.int32, device=device).roll(5)
    found: dict[str, Any] = {"calls": 0, "repeated": 0, "different": []}

    def compare(name: str, tokens: int, got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.cuda.synchronize(device)
        found["calls"] += 1
        if not torch.equal(got, wanted):
            found["different"].append([tokens, name])

    with mock.patch.object(replay, "_replay", side_effect=replay._replay) as repeated:
        for tokens in sizes:
            x = torch.randn(tokens, SHAPE.hidden, dtype=torch.bfloat16, device=device)
            weights, ids = routings(SHAPE, tokens, 1, device)[0]
            call = (weights, ids, expert_map if tokens in MAPPED else None, CallOptions())
            with usual():
                wanted = backend.apply(x, experts, *call)
            for name, layer in (("first", experts), ("again", experts), ("elsewhere", other)):
                poison(device, 64)
                compare(name, tokens, backend.apply(x, layer, *call), wanted)
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.default_stream(device))
                got = backend.apply(x, other, *call)
            compare("another stream", tokens, got, wanted)
            if tokens in CAPTURED:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    got = backend.apply(x, experts, *call)
                for _ in range(2):
                    got.fill_(float("nan"))
                    graph.replay()
                compare("graph", tokens, got, wanted)
        found["repeated"] = repeated.call_count
    return found


def _spread(samples: list[float]) -> dict[str, float]:
    return {"least": min(samples), "median": statistics.median(samples), "most": max(samples)}


def _in_turns(calls: dict[str, Call], measure: Callable[[str], list[float]]) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            torch.cuda.synchronize()
            found[name] += measure(name)
    return {name: _spread(samples) for name, samples in found.items()}


def _microseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def time_calls(calls: dict[str, Call], scrub: torch.Tensor) -> dict[str, Any]:
    """Microseconds of a call by arm: the host's, warm and cold, twelve calls with a wait behind them, the GPU's."""

    def row(name: str) -> None:
        for number in range(IN_A_ROW):
            calls[name](number % LAYERS)

    def layers(name: str) -> None:
        for number in range(LAYERS):
            calls[name](number)

    def cold(name: str) -> list[float]:
        samples = []
        for number in range(4):
            scrub.sum()
            samples.append(_microseconds(functools.partial(calls[name], number)))
            torch.cuda.synchronize()
        return samples

    def awaited(name: str) -> None:
        layers(name)
        torch.cuda.synchronize()

    graphs = {}
    for name in calls:
        layers(name)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            layers(name)

    def replayed(name: str) -> list[float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graphs[name].replay()
        begin.record()
        graphs[name].replay()
        end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / LAYERS]

    return {
        "host": _in_turns(calls, lambda name: [_microseconds(lambda: row(name)) / IN_A_ROW]),
        "host, caches cold": _in_turns(calls, cold),
        "twelve layers and a wait, a call": _in_turns(
            calls, lambda name: [_microseconds(lambda: awaited(name)) / LAYERS]
        ),
        "GPU, of a graph of twelve": _in_turns(calls, replayed),
    }


def _any_layer(peer: moe_peers.Call, *call: torch.Tensor) -> Call:
    """A layer of 300 MB and more finds nothing of itself in L2: one stands for twelve."""
    return lambda number: peer(*call)


def _arms(
    encoded: list[tuple[list[torch.Tensor], str]],
    peers: dict[str, moe_peers.Call],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> dict[str, Call]:
    def ours(number: int) -> torch.Tensor:
        tensors, meta = encoded[number]
        return call_experts(x, topk_weights, topk_ids, None, tensors, meta)

    def as_before(number: int) -> torch.Tensor:
        # `usual` takes longer than what is timed here.
        direct_launch.serves = _never
        try:
            return ours(number)
        finally:
            direct_launch.serves = _SERVES

    arms: dict[str, Call] = {"through Triton": as_before, "repeated": ours}
    return arms | {name: _any_layer(peer, x, topk_weights, topk_ids) for name, peer in peers.items()}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="vLLM's BF16 experts and Marlin too")
    parser.add_argument("--tokens", nargs="*", type=int, default=TIMED, help="sizes that are timed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    experts = prepare_triton(*random_experts(SHAPE, "float", device), {})
    document: dict[str, Any] = {
        "check": "moe_launches",
        "run": describe_run(),
        "shape": SHAPE.name,
        "groups": [128, 64],
    }
    document["bits"] = check(experts, CHECKED, device)
    print(json.dumps(document["bits"]), flush=True)
    scrub = torch.ones(16 << 20)
    with moe._vllm_context() if args.peers else nullcontext():
        peers = {}
        for name, build, zero in (("BF16", moe_peers.bf16, "float"), ("Marlin", moe_peers.marlin, "int")):
            if args.peers:
                peers[name] = build(SHAPES[SHAPE.name], *random_experts(SHAPES[SHAPE.name], zero, device))
        encoded = [encode_call(one, CallOptions()) for one in (experts, *(moved(experts) for _ in range(LAYERS - 1)))]
        document["microseconds"] = {}
        for tokens in args.tokens:
            x = torch.randn(tokens, SHAPE.hidden, dtype=torch.bfloat16, device=device)
            arms = _arms(encoded, peers, x, *routings(SHAPE, tokens, 1, device)[0])
            document["microseconds"][str(tokens)] = time_calls(arms, scrub)
            print(tokens, json.dumps(document["microseconds"][str(tokens)]), flush=True)
            if args.output:
                write_json(args.output, document)
    bits = document["bits"]
    return int(bool(bits["different"]) or 2 * bits["repeated"] < bits["calls"])


if __name__ == "__main__":
    sys.exit(main())
