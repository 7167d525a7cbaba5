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


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`vllm-ext ARGUMENTS` in an interpreter that cannot import torch, as after `pip install vllm-ext` alone."""
    program = "import sys; sys.modules['torch'] = None; from vllm_ext.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)


def test_doctor_without_torch_shows_its_screen() -> None:
    """The doctor is what a user runs when something is missing; it must not need what is missing."""
    done = without_torch("doctor")
    assert done.returncode == 1
    assert done.stdout.count("torch cannot be imported") == 2
    assert "vLLM versions the project is tried with" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [("quantize", "source", "target"), ("inspect", "folder"), ("bench", "moe-cpu")])
def test_verb_names_the_package_it_lacks(command: tuple[str, ...]) -> None:
    """One line with the package and the environment, not a traceback."""
    done = without_torch(*command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"vllm-ext {command[0]}: needs the Python package 'torch'")
    assert sys.executable in done.stderr
    assert len(done.stderr.splitlines()) == 1
