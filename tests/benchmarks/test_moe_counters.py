"""benchmarks/gpu_checks/moe_counters.py: what it reads from ncu's CSV."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu_checks"))
import moe_counters

CSV = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum"
"","","ns","byte"
"0","stream_kernel","72,608","146,375,680"
"1","down_kernel","51,000","n/a"
==PROF== Disconnected
"""


def test_units_are_no_kernel_and_a_missing_counter_is_none() -> None:
    rows = moe_counters.parse(CSV)
    assert [row["kernel"] for row in rows] == ["stream_kernel", "down_kernel"]
    assert rows[0]["nanoseconds"] == 72608
    assert rows[0]["dram bytes read"] == 146375680
    assert rows[1]["dram bytes read"] is None
    assert rows[1]["dram %"] is None


def test_the_table_takes_rows_with_missing_counters() -> None:
    rows = [{"cell": "DiffusionGemma:64", "gemm": "down"} | row for row in moe_counters.parse(CSV)]
    assert "stream_kernel 72.6 us" in moe_counters.table(rows)
