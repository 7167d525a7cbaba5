"""Routed experts in 4 bits under vLLM-Ascend: its own signature, routing, dispatch and combination around our weights.

On A2 and A3 the experts lie as `ops.moe.npu` lays them out, which is what vLLM-Ascend's path for its own W4A16 weights
reads; that path then sends tokens to their ranks (expert parallel), runs both grouped matmuls and combines. Shared
experts are run by its layer. On a 310P, which has no such product and no expert parallelism, our operator computes it.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.model_executor.ascend.platform import check_model_dtype, is_310p
from vllm_ext.model_executor.moe_method import AtLoadMoEMethod, PackedMoEMethod, moe_activation
from vllm_ext.model_executor.packed_experts import PackedFormat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.ops.moe.custom_op import call_experts
from vllm_ext.ops.moe.npu import NAME as NPU_BACKEND
from vllm_ext.ops.moe.npu.layout import expert_sizes
from vllm_ext.options import Options
from vllm_ext.quantization import QUANT_METHOD, Scheme


class _RunsOnAscend:
    """What both methods change for vLLM-Ascend's layer (0.23.0, `AscendFusedMoE` and `AscendFusedMoE310`)."""

    prefix: str
    tensors: list[tuple[str, torch.dtype | None]]
    meta: str
    tid2eid: Any = None

    @property
    def is_monolithic(self) -> bool:
        """Its layer calls `apply` either way."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """vLLM-Ascend moves experts by the names of its own weights."""
        return False

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """None: vLLM-Ascend communicates by itself."""
        return None

    def groups(self) -> tuple[int | None, int | None]:
        """Group sizes along the hidden and the intermediate size."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Refuse what cannot be served before minutes of loading; then as without vLLM-Ascend."""
        self.check_layer(layer)
        if not is_310p():
            along_hidden, along_intermediate = self.groups()
            try:
                expert_sizes(
                    hidden_size,
                    intermediate_size_per_partition,
                    along_hidden or hidden_size,
                    along_intermediate or intermediate_size_per_partition,
                )
            except ValueError as error:
                raise ValueError(f"{QUANT_METHOD}, layer {self.prefix}: {error}") from None
        super().create_weights(  # type: ignore[misc]
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )

    def check_layer(self, layer: Any) -> None:
        """Raise ValueError for what the path behind `apply` would compute wrongly or not at all."""
        check_model_dtype(layer.moe_config.in_dtype, f"{QUANT_METHOD}, layer {self.prefix}")
        if is_310p():
            return
        from vllm_ascend.ascend_config import get_ascend_config

        config = get_ascend_config()
        activation, _ = moe_activation(getattr(layer, "activation", "silu"), self.prefix)
        limit = getattr(layer, "swiglu_limit", 0) or 0
        refused = (
            (activation != "silu", f"its W4A16 path computes SwiGLU only, and this model uses {activation!r}", ""),
            (bool(limit), f"its W4A16 path ignores swiglu_limit={limit}", ""),
            (bool(layer.moe_config.has_bias), "its W4A16 path ignores the experts' biases", ""),
            (
                bool(config.enable_fused_mc2),
                "its fused MC2 operator takes no 4-bit weights with offsets",
                ": unset enable_fused_mc2",
            ),
            (
                bool(config.eplb_config.dynamic_eplb),
                "its expert balancing moves experts by the names of its own weights",
                ": unset dynamic_eplb",
            ),
            (
                bool(config.mix_placement),
                "its mixed placement puts shared experts, which stay in 16 bits, among the routed ones",
                ": unset mix_placement",
            ),
        )
        for is_refused, why, remedy in refused:
            if is_refused:
                way_out = remedy or f"; serve the model without --quantization {QUANT_METHOD}"
                raise ValueError(
                    f"{QUANT_METHOD}, layer {self.prefix}: vLLM-Ascend cannot run these in 4 bits: {why}{way_out}"
                )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        use_grouped_topk: bool = False,
        num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        topk_group: int | None = None,
        num_expert_group: int | None = None,
        custom_routing_function: Any = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        is_prefill: bool = True,
        enable_force_load_balance: bool = False,
        log2phy: torch.Tensor | None = None,
        global_redundant_expert_num: int = 0,
        pertoken_scale: torch.Tensor | None = None,
        activation: Any = "silu",
        apply_router_weight_on_input: bool = False,
        mc2_mask: torch.Tensor | None = None,
    ) -> Any:
        """vLLM-Ascend's `FusedExpertsResult` for x [M, H], router_logits [M, experts]; names and order are its own."""
        routing = {
            "hidden_states": x,
            "router_logits": router_logits,
            "top_k": top_k,
            "use_grouped_topk": use_grouped_topk,
            "renormalize": renormalize,
            "topk_group": topk_group,
            "num_expert_group": num_expert_group,
            "custom_routing_function": custom_routing_function,
            "scoring_func": scoring_func,
            "e_score_correction_bias": e_score_correction_bias,
        }
        if is_310p():
            return self._on_310p(layer, expert_map, routing, num_experts)
        from vllm_ascend.ascend_forward_context import _EXTRA_CTX
        from vllm_ascend.ops.fused_moe.experts_selector import select_experts
        from vllm_ascend.ops.fused_moe.moe_runtime_args import build_fused_experts_input
        from vllm_ascend.quantization.methods.base import get_moe_num_logical_experts
        from vllm_ascend.quantization.quant_type import QuantType

        logical = get_moe_num_logical_experts(
            layer,
            num_experts,
            global_redundant_expert_num=global_redundant_expert_num,
            num_shared_experts=getattr(layer, "n_shared_experts", 0) or 0,
        )
        topk_weights, topk_ids = select_experts(
            **routing, routed_scaling_factor=routed_scaling_factor, num_experts=logical, tid2eid=self.tid2eid
        )
        if enable_force_load_balance:
            # A profile run's tokens are all alike; spread over all experts they take the memory that real ones do.
            spread = torch.rand(topk_ids.shape[0], logical, device=topk_ids.device)
            topk_ids = torch.argsort(spread, dim=1)[:, : topk_ids.shape[1]]
        return _EXTRA_CTX.moe_comm_method.fused_experts(
            fused_experts_input=build_fused_experts_input(
                hidden_states=x,
                topk_weights=topk_weights.to(x.dtype),
                topk_ids=topk_ids.to(torch.int32),
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                quant_type=QuantType.W4A16,
                dynamic_eplb=False,
                expert_map=expert_map,
                global_redundant_expert_num=global_redundant_expert_num,
                mc2_mask=mc2_mask,
                apply_router_weight_on_input=apply_router_weight_on_input,
                log2phy=log2phy,
                pertoken_scale=pertoken_scale,
                activation=activation,
                w1_scale=layer.w13_scale,
                w2_scale=layer.w2_scale,
                w1_offset=layer.w13_offset,
                w2_offset=layer.w2_offset,
            )
        )

    def _on_310p(self, layer: Any, expert_map: torch.Tensor | None, routing: dict[str, Any], num_experts: int) -> Any:
        from vllm_ascend._310p.fused_moe.experts_selector import select_experts
        from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult

        topk_weights, topk_ids = select_experts(**routing, global_num_experts=num_experts)
        # Types change for experts that move between ranks only, and here none do.
        tensors = [getattr(layer, name) for name, _ in self.tensors]
        routed = call_experts(routing["hidden_states"], topk_weights, topk_ids, expert_map, tensors, self.meta)
        return FusedExpertsResult(routed_out=routed)


class AscendAtLoadMoEMethod(_RunsOnAscend, AtLoadMoEMethod):  # type: ignore[misc]
    """A 16-bit checkpoint's experts, quantised while they load."""

    def groups(self) -> tuple[int | None, int | None]:
        """Group sizes along the hidden and the intermediate size; None is a whole row."""
        return self.scheme.group_size_w13, self.scheme.group_size_w2


class AscendPackedMoEMethod(_RunsOnAscend, PackedMoEMethod):  # type: ignore[misc]
    """Experts that a checkpoint holds in 4 bits."""

    def groups(self) -> tuple[int | None, int | None]:
        """As above, of the checkpoint."""
        return self.packed.group_size_w13, self.packed.group_size_w2


def make_method(
    layer: Any,
    prefix: str,
    how: Scheme | PackedFormat,
    options: Options,
    report: QuantizationReport,
    tid2eid: Any = None,
) -> Any:
    """The method for a layer of routed experts: quantising at load by a scheme, or reading a packed checkpoint.

    vLLM-Ascend asks twice for every layer, the second time with `tid2eid`, its table from token to expert ids. Raises
    ValueError for options and checkpoints that its layers cannot use.
    """
    if options.moe_backend not in ("auto", NPU_BACKEND):
        raise ValueError(
            f"{QUANT_METHOD}: moe_backend {options.moe_backend!r} does not run under vLLM-Ascend; leave it out, or say "
            f"{NPU_BACKEND!r}"
        )
    if isinstance(how, PackedFormat) and how.compressed_tensors:
        raise ValueError(
            f"{QUANT_METHOD}: under vLLM-Ascend compressed-tensors checkpoints are served by its own method; drop the "
            "flag, or pack the 16-bit checkpoint with `vllm-ext quantize`"
        )
    check_model_dtype(layer.moe_config.in_dtype, f"{QUANT_METHOD}, layer {prefix}")
    method: Any
    if isinstance(how, PackedFormat):
        method = AscendPackedMoEMethod(layer, prefix, how, options, report)
    else:
        method = AscendAtLoadMoEMethod(layer, prefix, how, options, report)
    method.tid2eid = tid2eid
    return method
