"""`quantize_experts`, on a loaded model: the swap, and what lets transformers save the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from vllm_ext.integrations.hf_quantizer import earlier_scheme, mark_quantized
from vllm_ext.integrations.swap import Report, packed_experts, swap_experts
from vllm_ext.quantization import Scheme
from vllm_ext.quantization.names import is_ignored


def quantize_experts(
    model: nn.Module,
    *,
    group_sizes: tuple[int, int] = (128, 64),
    ignore: Sequence[str] = (),
    backend: str = "auto",
    progress: bool = True,
    symmetric: bool = False,
    zero_point: str = "float",
    method: str = "hqq",
    replay: bool = True,
) -> Report:
    """Put the routed experts of a Hugging Face model into 4 bits, in place, and return what changed.

    model        a loaded model in FP16, BF16 or FP32: transformers 5, on one or several devices, with or without PEFT
                 adapters on other modules. Each layer's 16-bit experts are freed before the next layer is packed.
    group_sizes  columns of a group along the hidden size (gate and up), and along the intermediate size (down)
    ignore       expert layers to leave as they are: names matched by component, or "re:" and a regular expression
                 (one string is one pattern)
    backend      "auto" (by device), "triton", "cpu" or "reference"; see `vllm_ext.ops.moe.prepare_experts`
    progress     show a bar on stderr
    symmetric, zero_point, method  as in `vllm_ext.quantization.Scheme`
    replay       on CUDA devices, record a layer called eagerly with the same number of rows (at most 1024) again and
                 again once, and replay it from a CUDA graph: an eager forward waits for its host (layer_graphs.py).
                 Takes the memory of one layer's intermediates; switch it off where that matters more

    Weights that several modules share (DiffusionGemma's encoder and decoder) are packed once and stay shared.
    Layers that an earlier call left out can follow in another, with the same options.
    Raises TypeError when `model` is no module; ValueError when it has no experts in 16 bits, or they are not in memory,
    or values do not fit.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_experts: model must be a loaded torch module, got {type(model).__name__}")
    if not isinstance(group_sizes, (tuple, list)) or len(group_sizes) != 2:
        raise ValueError(
            f"quantize_experts: group_sizes must be two numbers, (hidden, intermediate), got {group_sizes!r}"
        )
    scheme = Scheme(
        group_size_w13=group_sizes[0],
        group_size_w2=group_sizes[1],
        symmetric=symmetric,
        zero_point=zero_point,
        method=method,
        ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
    )
    packed = packed_experts(model)
    earlier = earlier_scheme(model) if packed else None
    report = swap_experts(model, scheme, backend=backend, progress=progress, replay=replay, earlier=earlier)
    if any(is_ignored(name, scheme.ignore) for name in packed):
        scheme = replace(scheme, ignore=tuple(report.ignored))
    mark_quantized(model, scheme)
    return report
