"""README's commands exist, and what a user types reaches the scripts unchanged."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import ascend_check
import pytest


def run_make(repository: Path, *arguments: str, environment: dict[str, str] | None = None, makefile: str = "") -> str:
    """Output of make with `makefile` added to the project's."""
    text = f"include {repository / 'Makefile'}\n{makefile}"
    clean = {key: value for key, value in os.environ.items() if key not in ("QUESTION", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "-s", "-f", "-", *arguments]
    done = subprocess.run(
        command, input=text, env={**clean, **(environment or {})}, cwd=repository, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_make_command_in_the_documents_exists(repository: Path) -> None:
    """A README whose commands fail is worse than none."""
    makefile = (repository / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (repository / name).read_text()
        mentioned = set(re.findall(r"\bmake ([a-z][a-z-]+)`", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.M))
        assert mentioned, name
        assert mentioned <= targets, f"{name}: {sorted(mentioned - targets)}"
    readme = (repository / "README.md").read_text()
    assert re.findall(r"^make (demo|test)\b", readme, re.M)[:2] == ["demo", "test"]


def test_every_script_that_make_runs_exists(repository: Path) -> None:
    """A target whose script was renamed is found here and not by a user."""
    scripts = re.findall(r"\btools/\w+\.py", (repository / "Makefile").read_text())
    assert scripts
    assert [script for script in scripts if not (repository / script).is_file()] == []


def test_ci_runs_the_tests_through_make(repository: Path) -> None:
    """CI proves README's second command, not a private one."""
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize("way", ["argument", "environment"])
@pytest.mark.parametrize(
    "question",
    [
        "What is the capital of Japan?",
        "Say \"hello\" & 'bye'; echo $HOME `id` $(shell echo expanded) $$ 5% \\n",
        "名前は?",
    ],
)
def test_a_question_reaches_the_script_as_typed(repository: Path, question: str, way: str) -> None:
    """`make demo QUESTION=...` and `QUESTION=... make demo`: neither make nor the shell expands anything in it."""
    show = "show:\n\t@printenv DEMO_QUESTION\n"
    if way == "argument":
        seen = run_make(repository, "show", f"QUESTION={question}", makefile=show)
    else:
        seen = run_make(repository, "show", environment={"QUESTION": question}, makefile=show)
    assert seen == question + "\n"


def test_ascend_check_without_cann_says_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A green check that checked nothing must not look like one that did."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert ascend_check.main() == 0
    assert "nothing was checked" in capsys.readouterr().out


def test_ascend_check_hands_every_kernel_file_to_bisheng(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No CANN can be installed here: a stand-in compiler that fails on one file shows what would be called."""
    kernels = tmp_path / "csrc_ascend" / "kernels"
    (kernels / "gdn").mkdir(parents=True)
    (kernels / "gdn" / "good.cpp").write_text("good")
    (kernels / "bad.cpp").write_text("bad")
    compiler = tmp_path / "cann" / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *bad.cpp*) exit 1;; esac\n')
    compiler.chmod(0o755)
    headers = tmp_path / "cann" / "compiler" / "tikcpp" / "tikcfw"
    headers.mkdir(parents=True)
    monkeypatch.setattr(ascend_check, "ROOT", tmp_path)
    monkeypatch.setattr(ascend_check, "KERNELS", kernels)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    assert ascend_check.main() == 1
    seen = capfd.readouterr().out
    assert "--npu-arch=dav-2002" in seen
    assert "good.cpp" in seen
    assert f"-I {headers}" in seen, "the build of the package looks there for kernel_operator.h, and so must the check"
    assert "1 compiled, 1 failed: csrc_ascend/kernels/bad.cpp" in seen
