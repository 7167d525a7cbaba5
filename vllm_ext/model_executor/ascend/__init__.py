"""The glue to vLLM-Ascend: its linear-attention prefill and its routed experts through our operators.

Written against vllm-ascend 0.23.0 with vLLM 0.23.0, from its sources; never run on hardware (docs/ascend.md). Nothing
here is imported before vLLM-Ascend's own modules are, so what it patches is in place when we look at it.
"""
