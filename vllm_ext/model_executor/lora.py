"""LoRA beside 4-bit experts: adapters of attention and dense layers work, adapters of routed experts are refused."""

from __future__ import annotations

from typing import Any

from vllm_ext._wrapping import wrap_once


def leave_experts_out(model_manager: Any) -> None:
    """Let vLLM's LoRA manager know that 4-bit experts take no adapter; it would otherwise fail on every adapter.

    An adapter that does target experts is then refused by vLLM, with the list of modules that take one.
    """

    @wrap_once(model_manager, "get_supported_lora_modules")
    def without_experts(supported: Any, model: Any) -> list[str]:
        from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod

        ours = set()
        for name, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), (AtLoadMoEMethod, PackedMoEMethod)):
                ours.add(name.removesuffix(".routed_experts").rpartition(".")[-1])
        return [suffix for suffix in supported(model) if suffix not in ours]
