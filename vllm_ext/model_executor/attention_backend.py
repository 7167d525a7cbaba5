"""`--attention-backend ha_npu`: make the name known to vLLM's enum, whose value nothing ever instantiates.

The name selects linear-attention prefill only, so it is turned into an entry of `additional_config` before vLLM builds
its configuration (see `engine_args`); full attention stays vLLM's own choice.
"""

from __future__ import annotations

from typing import Any

from vllm_ext.compat import add_enum_member

BACKEND_NAME = "HA_NPU"
CLASS_PATH = "vllm_ext.model_executor.attention_backend.HaNpuBackend"


class HaNpuBackend:
    """Target of the enum member. It is not a full-attention backend and cannot be built as one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "attention backend ha_npu: it serves linear-attention prefill (GDN, KDA) only and cannot be selected for a "
            "full-attention layer; pass it as --attention-backend ha_npu, where vLLM picks the full-attention backend"
        )


def add_backend_name(registry: Any) -> None:
    """Add HA_NPU to `registry.AttentionBackendEnum`, so that it parses and is listed among the valid names."""
    add_enum_member(registry.AttentionBackendEnum, BACKEND_NAME, CLASS_PATH)


def is_ha_npu(backend: object) -> bool:
    """Whether `backend` (a string in any case, an enum member or None) names ha_npu."""
    name = backend if isinstance(backend, str) else getattr(backend, "name", "")
    return name.upper() == BACKEND_NAME
