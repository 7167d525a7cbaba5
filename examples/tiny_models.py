"""Write a tiny random mixture-of-experts checkpoint that vLLM loads as it is: config, safetensors and a byte tokenizer.

    python examples/tiny_models.py qwen3-next tiny-gdn          # Gated DeltaNet + MoE (also: qwen3.5-moe)
    python examples/tiny_models.py kimi-linear tiny-kda         # Kimi Delta Attention + MLA + MoE
    python examples/tiny_models.py qwen3-moe tiny-moe           # full attention + MoE (also: mixtral)

The weights are random but not arbitrary: matrices keep activations near unit size, logits are spread enough that greedy
tokens do not hang on rounding, and the linear-attention heads forget at rates from slow to instant, as trained ones do.
Any field of config.json can be changed with --set, and the weights follow: --set num_experts=16 --set hidden_size=512
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BYTES = 256
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
Config = dict[str, Any]


class Weights:
    """Named random tensors; every matrix keeps the size of what it multiplies."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        """A BF16 tensor of normal numbers."""
        tensor = mean + std * torch.randn(*shape, generator=self.generator)
        self.tensors[name] = tensor.to(torch.bfloat16)

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
GDN: Config = {
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}


def qwen3_moe_weights(w: Weights, c: Config) -> None:
    """Qwen3-MoE: full attention with q and k norms, per-expert projections."""
    _embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = _layer_norms(w, c, index)
        _attention(w, c, f"{layer}.self_attn", qk_norm=True)
        _experts(w, c, f"{layer}.mlp", GATE_UP_DOWN)


def mixtral_weights(w: Weights, c: Config) -> None:
    """Mixtral: full attention, experts named w1, w2, w3."""
    _embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = _layer_norms(w, c, index)
        _attention(w, c, f"{layer}.self_attn")
        block = f"{layer}.block_sparse_moe"
        w.linear(f"{block}.gate", c["num_local_experts"], c["hidden_size"], gain=2.0)
        for expert in range(c["num_local_experts"]):
            w.swiglu(f"{block}.experts.{expert}", c["hidden_size"], c["intermediate_size"], W1_W3_W2)


def qwen3_next_weights(w: Weights, c: Config) -> None:
    """Qwen3-Next: three Gated DeltaNet layers to one of gated full attention, shared expert; q, k, v, z interleaved."""
    _hybrid(w, c, _qwen3_next_projections, lambda w, c, block: _experts(w, c, block, GATE_UP_DOWN))


def qwen3_5_moe_weights(w: Weights, c: Config) -> None:
    """Qwen3.5-MoE (text): as Qwen3-Next with separate projections and the experts fused into 3-D tensors."""
    _hybrid(w, c, _qwen3_5_projections, _fused_experts)


def kimi_linear_weights(w: Weights, c: Config) -> None:
    """Kimi-Linear: Kimi Delta Attention and MLA layers, a dense first feed-forward, experts beside a shared one."""
    _embeddings(w, c)
    linear = c["linear_attn_config"]
    for index in range(c["num_hidden_layers"]):
        layer = _layer_norms(w, c, index)
        attention = f"{layer}.self_attn"
        if index + 1 in linear["kda_layers"]:
            _kimi_delta_attention(w, c, attention)
        else:
            _multi_head_latent_attention(w, c, attention)
        if index < c["first_k_dense_replace"]:
            w.swiglu(f"{layer}.mlp", c["hidden_size"], c["intermediate_size"], GATE_UP_DOWN)
            continue
        block = f"{layer}.block_sparse_moe"
        w.linear(f"{block}.gate", c["num_experts"], c["hidden_size"], gain=2.0)
        w.normal(f"{block}.gate.e_score_correction_bias", c["num_experts"], std=0.01)
        w.fp32(f"{block}.gate.e_score_correction_bias")
        inter = c["moe_intermediate_size"]
        for expert in range(c["num_experts"]):
            w.swiglu(f"{block}.experts.{expert}", c["hidden_size"], inter, W1_W3_W2)
        w.swiglu(f"{block}.shared_experts", c["hidden_size"], inter * c["num_shared_experts"], GATE_UP_DOWN)


def _embeddings(w: Weights, c: Config, *, norm_mean: float = 1.0) -> None:
    w.normal("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"], std=1.0)
    w.linear("lm_head", c["vocab_size"], c["hidden_size"], gain=2.0)
    w.norm("model.norm", c["hidden_size"], mean=norm_mean)


def _layer_norms(w: Weights, c: Config, index: int, *, mean: float = 1.0) -> str:
    layer = f"model.layers.{index}"
    w.norm(f"{layer}.input_layernorm", c["hidden_size"], mean=mean)
    w.norm(f"{layer}.post_attention_layernorm", c["hidden_size"], mean=mean)
    return layer


def _attention(
    w: Weights, c: Config, prefix: str, *, qk_norm: bool = False, gated: bool = False, norm_mean: float = 1.0
) -> None:
    hidden, heads, size = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    w.linear(f"{prefix}.q_proj", heads * size * (2 if gated else 1), hidden)
    w.linear(f"{prefix}.k_proj", c["num_key_value_heads"] * size, hidden)
    w.linear(f"{prefix}.v_proj", c["num_key_value_heads"] * size, hidden)
    w.linear(f"{prefix}.o_proj", hidden, heads * size)
    if qk_norm:
        w.norm(f"{prefix}.q_norm", size, mean=norm_mean)
        w.norm(f"{prefix}.k_norm", size, mean=norm_mean)


def _experts(w: Weights, c: Config, block: str, names: tuple[str, str, str]) -> None:
    w.linear(f"{block}.gate", c["num_experts"], c["hidden_size"], gain=2.0)
    for expert in range(c["num_experts"]):
        w.swiglu(f"{block}.experts.{expert}", c["hidden_size"], c["moe_intermediate_size"], names)


def _fused_experts(w: Weights, c: Config, block: str) -> None:
    experts, hidden, inter = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    w.linear(f"{block}.gate", experts, hidden, gain=2.0)
    w.normal(f"{block}.experts.gate_up_proj", experts, 2 * inter, hidden, std=hidden**-0.5)
    w.normal(f"{block}.experts.down_proj", experts, hidden, inter, std=0.5 * inter**-0.5)


def _hybrid(
    w: Weights,
    c: Config,
    projections: Callable[[Weights, Config, str], None],
    experts: Callable[[Weights, Config, str], None],
) -> None:
    _embeddings(w, c, norm_mean=0.0)
    for index in range(c["num_hidden_layers"]):
        layer = _layer_norms(w, c, index, mean=0.0)
        if (index + 1) % c["full_attention_interval"]:
            _gated_delta_net(w, c, f"{layer}.linear_attn", projections)
        else:
            _attention(w, c, f"{layer}.self_attn", qk_norm=True, gated=True, norm_mean=0.0)
        experts(w, c, f"{layer}.mlp")
        w.swiglu(f"{layer}.mlp.shared_expert", c["hidden_size"], c["shared_expert_intermediate_size"], GATE_UP_DOWN)
        w.linear(f"{layer}.mlp.shared_expert_gate", 1, c["hidden_size"])


def _gdn_sizes(c: Config) -> tuple[int, int]:
    """Widths of all keys and of all values."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    return keys, c["linear_num_value_heads"] * c["linear_value_head_dim"]


def _gated_delta_net(w: Weights, c: Config, prefix: str, projections: Callable[[Weights, Config, str], None]) -> None:
    keys, values = _gdn_sizes(c)
    heads, taps = c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    projections(w, c, prefix)
    w.normal(f"{prefix}.conv1d.weight", 2 * keys + values, 1, taps, std=taps**-0.5)
    w.decay_rates(f"{prefix}.A_log", heads, (heads,))
    w.normal(f"{prefix}.dt_bias", heads, std=0.5)
    w.norm(f"{prefix}.norm", c["linear_value_head_dim"])
    w.linear(f"{prefix}.out_proj", c["hidden_size"], values)


def _qwen3_next_projections(w: Weights, c: Config, prefix: str) -> None:
    keys, values = _gdn_sizes(c)
    w.linear(f"{prefix}.in_proj_qkvz", 2 * keys + 2 * values, c["hidden_size"])
    w.linear(f"{prefix}.in_proj_ba", 2 * c["linear_num_value_heads"], c["hidden_size"], gain=2.0)


def _qwen3_5_projections(w: Weights, c: Config, prefix: str) -> None:
    keys, values = _gdn_sizes(c)
    w.linear(f"{prefix}.in_proj_qkv", 2 * keys + values, c["hidden_size"])
    w.linear(f"{prefix}.in_proj_z", values, c["hidden_size"])
    for name in ("in_proj_b", "in_proj_a"):
        w.linear(f"{prefix}.{name}", c["linear_num_value_heads"], c["hidden_size"], gain=2.0)


def _kimi_delta_attention(w: Weights, c: Config, prefix: str) -> None:
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


def _multi_head_latent_attention(w: Weights, c: Config, prefix: str) -> None:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    w.linear(f"{prefix}.q_proj", heads * (nope + rope), hidden)
    w.linear(f"{prefix}.kv_a_proj_with_mqa", rank + rope, hidden)
    w.norm(f"{prefix}.kv_a_layernorm", rank)
    w.linear(f"{prefix}.kv_b_proj", heads * (nope + value), rank)
    w.linear(f"{prefix}.o_proj", hidden, heads * value)


KINDS: dict[str, tuple[Config, Callable[[Weights, Config], None]]] = {
    "qwen3-moe": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **COMMON,
            **EXPERTS,
            "intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        qwen3_moe_weights,
    ),
    "mixtral": (
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            **COMMON,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "sliding_window": None,
        },
        mixtral_weights,
    ),
    "qwen3-next": (
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **COMMON,
            **EXPERTS,
            **GDN,
            "intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        qwen3_next_weights,
    ),
    "qwen3.5-moe": (
        {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **COMMON, **EXPERTS, **GDN},
        qwen3_5_moe_weights,
    ),
    "kimi-linear": (
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            **COMMON,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "intermediate_size": 512,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 128,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "num_nextn_predict_layers": 0,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        kimi_linear_weights,
    ),
}


def write_tiny_model(kind: str, directory: Path | str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write the checkpoint; `overrides` replace fields of config.json. Returns the directory.

    Raises ValueError for a kind or a config field that does not exist, and for a directory that holds something else.
    """
    if kind not in KINDS:
        raise ValueError(f"tiny_models: no kind {kind!r}; choose one of {', '.join(KINDS)}")
    defaults, make_weights = KINDS[kind]
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise ValueError(f"tiny_models: {kind} has no config field {', '.join(unknown)}; it has {', '.join(defaults)}")
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
        raise ValueError(f"tiny_models: {directory} holds something other than a model; name an empty or new directory")
    config = {**defaults, **overrides}
    weights = Weights(seed)
    make_weights(weights, config)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "tokenizer.json", byte_tokenizer())
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    _write_json(directory / "config.json", config)
    return directory


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_tokenizer() -> Config:
    """tokenizer.json of a tokenizer whose token ids are the bytes of the text (byte-level BPE without merges)."""
    special = [
        {"id": BYTES + index, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {_printable(byte): byte for byte in range(BYTES)}, "merges": []},
    }


def _printable(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself where printable, else one from 256 upwards."""

    def visible(value: int) -> bool:
        return 33 <= value <= 126 or (161 <= value <= 255 and value != 173)

    if visible(byte):
        return chr(byte)
    return chr(BYTES + sum(not visible(value) for value in range(byte)))


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: list[str]) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="tiny_models.py", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", type=_assignment, action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args(argv)
    try:
        directory = write_tiny_model(args.kind, args.directory, seed=args.seed, **dict(args.overrides))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    size = (directory / "model.safetensors").stat().st_size
    print(f"wrote {args.kind} to {directory} ({size / 2**20:.1f} MiB); tokens are bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
