"""What is done to vLLM's modules once they are imported; called by `plugin` with the module."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from vllm_ext._import_hooks import when_imported
from vllm_ext._wrapping import wrap_once

_CONFIG_MODULE = "vllm_ext.model_executor.quantization"


def register_quantization(quantization: Any) -> None:
    """Register w4a16-grouped with vLLM's quantisation registry, unless the name exists in-tree.

    Our module may be the one whose import brought vLLM's registry in (a process that unpickles a configuration first
    does that); then it is only half there, and registering waits for its end.
    """

    def add(ours: Any) -> None:
        if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
            quantization.register_quantization_config(QUANT_METHOD)(ours.W4A16GroupedConfig)

    from vllm_ext.quantization import QUANT_METHOD

    when_imported(_CONFIG_MODULE, add)
    if _CONFIG_MODULE not in sys.modules:
        import_module(_CONFIG_MODULE)


def wrap_load_model(base_loader: Any) -> None:
    """Look at what a loader will read, and check the model once it is filled: the first moment all layers are known."""

    @wrap_once(base_loader.BaseModelLoader, "load_model")
    def checked(load_model: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(("vllm_config", "model_config"), args, strict=False)), **kwargs}
        vllm_config = call.get("vllm_config")
        # A loader called in another way than the versions tried call it goes on without our checks.
        target = vllm_config is not None and call.get("model_config") is getattr(vllm_config, "model_config", None)
        if target:
            self.load_config = before_load(vllm_config, self.load_config)
        model = load_model(self, *args, **kwargs)
        # A speculative draft is loaded the same way, and may well have neither experts nor linear attention.
        if target:
            after_load(vllm_config, model)
        return model


def before_load(vllm_config: Any, load_config: Any) -> Any:
    """The loader's configuration: a packed checkpoint is kept to safetensors."""
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig

    config = getattr(vllm_config, "quant_config", None)
    if isinstance(config, W4A16GroupedConfig):
        return config.safetensors_only(load_config)
    return load_config


def after_load(vllm_config: Any, model: Any) -> None:
    """Refuse a model in which the chosen method found nothing to quantise; warn where ha_npu has nothing to serve."""
    from vllm_ext.model_executor.linear_attention_hooks import warn_if_unserved
    from vllm_ext.model_executor.quantization import W4A16GroupedConfig

    config = getattr(vllm_config, "quant_config", None)
    if isinstance(config, W4A16GroupedConfig):
        config.check_loaded(model, whole=vllm_config.parallel_config.pipeline_parallel_size == 1)
    warn_if_unserved(vllm_config, model)
