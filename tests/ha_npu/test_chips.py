from __future__ import annotations

import copy
import json

import pytest

from vllm_ext.ha_npu.chips import BUFFERS, CHIP_DIR, chip_names, load_chip, parse_chip, unsourced_numbers


@pytest.mark.parametrize("name", ["310p1", "310p3", "310b1", "310b4", "910b4", "h200"])
def test_every_number_of_a_chip_names_its_source(name: str) -> None:
    data = json.loads((CHIP_DIR / f"{name}.json").read_text())
    assert unsourced_numbers(data) == []
    chip = load_chip(name)
    assert chip.name == name
    for buffer in BUFFERS:
        assert 0 <= chip.buffers[buffer].usable <= chip.buffers[buffer].capacity


def test_the_files_are_the_list_of_chips() -> None:
    assert set(chip_names()) == {"310p1", "310p3", "310b1", "310b4", "910b4", "h200"}


@pytest.mark.parametrize("name", ["310p9", "", "../310p1", 310, None, ["310p1"]])
def test_an_unknown_chip_names_the_known_ones(name: object) -> None:
    with pytest.raises(ValueError, match="310p1"):
        load_chip(name)  # type: ignore[arg-type]


def test_a_number_without_a_source_is_refused() -> None:
    data = json.loads((CHIP_DIR / "310p1.json").read_text())
    bare = copy.deepcopy(data)
    bare["clock_mhz"] = 1060
    with pytest.raises(ValueError, match="clock_mhz has no source"):
        parse_chip(bare)
    unknown = copy.deepcopy(data)
    unknown["buffers"]["ub"]["usable"]["source"] = "hearsay"
    with pytest.raises(ValueError, match=r"buffers\.ub\.usable has no source"):
        parse_chip(unknown)


def test_the_310p_data_paths_are_those_of_the_chip() -> None:
    """310P has no Fixpipe; UB feeds L1 directly, which is what keeps intermediates on core."""
    chip = load_chip("310p1")
    assert chip.ub_to_l1
    assert chip.l0c_to_ub
    assert "Fixpipe" in chip.missing_apis
    assert not load_chip("910b4").ub_to_l1
    assert not load_chip("310b1").ub_to_l1
