"""Which platform vLLM runs on, as vLLM-Ascend sees it, and what its configuration must allow."""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.quantization import QUANT_METHOD


def allow_quantization(module: Any) -> None:
    """`vllm_ascend.platform`: let `--quantization w4a16-grouped` pass the platform's list of methods."""
    supported = module.NPUPlatform.supported_quantization
    if QUANT_METHOD not in supported:
        supported.append(QUANT_METHOD)


def is_ascend() -> bool:
    """Whether this vLLM runs on vLLM-Ascend's platform."""
    from vllm.platforms import current_platform

    return bool(current_platform.device_type == "npu")


def is_310p() -> bool:
    """Whether vLLM-Ascend was installed for a 310P. Only asked on its platform."""
    from vllm_ascend.utils import is_310p as asked

    return bool(asked())


def check_model_dtype(dtype: torch.dtype, what: str) -> None:
    """Raises ValueError, naming the way out, for a dtype that a 310P cannot compute."""
    if is_310p() and dtype != torch.float16:
        raise ValueError(
            f"{what}: the model runs in {str(dtype).removeprefix('torch.')} and a 310P computes in FP16 only; serve it "
            "with --dtype float16 (a model that needs BF16's range cannot be served on a 310P)"
        )


def unquantized_linear_method() -> Any:
    """vLLM-Ascend's method for linear layers in 16 bits; it also brings weights into the chip's own order."""
    from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod

    return AscendUnquantizedLinearMethod()


def unquantized_experts_method(layer: Any) -> Any:
    """vLLM-Ascend's method for routed experts in 16 bits."""
    if is_310p():
        from vllm_ascend._310p.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod310

        return AscendUnquantizedFusedMoEMethod310(layer.moe_config)
    from vllm_ascend.ops.fused_moe.fused_moe import AscendUnquantizedFusedMoEMethod

    return AscendUnquantizedFusedMoEMethod(layer.moe_config)
