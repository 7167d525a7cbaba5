"""Which backend serves a call. A backend is a module, imported when first asked for, that offers

NAME: str
usable(device: torch.device) -> tuple[bool, str]        can it run there, and if not, why
chunk_gated_delta_rule(call: Call) -> tuple[Tensor, Tensor | None]
chunk_kda(call: Call) -> tuple[Tensor, Tensor | None]
supports(problem: Problem) -> tuple[bool, str]           optional: which sizes and dtypes it refuses, and why
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from vllm_ext.ops.linear_attention.problem import Problem

_PACKAGE = "vllm_ext.ops.linear_attention"
_MODULES = {
    "reference": "reference",
    "cpu": "cpu",
    "triton": "triton",
    "ascend-sim": "ascend_sim",
    "npu": "npu",
}
# What "auto" tries, by device type, best first. The plain-torch "cpu" backend runs on any device torch fully supports.
_AUTO = {"cpu": ("cpu",), "cuda": ("triton", "cpu"), "npu": ("npu",)}


def _load(name: str) -> tuple[ModuleType | None, str]:
    """The backend's module, or None and why it cannot be imported."""
    module_name = f"{_PACKAGE}.{_MODULES[name]}"
    try:
        return importlib.import_module(module_name), ""
    except ImportError as error:
        if error.name == module_name:
            return None, "not part of this installation"
        return None, f"its module cannot be imported: {error}"


def _check(name: str, device: torch.device, problem: Problem | None) -> tuple[ModuleType | None, str]:
    """The module that can serve the problem (any problem when None) on the device, or None and the reason."""
    module, reason = _load(name)
    if module is None:
        return None, reason
    usable, reason = module.usable(device)
    if usable and problem is not None and hasattr(module, "supports"):
        usable, reason = module.supports(problem)
    return (module, "") if usable else (None, reason)


def select_backend(function: str, backend: str, problem: Problem) -> tuple[ModuleType, str]:
    """The module that serves this call, and why better ones do not ("" when it is the first choice).

    Raises:
        ValueError: a backend name that does not exist.
        RuntimeError: the backend named, or every candidate of "auto", cannot be used; with the reasons.
    """
    device = problem.device
    if backend == "auto":
        candidates = _AUTO.get(device.type, ("cpu",))
    elif backend in _MODULES:
        candidates = (backend,)
    else:
        raise ValueError(f"{function}: no backend {backend!r}; choose one of {', '.join(('auto', *_MODULES))}")
    reasons: list[str] = []
    for name in candidates:
        module, reason = _check(name, device, problem)
        if module is not None:
            return module, "; ".join(reasons)
        reasons.append(f"{name}: {reason}")
    raise RuntimeError(
        f"{function}: backend {backend!r} cannot run {problem.op} of {problem.dtype} with K={problem.key_dim}, "
        f"V={problem.value_dim} on {device}: {'; '.join(reasons)}"
    )


def backend_status(device: torch.device | str = "cpu") -> dict[str, tuple[bool, str]]:
    """For each backend name: whether it can run on the device, and if not, why."""
    return {name: ((result := _check(name, torch.device(device), None))[0] is not None, result[1]) for name in _MODULES}
