"""What bounds the two GEMMs of the Triton experts: ncu's counters of the kernels that the table picks, cell by cell.

    python benchmarks/gpu_checks/moe_counters.py --output FILE      the cells below; needs ncu and the right to counters
    python benchmarks/gpu_checks/moe_counters.py --cells DiffusionGemma:64

Each kernel is measured alone, with the L2 cache emptied before it, at the clocks the GPU has. Exit status 0 when every
cell's two kernels were counted.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.moe_common import SHAPES, prepare_triton, random_experts
from vllm_ext.benchmarks.registry import describe_run, write_json
from vllm_ext.benchmarks.tune_moe import Layer

from vllm_ext.ops.moe.triton import choice

CELLS = (
    "DiffusionGemma:64", "DiffusionGemma:256", "Qwen3-30B-A3B:64",
    "Qwen3.5-35B-A3B:64", "Qwen3.5-35B-A3B:256", "Qwen3.5-35B-A3B:1024",
)  # fmt: skip
_ACTIVE, _ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "wait",
)  # fmt: skip
# A name of ours for each of ncu's.
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram bytes read": "dram__bytes_read.sum",
    "dram bytes written": "dram__bytes_write.sum",
    "dram %": f"dram__throughput.{_ELAPSED}",
    "L2 %": f"lts__throughput.{_ELAPSED}",
    "tensor pipe %": f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
    "integer pipe %": f"sm__inst_executed_pipe_alu.{_ACTIVE}",
    "fma pipe %": f"sm__pipe_fma_cycles_active.{_ACTIVE}",
    "load-store pipe %": f"sm__inst_executed_pipe_lsu.{_ACTIVE}",
    "shared memory %": f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{_ELAPSED}",
    "shared memory bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "issue slots %": f"smsp__issue_active.{_ACTIVE}",
    "instructions": "smsp__inst_executed.sum",
    "SM cycles active %": f"sm__cycles_active.{_ELAPSED}",
    "warps active %": f"sm__warps_active.{_ACTIVE}",
    "registers": "launch__registers_per_thread",
    "shared memory bytes": "launch__shared_mem_per_block_dynamic",
    "programs": "launch__grid_size",
    "threads": "launch__block_size",
} | {f"stall {name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in _STALLS}
_KERNELS = "regex:^(stream_kernel|wide_kernel|gate_up_kernel|down_kernel)$"


def run_cells(cells: list[str]) -> None:
    """Beneath ncu: each layer once to compile, then once while it counts."""
    device = torch.device("cuda", 0)
    made: dict[str, Any] = {}
    layers = []
    for cell in cells:
        name, tokens = cell.split(":")
        shape = SHAPES[name]
        if name not in made:
            made[name] = prepare_triton(*random_experts(shape, "float", device), {})
        layer = Layer(shape, made[name], int(tokens), 1)
        launch = choice.choose(made[name].meta, int(tokens), shape.top_k, shape.experts, False, device.index, True)
        layers.append(layer.whole(launch)[0])
    for layer_call in layers:
        layer_call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for layer_call in layers:
        layer_call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def known_metrics(ncu: str) -> list[str]:
    """Those of METRICS that this GPU's counters give: ncu refuses a list with one that it does not know."""
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in done.stdout.splitlines() if "__" in line}
    wanted = list(METRICS.values())
    return [name for name in wanted if not names or name.startswith("launch__") or name.partition(".")[0] in names]


def parse(text: str) -> list[dict[str, Any]]:
    """ncu's raw page as CSV, a kernel each: its name and what METRICS names."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = []
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        # The first row holds the units.
        if not row["ID"]:
            continue
        found: dict[str, Any] = {"kernel": row["Kernel Name"]}
        for ours, theirs in METRICS.items():
            try:
                found[ours] = float(row[theirs].replace(",", ""))
            except (KeyError, ValueError):
                found[ours] = None
        rows.append(found)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A line a kernel; stalls are warps waiting for that reason, of all that wait, largest first."""
    lines = []
    for row in rows:
        stalls = {name[6:]: row[name] or 0.0 for name in row if name.startswith("stall ")}
        whole = sum(stalls.values()) or 1.0
        most = sorted(stalls, key=lambda name: -stalls[name])[:4]
        shares = ", ".join(f"{name} {stalls[name] / whole:.0%}" for name in most)
        rates = ", ".join(
            f"{name} {row[f'{name} %']:.0f}%"
            for name in ("dram", "tensor pipe", "integer pipe", "shared memory", "issue slots", "warps active")
            if row[f"{name} %"] is not None
        )
        lines.append(
            f"{row['cell']} {row['gemm']}: {row['kernel']} {(row['nanoseconds'] or 0) / 1e3:.1f} us, {rates}; {shares}"
        )
    return "\n".join(lines)


def main() -> int:
    """Count, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="SHAPE:TOKENS")
    parser.add_argument("--ncu", default="ncu", help="the profiler's program")
    parser.add_argument("--seconds", type=float, default=240.0, help="it is ended after so many")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", action="store_true", help="only run the layers: what the profiler starts")
    args = parser.parse_args()
    if args.run:
        run_cells(args.cells)
        return 0
    if shutil.which(args.ncu) is None:
        print(
            f"moe_counters: {args.ncu} is not here, so nothing was counted: it is in the CUDA toolkit", file=sys.stderr
        )
        return 1
    command = [args.ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--kernel-name", _KERNELS, "--metrics", ",".join(known_metrics(args.ncu))]
    command += [sys.executable, __file__, "--run", "--cells", *args.cells]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.seconds)
        text, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        text, status = (late.stdout or b"").decode(), 124
    rows = parse(text)
    cells = [(cell, gemm) for cell in args.cells for gemm in ("gate and up", "down")]
    rows = [{"cell": cell, "gemm": gemm} | row for (cell, gemm), row in zip(cells, rows, strict=False)]
    print(table(rows))
    if args.output:
        write_json(args.output, {"check": "moe_counters", "run": describe_run(), "metrics": METRICS, "rows": rows})
    if len(rows) == len(cells) and status == 0:
        return 0
    print(f"moe_counters: {len(rows)} of {len(cells)} kernels counted, ncu ended with {status}:", file=sys.stderr)
    print("\n".join([line for line in text.splitlines() if line.startswith("==")][-8:]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
