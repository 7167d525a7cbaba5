"""The 4-bit weight format and its quantisers. Pure torch; imports no vLLM."""

from vllm_ext.quantization.quantize import quantize_weight
from vllm_ext.quantization.weight import QuantizedWeight, pack_nibbles, unpack_nibbles

__all__ = ["QuantizedWeight", "pack_nibbles", "quantize_weight", "unpack_nibbles"]
