"""The shared object with the kernels and their binding: where it is, whether it loads, what it was compiled for."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch

from vllm_ext.ha_npu.chips import chip_names, load_chip

_HOW_TO_BUILD = "install vllm-ext from source with CANN: ASCEND_HOME_PATH=... pip install . (docs/ascend.md)"


def library_path() -> Path | None:
    """The object that setup.py built into the package, or the one $VLLM_EXT_ASCEND_LIBRARY names; None without one."""
    if named := os.environ.get("VLLM_EXT_ASCEND_LIBRARY"):
        return Path(named)
    return next(iter(sorted(Path(__file__).resolve().parents[3].glob("_ascend.*.so"))), None)


@cache
def load() -> str:
    """Load the object with torch_npu, once; "" when that worked, else why not."""
    path = library_path()
    if path is None:
        return f"this installation has no Ascend kernels: {_HOW_TO_BUILD}"
    try:
        import torch_npu  # noqa: F401 - its libraries are what the object is linked with
    except Exception as error:  # CANN's own failures are not ImportError
        return f"torch_npu cannot be imported: {error}"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{path} cannot be loaded, perhaps it was built with another torch or torch_npu: {error}"
    return ""


def compiled_targets() -> tuple[str, ...]:
    """`--npu-arch` of the kernels in the loaded object."""
    return tuple(name for name in str(torch.ops.vllm_ext.ascend_targets()).split(",") if name)


def chip_of(device: torch.device) -> tuple[str | None, str]:
    """The planner's name of the chip behind an NPU device, or None and why it cannot be used.

    $VLLM_EXT_ASCEND_CHIP overrides what the device calls itself.
    """
    override = os.environ.get("VLLM_EXT_ASCEND_CHIP")
    return _chip_of(override or torch.npu.get_device_name(device))  # type: ignore[attr-defined]


@cache
def _chip_of(name: str) -> tuple[str | None, str]:
    chip = name.lower().removeprefix("ascend")
    if chip not in chip_names():
        known = ", ".join(other for other in chip_names() if other.startswith("310"))
        return None, (
            f"no kernels for {name!r}: they are written for {known}, whose cores hold matrix and vector unit together; "
            "if this chip is one of them under another name, set VLLM_EXT_ASCEND_CHIP"
        )
    arch, targets = load_chip(chip).npu_arch, compiled_targets()
    if arch not in targets:
        return None, (
            f"this installation has kernels for {', '.join(targets) or 'no target'} and {name!r} needs {arch}; build "
            f"again with VLLM_EXT_ASCEND_TARGETS={arch}"
            if arch in ("dav-2002", "dav-3002")
            else f"no kernels for {name!r} ({arch}): its matrix and vector units are separate cores"
        )
    return chip, ""
