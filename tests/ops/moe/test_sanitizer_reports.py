"""benchmarks/gpu_checks/_sanitizer_reports.py: which of racecheck's hazards machine code explains."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu_checks"))
import _sanitizer_reports

REPORT = """
========= Error: Potential RAW hazard detected at __shared__ 0xdad8 in block (1,0,0) :
=========     Write Thread (31,0,0) at stream_kernel+0x50 in stream_kernel.py:325
=========     Read Thread (128,0,0) at stream_kernel+0x20 in stream_kernel.py:325
=========     Current Value : 1
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
# Warp 4 reads the byte at 0xd6d4 + 4, which is 1024 bytes further in what racecheck reports.
CODE = """
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0020*/                   LDS.U8 R0, [R0+UR26+0xd6d4] ;
        /*0030*/                   STS [R77+0xd480], R10 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0050*/                   STS [UR7+0xd6d8], R0 ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0070*/                   LDS R17, [R85+0xd480] ;
""".splitlines()


def test_a_report_is_read() -> None:
    assert _sanitizer_reports.summary(REPORT) == 1
    assert _sanitizer_reports.hazards(REPORT) == [
        _sanitizer_reports.Hazard("RAW", 0xDAD8, "stream_kernel", first=0x50, second=0x20)
    ]


def test_a_run_that_was_cut_off_is_not_clean() -> None:
    assert _sanitizer_reports.summary("========= COMPUTE-SANITIZER\n") is None


def test_only_the_hand_over_is_explained() -> None:
    """Another byte, another instruction or another order of the two is a race like any other."""
    handed = _sanitizer_reports.hand_over(CODE)
    hazard = _sanitizer_reports.hazards(REPORT)[0]
    assert handed is not None
    assert handed.explains(hazard)
    others = ({"address": 0xD6D8}, {"address": 0xDADC}, {"first": 0x30}, {"second": 0x70}, {"kind": "WAR"})
    assert not any(handed.explains(replace(hazard, **change)) for change in others)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (1, "        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;"),
        (6, "        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;"),
        (7, "        /*0070*/                   LDS R17, [R85+0xd6d8] ;"),
    ],
    ids=["read without all warps", "written without all warps", "read elsewhere"],
)
def test_code_without_that_barrier_explains_nothing(line: int, instead: str) -> None:
    assert _sanitizer_reports.hand_over([*CODE[:line], instead, *CODE[line + 1 :]]) is None


def test_the_tool_is_told_of_every_kernel_that_a_layer_launches() -> None:
    """It skips kernels whose names it is not given, without a word: one renamed would come out clean."""
    pytest.importorskip("triton")
    import moe_sanitizer

    from vllm_ext.ops.moe.triton import align, combine, gemm, stream_kernel, wide_kernel

    launched = [align.align_kernel, align.count_kernel, align.offset_kernel, align.place_kernel]
    launched += [combine._combine_kernel, gemm.gate_up_kernel, gemm.down_kernel]
    launched += [stream_kernel.stream_kernel, wide_kernel.wide_kernel]
    assert {kernel.__name__ for kernel in launched} == set(moe_sanitizer.KERNELS)
