"""One layer of DiffusionGemma as few kernels; its encoder and its decoder share it and differ in attention alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_ext.integrations.expert_layouts import recognise_pointwise
from vllm_ext.integrations.qkv import joined_weight
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.ops.fused import activation_and_mul, norm_chain, rms_norm, softmax_topk


@dataclass
class FusedLayer:
    """A layer's module with the joined matrices its kernels read."""

    module: Any
    qkv: torch.Tensor
    gate_up: torch.Tensor
    router_weight: torch.Tensor
    heads: int
    kv_heads: int
    dim: int
    kind: str

    @classmethod
    def of(cls, module: Any) -> FusedLayer:
        """The layer over `module`'s own parameters; nothing is copied where projections are joined already."""
        attention, router = module.self_attn, module.router
        linears = [m for m in (attention.q_proj, attention.k_proj, attention.v_proj) if m is not None]
        dim = attention.head_dim
        return cls(
            module=module,
            qkv=joined_weight(linears),
            gate_up=joined_weight([module.mlp.gate_proj, module.mlp.up_proj]),
            router_weight=router.scale.detach().float() * router.scalar_root_size,
            heads=attention.q_proj.out_features // dim,
            kv_heads=attention.k_proj.out_features // dim,
            dim=dim,
            kind=attention.layer_type,
        )


class Watched:
    """Tells when weights were moved, replaced or written to since the last look: what was derived from them is stale.

    A look takes some 0.3 us a tensor, so once a canvas is cheap.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.slots: list[tuple[dict[str, Any], str]] = [
            (holder, key)
            for module in modules
            for part in module.modules()
            for holder in (part._parameters, part._buffers)
            for key in holder
        ]
        self.seen = self._look()

    def changed(self) -> bool:
        """Whether any of them is not what it was at the last call."""
        now = self._look()
        before, self.seen = self.seen, now
        return now != before

    def _look(self) -> list[tuple[int, torch.dtype, int] | None]:
        found = (holder.get(key) for holder, key in self.slots)
        return [None if t is None else (t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for t in found]


def unsupported(layers: Any) -> str | None:
    """Why a stack of layers cannot be fused, or None."""
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        linears = [attention.q_proj, attention.k_proj, attention.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj]
        if any(type(linear) is not nn.Linear for linear in linears):
            return f"layer {index} has projections that are no plain linear layers; merge adapters first"
        if any(linear.bias is not None for linear in linears):
            return f"layer {index} has biases"
    if recognise_pointwise(layers[0].mlp.act_fn) is None:
        return "its activation is unknown"
    if len({parameter.device for layer in layers for parameter in layer.parameters()}) > 1:
        return "its layers are spread over several devices"
    return None


class LayerStack:
    """The layers of an encoder or a decoder, run over rows [B * L, H]."""

    def __init__(self, layers: Any, final_norm: Any, config: Any) -> None:
        self.eps: float = config.rms_norm_eps
        self.top_k: int = config.top_k_experts
        options = recognise_pointwise(layers[0].mlp.act_fn)
        assert options is not None
        self.activation = options.activation
        self.layers = [FusedLayer.of(layer) for layer in layers]
        self.final_norm = final_norm

    def run(self, h: torch.Tensor, attend: Callable[[int, FusedLayer, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The final norm of all layers' output. `attend` takes a layer's normed rows to its heads' output rows."""
        x = rms_norm(h, self.layers[0].module.input_layernorm.weight, self.eps)
        following = [layer.module.input_layernorm.weight for layer in self.layers[1:]] + [self.final_norm.weight]
        for index, (layer, weight) in enumerate(zip(self.layers, following, strict=True)):
            h, x = self._layer(layer, h, attend(index, layer, x), weight)
        return x

    def _layer(
        self, layer: FusedLayer, h: torch.Tensor, attended: torch.Tensor, next_weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module: Any = layer.module
        h, dense_in, expert_in, router_in = norm_chain(
            F.linear(attended, module.self_attn.o_proj.weight),
            h,
            module.post_attention_layernorm.weight,
            (
                module.pre_feedforward_layernorm.weight,
                module.pre_feedforward_layernorm_2.weight,
                layer.router_weight,
            ),
            self.eps,
        )
        scores = F.linear(router_in, module.router.proj.weight)
        weights, ids = softmax_topk(scores, self.top_k, module.router.per_expert_scale)
        routed = _experts(module.experts, expert_in, ids, weights)
        dense = activation_and_mul(F.linear(dense_in, layer.gate_up), self.activation)
        h, x = norm_chain(
            F.linear(dense, module.mlp.down_proj.weight),
            h,
            module.post_feedforward_layernorm.weight,
            (next_weight,),
            self.eps,
            branches=(module.post_feedforward_layernorm_1.weight, routed, module.post_feedforward_layernorm_2.weight),
            scale=module.layer_scalar,
        )
        return h, x


def _experts(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if isinstance(module, QuantizedExperts):
        return module.routed(x, ids, weights)
    out: torch.Tensor = module(x, ids.long(), weights)
    return out
