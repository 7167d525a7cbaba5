"""`prepare_experts` and `fused_moe_w4a16`: checks on the arguments, then the backend's own module."""

from __future__ import annotations

import importlib
import logging
import math
from functools import cache
from typing import Protocol

import torch

from vllm_ext.ops.moe.experts import ACTIVATIONS, CallOptions, PreparedExperts, check_weights
from vllm_ext.quantization import QuantizedWeight

logger = logging.getLogger(__name__)

_MODULES = {
    "reference": "vllm_ext.ops.moe.reference",
    "cpu": "vllm_ext.ops.moe.cpu",
    "triton": "vllm_ext.ops.moe.triton",
    "npu": "vllm_ext.ops.moe.npu",
}
# What "auto" tries on a device, best first; every device may end at the reference, never silently.
_PREFERENCE = {"cuda": ("triton",), "cpu": ("cpu",), "npu": ("npu",)}
# Backends whose layout depends on how many of the experts a token uses.
_TAKES_TOP_K = ("cpu",)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ID_DTYPES = (torch.int32, torch.int64)
_MAP_DTYPES = (torch.int8, torch.int16, *_ID_DTYPES)


class Backend(Protocol):
    """What a backend's module offers."""

    NAME: str

    def usable(self, device: torch.device) -> tuple[bool, str]:
        """(usable, reason)."""

    def prepare(
        self,
        w13: QuantizedWeight,
        w2: QuantizedWeight,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> PreparedExperts:
        """Put checked weights into the backend's own order on `device`."""

    def apply(
        self,
        hidden_states: torch.Tensor,
        experts: PreparedExperts,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        options: CallOptions,
    ) -> torch.Tensor:
        """The layer's output [M, H]; the arguments are checked, M and top_k are not 0."""


@cache
def load_backend(name: str) -> Backend:
    """Import a backend's module. Kernels' compilers (Triton, torch_npu) are imported here or later, never before."""
    return importlib.import_module(_MODULES[name])


def _usable(name: str, device: torch.device) -> tuple[bool, str]:
    try:
        return load_backend(name).usable(device)
    except ModuleNotFoundError as error:
        if error.name == _MODULES[name]:
            return False, f"this version has no {name!r} backend for experts"
        return False, f"{_MODULES[name]} cannot be imported: {error}"
    except ImportError as error:
        return False, f"{_MODULES[name]} cannot be imported: {error}"


def _default_device(name: str) -> torch.device:
    if name == "triton" and torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("npu" if name == "npu" and hasattr(torch, "npu") else "cpu")


def backend_status() -> list[tuple[str, bool, str]]:
    """(name, usable, reason) of every backend on the device it is made for; what `vllm-ext doctor` prints."""
    return [(name, *_usable(name, _default_device(name))) for name in _MODULES]


@cache
def _auto(device_type: str) -> str:
    device = torch.device(device_type)
    reasons = []
    for name in _PREFERENCE.get(device_type, ()):
        usable, reason = _usable(name, device)
        if usable:
            return name
        reasons.append(f"{name}: {reason}")
    usable, reason = _usable("reference", device)
    why = "; ".join(reasons) or f"no backend is written for {device_type!r} devices"
    if not usable:
        raise RuntimeError(f"prepare_experts: no backend runs on {device_type!r}: {why}; reference: {reason}")
    logger.warning("vllm_ext: experts on %r fall back to the slow reference backend (%s)", device_type, why)
    return "reference"


def select_backend(backend: str, device: torch.device) -> str:
    """The name of the backend to use on `device`; "auto" picks by device and logs a fall-back's reason once.

    Raises ValueError on an unknown name, RuntimeError, with the reason, on a backend that `device` cannot run.
    """
    if backend == "auto":
        return _auto(device.type)
    if backend not in _MODULES:
        raise ValueError(f"prepare_experts: backend must be one of {['auto', *_MODULES]}, got {backend!r}")
    usable, reason = _usable(backend, device)
    if not usable:
        raise RuntimeError(f"prepare_experts: backend {backend!r} is not usable on {str(device)!r}: {reason}")
    return backend


def prepare_experts(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
) -> PreparedExperts:
    """Put 4-bit experts into the order a backend's kernels read, once, at load.

    w13       [E, 2I, H] (gate rows, then up rows), or [E, I, H] for experts without a gate (inferred from w2)
    w2        [E, H, I]
    w13_bias  floating [E, 2I] or [E, I]; w2_bias floating [E, H]
    backend   "auto" (by device), "reference", "cpu", "triton" or "npu"
    device    where the experts shall live; None: where w13 is
    dtype     of the activations (BF16, FP16 or FP32); None: the dtype of w13's scales
    top_k     experts a token uses, if known: a hint for the layout, not a limit on the calls

    Raises ValueError on shapes or dtypes that do not fit together, RuntimeError on a backend that cannot run.
    """
    check_weights(w13, w2, w13_bias, w2_bias)
    dtype = dtype if dtype is not None else w13.scale.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"prepare_experts: dtype must be one of {[str(d) for d in _DTYPES]}, got {dtype}")
    target = torch.device(device) if device is not None else w13.packed.device
    name = select_backend(backend, target)
    hint = {"top_k": top_k} if name in _TAKES_TOP_K else {}
    return load_backend(name).prepare(w13, w2, w13_bias, w2_bias, target, dtype, **hint)


def check_call(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> None:
    """Raise ValueError unless the arguments of one call fit the experts."""
    meta = experts.meta
    if hidden_states.dim() != 2 or hidden_states.shape[1] != meta.hidden_size:
        raise ValueError(
            f"fused_moe_w4a16: hidden_states must be [M, {meta.hidden_size}], got {list(hidden_states.shape)}"
        )
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"fused_moe_w4a16: topk_weights and topk_ids must both be [M={hidden_states.shape[0]}, top_k], "
            f"got {list(topk_weights.shape)} and {list(topk_ids.shape)}"
        )
    if topk_ids.dtype not in _ID_DTYPES:
        raise ValueError(f"fused_moe_w4a16: topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if not topk_weights.is_floating_point():
        raise ValueError(f"fused_moe_w4a16: topk_weights must be floating, got {topk_weights.dtype}")
    if hidden_states.dtype not in _DTYPES:
        raise ValueError(
            f"fused_moe_w4a16: hidden_states must be one of {[str(d) for d in _DTYPES]}, got {hidden_states.dtype}"
        )
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.dtype not in _MAP_DTYPES):
        raise ValueError(
            "fused_moe_w4a16: expert_map must be a vector [global_experts] of signed integers (-1: not on this rank), "
            f"got {expert_map.dtype} {list(expert_map.shape)}"
        )
    _check_devices(experts.device, hidden_states, topk_weights, topk_ids, expert_map)
    if options.activation not in ACTIVATIONS:
        raise ValueError(f"fused_moe_w4a16: activation must be one of {ACTIVATIONS}, got {options.activation!r}")
    if options.activation == "swigluoai" and not meta.gated:
        raise ValueError(
            "fused_moe_w4a16: swigluoai needs gated experts (w13 of 2I rows); these have no gate, use a one-argument "
            f"activation: {ACTIVATIONS[:-1]}"
        )


def _check_devices(device: torch.device, *arguments: torch.Tensor | None) -> None:
    if all(tensor is None or tensor.device == device for tensor in arguments):
        return
    names = ("hidden_states", "topk_weights", "topk_ids", "expert_map")
    given = zip(names, arguments, strict=True)
    raise ValueError(
        f"fused_moe_w4a16: all arguments must be where the experts are, on {str(device)!r}; got "
        + ", ".join(f"{name} on {str(tensor.device)!r}" for name, tensor in given if tensor is not None)
    )


def apply_experts(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """`fused_moe_w4a16` with its options in one object, as the custom op carries them."""
    check_call(hidden_states, experts, topk_weights, topk_ids, expert_map, options)
    if not topk_ids.numel():
        return hidden_states.new_zeros(hidden_states.shape)
    meta = experts.meta
    given = hidden_states.dtype
    x = hidden_states if given == meta.dtype else hidden_states.to(meta.dtype)
    out = load_backend(meta.backend).apply(x, experts, topk_weights, topk_ids, expert_map, options)
    return out if given == meta.dtype else out.to(given)


def _number(name: str, value: float) -> float:
    """A float of any number: kernels are compiled for the kinds of their arguments."""
    if not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"fused_moe_w4a16: {name} must be a number, got {value!r}")
    return float(value)


def fused_moe_w4a16(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    batch_invariant: bool = False,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """Sum over slots of topk_weights * w2(activation(w13(hidden_states))), on 4-bit experts. Returns [M, H].

    hidden_states  [M, H], BF16, FP16 or FP32; the result has its dtype. Where that differs from the dtype the experts
                   were prepared for, the layer computes in the latter.
    topk_weights   floating [M, top_k]; topk_ids int32 or int64 [M, top_k]. Neither is written to. An id that is -1 or
                   names no expert here is not routed; a row with no routed slot is exactly 0.
    activation     "silu", "gelu", "gelu_tanh", "relu2" or "swigluoai" (clamped SwiGLU with swiglu_alpha, swiglu_limit)
    expert_map     int [global_experts]: global id -> id on this rank, or -1 (expert parallelism)
    batch_invariant  a row's bits do not depend on the other rows of the call
    apply_router_weight_on_input  the router's weight multiplies the expert's input instead of its output

    Equal calls give equal bits, from run to run and from process to process. Raises ValueError on values that do not
    fit, TypeError on unknown keywords.
    """
    alpha, limit = _number("swiglu_alpha", swiglu_alpha), _number("swiglu_limit", swiglu_limit)
    if limit <= 0:
        raise ValueError(f"fused_moe_w4a16: swiglu_limit must be above 0 (inf: none), got {limit}")
    options = CallOptions(activation, alpha, limit, apply_router_weight_on_input, batch_invariant)
    return apply_experts(hidden_states, experts, topk_weights, topk_ids, expert_map, options)
