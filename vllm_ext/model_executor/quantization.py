"""`--quantization w4a16-grouped`: vLLM's view of the scheme, and which layers it concerns."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_ext import compat
from vllm_ext.model_executor.ascend import platform as ascend
from vllm_ext.model_executor.packed_experts import PackedFormat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.options import Options, parse_options
from vllm_ext.quantization import QUANT_METHOD, Scheme
from vllm_ext.quantization.names import is_ignored

logger = logging.getLogger("vllm.vllm_ext.quantization")
PICKLED_FORMATS = ("pt", "npcache")


class W4A16GroupedConfig(QuantizationConfig):
    """Routed experts in 4 bits, everything else in 16.

    `packed` is how a packed checkpoint stores its experts, or None when a 16-bit checkpoint is quantised while it
    loads; then the scheme's options come from `additional_config["vllm_ext"]`. `dense` is vLLM's own configuration of a
    compressed-tensors checkpoint, which says what its attention and dense layers are.
    """

    def __init__(self, packed: PackedFormat | None = None, dense: QuantizationConfig | None = None) -> None:
        super().__init__()
        self.packed = packed
        self.dense = dense
        self.report = QuantizationReport()
        self.mapper: Any = None
        self.ignore: tuple[str, ...] = ()  # what the user asked to ignore, when quantising at load

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
        try:
            packed = PackedFormat.from_config(config)
        except ValueError as error:
            raise ValueError(
                f"{error}. This is the quantization_config in the checkpoint's config.json; pack the 16-bit checkpoint "
                "again with `vllm-ext quantize`"
            ) from None
        return cls(packed, compat.compressed_tensors_config(config) if packed.compressed_tensors else None)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **kwargs: Any) -> str | None:
        """Take compressed-tensors W4A16 checkpoints when asked to; refuse, by name, those of other methods."""
        found = hf_quant_cfg.get("quant_method") if isinstance(hf_quant_cfg, Mapping) else None
        if user_quant != QUANT_METHOD or not found or found == QUANT_METHOD:
            return None
        if found == "compressed-tensors":
            try:
                PackedFormat.from_config(hf_quant_cfg)
            except ValueError as error:
                raise ValueError(
                    f"--quantization {QUANT_METHOD}: {error}. Drop the flag to serve the checkpoint with vLLM's own "
                    f"{found!r}, or start from the unquantised checkpoint"
                ) from None
            return QUANT_METHOD
        raise ValueError(
            f"--quantization {QUANT_METHOD}: the checkpoint's config.json says quant_method {found!r}, and only BF16 "
            "or FP16 checkpoints, ones packed by `vllm-ext quantize`, and 4-bit compressed-tensors ones can be served "
            f"in this scheme; drop the flag to serve it with {found!r}, or start from the unquantised checkpoint"
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str, **kwargs: Any) -> Any:
        """The method for `layer`: ours for routed experts, vLLM's 16-bit method for everything else."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        on_ascend = ascend.is_ascend()
        if not isinstance(layer, compat.routed_experts_class()):
            if self.dense is not None:
                self.dense.packed_modules_mapping = self.packed_modules_mapping
                return self.dense.get_quant_method(layer, prefix)
            if not isinstance(layer, LinearBase):
                return None
            return ascend.unquantized_linear_method() if on_ascend else UnquantizedLinearMethod()
        options = current_options()
        if self.packed and options.scheme:
            raise ValueError(
                f"{QUANT_METHOD}: options {sorted(options.scheme)} are for quantising at load, and this checkpoint is "
                "packed already; drop them, or pack the 16-bit checkpoint again with `vllm-ext quantize`"
            )
        scheme = Scheme.from_dict(options.scheme)
        self.ignore = scheme.ignore
        if self._is_ignored(prefix, self.packed.ignore if self.packed else scheme.ignore):
            self.report.ignored.add(prefix)
            return ascend.unquantized_experts_method(layer) if on_ascend else None
        self.report.expected.add(prefix)
        if on_ascend:
            from vllm_ext.model_executor.ascend.experts import make_method

            return make_method(layer, prefix, self.packed or scheme, options, self.report, kwargs.get("tid2eid"))
        from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod

        if self.packed:
            return PackedMoEMethod(layer, prefix, self.packed, options, self.report)
        return AtLoadMoEMethod(layer, prefix, scheme, options, self.report)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Called by vLLM for models whose modules it names differently from the checkpoint."""
        self.mapper = hf_to_vllm_mapper
        if self.dense is not None:
            self.dense.apply_vllm_mapper(hf_to_vllm_mapper)

    def _is_ignored(self, prefix: str, patterns: tuple[str, ...]) -> bool:
        """Whether a pattern matches, written in vLLM's names or in the checkpoint's."""
        renamed = self.mapper.apply_list(list(patterns)) if self.mapper is not None else ()
        return is_ignored(prefix, (*patterns, *renamed))

    def safetensors_only(self, load_config: Any) -> Any:
        """`load_config` by which a packed checkpoint is read from safetensors alone; vLLM would fall back to pickles,
        which run code when read.

        Raises ValueError when the user asks for pickles by `load_format`.
        """
        if self.packed is None:
            return load_config
        if load_config.load_format in PICKLED_FORMATS:
            raise ValueError(
                f"{QUANT_METHOD}: packed checkpoints are safetensors, and load_format {load_config.load_format!r} "
                "reads pickles; drop --load-format"
            )
        if load_config.load_format in ("auto", "hf"):
            # A copy: a speculative draft is loaded by the same configuration, and may be anything.
            load_config = copy.copy(load_config)
            load_config.load_format = "safetensors"
        return load_config

    def check_loaded(self, model: torch.nn.Module, *, whole: bool = True) -> None:
        """Raise ValueError unless every routed expert of a freshly loaded model is in 4 bits.

        whole  the model has all layers; a pipeline stage has some, and those may well be dense ones
        """
        if not self.report.expected and not whole:
            logger.warning("%s: no routed experts in this pipeline stage of %s", QUANT_METHOD, type(model).__name__)
        elif not self.report.expected:
            ignored = f"; ignored by pattern: {sorted(self.report.ignored)}" if self.report.ignored else ""
            raise ValueError(
                f"--quantization {QUANT_METHOD}: {type(model).__name__} has no routed experts to quantise{ignored}. "
                "The scheme is for mixture-of-experts models; drop the flag to serve this one in 16 bits"
            )
        names = self.report.expected | self.report.ignored
        unused = [pattern for pattern in self.ignore if not any(self._is_ignored(name, (pattern,)) for name in names)]
        if unused and whole:
            logger.warning(
                "%s: ignore %s matches no layer of routed experts, such as %s", QUANT_METHOD, unused, min(names)
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
