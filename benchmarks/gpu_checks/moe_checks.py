"""Checks of the Triton experts on a GPU: error against FP64, padding ids, bits from run to run and process to process.

python benchmarks/gpu_checks/moe_checks.py            every check; exit status 1 when one fails
python benchmarks/gpu_checks/moe_checks.py --small    a few small calls, for compute-sanitizer
python benchmarks/gpu_checks/moe_checks.py --once     without a second set of processes for comparing bits
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm_ext.benchmarks.moe_common import FAMILIES, SHAPES, Shape, random_experts, relative_error, routings

from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts
from vllm_ext.ops.moe.triton import backend as triton_backend
from vllm_ext.ops.moe.triton.choice import streamed, wide
from vllm_ext.ops.moe.triton.config import LaunchConfig
from vllm_ext.quantization import QuantizedWeight

# 16-bit inputs, weights and intermediates: two roundings of 2^-9 and one of the output land near 3e-3.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}

# The persistent kernels, asked for where a table would not.
STREAMED = {
    "few": LaunchConfig(streamed(8, 128, 4, 4), streamed(16, 256, 8, 2)),
    "some": LaunchConfig(streamed(32, 128, 4, 3), streamed(32, 128, 4, 2)),
    "some, more rows": LaunchConfig(streamed(32, 128, 4, 2), streamed(32, 256, 8, 2)),
    "shared": LaunchConfig(streamed(8, 64, 4, 4, split=True), streamed(8, 256, 8, 2, split=True)),
    "guessed": LaunchConfig(streamed(8, 128, 4, 4, guess=True), streamed(8, 256, 4, 2)),
    "guessed, more": LaunchConfig(streamed(16, 128, 4, 2, guess=True), streamed(32, 128, 4, 3)),
    "apart": LaunchConfig(streamed(8, 128, 4, 4, guess=True, apart=True), streamed(8, 256, 4, 2, apart=True)),
    "apart, more": LaunchConfig(streamed(16, 256, 4, 2, apart=True), streamed(32, 128, 4, 3, apart=True)),
    "wide, few": LaunchConfig(wide(16, 128, 4, 2), wide(16, 256, 8, 2)),
    "wide, some": LaunchConfig(wide(32, 128, 4, 2), wide(32, 256, 8, 2)),
    "wide, more": LaunchConfig(wide(64, 128, 4, 2), wide(64, 256, 8, 1)),
    "wide, many": LaunchConfig(wide(128, 128, 8, 1), wide(128, 256, 8, 1)),
}
ODD = Shape("odd sizes", 200, 88, 6, 3, 32, 8, "silu")
NARROW = Shape("narrow", 576, 192, 16, 2, 64, 64, "silu")
FEW = Shape("few experts", 1024, 3584, 8, 2, 128, 64, "silu")
UNTUNED = Shape("untuned", 640, 320, 24, 3, 128, 64, "silu")


@dataclass(frozen=True)
class Case:
    """One call to check."""

    shape: Shape
    tokens: int
    zero: str | None = "float"
    dtype: torch.dtype = torch.bfloat16
    activation: str | None = None
    bias: bool = False
    weight_on_input: bool = False
    batch_invariant: bool = False
    expert_map: bool = False
    padding: bool = False
    streamed: str | None = None


def cases(small: bool) -> list[Case]:
    """What is checked; `small` ends in seconds under compute-sanitizer."""
    tiny = Shape("tiny", 256, 128, 8, 2, 64, 32, "gelu_tanh")
    if small:
        whole = Shape("whole tiles", 256, 192, 8, 2, 128, 64, "silu")
        made = [Case(tiny, 3), Case(tiny, 70, padding=True), Case(ODD, 17, None, bias=True), Case(tiny, 600)]
        kinds = [(5, "few"), (5, "shared"), (9, "guessed"), (40, "some"), (40, "wide, some"), (200, "wide, more")]
        kinds.append((600, "wide, many"))
        return made + [Case(whole, m, streamed=kind) for m, kind in kinds]
    dg, qwen, qwen35 = (SHAPES[n] for n in ("DiffusionGemma", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"))
    made = [Case(dg, m) for m in (1, 8, 32, 64, 256, 1024, 4096)]
    made += [Case(qwen, m) for m in (1, 64, 1024)] + [Case(qwen35, m) for m in (1, 256, 4096)]
    made += [Case(dg, 64, zero) for zero in ("int", None)] + [Case(dg, m, dtype=torch.float16) for m in (8, 256, 4096)]
    made += [Case(tiny, 33, activation=a, bias=True) for a in ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")]
    made += [Case(ODD, m, zero, bias=True) for m in (5, 200) for zero in ("float", "int", None)]
    made += [Case(qwen, 64, weight_on_input=True), Case(qwen, 64, expert_map=True), Case(dg, 300, batch_invariant=True)]
    guessed = [(64, "guessed"), (256, "guessed, more"), (64, "apart")]
    kinds = [(64, "few"), (64, "shared"), (256, "some"), (256, "wide, some"), (600, "wide, more"), (1024, "wide, many")]
    made += [Case(dg, m, zero, streamed=kind) for m, kind in (*kinds, *guessed) for zero in ("int", None)]
    kinds = [(32, "few"), (32, "shared"), (300, "some"), (64, "wide, few"), (300, "wide, some"), (4096, "wide, many")]
    made += [Case(dg, m, dtype=torch.float16, streamed=kind) for m, kind in kinds]
    kinds = [(64, "few"), (64, "shared"), (256, "some"), (64, "wide, few"), (256, "wide, some"), (1024, "wide, more")]
    # Groups of 64 take another kernel in its place.
    kinds += [(256, "some, more rows")]
    made += [Case(qwen, m, expert_map=True, streamed=kind) for m, kind in (*kinds, *guessed)]
    made += [Case(replace(qwen, group_w2=64), m) for m in (64, 256, 1024)]
    # Past 2^31 elements; sums of rows shorter than 1024, between 513 and 1024 slots; two of the rule's configurations.
    made += [Case(dg, 131072), Case(NARROW, 400, batch_invariant=True), Case(tiny, 128, padding=True)]
    made += [Case(dg, 128, padding=True), Case(dg, 16, padding=True)]
    # Of no table: what the rule takes for few slots and many, whole and halved.
    made += [Case(UNTUNED, m) for m in (1, 9, 70, 300, 1100, 5000)] + [Case(UNTUNED, 70, dtype=torch.float16)]
    made += [Case(UNTUNED, 128, padding=True), Case(UNTUNED, 16, padding=True)]
    # A rank's 64 columns are one half of a wide tile's rows; groups of 40 take a factor for every weight.
    made += [Case(replace(UNTUNED, inter=64, group_w13=64), m) for m in (300, 5000)]
    made += [Case(replace(UNTUNED, inter=640, group_w13=40, group_w2=40), 300)]
    # 704 columns are five groups of 128 and a half.
    made += [Case(replace(dg, group_w2=128), m) for m in (64, 1024)]
    # Rows of families whose pairs no case above launches.
    kimi, qwen235, deepseek = (FAMILIES[n] for n in ("Kimi-Linear-48B-A3B", "Qwen3-235B-A22B", "DeepSeek-V2-Lite"))
    made += [Case(kimi, m) for m in (1, 8, 32, 64, 256, 1024, 4096)] + [Case(qwen235, 1024), Case(deepseek, 1)]
    # 14336 columns of one piece of work are added up by up to ten programs.
    made += [Case(FAMILIES["Mixtral-8x7B"], m) for m in (1, 8, 32, 64)]
    # The rule's for few experts and as many columns as it has programs share.
    made += [Case(FEW, m) for m in (1, 8, 32, 64)] + [Case(FEW, 32, dtype=torch.float16)]
    return made + [Case(FEW, m, padding=True) for m in (16, 128)]


class Built:
    """A case's tensors."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(7)
        shape = case.shape
        w13, w2 = random_experts(shape, case.zero, device)
        if case.dtype != torch.bfloat16:
            w13, w2 = (
                QuantizedWeight(
                    w.packed,
                    w.scale.to(case.dtype),
                    w.zero_point.to(case.dtype) if case.zero == "float" and w.zero_point is not None else w.zero_point,
                    w.group_size,
                    w.shape,
                )
                for w in (w13, w2)
            )
        self.case = case
        self.weights = (w13, w2)
        self.biases: dict[str, Any] = (
            {
                "w13_bias": torch.randn(shape.experts, 2 * shape.inter, device=device, dtype=case.dtype),
                "w2_bias": torch.randn(shape.experts, shape.hidden, device=device, dtype=case.dtype),
            }
            if case.bias
            else {}
        )
        self.x = (torch.randn(case.tokens, shape.hidden, device=device) + 0.2).to(case.dtype)
        self.topk_weights, self.ids = routings(shape, case.tokens, 1, device)[0]
        self.map = None
        if case.expert_map:
            # Every other global expert lives here; ids reach past the map's end as well.
            self.map = torch.full((2 * shape.experts,), -1, dtype=torch.int32, device=device)
            self.map[::2] = torch.arange(shape.experts, dtype=torch.int32, device=device)
            self.ids = self.ids * 3
        if case.padding:
            self.ids[1::2] = -1
            self.ids[0, -1] = shape.experts + 5

    def experts(self, backend: str) -> PreparedExperts:
        """Prepared for a backend."""
        return prepare_experts(*self.weights, **self.biases, backend=backend, dtype=self.case.dtype)

    def call(self, experts: PreparedExperts, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """The layer on some of the rows."""
        activation = self.case.activation or self.case.shape.activation
        if self.case.streamed and experts.backend == triton_backend.NAME:
            launch, options = STREAMED[self.case.streamed], CallOptions(activation)
            if triton_backend.served(launch, experts, self.x[rows], options) != launch:
                raise RuntimeError(f"moe_checks: {self.case} is not served by the streaming kernels")
            return triton_backend.run(
                launch, self.x[rows], experts, self.topk_weights[rows], self.ids[rows], self.map, options
            )
        return fused_moe_w4a16(
            self.x[rows],
            experts,
            self.topk_weights[rows],
            self.ids[rows],
            activation=activation,
            expert_map=self.map,
            batch_invariant=self.case.batch_invariant,
            apply_router_weight_on_input=self.case.weight_on_input,
        )


def poison(device: torch.device, megabytes: int = 1024) -> None:
    """Leave NaN in the allocator's free memory, where outputs and intermediates will be placed."""
    blocks = [torch.full((1 << 19,), float("nan"), device=device) for _ in range(megabytes // 2)]
    del blocks
    whole = torch.full((megabytes << 18,), float("nan"), device=device)
    del whole


def check(case: Case, device: torch.device) -> tuple[bool, str]:
    """(passed, what was seen) of one case."""
    built = Built(case, device)
    ids, weights = built.ids.clone(), built.topk_weights.clone()
    experts = built.experts("triton")
    reference = built.experts("reference")
    poison(device)
    out = built.call(experts)
    # From the first to the last: offsets that wrap are wrong in the last rows alone.
    rows = torch.linspace(0, case.tokens - 1, min(case.tokens, 128), device=device).round().long()
    error = relative_error(out[rows], built.call(reference, rows))
    poison(device)
    # Several times: a race shows now and then.
    same = all(torch.equal(out, built.call(experts)) for _ in range(5))
    untouched = torch.equal(ids, built.ids) and torch.equal(weights, built.topk_weights)
    passed = error <= TOLERANCE[case.dtype] and same and untouched
    seen = f"error {error:.2e}, rerun {'equal' if same else 'DIFFERS'}, ids {'kept' if untouched else 'WRITTEN'}"
    if case.padding:
        zero = bool((out[1::2] == 0).all())
        kept = slice(0, None, 2)
        alone = fused_moe_w4a16(
            built.x[kept], experts, built.topk_weights[kept], built.ids[kept], activation=case.shape.activation
        )
        equal = torch.equal(alone, out[kept])
        passed = passed and zero and equal
        seen += (
            f", padded rows {'zero' if zero else 'NOT ZERO'}, the others {'equal' if equal else 'DIFFER'} without them"
        )
    if case.batch_invariant:
        alone = torch.cat([built.call(experts, slice(i, i + 1)) for i in (0, 1, 77, case.tokens - 1)])
        equal = torch.equal(alone, out[[0, 1, 77, case.tokens - 1]])
        passed, seen = passed and equal, seen + f", rows alone {'equal' if equal else 'DIFFER'}"
    return passed, seen


def digest(case: Case, device: torch.device) -> str:
    """SHA-256 of a case's output."""
    built = Built(case, device)
    out = built.call(built.experts("triton"))
    return hashlib.sha256(out.view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]


def run_case(case: Case) -> tuple[bool, str, str]:
    """(passed, what was seen, digest) of one case, in a worker."""
    device = torch.device("cuda", 0)
    try:
        return *check(case, device), digest(case, device)
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error)[:300]}", "none"


def main() -> int:
    """Run the checks asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to check, from 0")
    parser.add_argument("--once", action="store_true", help="without the second set of processes")
    parser.add_argument("--workers", type=int, default=10, help="cases checked at once, each in its own process")
    args = parser.parse_args()
    wanted = cases(args.small)
    wanted = [wanted[i] for i in args.only] if args.only else wanted
    failures = 0
    digests = []
    for case, (passed, seen, found) in zip(wanted, _results(wanted, args), strict=True):
        print("ok  " if passed else "FAIL", case, seen, flush=True)
        failures += not passed
        digests.append(found)
    if not (args.small or args.once):
        # A second set of processes must give the same bits.
        for case, first, (_, _, second) in zip(wanted, digests, _results(wanted, args), strict=True):
            if first != second:
                failures += 1
                print("FAIL", case, "other process DIFFERS", flush=True)
        print("compared with other processes")
    print(f"{failures} failures in {len(wanted)} cases")
    return 1 if failures else 0


def _results(wanted: list[Case], args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    """Results in order, each as soon as it is there."""
    if args.small:
        yield from map(run_case, wanted)
        return
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        yield from pool.imap(run_case, wanted, chunksize=1)


if __name__ == "__main__":
    sys.exit(main())
