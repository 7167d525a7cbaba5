"""Whole tiny models of transformers' own classes with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

COMMON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def seeded(model: nn.Module, seed: int = 3) -> Any:
    """Weights of unit gain, so that every part matters to the output; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **COMMON, **HEADS, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2
    )
    return seeded(transformers.MixtralForCausalLM(config))


def qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON, **HEADS, intermediate_size=48, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2
    )
    return seeded(transformers.Qwen3MoeForCausalLM(config))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **COMMON, **HEADS, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    )
    return seeded(transformers.GptOssForCausalLM(config))


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **COMMON, **HEADS, intermediate_size=48, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, attention_chunk_size=64,
    )  # fmt: skip
    return seeded(transformers.Llama4ForCausalLM(config))


def jetmoe() -> Any:
    config = transformers.JetMoeConfig(
        **COMMON,
        intermediate_size=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        kv_channels=16,
    )
    return seeded(transformers.JetMoeForCausalLM(config))


def aria() -> Any:
    config = transformers.AriaTextConfig(
        **COMMON, **HEADS, intermediate_size=48, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    )
    return seeded(transformers.AriaTextForCausalLM(config))


def switch() -> Any:
    config = transformers.SwitchTransformersConfig(
        vocab_size=96, d_model=64, d_kv=16, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=64,
    )  # fmt: skip
    return seeded(transformers.SwitchTransformersForConditionalGeneration(config))


def nllb() -> Any:
    config = transformers.NllbMoeConfig(
        vocab_size=96, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_experts=4, encoder_sparse_step=1,
        decoder_sparse_step=1, expert_capacity=64, max_position_embeddings=128,
    )  # fmt: skip
    return seeded(transformers.NllbMoeForConditionalGeneration(config))


def diffusion_gemma(dtype: torch.dtype = torch.float32) -> Any:
    """DiffusionGemma's own class: three layers, sliding and full attention, encoder and decoder tied."""
    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, num_experts=8,
        top_k_experts=2, moe_intermediate_size=24, sliding_window=24, max_position_embeddings=512,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    config = transformers.DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=16, boi_token_id=317, eoi_token_id=318, image_token_id=319
    )
    model = seeded(transformers.DiffusionGemmaForBlockDiffusion(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scores of unit variance and a residual that is scaled by depth. Without, every step of a canvas makes
            # roundings some five times larger, and after six of them tokens differ.
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(parameter.shape[0] ** -0.25)
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                parameter.mul_(6**-0.5)
    return model.to(dtype)


class ListedExperts(nn.Module):
    """A block as remote code writes it: a list of expert MLPs, called one by one by the block's forward."""

    def __init__(self) -> None:
        super().__init__()
        mlp = transformers.models.llama.modeling_llama.LlamaMLP
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=48)
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(mlp(config) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[M, 64] to [M, 64]."""
        weights, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (ids == number).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out
