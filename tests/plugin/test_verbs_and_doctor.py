"""`vllm-ext`: the verbs and the doctor's screen."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_ext import cli, doctor


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_tells_its_options(verb: str) -> None:
    """A verb whose module or function is missing shows only when someone types it."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ext.cli", verb, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_no_verb_and_unknown_verbs_are_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert cli.main(["quantise"]) == 2
    shown = capsys.readouterr()
    assert "unknown verb 'quantise'" in shown.err
    assert all(verb in shown.out for verb in cli.VERBS)


@pytest.mark.vllm
def test_doctor_sees_the_plugin_in_the_installed_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    screen = capsys.readouterr().out
    assert "known to --quantization" in screen
    assert "known to --attention-backend" in screen
    assert "0.23.0" in screen
    assert len(screen.splitlines()) < 50


def test_doctor_says_when_vllm_would_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PLUGINS is an allow-list; users forget that it must name every plugin."""
    monkeypatch.setenv("VLLM_PLUGINS", "other_plugin")
    rows = {name: (ok, reason) for name, ok, reason in doctor.plugin_rows()}
    assert rows["VLLM_PLUGINS"][0] is False
    assert "does not name vllm_ext" in rows["VLLM_PLUGINS"][1]


def test_doctor_without_vllm_reports_instead_of_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_ext.compat.vllm_version", lambda: None)
    rows = {name: (ok, reason) for name, ok, reason in doctor.plugin_rows()}
    assert rows["registration"] == (False, "vLLM is not installed")
