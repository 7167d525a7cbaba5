"""The 4-bit weight format, its options and its quantisers. Pure torch; imports no vLLM."""

from vllm_ext.quantization.quantize import quantize_weight
from vllm_ext.quantization.scheme import QUANT_METHOD, Scheme
from vllm_ext.quantization.slicing import join_quantized, local_group_size, regroup, slice_quantized
from vllm_ext.quantization.weight import QuantizedWeight, pack_nibbles, unpack_nibbles

__all__ = [
    "QUANT_METHOD",
    "QuantizedWeight",
    "Scheme",
    "join_quantized",
    "local_group_size",
    "pack_nibbles",
    "quantize_weight",
    "regroup",
    "slice_quantized",
    "unpack_nibbles",
]
