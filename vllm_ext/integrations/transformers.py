"""Hugging Face transformers: the experts of a loaded model in 4 bits, and the rest of `generate()` made faster.

    from vllm_ext.integrations.transformers import quantize_experts
    print(quantize_experts(model))

Importing this module also registers the checkpoint format, so that `from_pretrained` reads what `save_pretrained` or
`vllm-ext quantize` wrote.
"""

from __future__ import annotations

from vllm_ext.integrations.hf_quantizer import W4A16Config, W4A16Quantizer, register
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.integrations.swap import LayerReport, Report, find_experts, quantize_experts

register()

__all__ = [
    "LayerReport",
    "QuantizedExperts",
    "Report",
    "W4A16Config",
    "W4A16Quantizer",
    "find_experts",
    "quantize_experts",
]
