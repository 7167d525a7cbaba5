"""`--quantization w4a16-grouped`: vLLM's view of the scheme, and which layers it concerns."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_ext import compat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.options import Options, parse_options
from vllm_ext.quantization import QUANT_METHOD, Scheme

logger = logging.getLogger("vllm.vllm_ext.quantization")


class W4A16GroupedConfig(QuantizationConfig):
    """Routed experts in 4 bits, everything else in 16.

    `packed` is the scheme stored in a checkpoint, or None when a 16-bit checkpoint is quantised while it loads; then
    the scheme's options come from `additional_config["vllm_ext"]`.
    """

    def __init__(self, packed: Scheme | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.report = QuantizationReport()

    def __repr__(self) -> str:
        return f"W4A16GroupedConfig(packed={self.packed})"

    @classmethod
    def get_name(cls) -> str:
        """The name users type."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Activations stay in 16 bits; FP32 is computed too (CPU)."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """No CUDA capability is demanded here: the operator's dispatcher says what a device can run."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: without a `quantization_config` in config.json the checkpoint is a 16-bit one."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A16GroupedConfig:
        """Read the `quantization_config` of a packed checkpoint. Raises ValueError on unknown keys or values."""
        return cls(Scheme.from_dict(config))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **kwargs: Any) -> str | None:
        """Refuse, by name, checkpoints that are already quantised by another method."""
        found = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, Mapping) else None
        if user_quant == QUANT_METHOD and found and found != QUANT_METHOD:
            raise ValueError(
                f"--quantization {QUANT_METHOD}: the checkpoint's config.json says quant_method {found!r}, and only "
                "BF16 or FP16 checkpoints, or ones packed by `vllm-ext quantize`, can be served in this scheme; "
                f"drop the flag to serve it with {found!r}, or start from the unquantised checkpoint"
            )
        return None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str, **kwargs: Any) -> Any:
        """The method for `layer`: ours for routed experts, vLLM's 16-bit method for everything else."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if not isinstance(layer, compat.routed_experts_class()):
            return None
        options = current_options()
        scheme = self.packed or Scheme.from_dict(options.scheme)
        if scheme.ignores(prefix):
            self.report.ignored.add(prefix)
            return None
        from vllm_ext.model_executor.moe_method import AtLoadMoEMethod

        self.report.expected.add(prefix)
        return AtLoadMoEMethod(layer, prefix, scheme, options, self.report)

    def check_loaded(self, model: torch.nn.Module) -> None:
        """Raise ValueError unless every routed expert of a freshly loaded model is in 4 bits."""
        if not self.report.expected:
            ignored = f"; ignored by pattern: {sorted(self.report.ignored)}" if self.report.ignored else ""
            raise ValueError(
                f"--quantization {QUANT_METHOD}: {type(model).__name__} has no routed experts to quantise{ignored}. "
                "The scheme is for mixture-of-experts models; drop the flag to serve this one in 16 bits"
            )
        if missing := self.report.missing():
            raise ValueError(
                f"--quantization {QUANT_METHOD}: {len(missing)} of {len(self.report.expected)} layers of routed "
                f"experts received no weights and stayed unquantised, first {missing[0]}; the checkpoint lacks them"
            )


def current_options() -> Options:
    """Our options in the configuration vLLM is building the model with."""
    from vllm.config import get_current_vllm_config

    return parse_options(get_current_vllm_config().additional_config)
