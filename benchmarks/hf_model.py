"""DiffusionGemma with random weights in transformers' own class: at its true shape, or tiny for a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """The sizes that decide time; `true` is DiffusionGemma-26B-A4B's own configuration."""

    name: str
    layers: int
    hidden: int
    dense: int
    inter: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    global_kv_heads: int
    head_dim: int
    global_head_dim: int
    vocabulary: int
    canvas: int
    window: int


SIZES = {
    size.name: size
    for size in (
        Size("true", 30, 2816, 2112, 704, 128, 8, 16, 8, 2, 256, 512, 262144, 256, 1024),
        Size("shallow", 2, 2816, 2112, 704, 128, 8, 16, 8, 2, 256, 512, 262144, 256, 1024),
        Size("short", 6, 2816, 2112, 704, 128, 8, 16, 8, 2, 256, 512, 262144, 256, 1024),
        Size("tiny", 3, 64, 48, 24, 8, 2, 4, 2, 1, 16, 32, 512, 16, 32),
    )
}


def config(size: Size) -> Any:
    """The model's configuration; sliding attention in five layers of six, and in all but the last of a short model."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig

    kinds = [
        "full_attention" if (i + 1) % 6 == 0 or i + 1 == size.layers else "sliding_attention"
        for i in range(size.layers)
    ]
    text = DiffusionGemmaTextConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.dense,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim, global_head_dim=size.global_head_dim, num_global_key_value_heads=size.global_kv_heads,
        num_experts=size.experts, top_k_experts=size.top_k, moe_intermediate_size=size.inter,
        sliding_window=size.window, layer_types=kinds,
    )  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    last = size.vocabulary - 1
    return DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=size.canvas,
        boi_token_id=last - 2, eoi_token_id=last - 1, image_token_id=last,
    )  # fmt: skip


@torch.no_grad()
def random_model(size: Size, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """The model in eval mode, made where it runs, in seconds: products of unit gain, attention scores of unit variance.

    What a layer adds to the residual is scaled by the root of the number of additions, as trained models have it (GPT-2
    begins so). Without, tokens grow alike, a third of the experts is never hit, and a rounding grows with every layer.
    """
    from transformers import DiffusionGemmaForBlockDiffusion

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            skeleton = DiffusionGemmaForBlockDiffusion(config(size))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for name, module in skeleton.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _filled(f"{name}.{key}", parameter, size, dtype, generator)
            module._parameters[key] = made[id(parameter)]
        _real_buffers(module, device, dtype)
    return skeleton.eval()


def _filled(
    name: str, parameter: torch.Tensor, size: Size, dtype: torch.dtype, generator: torch.Generator
) -> nn.Parameter:
    value = torch.empty(parameter.shape, device=generator.device, dtype=dtype)
    if parameter.dim() < 2:
        gain = 1.0
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            # The model divides scores by nothing: with weights of one they deviate by the root of the head's size.
            gain = parameter.shape[0] ** -0.25
        elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            gain = (2 * size.layers) ** -0.5
        value.normal_(1.0, 0.05, generator=generator).mul_(gain)
    else:
        gain = 0.02 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[-1])
        value.normal_(0.0, gain, generator=generator)
    return nn.Parameter(value, requires_grad=False)


def _real_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Buffers hold what a constructor computes; on the meta device it computed nothing."""
    if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
        fresh = type(module)(module.config)
        for key, computed in fresh.named_buffers():
            module._buffers[key] = computed.to(device)
        return
    for key, buffer in module._buffers.items():
        if buffer is None or buffer.device.type != "meta":
            continue
        value = getattr(module, "scalar_embed_scale", 1.0) if key == "embed_scale" else 1.0
        kind = dtype if buffer.is_floating_point() else buffer.dtype
        module._buffers[key] = torch.full(buffer.shape, value, device=device, dtype=kind)
