"""The options users pass to vLLM under `additional_config["vllm_ext"]`. Pure: imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMESPACE = "vllm_ext"
LINEAR_ATTN_BACKENDS = ("ha_npu",)
MOE_BACKENDS = ("auto", "reference", "cpu", "triton", "npu")
ON_KERNEL_ERROR = ("raise", "fallback")

SCHEME_KEYS = ("group_size_w13", "group_size_w2", "symmetric", "zero_point", "method", "ignore")
_OTHER_KEYS = ("linear_attn_backend", "moe_backend", "batch_invariant", "on_kernel_error")
# Names that no other reader of `additional_config` has: outside our namespace they are there by mistake.
_OURS_ALONE = ("group_size_w13", "group_size_w2", "linear_attn_backend", "on_kernel_error")


@dataclass(frozen=True)
class Options:
    """Validated options.

    scheme               keys of the quantisation scheme given by the user, checked by `quantization.scheme`
    linear_attn_backend  "ha_npu" or None (vLLM's own)
    moe_backend          a backend of `ops.moe`, "auto" by default
    batch_invariant      a row's bits do not depend on the other rows of the batch
    on_kernel_error      "raise" or "fallback": what the linear-attention prefill does when it refuses an input
    """

    scheme: Mapping[str, Any] = field(default_factory=dict)
    linear_attn_backend: str | None = None
    moe_backend: str = "auto"
    batch_invariant: bool = False
    on_kernel_error: str = "raise"


def _choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"vllm_ext option {key!r}: got {value!r}, allowed are {', '.join(map(repr, allowed))}")


def _refuse_misplaced(additional_config: Mapping[str, Any]) -> None:
    """Raise ValueError on options that stand where nobody reads them, and would be without effect."""
    respelt = sorted(
        key
        for key in map(str, additional_config)
        if key != NAMESPACE and key.lower().replace("-", "").replace("_", "") == NAMESPACE.replace("_", "")
    )
    outside = sorted(set(additional_config) & set(_OURS_ALONE))
    if respelt or outside:
        raise ValueError(
            f"additional_config: {', '.join(map(repr, respelt + outside))} is read by nobody there; vllm_ext's options "
            f'stand in an object under "{NAMESPACE}": {{"{NAMESPACE}": {{"group_size_w13": 32}}}}'
        )


def parse_options(additional_config: object) -> Options:
    """Read `additional_config["vllm_ext"]`.

    Raises ValueError for an unknown key or value, naming what is allowed.
    """
    if isinstance(additional_config, Mapping):
        _refuse_misplaced(additional_config)
    given = additional_config.get(NAMESPACE) if isinstance(additional_config, Mapping) else None
    if given is None:
        return Options()
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["{NAMESPACE}"]: expected an object of options, got {given!r}')
    allowed = (*SCHEME_KEYS, *_OTHER_KEYS)
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise ValueError(
            f'additional_config["{NAMESPACE}"]: unknown option {", ".join(map(repr, unknown))}; '
            f"allowed are {', '.join(allowed)}"
        )
    backend = given.get("linear_attn_backend")
    if backend is not None:
        _choice("linear_attn_backend", backend, LINEAR_ATTN_BACKENDS)
    invariant = given.get("batch_invariant", False)
    if not isinstance(invariant, bool):
        raise ValueError(f"vllm_ext option 'batch_invariant': expected true or false, got {invariant!r}")
    moe_backend = given.get("moe_backend", "auto")
    _choice("moe_backend", moe_backend, MOE_BACKENDS)
    on_error = given.get("on_kernel_error", "raise")
    _choice("on_kernel_error", on_error, ON_KERNEL_ERROR)
    scheme = {key: given[key] for key in SCHEME_KEYS if key in given}
    return Options(scheme, backend, moe_backend, invariant, on_error)
