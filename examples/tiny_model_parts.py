"""Random weights of the parts that the tiny models are put together from; see tiny_models.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
Config = dict[str, Any]


class Weights:
    """Named random tensors, drawn on `device`, kept on `store`; every matrix keeps the size of what it multiplies."""

    def __init__(self, seed: int, device: str = "cpu", store: str = "cpu") -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.store = store
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        """A BF16 tensor of normal numbers."""
        drawn = {"generator": self.generator, "device": self.generator.device, "dtype": torch.float32}
        tensor = mean + std * torch.randn(*shape, **drawn)
        self.tensors[name] = tensor.to(torch.bfloat16).to(self.store)

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0) -> None:
        """A weight [rows, columns] that turns unit-size inputs into outputs of size `gain`."""
        self.normal(f"{name}.weight", rows, columns, std=gain * columns**-0.5)

    def norm(self, name: str, size: int, *, mean: float = 1.0) -> None:
        """A norm's scale, near `mean` (0 for norms that multiply by 1 + weight)."""
        self.normal(f"{name}.weight", size, std=0.1, mean=mean)

    def decay_rates(self, name: str, heads: int, shape: tuple[int, ...]) -> None:
        """log of the rate at which each head forgets, spread evenly from slow (0.01) to fast (16), in FP32."""
        rates = torch.linspace(math.log(0.01), math.log(16.0), heads)
        self.tensors[name] = rates.view(shape).contiguous()

    def fp32(self, name: str) -> None:
        """Store `name` in FP32, as released checkpoints of these models do."""
        self.tensors[name] = self.tensors[name].float()

    def swiglu(self, prefix: str, hidden: int, inter: int, names: tuple[str, str, str]) -> None:
        """Gate, up and down projections under the checkpoint's `names` for them."""
        gate, up, down = names
        self.linear(f"{prefix}.{gate}", inter, hidden)
        self.linear(f"{prefix}.{up}", inter, hidden)
        self.linear(f"{prefix}.{down}", hidden, inter, gain=0.5)


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")

COMMON: Config = {
    "torch_dtype": "bfloat16",
    "vocab_size": BYTES + len(SPECIAL_TOKENS),
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": BYTES,
    "bos_token_id": BYTES + 1,
    "eos_token_id": BYTES + 2,
}
EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SHARED_EXPERTS: Config = {
    "intermediate_size": 512,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
GDN_LAYERS: Config = {
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GDN: Config = {**GDN_LAYERS, "shared_expert_intermediate_size": 128}


def embeddings(w: Weights, c: Config, *, norm_mean: float = 1.0) -> None:
    """Embedding, head and last norm."""
    w.normal("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"], std=1.0)
    w.linear("lm_head", c["vocab_size"], c["hidden_size"], gain=2.0)
    w.norm("model.norm", c["hidden_size"], mean=norm_mean)


def layer_norms(w: Weights, c: Config, index: int, *, mean: float = 1.0) -> str:
    """A layer's two norms; returns the layer's name."""
    layer = f"model.layers.{index}"
    w.norm(f"{layer}.input_layernorm", c["hidden_size"], mean=mean)
    w.norm(f"{layer}.post_attention_layernorm", c["hidden_size"], mean=mean)
    return layer


def attention(
    w: Weights, c: Config, prefix: str, *, qk_norm: bool = False, gated: bool = False, norm_mean: float = 1.0
) -> None:
    """Full attention's projections and, where the family has them, norms of q and k."""
    hidden, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    w.linear(f"{prefix}.q_proj", heads * size * (2 if gated else 1), hidden)
    w.linear(f"{prefix}.k_proj", c["num_key_value_heads"] * size, hidden)
    w.linear(f"{prefix}.v_proj", c["num_key_value_heads"] * size, hidden)
    w.linear(f"{prefix}.o_proj", hidden, heads * size)
    if qk_norm:
        w.norm(f"{prefix}.q_norm", size, mean=norm_mean)
        w.norm(f"{prefix}.k_norm", size, mean=norm_mean)


def experts(w: Weights, c: Config, block: str, names: tuple[str, str, str]) -> None:
    """A router, and experts as one tensor a projection."""
    w.linear(f"{block}.gate", c["num_experts"], c["hidden_size"], gain=2.0)
    for expert in range(c["num_experts"]):
        w.swiglu(f"{block}.experts.{expert}", c["hidden_size"], c["moe_intermediate_size"], names)


def fused_experts(w: Weights, c: Config, block: str, *, router: bool = True) -> None:
    """Experts as two 3-D tensors."""
    count, hidden, inter = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    if router:
        w.linear(f"{block}.gate", count, hidden, gain=2.0)
    w.normal(f"{block}.experts.gate_up_proj", count, 2 * inter, hidden, std=hidden**-0.5)
    w.normal(f"{block}.experts.down_proj", count, hidden, inter, std=0.5 * inter**-0.5)


def hybrid(
    w: Weights,
    c: Config,
    projections: Callable[[Weights, Config, str], None],
    feed_forward: Callable[[Weights, Config, str], None],
) -> None:
    """Gated DeltaNet layers with one of full attention after every few."""
    embeddings(w, c, norm_mean=0.0)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index, mean=0.0)
        if (index + 1) % c["full_attention_interval"]:
            gated_delta_net(w, c, f"{layer}.linear_attn", projections)
        else:
            attention(w, c, f"{layer}.self_attn", qk_norm=True, gated=True, norm_mean=0.0)
        feed_forward(w, c, f"{layer}.mlp")


def gated_shared_expert(w: Weights, c: Config, block: str) -> None:
    """The expert that every token goes to, and its gate."""
    w.swiglu(f"{block}.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"], GATE_UP_DOWN)
    w.linear(f"{block}.shared_expert_gate", 1, c["hidden_size"])


def gdn_sizes(c: Config) -> tuple[int, int]:
    """Widths of all keys and of all values."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    return keys, c["linear_num_value_heads"] * c["linear_value_head_dim"]


def gated_delta_net(w: Weights, c: Config, prefix: str, projections: Callable[[Weights, Config, str], None]) -> None:
    """One Gated DeltaNet layer."""
    keys, values = gdn_sizes(c)
    heads, taps = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    projections(w, c, prefix)
    w.normal(f"{prefix}.conv1d.weight", 2 * keys + values, 1, taps, std=taps**-0.5)
    w.decay_rates(f"{prefix}.A_log", heads, (heads,))
    w.normal(f"{prefix}.dt_bias", heads, std=0.5)
    w.norm(f"{prefix}.norm", c["linear_value_head_dim"])
    w.linear(f"{prefix}.out_proj", c["hidden_size"], values)


def qwen3_next_projections(w: Weights, c: Config, prefix: str) -> None:
    """Qwen3-Next's joined projections."""
    keys, values = gdn_sizes(c)
    w.linear(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * values, c["hidden_size"])
    w.linear(f"{prefix}.in_proj_ba", 2 * c["linear_num_value_heads"], c["hidden_size"], gain=2.0)


def qwen3_5_projections(w: Weights, c: Config, prefix: str) -> None:
    """Qwen3.5's separate projections."""
    keys, values = gdn_sizes(c)
    w.linear(f"{prefix}.in_proj_qkv", 2 * keys + values, c["hidden_size"])
    w.linear(f"{prefix}.in_proj_z", values, c["hidden_size"])
    for name in ("in_proj_b", "in_proj_a"):
        w.linear(f"{prefix}.{name}", c["linear_num_value_heads"], c["hidden_size"], gain=2.0)


def olmo_gated_delta_net(w: Weights, c: Config, prefix: str) -> None:
    """OLMo-hybrid's Gated DeltaNet layer: every projection and convolution by itself."""
    keys, values = gdn_sizes(c)
    heads, taps = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    for name, rows in (("q", keys), ("k", keys), ("v", values), ("g", values)):
        w.linear(f"{prefix}.{name}_proj", rows, c["hidden_size"])
    for name in ("a", "b"):
        w.linear(f"{prefix}.{name}_proj", heads, c["hidden_size"], gain=2.0)
    for name, rows in (("q", keys), ("k", keys), ("v", values)):
        w.normal(f"{prefix}.{name}_conv1d.weight", rows, 1, taps, std=taps**-0.5)
    w.decay_rates(f"{prefix}.A_log", heads, (heads,))
    w.normal(f"{prefix}.dt_bias", heads, std=0.5)
    w.norm(f"{prefix}.o_norm", c["linear_value_head_dim"])
    w.linear(f"{prefix}.o_proj", c["hidden_size"], values)


def kimi_delta_attention(w: Weights, c: Config, prefix: str) -> None:
    """One KDA layer."""
    linear, hidden = c["linear_attn_config"], c["hidden_size"]
    heads, size, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    for name in ("q", "k", "v"):
        w.linear(f"{prefix}.{name}_proj", heads * size, hidden)
        w.normal(f"{prefix}.{name}_conv1d.weight", heads * size, 1, taps, std=taps**-0.5)
        w.fp32(f"{prefix}.{name}_conv1d.weight")
    for name in ("f", "g"):
        w.linear(f"{prefix}.{name}_a_proj", size, hidden)
        w.linear(f"{prefix}.{name}_b_proj", heads * size, size, gain=2.0)
    w.linear(f"{prefix}.b_proj", heads, hidden, gain=2.0)
    w.decay_rates(f"{prefix}.A_log", heads, (1, 1, heads, 1))
    w.normal(f"{prefix}.dt_bias", heads * size, std=0.5)
    w.fp32(f"{prefix}.dt_bias")
    w.norm(f"{prefix}.o_norm", size)
    w.linear(f"{prefix}.o_proj", hidden, heads * size)


def multi_head_latent_attention(w: Weights, c: Config, prefix: str) -> None:
    """One MLA layer."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    w.linear(f"{prefix}.q_proj", heads * (nope + rope), hidden)
    w.linear(f"{prefix}.kv_a_proj_with_mqa", rank + rope, hidden)
    w.norm(f"{prefix}.kv_a_layernorm", rank)
    w.linear(f"{prefix}.kv_b_proj", heads * (nope + value), rank)
    w.linear(f"{prefix}.o_proj", hidden, heads * value)
