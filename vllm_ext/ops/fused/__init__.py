"""Small operations fused into one kernel each: norms, heads, routing, and statistics over the vocabulary."""

from vllm_ext.ops.fused.gated import activation_and_mul
from vllm_ext.ops.fused.heads import norm_rope_heads
from vllm_ext.ops.fused.rms_norm import add_rms_norm, norm_chain, rms_norm
from vllm_ext.ops.fused.router import softmax_topk
from vllm_ext.ops.fused.vocabulary import TokenStatistics, confidence_argmax, probabilities, token_statistics

__all__ = [
    "TokenStatistics",
    "activation_and_mul",
    "add_rms_norm",
    "confidence_argmax",
    "norm_chain",
    "norm_rope_heads",
    "probabilities",
    "rms_norm",
    "softmax_topk",
    "token_statistics",
]
