"""Run a callback once a module has been imported, without importing it now.

vLLM calls `register()` in every process, often before the modules concerned are loaded; importing them there would cost
seconds and can deadlock on half-initialised modules. A callback for a module that is already loaded runs at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType

Callback = Callable[[ModuleType], None]

_pending: dict[str, list[Callback]] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` right after `name` has finished importing, or now if it has already."""
    module = sys.modules.get(name)
    if module is not None and not _initializing(module):
        callback(module)
        return
    _pending.setdefault(name, []).append(callback)
    if module is not None:
        _run_after_exec(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _run_callbacks(module: ModuleType) -> None:
    for callback in _pending.pop(module.__name__, []):
        callback(module)


class _LateSpec(importlib.machinery.ModuleSpec):
    """A spec that notices the end of an import already under way.

    `importlib` clears `_initializing` on the spec when the module body has run; that assignment is the only signal a
    half-imported module gives.
    """

    def __setattr__(self, key: str, value: object) -> None:
        super().__setattr__(key, value)
        if key == "_initializing" and not value:
            module = sys.modules.get(self.name)
            if module is not None:
                _run_callbacks(module)


def _run_after_exec(module: ModuleType) -> None:
    spec = module.__spec__
    if spec is not None and type(spec) is importlib.machinery.ModuleSpec:
        spec.__class__ = _LateSpec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> object:
        # A spec found without importing it (`importlib.util.find_spec`, `python -m`) is asked for its source and code.
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restored first, so that pickling, reloading and resource access see the ordinary loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _run_callbacks(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the awaited modules and steps aside for all others."""

    def __init__(self) -> None:
        self.busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _pending or fullname in self.busy:
            return None
        self.busy.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self.busy.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec
