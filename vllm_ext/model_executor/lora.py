"""LoRA beside 4-bit experts: adapters of attention and dense layers work, adapters of routed experts are refused."""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_vllm_ext_wrapped"


def leave_experts_out(model_manager: Any) -> None:
    """Let vLLM's LoRA manager know that 4-bit experts take no adapter; it would otherwise fail on every adapter.

    An adapter that does target experts is then refused by vLLM, with the list of modules that take one.
    """
    supported = model_manager.get_supported_lora_modules
    if getattr(supported, _MARK, False):
        return

    @functools.wraps(supported)
    def wrapped(model: Any) -> list[str]:
        from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod

        ours = set()
        for name, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), (AtLoadMoEMethod, PackedMoEMethod)):
                ours.add(name.removesuffix(".routed_experts").rpartition(".")[-1])
        return [suffix for suffix in supported(model) if suffix not in ours]

    setattr(wrapped, _MARK, True)
    model_manager.get_supported_lora_modules = wrapped
