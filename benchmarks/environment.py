"""What machine and which versions a result was measured with; goes into every results file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "vllm", "transformers", "triton")


def cpu_model() -> str:
    """The processor's name as the kernel reports it, or the architecture where it reports none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, None when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, Python and the versions of the packages that decide speed and rounding."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed_version(name)) is not None},
    }
