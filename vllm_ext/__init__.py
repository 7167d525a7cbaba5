"""vllm_ext: 4-bit routed experts and locality-first linear-attention prefill for stock vLLM and vLLM-Ascend.

Importing the package imports nothing heavy; vLLM reaches it through `vllm_ext.plugin.register`.
"""

__version__ = "0.1.0"
