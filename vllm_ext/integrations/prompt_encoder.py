"""DiffusionGemma's text encoder as few kernels: it fills the same cache with the same keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_ext.integrations.fused_layers import FusedLayer, LayerStack, Watched, unsupported
from vllm_ext.ops.fused import norm_rope_heads

_KNOWN = frozenset(("return_dict", "use_cache"))


class PromptEncoder:
    """Takes the place of the encoder's `language_model.forward`; whatever it does not know goes to that."""

    def __init__(self, text_model: Any) -> None:
        self.text_model = text_model
        self.stock = text_model.forward
        self._build()

    def _build(self) -> None:
        model = self.text_model
        usable = unsupported(model.layers) is None
        self.stack: Any = LayerStack(model.layers, model.norm, model.config) if usable else None
        self.watched = Watched(model)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """A BaseModelOutputWithPast."""
        embeds, masks = inputs.get("inputs_embeds"), inputs.get("attention_mask")
        cache, positions = inputs.get("past_key_values"), inputs.get("position_ids")
        extra = (
            set(inputs) - _KNOWN - {"input_ids", "inputs_embeds", "attention_mask", "past_key_values", "position_ids"}
        )
        config = self.text_model.config
        plain = not (
            args or extra or config.output_attentions or config.output_hidden_states or torch.is_grad_enabled()
        )
        if not plain or cache is None or positions is None or not isinstance(masks, dict) or not _are_4d(masks):
            return self.stock(*args, **inputs)
        if self.watched.changed():
            self._build()
        if self.stack is None:
            return self.stock(*args, **inputs)
        if embeds is None:
            embeds = self.text_model.embed_tokens(inputs["input_ids"])
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(
            last_hidden_state=self._run(embeds, masks, cache, positions), past_key_values=cache
        )

    def _run(self, embeds: torch.Tensor, masks: dict[str, Any], cache: Any, positions: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = embeds.shape
        kinds = sorted({layer.kind for layer in self.stack.layers})
        angles = {kind: self.text_model.rotary_emb(embeds, positions, kind) for kind in kinds}

        def attend(index: int, layer: FusedLayer, x: torch.Tensor) -> torch.Tensor:
            attention: Any = layer.module.self_attn
            query = x.new_empty(batch, layer.heads, length, layer.dim)
            key, value = (x.new_empty(batch, layer.kv_heads, length, layer.dim) for _ in range(2))
            q_weight, k_weight = attention.q_norm.weight, attention.k_norm.weight
            qkv = F.linear(x, layer.qkv)
            cos, sin = angles[layer.kind]
            norm_rope_heads(qkv, query, key, value, q_weight, k_weight, cos, sin, self.stack.eps)
            key, value = cache.update(key, value, attention.layer_idx)
            mask = masks[layer.kind]
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None and length > 1 and attention.is_causal,
                scale=attention.scaling, enable_gqa=True,
            )  # fmt: skip
            return out.transpose(1, 2).reshape(batch * length, -1)

        return self.stack.run(embeds.reshape(batch * length, hidden), attend).view(embeds.shape)


def _are_4d(masks: dict[str, Any]) -> bool:
    return all(mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 4) for mask in masks.values())
