"""What is done to vLLM's modules once they are imported; called by `plugin` with the module."""

from __future__ import annotations

import functools
from typing import Any

_MARK = "_vllm_ext_wrapped"


def register_quantization(quantization: Any) -> None:
    """Register w4a16-grouped with vLLM's quantisation registry, unless the name exists in-tree."""
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig
    from vllm_ext.quantization import QUANT_METHOD

    if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(QUANT_METHOD)(W4A16GroupedConfig)


def wrap_load_model(base_loader: Any) -> None:
    """Check a model right after every loader has filled it: the first moment at which all layers are known."""
    cls = base_loader.BaseModelLoader
    if getattr(cls, _MARK, False):
        return
    load_model = cls.load_model

    @functools.wraps(load_model)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, *args, **kwargs)
        call = {**dict(zip(("vllm_config", "model_config"), args, strict=False)), **kwargs}
        # A speculative draft is loaded the same way, and may well have neither experts nor linear attention.
        if call["model_config"] is call["vllm_config"].model_config:
            after_load(call["vllm_config"], model)
        return model

    cls.load_model = wrapped
    setattr(cls, _MARK, True)


def after_load(vllm_config: Any, model: Any) -> None:
    """Refuse a model in which the chosen method found nothing to quantise; warn where ha_npu has nothing to serve."""
    from vllm_ext.model_executor.linear_attention_hooks import warn_if_unserved
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig

    config = getattr(vllm_config, "quant_config", None)
    if isinstance(config, W4A16GroupedConfig):
        config.check_loaded(model)
    warn_if_unserved(vllm_config, model)
