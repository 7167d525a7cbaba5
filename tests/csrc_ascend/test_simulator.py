"""The simulator against values worked out by hand, and every rule against a kernel that must be refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from vllm_ext.ops.linear_attention.ascend_sim import build
from vllm_ext.ops.linear_attention.ascend_sim.session import Session, SimulatorViolation


def run(
    library: Path,
    kernel: str,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor] = [],  # noqa: B006
    *,
    chip: str = "310p1",
    blocks: int = 1,
    cooperate: bool = False,
):
    """Launch one of rule_kernels.cpp's kernels; outputs start as NaN and must be written in full."""
    with Session(chip, library=library, threads=1) as session:
        for index, tensor in enumerate(inputs):
            session.register(f"in{index}", tensor, "in")
        for index, tensor in enumerate(outputs):
            session.register(f"out{index}", tensor.fill_(float("nan")), "out")
        if cooperate:
            session.cooperate()
        session.launch(kernel, blocks, [*inputs, *outputs])
        session.check_outputs()
        return session.counters()


def nz(matrix: torch.Tensor) -> torch.Tensor:
    """Column strips of 16, each [rows, 16] row-major: what L1 and L0C hold."""
    rows, columns = matrix.shape
    return matrix.reshape(rows, columns // 16, 16).transpose(0, 1).contiguous()


def test_mmad_multiplies_zz_by_zn_into_nz_with_float_sums(rule_kernels: Path) -> None:
    """Half sums would lose the +1 beside 2048: 2048 + 1 is no half. Counted: 2 + 2 fractals loaded, 2 multiplied."""
    a = torch.zeros(16, 32, dtype=torch.half)
    b = torch.zeros(32, 16, dtype=torch.half)
    a[3, 0], a[3, 17], a[5, 31] = 2048, 1, -2
    b[0, 7], b[17, 7], b[31, 2] = 1, 1, 0.5
    out = torch.empty(16, 16)
    counters = run(rule_kernels, "mmad_16x16x32", [nz(a), nz(b)], [out])
    expected = torch.zeros(16, 16)
    expected[3, 7], expected[5, 2] = 2049, -1
    assert torch.equal(out, expected)
    assert (counters.l1_to_l0a_fractals, counters.l1_to_l0b_fractals, counters.mac_fractals) == (2, 2, 2)
    assert (counters.gm_read_bytes, counters.gm_write_bytes, counters.flags) == (2048, 1024, 4)
    assert (counters.peak_l1, counters.peak_l0a, counters.peak_ub) == (2048, 1024, 1024)


def test_load_data_picks_fractals_and_transposes_each(rule_kernels: Path) -> None:
    """Start index 1 with transpose, then index 0 without; the right operand is the identity."""
    fractals = torch.arange(512, dtype=torch.float32).reshape(2, 16, 16).half()
    out = torch.empty(32, 16)
    run(rule_kernels, "load_data", [fractals, torch.eye(16, dtype=torch.half)], [out])
    assert torch.equal(out[:16], fractals[1].T.float())
    assert torch.equal(out[16:], fractals[0].float())


def test_cast_rounds_to_nearest_even_or_to_odd(rule_kernels: Path) -> None:
    """1 + 2^-11 lies half way between 1 and 1 + 2^-10; the smallest half is 2^-24; 65520 overflows and is counted."""
    step = 2.0**-10
    table = [
        (1 + step / 2, 1.0, 1 + step),
        (1 + 3 * step / 2, 1 + 2 * step, 1 + step),
        (1 + step / 2 + 2.0**-20, 1 + step, 1 + step),
        (2.0**-25, 0.0, 2.0**-24),
        (3 * 2.0**-25, 2.0**-23, 2.0**-24),
        (65519.0, 65504.0, 65504.0),
        (-2049.0, -2048.0, -2050.0),
        (0.5, 0.5, 0.5),
    ]
    source = torch.tensor([row[0] for row in table] + [65520.0] + [0.25] * 55)
    even, odd, back = torch.empty(64, dtype=torch.half), torch.empty(64, dtype=torch.half), torch.empty(64)
    counters = run(rule_kernels, "cast_rounding", [source], [even, odd, back])
    assert even[:8].tolist() == [row[1] for row in table]
    assert odd[:8].tolist() == [row[2] for row in table]
    assert even[8] == float("inf")
    assert counters.cast_overflows == 1
    assert torch.equal(back, even.float())


def test_brcb_spreads_elements_and_whole_reduce_adds_a_masked_repeat(rule_kernels: Path) -> None:
    """Repeats of the reduction start one block apart, sums land four elements apart, mask 5."""
    source = torch.arange(1.0, 17.0)
    wide, sums = torch.empty(16, 8), torch.empty(8)
    run(rule_kernels, "brcb_and_reduce", [source], [wide, sums])
    assert torch.equal(wide, source[:, None].expand(16, 8))
    assert sums.tolist() == [15.0, 0, 0, 0, 55.0, 0, 0, 0]


def test_whole_reduce_takes_the_elements_of_a_bit_mask(rule_kernels: Path) -> None:
    """How a chip without Brcb picks a single element: bits 1 and 6, blocks 0 and 1."""
    sums = torch.empty(8)
    run(rule_kernels, "reduce_by_bits", [torch.arange(1.0, 17.0)], [sums])
    assert sums.tolist() == [2.0 + 7.0, 0, 0, 0, 10.0 + 15.0, 0, 0, 0]


def test_blocks_that_wait_for_each_other_may_exchange_results(rule_kernels: Path) -> None:
    """One launch for many stages rests on it; without the meeting the read would race, and alone it cannot be met."""
    for _ in range(20):
        first, second = torch.empty(128), torch.empty(128)
        run(rule_kernels, "exchange", [], [first, second], blocks=2, cooperate=True)
        assert second.tolist() == [11.0] * 64 + [11.0] * 64
    with pytest.raises(SimulatorViolation, match=r"\[cooperative\] SyncAll needs all blocks"):
        run(rule_kernels, "exchange", [], [first, second], blocks=2)


def test_a_meeting_that_a_block_misses_is_refused(rule_kernels: Path) -> None:
    """On a chip the other blocks would hang."""
    for _ in range(20):
        with pytest.raises(SimulatorViolation, match=r"\[deadlock\] another block of the launch ended"):
            run(rule_kernels, "meeting_missed", [], blocks=2, cooperate=True)


def test_vector_strides_masks_and_accumulation(rule_kernels: Path) -> None:
    """Block stride 2 scatters the sum's blocks, block stride 0 repeats a source block, the last block keeps 4 of 8."""
    x = torch.arange(128, dtype=torch.float32).reshape(2, 64)
    out = torch.empty(64)
    run(rule_kernels, "vector_forms", [x], [out])
    expected = torch.ones(64)
    first = x[1, :8]
    expected[0:8], expected[16:24] = x[0, 0:8] + first, x[0, 8:16] + first
    expected[32:36] = x[0, 16:20] + first[:4]
    expected *= 2
    expected[:8] -= x[0, :8]
    expected[56:] += x[0, :8] * first
    expected[1::2] = 0.5
    assert torch.equal(out, expected)


def test_transpose_through_queues(rule_kernels: Path) -> None:
    """Two tiles through one-deep queues: the second AllocTensor waits for the first FreeTensor."""
    tiles = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).half()
    out = torch.empty(2, 16, 16, dtype=torch.half)
    run(rule_kernels, "transpose", [tiles], [out])
    assert torch.equal(out, tiles.transpose(1, 2))


def test_gm_to_l1_makes_nz(rule_kernels: Path) -> None:
    """A copy from global memory changes the layout on its way, which is not counted as a transform."""
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).half()
    out = torch.empty(4, 32, 16, dtype=torch.half)
    counters = run(rule_kernels, "nd2nz", [rows], [out])
    assert torch.equal(out, nz(rows))
    assert counters.relaid_fractals == 0


def test_relaid_tiles_are_counted_where_rows_become_strips(rule_kernels: Path) -> None:
    """A Cast and a copy to L1 take [16, 32] from rows to strips, two tiles each; the way back to UB moves them as they
    are, and one row of each strip, less than a tile, is none."""
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(5)).half()
    wide, narrow = torch.empty(2, 16, 16), torch.empty(2, 16, 16, dtype=torch.half)
    counters = run(rule_kernels, "relaying", [rows], [wide, narrow])
    assert torch.equal(narrow, nz(rows))
    assert torch.equal(wide, nz(rows).float())
    assert counters.relaid_fractals == 4


def test_exp_is_exact_to_float_and_rsqrt_is_an_estimate(rule_kernels: Path) -> None:
    """exp within 2 ulp down to the denormals, 0 below; rsqrt off by a part in a thousand on purpose."""
    x = torch.cat([torch.linspace(1e-3, 80, 32), torch.linspace(-120, -0.001, 32)])
    out = torch.empty(2, 64)
    run(rule_kernels, "functions", [x], [out])
    wanted = x.double().exp()
    tolerance = torch.maximum(wanted * 2.4e-7, torch.full_like(wanted, 1.5e-45))
    assert ((out[0].double() - wanted).abs() <= tolerance).all()
    error = (out[1, :32].double() * x[:32].double().sqrt() - 1).abs()
    assert ((error > 9e-4) & (error < 1.1e-3)).all()


def test_fixpipe_is_the_way_out_of_l0c_on_m300(rule_kernels: Path) -> None:
    """310B has Fixpipe to UB where 310P has DataCopy."""
    a = torch.randn(16, 32, generator=torch.Generator().manual_seed(3)).half()
    b = torch.randn(32, 16, generator=torch.Generator().manual_seed(4)).half()
    out = torch.empty(16, 16)
    run(rule_kernels, "fixpipe", [nz(a), nz(b)], [out], chip="310b1")
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    with pytest.raises(SimulatorViolation, match=r"missing API.*DataCopy from L0C"):
        run(rule_kernels, "mmad_16x16x32", [nz(a), nz(b)], [out], chip="310b1")


# kernel: (rule, another word of the message).
REFUSED = {
    "capacity": ("capacity", "253952"),
    "bounds": ("buffer bounds", "0 to 256"),
    "view_bounds": ("buffer bounds", "192"),
    "alignment_ub": ("alignment", "UB offset 16"),
    "alignment_l0": ("alignment", "L0A offset 256"),
    "alignment_l0c": ("alignment", "L0C offset 32"),
    "repeat_limit": ("repeat", "256"),
    "stride_limit": ("field width", "256"),
    "mask_limit": ("mask", "65"),
    "block_count_limit": ("block count", "4096"),
    "missing_fixpipe": ("missing API", "Fixpipe"),
    "missing_datacopy_pad": ("missing API", "DataCopyPad"),
    "missing_load_data_with_transpose": ("missing API", "LoadDataWithTranspose"),
    "missing_l1_to_gm": ("missing API", "L1 to GM"),
    "missing_round_mode": ("rounding mode", "CAST_NONE"),
    "queue_not_freed": ("unbalanced queue", "never freed"),
    "queue_exhausted": ("unbalanced queue", "FreeTensor is missing"),
    "queue_empty": ("unbalanced queue", "empty queue"),
    "queue_of_another": ("unbalanced queue", "did not hand out"),
    "queue_too_deep": ("queue depth", "asked for 9"),
    "read_unwritten": ("unwritten", "UB offset 224"),
    "race_read_after_write": ("read after write", "pipe MTE2"),
    "race_write_after_read": ("write after read", "pipe V"),
    "race_write_after_write": ("write after write", "pipe V"),
    "race_within_vector": ("read after write", "pipe V"),
    "race_within_instruction": ("read after write", "pipe V"),
    "race_wrong_event": ("read after write", "pipe MTE2"),
    "race_small_mmad": ("read after write", "L0C offset 0"),
    "flag_deadlock": ("deadlock", "MTE2_V id 0"),
    "flag_left_set": ("flag left set", "MTE2_V id 3"),
    "flag_set_twice": ("flag set twice", "MTE2_V id 1"),
    "event_ids": ("event id", "MTE2_V"),
    "event_id_beyond": ("event id", "got 8"),
    "event_id_not_taken": ("event id", "not allocated"),
    "gm_bounds": ("GM bounds", "65536"),
    "gm_read_only": ("read-only", "in0"),
    "gm_race": ("read after write", "GM tensor out0"),
    "gm_write_after_write": ("write after write", "GM tensor out0"),
    "gm_write_after_read": ("write after read", "GM tensor out0"),
    "gm_read_unwritten": ("unwritten", "GM tensor out0"),
    "output_unwritten": ("output", "out0 offset 224"),
    "wrong_memory_load": ("wrong memory", "not to L0A"),
    "wrong_memory_fractals": ("wrong memory", "not UB"),
    "wrong_memory_vector": ("wrong memory", "is in L1"),
    "load_of_nothing": ("repeat", "is 0"),
    "load_downwards": ("address mode", "upwards"),
    "product_without_rows": ("Mmad size", "positive"),
    "product_with_bias": ("Mmad bias", "not modelled"),
    "copy_of_empty_blocks": ("block length", "at least one"),
    "copy_of_part_of_a_block": ("copy size", "is 40"),
    "nd2nz_of_half_blocks": ("ND2NZ", "whole blocks"),
    "drain_in_normal_mode": ("block mode", "BLOCK_MODE_MATRIX"),
    "vector_of_nothing": ("count", "is 0"),
    "mask_of_no_bits": ("mask", "no element"),
    "odd_rounding_by_count": ("rounding mode", "CAST_ODD"),
    "brcb_with_gaps": ("Brcb stride", "dstBlkStride 1"),
}
# The same on a chip that has the instruction, and with more than one block.
REFUSED_ON_910B = {
    "missing_load_data_with_transpose": ("not modelled", "LoadDataWithTranspose"),
    "fixpipe_strips_to_gm": ("fixpipe layout", "rows to GM"),
}
REFUSED_WITH_TWO_BLOCKS = {
    "gm_cross_block": ("cross-block", "another block"),
    "gm_cross_block_read": ("cross-block", "block 0 wrote it"),
}
REFUSED_AMONG_BLOCKS_THAT_MEET = {"cooperative", "deadlock"}


@pytest.mark.parametrize("kernel", REFUSED)
def test_rule_refuses(rule_kernels: Path, kernel: str) -> None:
    """On a chip some of these only show as wrong numbers; the message says kernel, line, place and rule."""
    rule, detail = REFUSED[kernel]
    with pytest.raises(SimulatorViolation) as refused:
        run(rule_kernels, kernel, [torch.zeros(1024)], [torch.empty(64)])
    message = str(refused.value)
    assert f"[{rule}]" in message
    assert detail in message
    if kernel not in ("output_unwritten", "queue_not_freed"):
        assert re.search(rf"kernel {kernel}, block 0, \w+_rules\.h:", message)


def test_ub_to_l1_is_refused_where_the_documents_leave_it_open(rule_kernels: Path) -> None:
    """310B: listed in the headers, unsupported in the documents; runs on 310P."""
    run(rule_kernels, "missing_ub_to_l1", [])
    with pytest.raises(SimulatorViolation, match=r"missing API.*UB to L1 does not exist on 310b1"):
        run(rule_kernels, "missing_ub_to_l1", [], chip="310b1")


@pytest.mark.parametrize("kernel", REFUSED_ON_910B)
def test_what_only_a_910b_has_is_refused_as_not_modelled(rule_kernels: Path, kernel: str) -> None:
    """Rather than computed in a way nobody checked."""
    rule, detail = REFUSED_ON_910B[kernel]
    with pytest.raises(SimulatorViolation, match=rf"\[{rule}\].*{detail}"):
        run(rule_kernels, kernel, [torch.zeros(1024)], [torch.empty(64)], chip="910b4")


@pytest.mark.parametrize("kernel", REFUSED_WITH_TWO_BLOCKS)
def test_blocks_of_a_launch_may_not_touch_the_same_place(rule_kernels: Path, kernel: str) -> None:
    """Blocks run in any order; one block alone is fine."""
    rule, detail = REFUSED_WITH_TWO_BLOCKS[kernel]
    out = torch.empty(64)
    run(rule_kernels, kernel, [out.clone()], [out])
    with pytest.raises(SimulatorViolation, match=rf"\[{rule}\].*{detail}"):
        run(rule_kernels, kernel, [out.clone()], [out], blocks=2)


def test_blocks_may_share_a_cell_but_no_byte_of_it(rule_kernels: Path) -> None:
    """The shadow knows cells of 32 bytes; who wrote which of them in this launch is known all the same."""
    out = torch.empty(8)
    run(rule_kernels, "gm_parts_of_a_cell", [out.clone()], [out], chip="310b1", blocks=2)
    assert out.tolist() == [1.0] * 8
    with pytest.raises(SimulatorViolation, match=r"\[cross-block\]"):
        run(rule_kernels, "gm_same_part_of_a_cell", [out.clone()], [out], chip="310b1", blocks=2)


def test_every_rule_has_a_kernel_that_breaks_it() -> None:
    """A rule that nothing breaks may never have refused anything."""
    sources = "".join(path.read_text(encoding="utf-8") for path in (build.SOURCE_DIR / "simulator").glob("*.h"))
    rules = set(re.findall(r'Refuse\w*\((?!rule)[^";{]*?"(\w[^"]*)"', sources))
    rules.update(re.findall(r"rule \[(\w+)\]", sources))
    broken = {rule for table in (REFUSED, REFUSED_ON_910B, REFUSED_WITH_TWO_BLOCKS) for rule, _ in table.values()}
    assert {"capacity", "write after read", "output", "field width"} <= rules
    assert rules == broken | REFUSED_AMONG_BLOCKS_THAT_MEET


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the way out; a bare OSError from somewhere inside a call of an operator says neither."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"ascend-sim: cannot write .*file.*VLLM_EXT_CACHE"):
        build.build()


def test_unknown_chip_is_a_value_error(rule_kernels: Path) -> None:
    """Naming what was asked for."""
    with pytest.raises(ValueError, match="310z9"):
        Session("310z9", library=rule_kernels)
