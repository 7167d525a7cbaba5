from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_ext.ha_npu.ascend_tiles import tile_places
from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ha_npu.chunk_plan import plan_chunk
from vllm_ext.ha_npu.header import emit_header
from vllm_ext.ha_npu.kernel_header import kernel_header, write_kernel_headers
from vllm_ext.ha_npu.paper import PAPER, all_checks, beyond, mapping_example, report
from vllm_ext.ha_npu.plan import _work, make_plan
from vllm_ext.ha_npu.strategies import STRATEGIES

CHIPS = ("310p1", "310p3", "310b1", "310b4", "910b4", "h200")


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("op", ["gdn", "kda", "gla"])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_plans_on_every_chip_within_its_buffers(chip: str, op: str, strategy: str) -> None:
    plan = make_plan(op, chip=chip, num_heads=16, num_tokens=1000, strategy=strategy)
    assert set(plan.peak_bytes) == {"ub", "l1", "l0a", "l0b", "l0c"}
    for buffer, peak in plan.peak_bytes.items():
        assert peak <= plan.chip.buffers[buffer].usable
    assert plan.peak_bytes["ub"] > 0
    assert plan.macs > 0
    assert 0 <= plan.mapping.idle_share < 1
    assert json.loads(plan.to_json())["traffic"]["gm_bytes"] == plan.traffic.gm_bytes
    assert (plan.traffic.path_gm_bytes > 0) == (chip in ("310b1", "310b4", "910b4") and any(
        step.unit in ("stage", "drain") and not (step.unit == "drain" and plan.chip.l0c_to_ub)
        for kernel in plan.chunk.kernels
        for step in kernel.program.steps.values()
    ))  # fmt: skip


@pytest.mark.parametrize("heads", [1, 48])
@pytest.mark.parametrize("tokens", [1, 63, 65, 65536])
@pytest.mark.parametrize("chip", ["310p1", "310b4"])
def test_extremes(heads: int, tokens: int, chip: str) -> None:
    plan = make_plan("gdn", chip=chip, num_heads=heads, num_tokens=tokens)
    assert plan.num_tokens == tokens
    assert plan.macs == heads * -(-tokens // 64) * 1320 * 4096
    assert plan.mapping.makespan <= plan.mapping.head_only_makespan


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_64k_tokens_are_planned_in_under_a_second(op: str) -> None:
    plan_chunk.cache_clear()
    _work.cache_clear()
    start = time.process_time()
    plan = make_plan(op, chip="310p1", num_heads=32, num_tokens=65536)
    assert time.process_time() - start < 1
    assert plan.layout_plan is not None
    assert len(plan.layout_plan.state) == 1025


def test_the_planner_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_ext.ha_npu; sys.exit(len({'torch', 'vllm', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


GOOD = {"chip": "310p1", "num_heads": 16, "num_tokens": 4096}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"num_tokens": -64}, "num_tokens must be at least 1"),
        ({"num_tokens": 64.0}, "num_tokens must be a whole number"),
        ({"num_tokens": True}, "num_tokens must be a whole number, got True"),
        ({"num_tokens": "64"}, "num_tokens must be a whole number"),
        ({"num_tokens": None}, "num_tokens must be a whole number"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"num_heads": False}, "num_heads must be a whole number"),
        ({"head_dim": 100}, "head_dim must be a multiple of 16, got 100"),
        ({"head_dim": 8}, "head_dim must be at least 16"),
        ({"head_dim": 512}, r"head_dim 512 .* needs 1048576 bytes of UB for s alone, 310p1 has 253952 usable"),
        ({"head_dim": 256}, r"head_dim 256 .* needs \d+ bytes of UB .* 253952 usable; take a smaller"),
        ({"chunk_size": 40}, "chunk_size must be a multiple of 16"),
        ({"chunk_size": 1024}, r"chunk_size 1024 needs \d+ bytes"),
        ({"chip": "310p9"}, "unknown chip '310p9'; known: 310b1"),
        ({"strategy": "magic"}, "unknown strategy 'magic'; known: ha-npu"),
        ({"strategy": ["ha-npu"]}, "unknown strategy"),
        ({"seq_lens": [4000, 97]}, "seq_lens sum to 4097, num_tokens is 4096"),
        ({"seq_lens": [4097, -1]}, "seq_lens must be at least 0"),
        ({"seq_lens": []}, "seq_lens sum to 0"),
        ({"seq_lens": 4096}, "seq_lens must be a sequence of whole numbers, got 4096"),
        ({"seq_lens": "4096"}, "seq_lens must be a sequence of whole numbers, got '4096'"),
        ({"seq_lens": b"4096"}, "seq_lens must be a sequence"),
        ({"num_tokens": 2**63}, r"num_tokens must be at most 16777216, got 9223372036854775808; plan"),
        ({"num_heads": 10**30}, "num_heads must be at most 65536, got 10+; plan"),
        ({"num_heads": 65536, "seq_lens": [1000] * 4 + [96]}, "number of sequences must be at most 262144, got 327680"),
    ],
)
def test_bad_values_say_the_rule_and_the_number(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan("gdn", **{**GOOD, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["mamba", "", None, ["gdn"]])
def test_an_unknown_operator_is_refused(op: object) -> None:
    with pytest.raises(ValueError, match="unknown operator"):
        make_plan(op, **GOOD)  # type: ignore[arg-type]


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        make_plan("gdn", **GOOD, heads=3)  # type: ignore[call-arg]


def test_numpy_integers_are_whole_numbers() -> None:
    plan = make_plan("gdn", chip="310p1", num_heads=np.int64(16), num_tokens=np.int32(4096))  # type: ignore[arg-type]
    assert plan.to_json() == make_plan("gdn", **GOOD).to_json()  # type: ignore[arg-type]


def test_cut_heads_show_what_their_parts_repeat() -> None:
    """Five heads in two parts repeat KK^T, QK^T and the inverse; beside O, the sixth keeps P, V' and its states."""
    plan = make_plan("gdn", **GOOD)  # type: ignore[arg-type]
    tail = plan.traffic.tail
    repeated = (128 + 128 + 40) * 4096
    assert tail.macs == 5 * 64 * repeated
    assert tail.device_bytes == 64 * (8 + 16 + 32) * 1024
    assert tail.gm_bytes == plan.mapping.tail_gm_bytes > 5 * 64 * (32 * 1024 + 512)
    assert plan.traffic.total_gm_bytes == plan.traffic.gm_bytes + tail.gm_bytes
    whole = make_plan("gdn", chip="310p1", num_heads=10, num_tokens=4096).traffic
    assert (whole.tail.gm_bytes, whole.tail.macs, whole.tail.device_bytes, whole.tail.l1_to_l0_bytes) == (0, 0, 0, 0)


def test_a_chip_that_takes_any_layout_has_no_blocked_tiles() -> None:
    """Products on a GPU used to be listed as blocked, though nothing there is."""
    plan = make_plan("gdn", **{**GOOD, "chip": "h200"})  # type: ignore[arg-type]
    assert set(plan.layouts.values()) == {"dense"}
    assert plan.traffic.transforms == 0
    assert "= 1" not in emit_header(plan).split("// Tiles in UB")[1].split("// tier")[0]


def test_the_json_carries_the_plan() -> None:
    plan = make_plan("kda", chip="310p1", num_heads=7, num_tokens=300, seq_lens=[170, 130])
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert plan.to_dict()["seq_lens"] == [170, 130]


def test_kda_reorders_where_the_operators_order_does_not_fit() -> None:
    """GDN fits as the operators come; KDA's five gate tiles do not, and the lifetime-aware order saves it."""
    gdn, kda = (make_plan(op, **GOOD) for op in ("gdn", "kda"))  # type: ignore[arg-type]
    assert gdn.chunk.kernels[0].order_kind == "operator"
    assert kda.chunk.kernels[0].order_kind == "lifetime"


def test_910b4_takes_a_single_staging_tile_where_two_do_not_fit() -> None:
    kda = make_plan("kda", **{**GOOD, "chip": "910b4"})  # type: ignore[arg-type]
    assert kda.chunk.kernels[0].program.static["staging"] == 16 * 1024
    assert kda.peak_bytes["ub"] <= 192 * 1024


def test_the_comparison_with_the_paper_holds() -> None:
    checks = all_checks()
    exact = [check for check in checks if check.exact]
    assert len(exact) == 10
    assert all(check.agrees for check in exact)
    assert all(check.note for check in checks if not check.agrees), "a deviation needs its reason"
    assert {check.paper for check in checks} == set(PAPER.values())
    assert mapping_example().holds
    assert all(finding.holds for finding in beyond())
    text, good = report()
    assert good
    assert "FAILS" not in text


def test_nothing_in_the_planner_reads_the_papers_figures() -> None:
    folder = Path(__file__).parents[2] / "vllm_ext" / "ha_npu"
    for path in folder.glob("*.py"):
        text = path.read_text()
        if path.name not in ("paper.py", "cli.py"):
            assert "ha_npu.paper" not in text, path.name


@pytest.mark.parametrize("op", ["gdn", "kda", "gla"])
@pytest.mark.parametrize("strategy", ["ha-npu", "ha-npu-tuned"])
def test_the_header_compiles_and_carries_the_plan(op: str, strategy: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    plan = make_plan(op, chip="310p1", num_heads=16, num_tokens=4096, strategy=strategy)
    header = tmp_path / "plan.h"
    header.write_text(emit_header(plan))
    for place in plan.placements["fused"]:
        name = place.item.replace(":", "_").upper()
        assert f" {name}_OFFSET = {place.offset};" in header.read_text()
    assert f"NUM_PIECES = {len(plan.mapping.pieces)};" in header.read_text()
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "use.cpp"
    space = f"vllm_ext_plan_{op}"
    source.write_text(
        '#include "plan.h"\n'
        f"using namespace {space};\n"
        f"static_assert(UB_PEAK_BYTES == {plan.peak_bytes['ub']});\n"
        f"static_assert(UB_S_OFFSET % 32 == 0 && UB_S_OFFSET + UB_S_BYTES <= UB_PEAK_BYTES);\n"
        f"static_assert(NUM_STEPS == {len(plan.order)});\n"
        "static_assert(PIECES[0].core == 0 && PIECES[NUM_PIECES - 1].core == NUM_CORES - 1);\n"
    )
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Werror", "-fsyntax-only", str(source)], check=True)


def test_a_header_is_for_one_kernel() -> None:
    with pytest.raises(ValueError, match="strategy of one kernel, 'fla' has 6"):
        emit_header(make_plan("gdn", **GOOD, strategy="fla"))  # type: ignore[arg-type]


KERNEL = {**GOOD, "strategy": "ha-npu-kernel"}


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize("chip", ["310p1", "310b1"])
def test_tiles_of_the_kernels_share_no_byte_at_any_step(op: str, key_dim: int, value_dim: int, chip: str) -> None:
    """A 310B's L0C holds half of what a 310P's does: tiles share it there, but never at the same step."""
    places, peaks = tile_places(op, key_dim, value_dim, load_chip(chip))
    for place in places.values():
        assert place.offset % load_chip(chip).buffers[place.buffer].alignment == 0
        assert place.offset + place.nbytes <= peaks[place.buffer] <= load_chip(chip).buffers[place.buffer].usable
    for a, b in itertools.combinations(places.values(), 2):
        together = a.buffer == b.buffer and a.start <= b.end and b.start <= a.end
        assert not together or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset, (a, b)


@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_the_kernels_header_is_that_of_their_plan(op: str, tmp_path: Path) -> None:
    """What the command prints is what builds include; a compiler reads the same bytes out of it as the plan holds."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    plan = make_plan(op, **KERNEL)  # type: ignore[arg-type]
    assert emit_header(plan) == kernel_header(op)
    assert [path.name for path in write_kernel_headers(tmp_path)] == ["gdn_prefill_plan.h", "kda_prefill_plan.h"]
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "use.cpp"
    checks = [f"b.{p.item.split(':')[1]}.offset == {p.offset}" for p in plan.placements["fused"]]
    checks += [f"b.{buffer}_bytes == {peak}" for buffer, peak in plan.peak_bytes.items()]
    source.write_text(
        f'#include "{op}_prefill_plan.h"\n'
        f"int main() {{ const auto b = vllm_ext_plan_{op}::BuffersFor(128, 128); return !({' && '.join(checks)}); }}\n"
    )
    program = str(tmp_path / "use")
    subprocess.run([compiler, "-std=c++17", "-D__CCE_AICORE__=200", "-Wall", str(source), "-o", program], check=True)
    subprocess.run([program], check=True)


def test_the_kernels_header_needs_the_standard_library_only(tmp_path: Path) -> None:
    """A wheel is built in an environment without numpy."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-S", "-m", "vllm_ext.ha_npu.kernel_header", str(tmp_path)]
    subprocess.run(command, check=True, cwd=root)
    assert (tmp_path / "gdn_prefill_plan.h").read_text() == kernel_header("gdn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "gla"}, "no kernel for 'gla'; there are gdn, kda"),
        ({"chip": "910b4"}, r"no kernel for 910b4 \(dav-2201\)"),
        ({"head_dim": 96}, "head_dim of 64 or 128, got 96"),
        ({"chunk_size": 32}, "chunk_size of 64, got 32"),
    ],
)
def test_a_plan_without_a_kernel_says_so(change: dict[str, object], message: str) -> None:
    arguments = {"op": "gdn", **KERNEL, **change}
    with pytest.raises(ValueError, match=message):
        make_plan(**arguments)  # type: ignore[arg-type]
