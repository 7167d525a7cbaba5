"""How vLLM's linear-attention layers come to call `linear_attention`: changes to vLLM's modules once they are imported.

Each layer is looked at when it is built: with ha_npu in the engine's configuration it gets a `LayerPrefill`, otherwise
nothing. vLLM's Qwen layer holds its kernel as a submodule, which is replaced on that one layer. Elsewhere the kernel is
a function shared by all layers of the process, perhaps of two engines; there the layer's method that leads to the call
notes which layer is running, and the function is served by us only if that layer has a `LayerPrefill`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

from vllm_ext import compat
from vllm_ext._wrapping import wrap_once

_ATTRIBUTE = "_vllm_ext_prefill"
_running = threading.local()


def _no_layer() -> None:
    return None


def is_served(layer: Any) -> bool:
    """Whether ha_npu serves a layer's prefill."""
    return hasattr(layer, _ATTRIBUTE)


def hook_qwen_layer(module: Any) -> None:
    """Qwen3-Next and Qwen3.5."""
    cls = module.QwenGatedDeltaNetAttention
    _prefer_triton(module)
    _note_running(cls, "rearrange_mixed_qkv", encloses_call=False)

    def attach(layer: Any) -> None:
        prefill = _make_prefill(layer, "gdn", layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        if prefill is not None:
            from vllm_ext.model_executor.linear_attention import GatedDeltaRulePrefill

            layer.chunk_gated_delta_rule = GatedDeltaRulePrefill(prefill, layer.chunk_gated_delta_rule)

    _after_init(cls, attach)


def hook_olmo_layer(module: Any) -> None:
    """OLMo-hybrid: calls a function of its module."""
    cls = module.OlmoHybridGatedDeltaNetAttention
    _note_running(cls, "_forward_core", encloses_call=True)

    def serve(prefill: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
        from vllm_ext.model_executor.linear_attention import GatedDeltaRulePrefill

        return GatedDeltaRulePrefill(prefill, stock)(**kwargs)

    _serve_function(module, "chunk_gated_delta_rule", serve)
    _after_init(
        cls,
        lambda layer: _make_prefill(
            layer, "gdn", layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        ),
    )


def hook_kimi_layer(module: Any) -> None:
    """Kimi-Linear, whose kernel applies the gate (with or without a lower bound) and, since 0.32, the step size's.

    0.23 calls a function of this module; later versions import it at the call (`hook_kda_kernels`).
    """
    cls = module.KimiGatedDeltaNetAttention
    _note_running(cls, "_forward", encloses_call=True)
    if hasattr(module, "chunk_kda_with_fused_gate"):
        hook_kda_kernels(module)
    _after_init(
        cls,
        lambda layer: _make_prefill(layer, "kda", layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim),
    )


def hook_kda_kernels(module: Any) -> None:
    """A module that offers `chunk_kda_with_fused_gate`."""

    def serve(prefill: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
        from vllm_ext.model_executor.linear_attention import kda_with_fused_gate

        return kda_with_fused_gate(prefill, stock, **kwargs)

    _serve_function(module, "chunk_kda_with_fused_gate", serve)


def hook_bailing_layer(module: Any) -> None:
    """Ling 3.0 (Bailing MoE v3): KDA whose gate the layer applies itself; calls a function of its module."""
    cls = module.BailingMoeV3KimiDeltaAttention
    _note_running(cls, "_forward", encloses_call=True)

    def serve(prefill: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
        from vllm_ext.model_executor.linear_attention import kda

        return kda(prefill, stock, **kwargs)

    _serve_function(module, "chunk_kda", serve)
    _after_init(
        cls,
        lambda layer: _make_prefill(layer, "kda", layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim),
    )


def hook_cpu_kernels(module: Any) -> None:
    """`vllm._custom_ops`: what the CPU's GDN layers call."""

    def serve(prefill: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
        from vllm_ext.model_executor.linear_attention import gated_delta_rule_on_cpu

        return gated_delta_rule_on_cpu(prefill, stock, **kwargs)

    if hasattr(module, "chunk_gated_delta_rule_cpu"):
        _serve_function(module, "chunk_gated_delta_rule_cpu", serve)


def warn_if_unserved(vllm_config: Any, model: Any) -> None:
    """One warning when ha_npu was asked for and the loaded model has no layer that it serves."""
    if not _options(vllm_config).linear_attn_backend:
        return
    if any(is_served(layer) for layer in model.modules()):
        return
    from vllm.logger import init_logger

    others = sorted({type(layer).__name__ for layer in model.modules() if compat.is_linear_attention(layer)})
    init_logger("vllm.vllm_ext.linear_attention").warning_once(
        "--attention-backend ha_npu has no effect on %s: %s",
        type(model).__name__,
        f"its linear-attention layers ({', '.join(others)}) are of a kind it does not serve"
        if others
        else "it has no linear-attention (GDN or KDA) layer on this rank; full attention stays vLLM's own choice",
    )


def _options(vllm_config: Any) -> Any:
    from vllm_ext.options import parse_options

    return parse_options(vllm_config.additional_config)


def _after_init(cls: Any, attach: Callable[[Any], Any]) -> None:
    """Run `attach` on each new layer."""

    @wrap_once(cls, "__init__")
    def looked_at(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        attach(self)


def _make_prefill(layer: Any, op: str, heads: int, value_heads: int, key_dim: int, value_dim: int) -> Any:
    """Give the layer its `LayerPrefill` if ha_npu was asked for; head counts are the whole model's."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    options = _options(config)
    if not options.linear_attn_backend:
        return None
    import torch
    from vllm.platforms import current_platform

    from vllm_ext.model_executor.linear_attention_prefill import make_layer_prefill
    from vllm_ext.ops.linear_attention.problem import Problem

    problem = Problem(
        op=op,
        batch=1,
        num_tokens=0,
        num_heads=heads // layer.tp_size,
        num_value_heads=value_heads // layer.tp_size,
        key_dim=key_dim,
        value_dim=value_dim,
        num_sequences=0,
        varlen=True,
        dtype=layer.model_config.dtype,
        state_dtype=layer.get_state_dtype()[-1],
        device=torch.device(current_platform.device_type),
    )
    prefill = make_layer_prefill(
        layer.prefix,
        problem,
        options.on_kernel_error == "fallback",
        num_tokens=config.scheduler_config.max_num_batched_tokens,
    )
    if prefill is not None:
        setattr(layer, _ATTRIBUTE, prefill)
    return prefill


def _note_running(cls: Any, method: str, *, encloses_call: bool) -> None:
    """Note each layer that enters `method`, which leads to the kernel's call in the same thread.

    Held weakly: the note must not keep a finished engine's weights alive.
    """

    @wrap_once(cls, method, through=compat.wrap_beneath_graph_break)
    def noted(function: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_running, "layer", _no_layer)
        _running.layer = weakref.ref(self)
        try:
            return function(self, *args, **kwargs)
        finally:
            if encloses_call:
                _running.layer = before


def _serve_function(module: Any, name: str, serve: Callable[..., Any]) -> None:
    """Replace a kernel of `module`: calls from a layer with a `LayerPrefill` go to serve(prefill, stock, **kwargs)."""
    names = tuple(inspect.signature(getattr(module, name)).parameters)

    @wrap_once(module, name)
    def served(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layer = getattr(_running, "layer", _no_layer)()
        prefill = getattr(layer, _ATTRIBUTE, None)
        if prefill is None:
            return stock(*args, **kwargs)
        return serve(prefill, stock, **dict(zip(names, args, strict=False)), **kwargs)


def _prefer_triton(module: Any) -> None:
    """Under ha_npu, keep vLLM from preparing for, and announcing, a GDN prefill kernel that then is not called."""

    @wrap_once(module, "_resolve_gdn_prefill_backend")
    def resolved(resolve: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _options(vllm_config).linear_attn_backend:
            return "triton", "triton"
        return resolve(vllm_config, *args, **kwargs)

    @wrap_once(module, "_log_gdn_backend_decision")
    def announced(announce: Callable[..., None], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not _options(vllm_config).linear_attn_backend:
            announce(vllm_config, *args, **kwargs)
