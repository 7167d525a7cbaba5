"""The layers that ours are compared with, built from the same quantised weights: vLLM's Marlin, humming, WNA16 and BF16
experts.

Each builder imports vLLM when it is called and returns a call (x, topk_weights, topk_ids) -> [M, H]. Marlin and WNA16
read integer zero points, or none; humming reads float zero points, BF16 the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm_ext.benchmarks.moe_common import Shape

from vllm_ext.quantization import QuantizedWeight

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _activation(shape: Shape) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return MoEActivation(shape.activation)


def _dequantize(weight: QuantizedWeight) -> torch.Tensor:
    experts = weight.shape[0]
    return torch.stack(
        [
            QuantizedWeight(
                weight.packed[e],
                weight.scale[e],
                None if weight.zero_point is None else weight.zero_point[e],
                weight.group_size,
                weight.shape[1:],
            ).dequantize(torch.bfloat16)
            for e in range(experts)
        ]
    )


def bf16(shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    """vLLM's Triton BF16 experts, with the launch configuration vLLM ships for the shape, if it ships one."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    weights = (_dequantize(w13), _dequantize(w2))
    activation = _activation(shape)
    return lambda x, topk_weights, topk_ids: fused_experts(x, *weights, topk_weights, topk_ids, activation=activation)


def wna16(shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    """vLLM's Triton int4 experts; they take one group size, so the smaller one's weights are theirs to read."""
    from vllm.model_executor.layers.fused_moe.config import int4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    if w13.zero_point is None or w2.zero_point is None or w13.zero_point.is_floating_point():
        raise ValueError("wna16: integer zero points are needed")
    group = min(w13.group_size, w2.group_size)

    def per_group(weight: QuantizedWeight, values: torch.Tensor) -> torch.Tensor:
        groups = weight.shape[-1] // group
        return values.repeat_interleave(weight.group_size // group, dim=-1)[..., :groups].contiguous()

    def zeros(weight: QuantizedWeight) -> torch.Tensor:
        assert weight.zero_point is not None
        expanded = per_group(weight, weight.zero_point)
        return (expanded[:, 0::2] | expanded[:, 1::2] << 4).contiguous()

    config = int4_w4a16_moe_quant_config(
        w1_scale=per_group(w13, w13.scale),
        w2_scale=per_group(w2, w2.scale),
        w1_zp=zeros(w13),
        w2_zp=zeros(w2),
        block_shape=[0, group],
    )
    activation = _activation(shape)
    return lambda x, topk_weights, topk_ids: fused_experts(
        x, w13.packed, w2.packed, topk_weights, topk_ids, activation=activation, quant_config=config
    )


def _marlin_weight(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(words, scales, zero points) in Marlin's order."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    experts, rows, columns = weight.shape
    device = weight.packed.device
    words = weight.packed.view(torch.int32).transpose(1, 2).contiguous()
    no_order = torch.empty(experts, 0, dtype=torch.int32, device=device)
    repacked = ops.gptq_marlin_moe_repack(words, no_order, columns, rows, 4)
    scales = marlin_utils.marlin_moe_permute_scales(
        weight.scale.transpose(1, 2).contiguous(), columns, rows, weight.group_size
    )
    if weight.zero_point is None:
        return repacked, scales, None
    groups = weight.scale.shape[-1]
    zeros = torch.stack(
        [
            marlin_utils.marlin_zero_points(weight.zero_point[e].T.contiguous().int(), groups, rows, 4)
            for e in range(experts)
        ]
    )
    return repacked, scales, zeros.to(device)


def marlin(shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    """vLLM's Marlin experts, with integer zero points or symmetric, as the weights are."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    first, second = _marlin_weight(w13), _marlin_weight(w2)
    kind = scalar_types.uint4b8 if w13.symmetric else scalar_types.uint4
    workspace = marlin_make_workspace_new(w13.packed.device, 4)
    activation = _activation(shape)
    return lambda x, topk_weights, topk_ids: fused_marlin_moe(
        x,
        first[0],
        second[0],
        None,
        None,
        first[1],
        second[1],
        topk_weights,
        topk_ids,
        quant_type_id=kind.id,
        global_num_experts=shape.experts,
        activation=activation,
        w1_zeros=first[2],
        w2_zeros=second[2],
        workspace=workspace,
    )


def _humming_layer(shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> torch.nn.Module:
    """Both weights in humming's order, padded as vLLM pads them; it takes the same float zero points as ours."""
    from humming import dtypes
    from humming.layer import HummingMethod
    from humming.schema import HummingInputSchema, HummingWeightSchema

    layer = torch.nn.Module()
    sizes = {"w13": (2 * shape.inter, shape.hidden), "w2": (shape.hidden, shape.inter)}
    for name, weight in (("w13", w13), ("w2", w2)):
        assert weight.zero_point is not None
        tensors = {"weight": weight.packed.view(torch.int32), "weight_scale": weight.scale}
        for key, tensor in (tensors | {"zero_point": weight.zero_point}).items():
            setattr(layer, f"{name}_{key}", torch.nn.Parameter(tensor, requires_grad=False))
        schema = HummingWeightSchema(
            b_dtype=dtypes.DataType.from_str("uint4"),
            weight_scale_group_size=weight.group_size,
            has_zero_point=True,
            is_fp_zero_point=True,
        )
        HummingMethod.prepare_layer_meta(
            layer=layer,
            shape_n=sizes[name][0],
            shape_k=sizes[name][1],
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            input_schema=HummingInputSchema(),
            weight_schema=schema,
            num_experts=shape.experts,
            torch_dtype=torch.bfloat16,
            sublayer_name=name,
        )
        HummingMethod.transform_humming_layer(layer, sublayer_name=name)
    layer.register_buffer("locks", torch.zeros(1024, dtype=torch.int32, device=w13.packed.device))
    return layer


def humming(tokens: Sequence[int], shape: Shape, w13: QuantizedWeight, w2: QuantizedWeight) -> Call:
    """vLLM's humming experts ("indexed" GEMMs, its default), compiled for the GPU when first called.

    Only the kernels that batches of `tokens` take are compiled, of some dozens that it has for all sizes.
    """
    import json

    from humming.config import GemmType
    from humming.layer import HummingMethod
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    layer = _humming_layer(shape, w13, w2)
    compute = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": GemmType.INDEXED.value})
    # Its launcher looks the row for one slot up at every call.
    wanted = (1, *(count * shape.top_k for count in tokens))
    tuned = {}
    for name in ("w13", "w2"):
        rows = HummingMethod.get_default_tuning_configs(layer=layer, gemm_type=GemmType.INDEXED, sublayer_name=name)
        tuned[name] = [row for row in rows if any(row[0] < slots <= row[1] for slots in wanted)]
    activation = _activation(shape)

    def call(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        count, top_k = topk_ids.shape
        slots = count * top_k
        block = next((row[2]["block_shape"][0] for row in tuned["w13"] if row[0] < slots <= row[1]), None)
        if block is None:
            raise ValueError(f"humming: compiled for {tuple(tokens)} tokens, not for {count}")
        sorted_ids, expert_ids, padded = moe_align_block_size(
            topk_ids, block, shape.experts, None, ignore_invalid_experts=True
        )
        common = {
            "layer": layer,
            "sorted_ids": sorted_ids,
            "expert_ids": expert_ids,
            "num_tokens_padded": padded,
            "compute_config": compute,
            "valid_shape_m": slots,
        }
        first, second, third = (x.new_empty(slots, width) for width in (2 * shape.inter, shape.inter, shape.hidden))
        HummingMethod.forward_layer(
            inputs=x, outputs=first, top_k=top_k, tuning_config=json.dumps(tuned["w13"]), sublayer_name="w13", **common
        )
        apply_moe_activation(activation, second, first)
        HummingMethod.forward_layer(
            inputs=second, outputs=third, top_k=1, tuning_config=json.dumps(tuned["w2"]), sublayer_name="w2", **common
        )
        out = torch.empty_like(x)
        moe_fused_mul_sum(third.view(count, top_k, -1), topk_weights, out)
        return out

    return call
