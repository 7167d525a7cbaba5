"""DiffusionGemma's decoder as few kernels: the function its Hugging Face modules compute, over the same parameters.

A layer is seventeen launches: five products, attention, the experts, and one kernel for all that stands between two of
them. Keys and values of the canvas lie before those of the prompt, so that their places never move: with rotated keys
and an attention that looks both ways, order does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_ext.integrations.fused_layers import FusedLayer, LayerStack, unsupported
from vllm_ext.integrations.qkv import joined_weight
from vllm_ext.ops.fused import activation_and_mul, add_rms_norm, norm_rope_heads, probabilities, rms_norm

_CAPACITY_STEP = 256


def supports(model: Any) -> str | None:
    """Why `CanvasDecoder` cannot run `model`, or None."""
    decoder = getattr(getattr(model, "model", None), "decoder", None)
    if decoder is None or not hasattr(model, "_denoising_step"):
        return f"{type(model).__name__} has no denoising decoder"
    return unsupported(decoder.layers)


class CanvasDecoder:
    """Logits of a canvas. `load_prefix` once a canvas, then `logits` once a denoising step; no gradients.

    processed, log_sum  the previous step's logits as [B * L, V] in the model's dtype and their log-sum-exp: what a step
                        is conditioned on. log_sum inf (as `start_canvas` sets it) conditions it on nothing.
    """

    def __init__(self, model: Any) -> None:
        reason = supports(model)
        if reason is not None:
            raise ValueError(f"CanvasDecoder: {reason}")
        self.model = model
        decoder = model.model.decoder
        self.decoder = decoder
        self.stack = LayerStack(decoder.layers, decoder.norm, decoder.text_config)
        conditioning = decoder.self_conditioning
        self.conditioning_gate_up = joined_weight([conditioning.gate_proj, conditioning.up_proj])
        self.dtype: torch.dtype = decoder.embed_tokens.weight.dtype
        self.device: torch.device = decoder.embed_tokens.weight.device
        self.softcap: float = float(model.final_logit_softcapping)
        self.batch = self.length = 0
        self.capacity: dict[str, int] = {}
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.masks: dict[str, torch.Tensor] = {}

    def load_prefix(self, past_key_values: Any, masks: dict[str, torch.Tensor | None], batch: int, length: int) -> bool:
        """Take over the prompt's keys and values and what of them is padding. True where buffers had to be made anew.

        masks: by layer kind, boolean or additive [B, 1, L, keys], or None where nothing is masked.
        """
        prefix = [_valid(past_key_values.layers[i]) for i in range(len(self.stack.layers))]
        needed: dict[str, int] = {}
        for layer, (key, _) in zip(self.stack.layers, prefix, strict=True):
            needed[layer.kind] = max(needed.get(layer.kind, 0), key.shape[2])
        fits = all(self.capacity.get(kind, -1) >= count for kind, count in needed.items())
        fresh = (batch, length) != (self.batch, self.length) or not fits
        if fresh:
            self._allocate(batch, length, needed)
        for index, (key, value) in enumerate(prefix):
            end = length + key.shape[2]
            self.keys[index][:, :, length:end].copy_(key)
            self.values[index][:, :, length:end].copy_(value)
        for kind, count in needed.items():
            bias = self.masks[kind]
            bias.fill_(float("-inf"))
            bias[..., : length + count] = 0
            given = masks.get(kind)
            if given is not None:
                seen = given[:, :1, :1, :count]
                seen = seen if seen.dtype == torch.bool else seen == 0
                bias[..., length : length + count].masked_fill_(~seen, float("-inf"))
        return fresh

    def _allocate(self, batch: int, length: int, needed: dict[str, int]) -> None:
        self.batch, self.length = batch, length
        self.capacity = {
            kind: -(-max(count, self.capacity.get(kind, 0)) // _CAPACITY_STEP) * _CAPACITY_STEP
            for kind, count in needed.items()
        }

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        self.keys, self.values = (
            [zeros(batch, x.kv_heads, length + self.capacity[x.kind], x.dim) for x in self.stack.layers]
            for _ in range(2)
        )
        self.masks = {kind: zeros(batch, 1, 1, length + count) for kind, count in self.capacity.items()}
        vocabulary = self.decoder.embed_tokens.weight.shape[0]
        self.processed = zeros(batch * length, vocabulary)
        self.probabilities = zeros(batch * length, vocabulary)
        self.log_sum = torch.full((batch * length,), float("inf"), device=self.device)

    def start_canvas(self) -> None:
        """The next step is conditioned on nothing."""
        self.log_sum.fill_(float("inf"))

    def condition_on(self, logits: torch.Tensor) -> None:
        """The next step is conditioned on `logits` [B, L, V]."""
        self.processed.copy_(logits.reshape(self.processed.shape))
        self.log_sum.copy_(torch.logsumexp(self.processed.float(), -1))

    @torch.no_grad()
    def logits(self, canvas: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[B * L, V] in the model's dtype, before the final soft cap. canvas, position_ids int [B or 1, L]."""
        embed = self.decoder.embed_tokens
        soft = probabilities(self.processed, self.log_sum, self.probabilities) @ embed.weight
        soft = soft * embed.embed_scale.to(self.dtype)
        h = self._conditioned(embed(canvas).view(soft.shape), soft)
        kinds = sorted({layer.kind for layer in self.stack.layers})
        angles = {kind: self.decoder.rotary_emb(h, position_ids, kind) for kind in kinds}
        x = self.stack.run(h, lambda index, layer, x: self._attend(index, layer, x, angles[layer.kind]))
        return F.linear(x, self.model.lm_head.weight)

    def _conditioned(self, embeds: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        module = self.decoder.self_conditioning
        normed = rms_norm(soft, module.pre_norm.weight, self.stack.eps)
        inner = activation_and_mul(F.linear(normed, self.conditioning_gate_up), self.stack.activation)
        return add_rms_norm(F.linear(inner, module.down_proj.weight), embeds, None, self.stack.eps)[0]

    def _attend(
        self, index: int, layer: FusedLayer, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        attention: Any = layer.module.self_attn
        batch, length = self.batch, self.length
        query = torch.empty(batch, layer.heads, length, layer.dim, dtype=x.dtype, device=x.device)
        key, value = self.keys[index], self.values[index]
        norm_rope_heads(
            F.linear(x, layer.qkv),
            query,
            key,
            value,
            attention.q_norm.weight,
            attention.k_norm.weight,
            *angles,
            eps=self.stack.eps,
        )
        # The mask is the same for every query, so the heads that share keys are rows of one attention: no copies.
        rows = query.view(batch, layer.kv_heads, -1, layer.dim)
        mask = self.masks[layer.kind].expand(batch, layer.kv_heads, rows.shape[2], -1)
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=attention.scaling)
        return out.reshape(batch, layer.heads, length, layer.dim).transpose(1, 2).reshape(batch * length, -1)


def _valid(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache's layer that hold tokens: static caches are longer than what they hold."""
    keys, values = layer.keys, layer.values
    if getattr(layer, "is_compileable", False):
        count = min(int(layer.get_seq_length()), keys.shape[2])
        keys, values = keys[:, :, :count], values[:, :, :count]
    return keys, values
