"""Hugging Face transformers: the experts of a loaded model in 4 bits, and the rest of `generate()` made faster.

    from vllm_ext.integrations.transformers import accelerate_generate, quantize_experts
    print(quantize_experts(model))        # the experts alone
    print(accelerate_generate(model))     # the whole kit

Importing this module also registers the checkpoint format, so that `from_pretrained` reads what `save_pretrained` or
`vllm-ext quantize` wrote.
"""

from __future__ import annotations

from vllm_ext.integrations.accelerate import Acceleration, accelerate_generate
from vllm_ext.integrations.expert_modules import find_experts
from vllm_ext.integrations.hf_quantizer import W4A16Config, W4A16Quantizer, register
from vllm_ext.integrations.norms import Patch, patch_rms_norms
from vllm_ext.integrations.qkv import join_projections, merge_lora
from vllm_ext.integrations.quantize import quantize_experts
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.integrations.swap import LayerReport, Report

register()

__all__ = [
    "Acceleration",
    "LayerReport",
    "Patch",
    "QuantizedExperts",
    "Report",
    "W4A16Config",
    "W4A16Quantizer",
    "accelerate_generate",
    "find_experts",
    "join_projections",
    "merge_lora",
    "patch_rms_norms",
    "quantize_experts",
]
