"""The model families that tiny_models.py can write: config.json's fields, and the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable

from tiny_model_parts import (
    COMMON,
    EXPERTS,
    GATE_UP_DOWN,
    GDN,
    GDN_LAYERS,
    SHARED_EXPERTS,
    W1_W3_W2,
    Config,
    Weights,
    attention,
    embeddings,
    experts,
    fused_experts,
    gated_shared_expert,
    hybrid,
    kimi_delta_attention,
    layer_norms,
    multi_head_latent_attention,
    olmo_gated_delta_net,
    qwen3_5_projections,
    qwen3_next_projections,
)


def qwen3_moe_weights(w: Weights, c: Config) -> None:
    """Qwen3-MoE: full attention with q and k norms, per-expert projections."""
    embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        attention(w, c, f"{layer}.self_attn", qk_norm=True)
        experts(w, c, f"{layer}.mlp", GATE_UP_DOWN)


def mixtral_weights(w: Weights, c: Config) -> None:
    """Mixtral: full attention, experts named w1, w2, w3."""
    embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        attention(w, c, f"{layer}.self_attn")
        block = f"{layer}.block_sparse_moe"
        w.linear(f"{block}.gate", c["num_local_experts"], c["hidden_size"], gain=2.0)
        for expert in range(c["num_local_experts"]):
            w.swiglu(f"{block}.experts.{expert}", c["hidden_size"], c["intermediate_size"], W1_W3_W2)


def qwen3_next_weights(w: Weights, c: Config) -> None:
    """Qwen3-Next: three Gated DeltaNet layers to one of gated full attention, shared expert; q, k, v, z interleaved."""

    def feed_forward(w: Weights, c: Config, block: str) -> None:
        experts(w, c, block, GATE_UP_DOWN)
        gated_shared_expert(w, c, block)

    hybrid(w, c, qwen3_next_projections, feed_forward)


def qwen3_5_moe_weights(w: Weights, c: Config) -> None:
    """Qwen3.5-MoE (text): as Qwen3-Next with separate projections and the experts fused into 3-D tensors."""

    def feed_forward(w: Weights, c: Config, block: str) -> None:
        fused_experts(w, c, block)
        gated_shared_expert(w, c, block)

    hybrid(w, c, qwen3_5_projections, feed_forward)


def qwen3_5_weights(w: Weights, c: Config) -> None:
    """Qwen3.5 (text), dense: the layers of Qwen3.5-MoE with one feed-forward each."""
    hybrid(
        w,
        c,
        qwen3_5_projections,
        lambda w, c, block: w.swiglu(block, c["hidden_size"], c["intermediate_size"], GATE_UP_DOWN),
    )


def olmo_hybrid_weights(w: Weights, c: Config) -> None:
    """OLMo-hybrid, dense: norms before Gated DeltaNet layers and behind those of full attention."""
    embeddings(w, c)
    hidden, kept = c["hidden_size"], c["num_key_value_heads"] * (c["hidden_size"] // c["num_attention_heads"])
    for index, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{index}"
        w.norm(f"{layer}.post_attention_layernorm", hidden)
        if kind == "linear_attention":
            w.norm(f"{layer}.input_layernorm", hidden)
            olmo_gated_delta_net(w, c, f"{layer}.linear_attn")
        else:
            w.norm(f"{layer}.post_feedforward_layernorm", hidden)
            attention(w, {**c, "head_dim": hidden // c["num_attention_heads"]}, f"{layer}.self_attn")
            w.norm(f"{layer}.self_attn.q_norm", hidden)
            w.norm(f"{layer}.self_attn.k_norm", kept)
        w.swiglu(f"{layer}.mlp", hidden, c["intermediate_size"], GATE_UP_DOWN)


def kimi_linear_weights(w: Weights, c: Config) -> None:
    """Kimi-Linear: Kimi Delta Attention and MLA layers, a dense first feed-forward, experts beside a shared one."""
    embeddings(w, c)
    linear = c["linear_attn_config"]
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        attention = f"{layer}.self_attn"
        if index + 1 in linear["kda_layers"]:
            kimi_delta_attention(w, c, attention)
        else:
            multi_head_latent_attention(w, c, attention)
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


def olmoe_weights(w: Weights, c: Config) -> None:
    """OLMoE: q and k are normalised over all heads at once; the experts are all there is of a feed-forward."""
    embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        attention(w, c, f"{layer}.self_attn")
        for name, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
            w.norm(f"{layer}.self_attn.{name}_norm", heads * c["head_dim"])
        experts(w, {**c, "moe_intermediate_size": c["intermediate_size"]}, f"{layer}.mlp", GATE_UP_DOWN)


def deepseek_v2_weights(w: Weights, c: Config) -> None:
    """DeepSeek-V2-Lite: MLA, a dense first feed-forward, experts beside shared ones."""
    embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        multi_head_latent_attention(w, c, f"{layer}.self_attn")
        _experts_after_dense_layers(w, c, index, f"{layer}.mlp")


def glm4_moe_weights(w: Weights, c: Config) -> None:
    """GLM-4.5: attention with biases, then as DeepSeek, with a bias that corrects the router's choice."""
    embeddings(w, c)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        attention(w, c, f"{layer}.self_attn")
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            w.normal(f"{layer}.self_attn.{name}_proj.bias", c[heads] * c["head_dim"], std=0.1)
        _experts_after_dense_layers(w, c, index, f"{layer}.mlp")
        if index >= c["first_k_dense_replace"]:
            w.normal(f"{layer}.mlp.gate.e_score_correction_bias", c["n_routed_experts"], std=0.01)
            w.fp32(f"{layer}.mlp.gate.e_score_correction_bias")


def _experts_after_dense_layers(w: Weights, c: Config, index: int, block: str) -> None:
    if index < c["first_k_dense_replace"]:
        w.swiglu(block, c["hidden_size"], c["intermediate_size"], GATE_UP_DOWN)
        return
    experts(w, {**c, "num_experts": c["n_routed_experts"]}, block, GATE_UP_DOWN)
    shared = c["moe_intermediate_size"] * c["n_shared_experts"]
    w.swiglu(f"{block}.shared_experts", c["hidden_size"], shared, GATE_UP_DOWN)


def gemma4_moe_weights(w: Weights, c: Config) -> None:
    """Gemma 4 (text): a dense feed-forward and experts side by side, norms around each; the head is the embedding."""
    hidden = c["hidden_size"]
    w.normal("model.embed_tokens.weight", c["vocab_size"], hidden, std=2 * hidden**-0.5)
    w.norm("model.norm", hidden)
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        for name in ("pre_feedforward", "post_feedforward"):
            w.norm(f"{layer}.{name}_layernorm", hidden)
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            w.norm(f"{layer}.{name}", hidden)
        last = index + 1 == c["num_hidden_layers"]
        size = c["global_head_dim"] if last or (index + 1) % 6 == 0 else c["head_dim"]
        # Scores are not divided by the root of the head's size here: the norms of q and k keep them in bounds.
        attention(w, {**c, "head_dim": size}, f"{layer}.self_attn", qk_norm=True, norm_mean=size**-0.25)
        w.swiglu(f"{layer}.mlp", hidden, c["intermediate_size"], GATE_UP_DOWN)
        w.linear(f"{layer}.router.proj", c["num_experts"], hidden, gain=2.0)
        w.normal(f"{layer}.router.scale", hidden, std=0.1, mean=hidden**0.5)
        w.normal(f"{layer}.router.per_expert_scale", c["num_experts"], std=0.1, mean=1.0)
        fused_experts(w, c, layer, router=False)
        w.normal(f"{layer}.layer_scalar", 1, std=0.01, mean=1.0)


def gpt_oss_weights(w: Weights, c: Config) -> None:
    """gpt-oss: attention with sinks and biases; experts transposed, gate and up interleaved, with biases."""
    embeddings(w, c)
    count, hidden, inter = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    for index in range(c["num_hidden_layers"]):
        layer = layer_norms(w, c, index)
        block = f"{layer}.self_attn"
        attention(w, c, block)
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            w.normal(f"{block}.{name}_proj.bias", c[heads] * c["head_dim"], std=0.1)
        w.normal(f"{block}.o_proj.bias", hidden, std=0.1)
        w.normal(f"{block}.sinks", c["num_attention_heads"], std=1.0)
        w.linear(f"{layer}.mlp.router", count, hidden, gain=2.0)
        w.normal(f"{layer}.mlp.router.bias", count, std=0.1)
        w.normal(f"{layer}.mlp.experts.gate_up_proj", count, hidden, 2 * inter, std=hidden**-0.5)
        w.normal(f"{layer}.mlp.experts.gate_up_proj_bias", count, 2 * inter, std=0.1)
        w.normal(f"{layer}.mlp.experts.down_proj", count, inter, hidden, std=0.5 * inter**-0.5)
        w.normal(f"{layer}.mlp.experts.down_proj_bias", count, hidden, std=0.1)


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
    "qwen3.5": (
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **COMMON,
            **GDN_LAYERS,
            "intermediate_size": 512,
        },
        qwen3_5_weights,
    ),
    "olmo-hybrid": (
        {
            "architectures": ["OlmoHybridForCausalLM"],
            "model_type": "olmo_hybrid",
            **{key: value for key, value in COMMON.items() if key not in ("head_dim", "rope_theta")},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "intermediate_size": 512,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 96,
            "linear_value_head_dim": 192,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_allow_neg_eigval": True,
        },
        olmo_hybrid_weights,
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
    "olmoe": (
        {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            **COMMON,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "norm_topk_prob": False,
        },
        olmoe_weights,
    ),
    "deepseek-v2": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **COMMON,
            **SHARED_EXPERTS,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        deepseek_v2_weights,
    ),
    "glm4-moe": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **COMMON,
            **SHARED_EXPERTS,
            "norm_topk_prob": True,
            "attention_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
        },
        glm4_moe_weights,
    ),
    "gemma4-moe": (
        {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            **{key: value for key, value in COMMON.items() if key not in ("hidden_act", "rope_theta")},
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 128,
            "intermediate_size": 256,
            "enable_moe_block": True,
            "global_head_dim": 64,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
        },
        gemma4_moe_weights,
    ),
    "gpt-oss": (
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **COMMON,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "sliding_window": 128,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "layer_types": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 1024,
            },
        },
        gpt_oss_weights,
    ),
}
