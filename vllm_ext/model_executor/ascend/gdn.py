"""Gated DeltaNet prefill of vLLM-Ascend's layers by our operator: the functions its layers look up at each call.

| chip | function | state | dtype |
| --- | --- | --- | --- |
| 310P | `vllm_ascend._310p.ops.fla.gdn_310.chunk_gated_delta_rule_310` | [N, HV, V, K] | FP16 in, FP32 out |
| A2, A3 | `vllm_ascend.ops.gdn.chunk_gated_delta_rule` | [N, HV, K, V] | the cache's in, FP32 out |

A2's caller transposes to and fro. Both callers gather by slot, zero what begins, cast what we return to the cache's
dtype once, and scatter it. KDA has no function of vLLM-Ascend's own: it runs through vLLM's
`chunk_kda_with_fused_gate`, which `linear_attention_hooks` serves on every platform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_ext.model_executor.linear_attention_hooks import _serve_function
from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill, PrefillOperands, Result
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule


def hook_310p(module: Any) -> None:
    """`vllm_ascend._310p.ops.fla.gdn_310`."""
    _serve_function(module, "chunk_gated_delta_rule_310", serve_310p)


def hook_a2(module: Any) -> None:
    """`vllm_ascend.ops.gdn`, for A2 and A3."""
    _serve_function(module, "chunk_gated_delta_rule", serve_a2)


def serve_310p(prefill: LayerPrefill, stock: Callable[..., Any], **call: Any) -> Result:
    """Stands in for `chunk_gated_delta_rule_310`: states [N, HV, V, K]."""
    return _serve(prefill, stock, True, **call)


def serve_a2(prefill: LayerPrefill, stock: Callable[..., Any], **call: Any) -> Result:
    """Stands in for A2's `chunk_gated_delta_rule`: states [N, HV, K, V]."""
    return _serve(prefill, stock, False, **call)


def _serve(
    prefill: LayerPrefill,
    stock: Callable[..., Any],
    state_v_first: bool,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: torch.Tensor | None = None,
    **precomputed: Any,
) -> Result:
    """q, k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV], cu_seqlens [N + 1]; `precomputed` is for vLLM-Ascend's
    kernels. Its own function takes the very call it was given when ours refuses and a fallback was asked for.
    """
    flags: dict[str, Any] = {
        "scale": scale,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    operands = PrefillOperands(q, k, v, g, beta, initial_state, cu_seqlens)

    def ours(x: PrefillOperands) -> Result:
        if head_first:
            raise ValueError("head_first layout is not supported; vLLM-Ascend passes tokens first")
        return chunk_gated_delta_rule(**vars(x), **flags, state_v_first=state_v_first)

    def theirs() -> Result:
        optional = {} if core_attn_out is None else {"core_attn_out": core_attn_out}
        result: Result = stock(**vars(operands), **flags, head_first=head_first, **optional, **precomputed)
        return result

    o, state = prefill.run(operands, ours, theirs)
    if core_attn_out is not None and o.data_ptr() != core_attn_out.data_ptr():
        core_attn_out.view(-1)[: o.numel()].copy_(o.reshape(-1))
    return o, state
