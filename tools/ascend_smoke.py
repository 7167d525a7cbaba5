"""Compare this machine's NPU with the host simulator, and print a table to send back.

    make ascend-check                       # compiles the kernels, then runs this
    python tools/ascend_smoke.py            # this alone; ascend_smoke.json holds the same

Every prefill kernel is given the same operands on the NPU and on the simulator: both should give the same bits but for
the rounding of exponentials, so the table says how far they are apart, and how far both are from FP64. Experts in 4
bits are compared with the FP64 reference. A row that fails says why and the next one runs. Without an NPU nothing is
compared, and this says so. Exit status 1 when a row failed.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULT = Path("ascend_smoke.json")
REPEATS = 10
# FP16 results of chunks of 64 summed in FP32: what the simulator shows against FP64 on these operands, with a margin.
PREFILL_TOLERANCE = 4e-3
EXPERTS_TOLERANCE = 6e-3
# (op, sequence lengths, key heads, value heads, head size): a ragged chunk; more heads than cores; a long tail.
PREFILLS = (
    ("gdn", (70,), 2, 2, 64),
    ("gdn", (64, 0, 130), 2, 4, 128),
    ("gdn", (1024,), 16, 32, 128),
    ("kda", (70,), 2, 2, 64),
    ("kda", (64, 0, 130), 4, 4, 128),
    ("kda", (512,), 16, 16, 128),
)
# (tokens, experts, slots, hidden, intermediate, groups)
EXPERTS = ((1, 8, 2, 512, 256, (128, 64)), (64, 16, 4, 1024, 352, (128, 64)))


@dataclass
class Row:
    """One line of the table. difference: from the simulator, relative to the largest value; error: from FP64."""

    case: str
    status: str
    difference: float | None = None
    equal_share: float | None = None
    error: float | None = None
    milliseconds: float | None = None
    reason: str = ""


def find_npu() -> tuple[Any, str]:
    """The NPU device, or None and why there is none."""
    try:
        import torch
        import torch_npu  # noqa: F401
    except Exception as error:  # CANN's own failures are not ImportError
        return None, f"torch_npu cannot be imported ({error})"
    if not torch.npu.is_available():
        return None, "torch_npu sees no NPU"
    return torch.device("npu", torch.npu.current_device()), ""


def describe(device: Any) -> dict[str, str]:
    """Who computed: chip and versions."""
    import torch
    import torch_npu

    from vllm_ext.ops.linear_attention.npu import extension

    return {
        "device": torch.npu.get_device_name(device),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "cann": str(getattr(torch_npu.version, "cann", "") or _cann_version()),
        "python": platform.python_version(),
        "kernels": extension.load() or ", ".join(extension.compiled_targets()),
    }


def _cann_version() -> str:
    try:
        from torch_npu.npu.utils import get_cann_version

        return str(get_cann_version())
    except Exception as error:
        return f"unknown ({error})"


def median_ms(run: Callable[[], Any]) -> float:
    """Median wall time of a call that waits for the NPU."""
    import torch

    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        torch.npu.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def prefill_row(case: tuple[Any, ...], device: Any) -> Row:
    """One prefill on the NPU, on the simulator of the same chip, and in FP64."""
    import torch

    from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
    from vllm_ext.ops.linear_attention.npu import extension
    from vllm_ext.ops.linear_attention.npu.launches import layout
    from vllm_ext.ops.linear_attention.npu.prefill import load_simulator
    from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

    op, lengths, heads, value_heads, size = case
    if reason := extension.load():
        raise RuntimeError(reason)
    chip, reason = extension.chip_of(device)
    if chip is None:
        raise RuntimeError(reason)
    load_simulator(chip)
    bounds = tuple(sum(lengths[:index]) for index in range(len(lengths) + 1))
    x = sample_operands(op, 1, bounds[-1], heads, value_heads, size, size, dtype=torch.float16, normalised=False)
    state = sample_state(len(lengths), value_heads, size, size)
    planned = layout(op, chip, bounds, value_heads, size, size)
    tensors = [x["q"], x["k"], x["v"], planned.pad(x["g"][0]), planned.pad(x["beta"][0]), state]
    options = {
        "scale": size**-0.5,
        "num_sequences": len(lengths),
        "chip": chip,
        "output_final_state": True,
        "state_v_first": False,
        "normalise": True,
        "state_dtype": torch.float32,
    }
    function = getattr(torch.ops.vllm_ext, f"ascend_{op}_prefill")
    on_npu = [tensor.contiguous().to(device) for tensor in tensors]

    def run() -> tuple[Any, Any]:
        return function(*on_npu, planned.tasks, planned.launches, **options)

    results = [tensor.cpu() for tensor in run()]
    simulated = function(*(t.contiguous() for t in tensors), planned.tasks, planned.launches, **options)
    exact = (chunk_gated_delta_rule if op == "gdn" else chunk_kda)(
        *(x[name].double() for name in ("q", "k", "v", "g", "beta")),
        initial_state=state.double(),
        output_final_state=True,
        cu_seqlens=torch.tensor(bounds),
        use_qk_l2norm_in_kernel=True,
        backend="reference",
    )
    difference = max(_apart(got, there) for got, there in zip(results, simulated, strict=True))
    error = max(_apart(got, truth) for got, truth in zip(results, exact, strict=True))
    equal = min(float((got == there).double().mean()) for got, there in zip(results, simulated, strict=True))
    good = error <= PREFILL_TOLERANCE and all(bool(t.isfinite().all()) for t in results)
    reason = "" if good else f"further than {PREFILL_TOLERANCE:g} from FP64, or not finite"
    return Row(_prefill_name(case), "ok" if good else "WRONG", difference, equal, error, median_ms(run), reason)


def _prefill_name(case: tuple[Any, ...]) -> str:
    op, lengths, heads, value_heads, size = case
    return f"{op} {'+'.join(map(str, lengths))} tokens, {heads}/{value_heads} heads of {size}"


def _apart(got: Any, other: Any) -> float:
    """The largest difference relative to the largest value."""
    scale = float(other.double().abs().max())
    return float((got.double() - other.double()).abs().max()) / max(scale, 1e-30)


def experts_row(case: tuple[Any, ...], device: Any) -> Row:
    """One layer of experts in 4 bits on the NPU and in FP64."""
    import torch

    from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
    from vllm_ext.quantization import quantize_weight

    tokens, experts, slots, hidden, intermediate, groups = case
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    w13 = quantize_weight((normal(experts, 2 * intermediate, hidden) / hidden**0.5).half(), groups[0])
    w2 = quantize_weight((normal(experts, hidden, intermediate) / intermediate**0.5).half(), groups[1])
    x = normal(tokens, hidden).half()
    weights = torch.softmax(normal(tokens, slots), -1)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :slots].int()
    reference = prepare_experts(w13, w2, backend="reference")
    exact = fused_moe_w4a16(x.double().float(), reference, weights, ids)
    prepared = prepare_experts(w13, w2, backend="npu", device=device)
    there = [tensor.to(device) for tensor in (x, weights, ids)]

    def run() -> Any:
        return fused_moe_w4a16(there[0], prepared, there[1], there[2])

    error = _apart(run().cpu(), exact)
    good = error <= EXPERTS_TOLERANCE
    reason = "" if good else f"further than {EXPERTS_TOLERANCE:g} from FP64"
    return Row(_experts_name(case), "ok" if good else "WRONG", None, None, error, median_ms(run), reason)


def _experts_name(case: tuple[Any, ...]) -> str:
    tokens, experts, slots, hidden, intermediate, _ = case
    return f"experts {tokens} tokens, {slots} of {experts}, {hidden} x {intermediate}"


def attempt(case: tuple[Any, ...], name: str, make: Callable[[tuple[Any, ...], Any], Row], device: Any) -> Row:
    """The row, or what it failed with."""
    try:
        return make(case, device)
    except Exception as error:
        return Row(name, "FAILED", reason=" ".join(f"{type(error).__name__}: {error}".split())[:300])


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| case | result | from simulator | equal bits | from FP64 | ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        numbers = [
            "" if row.difference is None else f"{row.difference:.1e}",
            "" if row.equal_share is None else f"{row.equal_share:.2%}",
            "" if row.error is None else f"{row.error:.1e}",
            "" if row.milliseconds is None else f"{row.milliseconds:.2f}",
        ]
        lines.append(f"| {row.case} | {row.status} | {' | '.join(numbers)} |")
    lines += [f"\n{row.case}: {row.reason}" for row in rows if row.reason]
    return "\n".join(lines)


def main() -> int:
    """Run every row; 0 when all are right or there is no NPU, 1 otherwise."""
    device, reason = find_npu()
    if device is None:
        print(f"ascend-smoke: {reason}: nothing was compared")
        return 0
    machine = describe(device)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    work = [(case, _prefill_name(case), prefill_row) for case in PREFILLS]
    work += [(case, _experts_name(case), experts_row) for case in EXPERTS]
    rows = []
    for number, (case, name, make) in enumerate(work, 1):
        print(f"[{number}/{len(work)}] {name}", flush=True)
        rows.append(attempt(case, name, make, device))
    print(f"\n{table(rows)}\n")
    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"The same is in {RESULT.resolve()}; please send it back (docs/ascend.md).")
    return 0 if all(row.status == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
