"""GDN and KDA prefill in Triton on a GPU against FP64, at the sizes and in the ways the interpreter cannot show.

    python benchmarks/gpu_checks/linear_attention_checks.py [--fla] [--quick] [--workers 12] [--out FILE]

Each case is computed by the kernels and, in FP64, by the plain-torch backend; the relative errors of outputs and final
states must stay below what 16-bit operands leave. Equal calls must give equal bits a few hundred times, whatever the
memory they write to held before. --fla compares with fla-core's errors on the same inputs. --quick runs a few small
cases without a reference, for compute-sanitizer. The last line printed is JSON; exit status 0 when every case holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda  # noqa: E402
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state  # noqa: E402

FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
# Measured: 3.0e-3 to 3.7e-3 in BF16, 4.0e-4 to 5.5e-4 in FP16, whatever the size.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
REPEATING_TOLERANCE = 2e-2
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """heads (key, value), dims (K, V); lengths of packed sequences, or of the batch's equal ones when not packed.

    slow: a state outlives all of a sequence, which the planner cuts into segments; apart: operands begin between two
    steps of 16 bytes.
    """

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    packed: bool = True
    normalise: bool = True
    state: torch.dtype | None = torch.float32
    state_v_first: bool = True
    scale: float | None = None
    gate_divisor: float | None = None
    period: int | None = None
    slow: bool = False
    apart: bool = False
    ops: tuple[str, ...] = ("gdn", "kda")
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("one sequence", (300,)),
    Case("ragged end", (130,)),
    Case("short prompts", (1, 2, 15, 31, 33, 63)),
    Case("empty sequences", (0, 64, 0, 66, 0)),
    Case("many short sequences", (5,) * 150),
    Case("mixed batch", (1, 1, 1, 700, 129)),
    Case("long", (8192,), heads=(1, 4)),
    Case("unequal", (3584, 512), heads=(1, 4)),
    Case("batch, K first", (200, 200, 200), packed=False, normalise=False, state_v_first=False),
    Case("no state", (200,), state=None),
    Case("BF16 state", (200,), state=torch.bfloat16),
    Case("FP16 state, K first", (200,), dtype=torch.float16, state=torch.float16, state_v_first=False),
    Case("FP16", (500, 77), dtype=torch.float16),
    Case("head size 64", (300, 40), dims=(64, 64)),
    Case("head size 256", (300, 40), dims=(256, 256)),
    Case("K 64, V 128", (300,), dims=(64, 128)),
    Case("K 96, V 192", (300, 1, 64, 40), heads=(3, 3), dims=(96, 192)),
    Case("K 96, V 192, long, K first", (8192,), heads=(1, 3), dims=(96, 192), state_v_first=False),
    Case("K 24, V 40", (300, 40), dims=(24, 40)),
    Case("K 128, V 64", (300,), dims=(128, 64)),
    Case("heads 1/1", (200,), heads=(1, 1)),
    Case("heads 16/32", (200,), heads=(16, 32)),
    Case("heads 16/64", (200,), heads=(16, 64)),
    Case("heads 4/16", (200,), heads=(4, 16)),
    # Programs of 128 columns with few value heads a key: GDN's scores are made by the recurrence.
    Case("filled, two heads a key", (70, 1, 0, 64) * 12, heads=(8, 16), normalise=False),
    Case("filled, one head a key", (130, 64) * 20, heads=(8, 8), normalise=False, state=torch.bfloat16),
    Case("between steps of 16 bytes", (200, 77), apart=True),
    # flash-linear-attention's parametrisations, in 16 bits: lengths, heads, scale, divisor of the log-sigmoid gates.
    Case("FLA 2x500 d 60", (500, 500), (4, 4), (60, 60), packed=False, scale=1.0, gate_divisor=1.0),
    Case("FLA 1x63", (63,), (1, 1), (64, 64), packed=False, scale=1.0, gate_divisor=1.0),
    Case("FLA 2x1000", (1000, 1000), (2, 8), packed=False, scale=1.0, gate_divisor=0.1),
    Case("FLA 3x1024", (1024,) * 3, (2, 2), packed=False, scale=0.1, gate_divisor=1.0),
    Case("FLA 4x1024", (1024,) * 4, (3, 3), packed=False, scale=1.0, gate_divisor=10.0),
    Case("FLA 4x2048", (2048,) * 4, (4, 4), (64, 64), packed=False, scale=0.1, gate_divisor=1.0),
    Case("FLA 2x1024 FP16", (1024,) * 2, (4, 8), dtype=torch.float16, packed=False, scale=1.0, gate_divisor=10.0),
)
# Prompts that repeat a few tokens, whose states decay slowly: keys are collinear, and an inverse's rows cancel.
REPEATS = tuple(Case(f"repeats {period}", (310, 64), period=period) for period in (1, 3, 7))
# All rows of its inverse are rounded alike: the worst that repeating is known to do to a state.
ONE_TOKEN = Case("one chunk of one token", (64,), heads=(4, 24), period=1)
# Transitions over 16 to 384 chunks of which something is left.
SLOW = (
    Case("slow, 8192 tokens", (8192,), heads=(2, 8), slow=True),
    Case("slow, 32768 tokens", (32768,), heads=(2, 8), slow=True),
    Case("slow, 32768 tokens of many heads", (32768,), heads=(8, 32), slow=True, ops=("gdn",)),
    Case("slow, 32768 tokens of many heads", (32768,), heads=(16, 16), slow=True, ops=("kda",)),
)
WITH_FLA = (CASES[0], CASES[5], Case("longer", (4096,)), *REPEATS, ONE_TOKEN, *SLOW[:2])
NO_WORSE = 1.05
DRAWN = 2048  # longer sequences repeat so many tokens, from another one on each time
QUICK = (
    "short prompts",
    "empty sequences",
    "batch, K first",
    "head size 64",
    "K 128, V 64",
    "filled, two heads a key",
    "filled, one head a key",
)


def operands(case: Case, op: str) -> dict[str, Any]:
    """Keyword arguments of the operator on the GPU."""
    batch, tokens = (1, sum(case.lengths)) if case.packed else (len(case.lengths), case.lengths[0])
    drawn = min(tokens, DRAWN) if case.slow else tokens
    x = sample_operands(
        op, batch, drawn, *case.heads, *case.dims, dtype=case.dtype, normalised=not case.normalise, device="cuda"
    )
    if case.slow:
        x = {name: torch.cat([y.roll(137 * n, 1) for n in range(tokens // drawn)], 1) for name, y in x.items()}
        x["g"], x["beta"] = 1e-5 * x["g"].clamp(min=-2.0), 0.01 * x["beta"]
    if case.gate_divisor is not None:
        generator = torch.Generator().manual_seed(1)
        g = torch.nn.functional.logsigmoid(torch.rand(x["g"].shape, generator=generator)) / case.gate_divisor
        x["g"] = g.cuda()
    if case.period is not None:
        x = {name: value[:, torch.arange(tokens, device="cuda") % case.period] for name, value in x.items()}
        x["g"] = 0.02 * x["g"].clamp(min=-2.0)
    if case.apart:
        x = {name: between_steps(y) for name, y in x.items()}
    state = None
    if case.state is not None:
        state = sample_state(len(case.lengths), case.heads[1], *case.dims).to(case.state).cuda()
        state = state.transpose(-1, -2).contiguous() if case.state_v_first else state
    bounds = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return {
        **x,
        "scale": case.scale,
        "initial_state": state,
        "output_final_state": True,
        "cu_seqlens": bounds if case.packed else None,
        "use_qk_l2norm_in_kernel": case.normalise,
        "state_v_first": case.state_v_first,
    }


def between_steps(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a contiguous view that begins one number after a step of 16 bytes."""
    return torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape)


def segment(case: Case, op: str) -> int | None:
    """Chunks in a segment of a packed case, as the planner cuts it."""
    from vllm_ext.ops.linear_attention.triton import backend
    from vllm_ext.ops.linear_attention.triton.chunks import Sizes

    sizes = Sizes(len(case.lengths), sum(case.lengths), True, *case.heads, *case.dims)
    device = torch.device("cuda", torch.cuda.current_device())
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return backend.map_call(op, sizes, cores, backend.hopper_launches(device, sizes)).segment_chunks


def wide(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in call.items()}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||; infinite when got is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = expected.double().norm()
    return float((got.double() - expected.double()).norm() / norm) if norm else float(got.double().norm())


def check_case(case: Case, op: str) -> Result:
    """One case in a worker."""
    result: Result = {"case": case.name, "op": op, "ok": False}
    try:
        call = operands(case, op)
        o, state = FUNCTIONS[op](**call, **case.options)
        expected = FUNCTIONS[op](**wide(call), backend="cpu")
        assert state is not None
        assert expected[1] is not None
        result["errors"] = [error(o, expected[0]), error(state, expected[1])]
        again = FUNCTIONS[op](**call, **case.options)
        assert again[1] is not None
        result["same_bits"] = torch.equal(o, again[0]) and torch.equal(state, again[1])
        tolerance = TOLERANCE[case.dtype] if case.period is None else REPEATING_TOLERANCE
        result["ok"] = max(result["errors"]) < tolerance and result["same_bits"]
        if case.slow:
            result["segment_chunks"] = segment(case, op)
            result["ok"] = result["ok"] and result["segment_chunks"] is not None
    except Exception:
        result["failed"] = traceback.format_exc()[-600:]
    return result


def check_fla(op: str) -> Result:
    """Our errors and fla-core's on the same inputs; its kernels run as they are first tried, whatever is fastest."""
    from triton.runtime.autotuner import Autotuner
    from vllm_ext.benchmarks.linear_attention_peers import fla_function

    candidates = Autotuner.prune_configs
    Autotuner.prune_configs = lambda *given: candidates(*given)[:1]
    result: Result = {"case": "no worse than FLA", "op": op, "errors": {}}
    for case in WITH_FLA:
        call = operands(case, op)
        expected = FUNCTIONS[op](**wide(call), backend="cpu")
        ours = FUNCTIONS[op](**call)
        theirs = fla_function(op)(**{**call, "cu_seqlens": call["cu_seqlens"].long()})
        errors = []
        for o, state in (ours, theirs):
            assert state is not None
            assert expected[1] is not None
            errors.append([error(o, expected[0]), error(state, expected[1])])
        result["errors"][case.name] = {"ours": errors[0], "FLA": errors[1]}
    pairs = [pair for x in result["errors"].values() for pair in zip(x["ours"], x["FLA"], strict=True)]
    result["ok"] = all(our <= NO_WORSE * their for our, their in pairs)
    return result


def check_equal_bits(op: str) -> Result:
    """Ragged sequences, single tokens between long ones, with and without states and segments, 200 calls each; whatever
    is allocated holds NaN first, so that reading what no program of the call wrote shows.
    """
    from vllm_ext.ops.linear_attention.problem import Call
    from vllm_ext.ops.linear_attention.triton import backend, plan

    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills what torch.empty allocates
    wrong: dict[str, int] = {}
    lengths = (1, 130, 1, 64, 3, 700, 1, 65, 0, 2, 310)
    for name, state, segment, block in (
        ("state", torch.float32, None, 64),
        ("no state", None, None, 64),
        ("128 columns", torch.float32, None, 128),
        ("segments", torch.float32, 2, 64),
    ):
        call = Call(**{**operands(Case(name, lengths, heads=(4, 8), state=state), op), "scale": 128**-0.5})
        mapping = plan.Mapping("", block, segment)
        first = backend.run(call, op, mapping)
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            for x, y in zip(backend.run(call, op, mapping), first, strict=True):
                assert x is not None
                assert y is not None
                different += torch.ne(x, y).any()  # NaN differs from itself
        wrong[name] = int(different)
    return {"case": "equal bits", "op": op, "wrong": wrong, "ok": not any(wrong.values())}


def check_segments(op: str, reference: bool = True) -> Result:
    """Segments of two chunks give what whole sequences give, on both kernels of the recurrence."""
    from vllm_ext.ops.linear_attention.problem import Call
    from vllm_ext.ops.linear_attention.triton import backend, plan

    call = operands(Case("segments", (700, 0, 1, 300)), op)
    given = Call(**{**call, "scale": 128**-0.5})
    expected = FUNCTIONS[op](**wide(call), backend="cpu") if reference else FUNCTIONS[op](**call)
    errors = []
    hopper = backend.hopper_launches
    try:
        for choice in (hopper, lambda *_: None):
            backend.hopper_launches = choice
            for block, segment in ((64, 2), (128, 3), (64, None)):
                got = backend.run(given, op, plan.Mapping(plan.SEGMENTS, block, segment))
                for x, y in zip(got, expected, strict=True):
                    assert x is not None
                    assert y is not None
                    errors.append(error(x, y))
    finally:
        backend.hopper_launches = hopper
    return {"case": "segments", "op": op, "errors": errors, "ok": max(errors) < TOLERANCE[torch.bfloat16]}


def check_parts(op: str, reference: bool = True) -> Result:
    """A call that is prepared in parts of a few chunks has the bits of one that is not, and is right; with 128 columns
    GDN's scores are made by the recurrence.
    """
    from vllm_ext.ops.linear_attention.problem import Call
    from vllm_ext.ops.linear_attention.triton import backend, plan

    call = operands(Case("parts", (700, 0, 1, 300, 64), normalise=False, state_v_first=False), op)
    given = Call(**{**call, "scale": 128**-0.5})
    expected = FUNCTIONS[op](**wide(call), backend="cpu") if reference else None
    most, errors, same = backend._MOST_BYTES, [], True
    for block in (64, 128):
        mapping = plan.Mapping("", block, None)
        whole = backend.run(given, op, mapping)
        expected = expected or whole
        try:
            backend._MOST_BYTES = 3 * 4 * backend.chunk_bytes(op, 128)
            parts = backend.run(given, op, mapping)
        finally:
            backend._MOST_BYTES = most
        for x, y, z in zip(parts, whole, expected, strict=True):
            assert x is not None
            assert y is not None
            assert z is not None
            errors.append(error(x, z))
            same = same and torch.equal(x, y)
    ok = same and max(errors) < TOLERANCE[torch.bfloat16]
    return {"case": "parts", "op": op, "errors": errors, "same_bits": same, "ok": ok}


def check_graph(op: str) -> Result:
    """A captured call gives the same bits, and follows offsets that change after the capture."""
    call = operands(Case("graph", (300, 212)), op)
    function = FUNCTIONS[op]
    function(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(**call)
    for bounds in ([0, 300, 512], [0, 17, 512], [0, 512, 512]):
        call["cu_seqlens"].copy_(torch.tensor(bounds, dtype=torch.int32))
        graph.replay()
        fresh = function(**call)
        pairs = zip(captured, fresh, strict=True)
        if not all(x is not None and y is not None and torch.equal(x, y) for x, y in pairs):
            return {"case": "graph", "op": op, "ok": False, "bounds": bounds}
    return {"case": "graph", "op": op, "ok": True}


def check_refused(op: str) -> Result:
    """FP32 operands are computed by the plain-torch backend on "auto" and refused by name on "triton"."""
    call = operands(Case("FP32", (100,)), op)
    narrow = {name: call[name].float() for name in ("q", "k", "v")}
    o, _ = FUNCTIONS[op](**{**call, **narrow})
    expected, _ = FUNCTIONS[op](**wide({**call, **narrow}), backend="cpu")
    try:
        FUNCTIONS[op](**{**call, **narrow}, backend="triton")
        message = ""
    except RuntimeError as refusal:
        message = str(refusal)
    return {"case": "FP32", "op": op, "ok": error(o, expected) < 1e-5 and "float32" in message}


def quick() -> list[Result]:
    """Small cases without a reference."""
    results = []
    for op in FUNCTIONS:
        for case in CASES:
            if case.name in QUICK:
                o, state = FUNCTIONS[op](**operands(case, op))
                assert state is not None
                finite = bool(torch.isfinite(o).all()) and bool(torch.isfinite(state).all())
                results.append({"case": case.name, "op": op, "ok": finite})
        results += [check_parts(op, reference=False), check_segments(op, reference=False)]
    return results


def _run(task: tuple[str, Any]) -> Result:
    kind, argument = task
    special = {"segments": check_segments, "graph": check_graph, "FP32": check_refused}
    special |= {"equal bits": check_equal_bits, "FLA": check_fla, "parts": check_parts}
    try:
        return check_case(*argument) if kind == "case" else special[kind](argument)
    except Exception:
        return {"case": kind, "op": str(argument), "ok": False, "failed": traceback.format_exc()[-600:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        results = quick()
    else:
        tasks: list[tuple[str, Any]] = [
            ("case", (case, op)) for case in (*CASES, *REPEATS, ONE_TOKEN, *SLOW) for op in case.ops
        ]
        tasks += [(kind, op) for kind in ("segments", "parts", "graph", "FP32", "equal bits") for op in FUNCTIONS]
        tasks += [("FLA", op) for op in FUNCTIONS if args.fla]
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            results = []
            for result in pool.imap_unordered(_run, tasks):
                results.append(result)
                print(json.dumps(result), flush=True)
    ok = all(result["ok"] for result in results)
    document = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "ok": ok, "results": results}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"ok": ok, "cases": len(results), "wrong": [r for r in results if not r["ok"]]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
