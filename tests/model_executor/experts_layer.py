"""A layer as vLLM hands it to our method, with 4-bit experts, without an engine."""

from __future__ import annotations

import types
from typing import Any

import torch

from vllm_ext.options import Options
from vllm_ext.quantization import QuantizedWeight, quantize_weight

EXPERTS, HIDDEN, INTER = 4, 64, 32


def random_experts() -> tuple[QuantizedWeight, QuantizedWeight]:
    """w13 [E, 2I, H] and w2 [E, H, I]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    w13, w2 = (quantize_weight(torch.randn(s, generator=generator).bfloat16() * 0.2, 32) for s in shapes)
    return w13, w2


def experts_layer(backend: str, *, eplb: bool = False, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The layer, finished by `_RunsW4A16`; `fields` are attributes by which vLLM's layers say how they compute."""
    from vllm_ext.model_executor.moe_method import _RunsW4A16
    from vllm_ext.model_executor.report import QuantizationReport

    layer = torch.nn.Module()
    layer.moe_config = types.SimpleNamespace(moe_parallel_config=types.SimpleNamespace(enable_eplb=eplb))
    said = {"activation": "silu", "top_k": 2, "apply_router_weight_on_input": False, "expert_map": None}
    for name, value in {**said, "global_num_experts": EXPERTS, **fields}.items():
        setattr(layer, name, value)
    for name in ("w13_weight", "w2_weight"):
        layer.register_parameter(name, torch.nn.Parameter(torch.empty(0), requires_grad=False))
    layer.quant_method = _RunsW4A16()
    layer.quant_method._set_up(
        "layers.5.experts", Options(moe_backend=backend, **(options or {})), QuantizationReport()
    )
    layer.quant_method._finish(layer, *random_experts(), torch.bfloat16, 0)
    return layer
