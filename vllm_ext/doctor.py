"""`vllm-ext doctor`: one screen that says what is installed, what works here, and why the rest does not."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_ext import __version__, compat

_DISTRIBUTIONS = ("torch", "triton", "transformers", "torch-npu", "vllm-ascend")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def version_rows() -> list[tuple[str, str]]:
    """(name, version) of everything that matters, read from metadata."""
    found = compat.vllm_version()
    note = ""
    if found is not None and not compat.within_tested_versions(found):
        note = " (outside the versions tried: see below)"
    rows = [
        ("vllm-ext", __version__),
        ("python", platform.python_version()),
        ("vllm", (found or "not installed") + note),
    ]
    return rows + [(name, _version(name)) for name in _DISTRIBUTIONS]


def plugin_rows() -> list[tuple[str, bool, str]]:
    """(what, ok, reason): whether vLLM will load the plugin, and whether it registers with this vLLM."""
    names = [entry.name for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("vllm_ext.")]
    rows = [
        ("entry point", bool(names), "vllm.general_plugins" if names else "not found: install with `pip install .`")
    ]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not set(names) & set(allowed.split(",")):
        rows.append(
            ("VLLM_PLUGINS", False, f"is {allowed!r} and does not name vllm_ext: vLLM will not load the plugin")
        )
    if compat.vllm_version() is None:
        rows.append(("registration", False, "vLLM is not installed"))
        return rows
    try:
        rows += [(name, ok, reason) for name, ok, reason in compat.registration_status()]
    except Exception as error:
        rows.append(("registration", False, f"vLLM cannot be imported: {type(error).__name__}: {error}"))
    return rows


def operator_rows() -> tuple[list[tuple[str, bool, str]], list[tuple[str, bool, str]]]:
    """(backend, usable, reason) of the experts and of linear attention; where torch is missing, one row says so."""
    try:
        from vllm_ext.ops import linear_attention, moe
    except ImportError as error:
        nothing = [("all", False, f"torch cannot be imported: {error}; install vLLM, which brings its torch")]
        return nothing, nothing
    attention = [(name, ok, reason) for name, (ok, reason) in linear_attention.backend_status().items()]
    return moe.backend_status(), attention


def _print_table(title: str, rows: list[tuple[str, bool, str]]) -> None:
    print(f"\n{title}")
    for name, ok, reason in rows:
        print(f"  {'ok ' if ok else 'no '} {name:14} {reason}")


def main(argv: list[str]) -> int:
    """Print the screen; 0 when the plugin is registered and at least one backend of each operator works."""
    argparse.ArgumentParser(prog="vllm-ext doctor", description=__doc__).parse_args(argv)
    print("versions")
    for name, found in version_rows():
        print(f"      {name:14} {found}")
    plugin, (experts, attention) = plugin_rows(), operator_rows()
    _print_table("plugin", plugin)
    _print_table("4-bit experts (--quantization w4a16-grouped)", experts)
    _print_table("linear attention (--attention-backend ha_npu)", attention)
    print("\nvLLM versions the project is tried with")
    for row in compat.SUPPORTED:
        print(f"      {row.version:14} {row.where}")
    healthy = all(ok for _, ok, _ in plugin) and any(ok for _, ok, _ in experts) and any(ok for _, ok, _ in attention)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
