"""Contracts of `when_imported`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from vllm_ext._import_hooks import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_callback_waits_for_the_import_and_runs_once(package: Path) -> None:
    (package / "hooked_later.py").write_text("VALUE = 41\n")
    seen = []
    when_imported("hooked_later", lambda module: seen.append(module.VALUE))
    assert seen == []
    importlib.import_module("hooked_later")
    importlib.import_module("hooked_later")
    assert seen == [41]
    assert type(sys.modules["hooked_later"].__loader__).__name__ == "SourceFileLoader"


def test_callback_runs_at_once_for_a_loaded_module() -> None:
    seen = []
    when_imported("json", seen.append)
    assert [module.__name__ for module in seen] == ["json"]


def test_callback_waits_for_a_half_imported_module(package: Path) -> None:
    """vLLM asks platform plugins in the middle of importing its own modules; attributes are not there yet."""
    (package / "hooked_half.py").write_text(
        textwrap.dedent(
            """
            from vllm_ext._import_hooks import when_imported
            SEEN = []
            when_imported("hooked_half", lambda module: SEEN.append(hasattr(module, "AFTER")))
            AFTER = True
            """
        )
    )
    module = importlib.import_module("hooked_half")
    assert module.SEEN == [True]


def test_failing_module_leaves_the_hook_in_place(package: Path) -> None:
    (package / "hooked_broken.py").write_text("raise OSError('not now')\n")
    seen = []
    when_imported("hooked_broken", seen.append)
    with pytest.raises(OSError, match="not now"):
        importlib.import_module("hooked_broken")
    (package / "hooked_broken.py").write_text("READY = 'at last'\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked_broken")
    assert [module.READY for module in seen] == ["at last"]


def test_spec_found_before_the_import_still_gives_code_and_source(package: Path) -> None:
    """`python -m` and code inspection ask the spec's loader for more than running the module."""
    (package / "hooked_looked_up.py").write_text("VALUE = 41\n")
    seen = []
    when_imported("hooked_looked_up", lambda module: seen.append(module.VALUE))
    spec = importlib.util.find_spec("hooked_looked_up")
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source("hooked_looked_up") == "VALUE = 41\n"
    assert spec.loader.get_code("hooked_looked_up").co_filename == str(package / "hooked_looked_up.py")
    assert seen == []
    importlib.import_module("hooked_looked_up")
    assert seen == [41]
