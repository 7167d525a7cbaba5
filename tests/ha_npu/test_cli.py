from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from vllm_ext.ha_npu.cli import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_names_what_the_plan_decides(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gdn", "--chip", "310p1", "--heads", "16", "--tokens", "4096")
    assert code == 0
    for text in ("244 of 248 KiB", "0-9", "10-14 in 2 each", "3 a chunk of a head", "operator"):
        assert text in out


def test_all_strategies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "kda", "--compare", "--heads", "32", "--tokens", "8192")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [
        "ha-npu",
        "ha-npu-tuned",
        "fla",
        "fla-megakernel",
        "flash-qla",
        "vllm-ascend",
    ]


def test_json_and_header_go_to_the_terminal_or_to_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "gdn", "--tokens", "64", "--json")
    assert code == 0
    assert json.loads(out)["num_tokens"] == 64
    code, out, _ = run(capsys, "gdn", "--json", str(tmp_path / "p.json"), "--emit-header", str(tmp_path / "p.h"))
    assert code == 0
    assert json.loads((tmp_path / "p.json").read_text())["op"] == "gdn"
    assert "constexpr uint32_t CHUNK_SIZE = 64;" in (tmp_path / "p.h").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.h", "p.json"]


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    for target in (tmp_path / "missing" / "p.json", tmp_path / "taken"):
        code, _, err = run(capsys, "gdn", "--json", str(target))
        assert code == 2
        assert err.startswith("vllm-ext plan: error:")
        assert f"cannot write {str(target)!r}" in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_new_file_has_the_usual_permissions_and_an_old_one_keeps_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Files used to come out readable by their owner only."""
    target, usual = tmp_path / "p.json", tmp_path / "usual"
    usual.touch()
    assert run(capsys, "gdn", "--json", str(target))[0] == 0
    assert target.stat().st_mode == usual.stat().st_mode
    target.chmod(0o600)
    assert run(capsys, "gdn", "--json", str(target))[0] == 0
    assert target.stat().st_mode & 0o777 == 0o600


def test_links_stay_and_pipes_are_written_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Replacing whatever bears the name would put a plain file in the place of /dev/null."""
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "real.json")
    assert run(capsys, "gdn", "--json", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["op"] == "gdn"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert run(capsys, "gdn", "--json", str(pipe))[0] == 0
    reader.join(timeout=20)
    assert pipe.is_fifo()
    assert json.loads(read[0])["op"] == "gdn"


def test_an_output_that_cannot_be_made_keeps_the_others_from_being_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ("--json", str(tmp_path / "p.json"), "--emit-header", str(tmp_path / "p.h"), "--plot", str(tmp_path / "p"))
    assert run(capsys, "gdn", "--strategy", "fla", *files)[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_pictures_without_matplotlib_say_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "gdn", "--plot", str(tmp_path / "p"))
    assert code == 2
    assert "pip install matplotlib" in err


@pytest.mark.parametrize("strategy", ["ha-npu", "ha-npu-tuned", "fla"])
def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = run(capsys, "gdn", "--plot", str(tmp_path / "new"), "--strategy", strategy)
    assert code == 0
    kinds = ["schedule"] if strategy == "fla" else ["dataflow", "occupancy", "schedule"]
    names = [f"gdn_310p1_{strategy}_{kind}.png" for kind in kinds]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "new").iterdir())
    assert all(name in err for name in names)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name an operator"),
        (["mamba"], "unknown operator 'mamba'"),
        (["gdn", "--chip", "tpu"], "unknown chip 'tpu'"),
        (["gdn", "--tokens", "0"], "num_tokens must be at least 1"),
        (["gdn", "--head-dim", "256"], "bytes of UB"),
        (["gdn", "--seq-lens", "64,x"], "whole numbers separated by commas"),
        (["gdn", "--seq-lens", "64,64", "--tokens", "100"], "seq_lens sum to 128"),
        (["gdn", "--strategy", "fla", "--emit-header"], "strategy of one kernel"),
        (["gdn", "--compare", "--head-dim", "512"], "bytes of UB"),
        (["--check-paper", "--json", "p.json"], "name an operator"),
        (["gdn", "--chip", "tpu", "--check-paper"], "unknown chip 'tpu'"),
        (["gdn", "--json", "--emit-header"], "the terminal takes one of"),
        (["gdn", "--compare", "--json"], "the terminal takes one of"),
        (["gdn", "--plot", "/dev/null/folder"], "cannot draw into folder '/dev/null/folder'"),
        (["gdn", "--json", ""], "cannot write ''"),
    ],
)
def test_bad_input_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_sequences_add_up_to_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "gdn", "--seq-lens", "0,130,64", "--heads", "3")
    assert code == 0
    assert "194 tokens in 3 sequence(s)" in out


def test_other_outputs_come_with_the_comparisons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Asked for together, one of them used to be left out without a word."""
    for number, also in enumerate(("--compare", "--check-paper")):
        target = tmp_path / f"{number}.json"
        assert run(capsys, "gdn", "--tokens", "100", "--json", str(target), also)[0] == 0
        assert json.loads(target.read_text())["num_tokens"] == 100


@pytest.mark.parametrize("argv", [["--check-paper"], ["gdn", "--heads", "16", "--tokens", "4096", "--check-paper"]])
def test_the_comparison_with_the_paper_is_one_command(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert out.startswith("plan " if len(argv) > 1 else "figure ")
    for text in ("Fig. 4 GDN global memory", "Table 1 MACs", "UB peak, two states", "Fig. 16", "Fig. 17", "10 cores"):
        assert text in out
