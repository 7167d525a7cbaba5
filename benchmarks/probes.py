"""`vllm-ext bench probes`: what this GPU reaches: a large matrix product, streaming reads and copies, and the ridge."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed


def arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def check(args: argparse.Namespace) -> None:
    """There is a GPU."""
    if not torch.cuda.is_available():
        raise CheckFailed("it measures a GPU, and torch sees no CUDA device")


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a kernel that reads one large tensor and keeps next to nothing."""
    from vllm_ext.benchmarks.moe_common import graph_milliseconds

    source = torch.randint(0, 100, (1 << 30,), dtype=torch.int32, device=device)
    return source.nbytes / (graph_milliseconds([lambda: torch.amax(source)]) / 1e3)


def measure(device: torch.device) -> dict[str, float]:
    """flops, read and copy in units per second; ridge in FLOP per byte of streaming reads or copies, the faster."""
    from vllm_ext.benchmarks.moe_common import matrix_rate, memory_bandwidth

    rates = {"flops": matrix_rate(device), "read": read_bandwidth(device), "copy": memory_bandwidth(device)}
    return {
        **rates,
        "bandwidth": max(rates["read"], rates["copy"]),
        "ridge": rates["flops"] / max(rates["read"], rates["copy"]),
    }


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row."""
    from vllm_ext.benchmarks.gpu_readings import readings

    return [{**measure(torch.device("cuda")), **readings()}]


def table(rows: list[dict[str, Any]]) -> str:
    """The row in words."""
    row = rows[0]
    return (
        f"BF16 matrix product  {row['flops'] / 1e12:8.1f} TFLOP/s\nstreaming read       {row['read'] / 1e9:8.1f} GB/s\n"
        f"copy, both counted   {row['copy'] / 1e9:8.1f} GB/s\nridge                {row['ridge']:8.1f} FLOP per byte"
    )


BENCHMARK = Benchmark(
    "probes", "large matrix product, streaming reads, and the ridge between them", arguments, check, run, table
)
