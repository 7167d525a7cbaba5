"""Linear-attention prefill: the gated delta rule (GDN) and Kimi Delta Attention (KDA) over whole prompts.

Importing this package imports torch and nothing heavier; a backend's module is imported when it is first asked for.
"""

from vllm_ext.ops.linear_attention.dispatch import backend_status
from vllm_ext.ops.linear_attention.interface import chunk_gated_delta_rule, chunk_kda

__all__ = ["backend_status", "chunk_gated_delta_rule", "chunk_kda"]
