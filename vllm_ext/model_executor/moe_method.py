"""vLLM's MoE method for routed experts in 4 bits, quantised layer by layer while a 16-bit checkpoint loads."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_ext import compat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.ops.moe import CallOptions, PreparedExperts, prepare_experts
from vllm_ext.ops.moe.custom_op import encode_call, fused_moe_w4a16_op
from vllm_ext.options import Options
from vllm_ext.quantization import Scheme

logger = logging.getLogger("vllm.vllm_ext.quantization")


class AtLoadMoEMethod(compat.moe_method_base()):  # type: ignore[misc]
    """Loads 16-bit experts on the meta device, quantises a layer once its last weight has arrived, and runs it."""

    def __init__(self, layer: Any, prefix: str, scheme: Scheme, options: Options, report: QuantizationReport) -> None:
        super().__init__(layer.moe_config)
        self.prefix = prefix
        self.scheme = scheme
        self.options = options
        self.report = report
        self.routes_itself = compat.cpu_router_is_internal()
        self.names: list[str] = []
        self.meta = ""

    @property
    def is_monolithic(self) -> bool:
        """Whether the method gets router logits instead of topk ids."""
        return self.routes_itself

    @property
    def supports_eplb(self) -> bool:
        """Expert weights can be moved between ranks as rows [local_experts, -1] of each parameter."""
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's modular kernels are not used."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the layer's 16-bit experts by 4-bit ones in the order the device's kernels read."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        w13_bias, w2_bias = (getattr(getattr(layer, name, None), "data", None) for name in ("w13_bias", "w2_bias"))
        activation, interleaved = moe_activation(layer.activation, self.prefix)
        if interleaved:
            w13 = torch.cat((w13[:, 0::2], w13[:, 1::2]), dim=1)
            w13_bias = None if w13_bias is None else torch.cat((w13_bias[:, 0::2], w13_bias[:, 1::2]), dim=1)
        before = w13.nbytes + w2.nbytes
        q13 = self.scheme.quantize(w13, "w13", name=f"{self.prefix}.w13_weight")
        q2 = self.scheme.quantize(w2, "w2", name=f"{self.prefix}.w2_weight")
        experts = prepare_experts(
            q13,
            q2,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            backend=self.options.moe_backend,
            device=w13.device,
            dtype=w13.dtype,
        )
        self._adopt(layer, experts, activation)
        layer._already_called_process_weights_after_loading = True
        self.report.add(self.prefix, q2.shape[0], before, q13.nbytes + q2.nbytes)
        if self.report.complete and not self.report.announced:
            self.report.announced = True
            logger.info("%s, backend %s", self.report.summary(), experts.backend)

    def _adopt(self, layer: Any, experts: PreparedExperts, activation: str) -> None:
        """Register the prepared tensors as the layer's parameters, so that sleep mode, reload and EPLB see them.

        The two main tensors keep the names `w13_weight` and `w2_weight`: under expert parallelism, weights of foreign
        experts are still looked up by those names after this layer is finished.
        """
        from vllm.model_executor.utils import replace_parameter

        renamed = {"w13": "w13_weight", "w2": "w2_weight"}
        self.names = [renamed.get(name, name) for name in experts.tensors]
        for name, tensor in zip(self.names, experts.tensors.values(), strict=True):
            replace_parameter(layer, name, tensor)
        for name in ("w13_weight", "w2_weight"):
            if name not in self.names:
                replace_parameter(layer, name, torch.empty(0, dtype=torch.uint8))
        call = CallOptions(
            activation=activation,
            swiglu_alpha=_first_number(getattr(layer, "swiglu_alpha", None), 1.702),
            swiglu_limit=_first_number(getattr(layer, "swiglu_limit", None), 7.0),
            apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
            batch_invariant=self.options.batch_invariant or compat.batch_invariance_requested(),
        )
        _, self.meta = encode_call(experts, call)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed experts' output [M, H]; shared experts are run by vLLM's runner."""
        tensors = [getattr(layer, name) for name in self.names]
        return fused_moe_w4a16_op(x, topk_weights, topk_ids, layer.expert_map, tensors, self.meta)

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route and apply, where vLLM leaves routing to the method."""
        topk_weights, topk_ids = compat.select_experts_on_cpu(layer, x, router_logits)
        return self.apply(layer, x, topk_weights, topk_ids)


def _first_number(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def moe_activation(activation: Any, prefix: str) -> tuple[str, bool]:
    """vLLM's activation as our name, and whether w13's gate and up rows are interleaved.

    Raises ValueError, naming the layer, for an activation the kernels do not compute.
    """
    name = str(getattr(activation, "value", activation)).removesuffix("_no_mul")
    if name in ("swigluoai", "swigluoai_uninterleave"):
        return "swigluoai", name == "swigluoai"
    if name == "gelu_pytorch_tanh":
        name = "gelu_tanh"
    supported = ("silu", "gelu", "gelu_tanh", "relu2")
    if name not in supported:
        raise ValueError(
            f"w4a16-grouped, layer {prefix}: activation {name!r} is not supported; supported are "
            f"{', '.join((*supported, 'swigluoai'))}. Serve the model without --quantization w4a16-grouped"
        )
    return name, False
