"""The serving benchmark: what it refuses, how it compares, and that README shows what was stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_ext.benchmarks import serve_cpu


def test_an_arm_that_computes_something_else_is_not_timed() -> None:
    """A kernel that skips work is fast; NaN compares false with everything and must not slip through."""
    serve_cpu.check({"BF16": -3.2, "4-bit": -3.4})
    for wrong in (-9.8, 0.0, float("nan")):
        with pytest.raises(RuntimeError, match="its speed means nothing"):
            serve_cpu.check({"BF16": -3.2, "4-bit": wrong})


def test_rates_are_compared_within_a_round() -> None:
    """When other work halves the machine's speed for two rounds of three, both arms are halved and the ratio stands."""
    base, arm = [20.0, 10.0, 10.0], [30.0, 15.0, 15.0]
    assert serve_cpu.median_ratio(arm, base) == 1.5


def test_arms_take_turns_in_alternating_order() -> None:
    """A,B,C then C,B,A: an arm that always came last would meet the warmest, or the most throttled, machine."""
    calls: list[tuple[str, int]] = []

    class Fake(serve_cpu.Worker):
        def __init__(self, arm: str) -> None:
            self.arm = arm

        def rate(self, streams: int, new_tokens: int) -> float:
            if new_tokens == 48:
                calls.append((self.arm, streams))
            return float(streams)

    *_, samples = serve_cpu.take_turns([Fake("A"), Fake("B")], rounds=2, new_tokens=48)
    assert [arm for arm, streams in calls if streams == 1] == ["A", "B", "B", "A"]
    assert samples["B"] == {1: [1.0, 1.0], 8: [8.0, 8.0]}


class Dying(serve_cpu.Worker):
    """Answers from a script, and no more after the first round."""

    def __init__(self, model: Path, arm: str) -> None:
        self.arm, self.logprob, self.left = arm, -3.0, 2

    def rate(self, streams: int, new_tokens: int) -> float:
        if new_tokens == 4:
            return 0.0
        self.left -= 1
        if self.left < 0:
            raise RuntimeError(f"serve-cpu: the arm {self.arm!r} ended")
        return 10.0 * streams

    def close(self) -> None:
        pass


def test_rounds_before_an_engine_died_are_kept_beside_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    output = tmp_path / "serve_cpu.json"
    output.write_text("an earlier whole run")
    monkeypatch.setattr(serve_cpu, "Worker", Dying)
    assert serve_cpu.main(["--model", str(tmp_path), "--rounds", "3", "--output", str(output)]) == 1
    assert "ended; 1 of 3 rounds are kept in" in capsys.readouterr().err
    kept = json.loads((tmp_path / "serve_cpu_partial.json").read_text())
    assert kept["rounds"] == 1
    assert [row["samples"] for row in kept["rows"]] == [{"1": [10.0], "8": [80.0]}] * 3
    assert output.read_text() == "an earlier whole run"
    assert serve_cpu.main(["--model", str(tmp_path), "--rounds", "1", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["rounds"] == 1
    assert not (tmp_path / "serve_cpu_partial.json").exists()


@pytest.mark.parametrize(("script", "says"), [("import time; time.sleep(60)", "no answer in 1 s"), ("", "ended")])
def test_an_engine_that_hangs_or_ends_is_told_apart(script: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung engine held the whole run for ever."""
    worker = serve_cpu.Worker.__new__(serve_cpu.Worker)
    worker.arm = "BF16"
    worker._process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    if not script:
        worker._process.wait()
    monkeypatch.setattr(serve_cpu, "ANSWER", 1.0 if script else 30.0)
    with pytest.raises(RuntimeError, match=says):
        worker.rate(1, 48)
    worker.close()
    assert worker._process.returncode is not None


def test_missing_model_names_the_command_that_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is not in the repository."""
    assert serve_cpu.main(["--model", str(tmp_path)]) == 1
    assert "examples/smollm2_as_moe.py" in capsys.readouterr().err


def test_readme_shows_the_stored_results() -> None:
    """4-bit experts serve at least as fast as BF16 at every number of streams, and README shows the file's figures."""
    results = json.loads(serve_cpu.RESULTS.read_text())
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert serve_cpu.markdown(results) in readme
    assert all(ratio >= 1 for row in results["rows"] for ratio in row["ratio"].values())
