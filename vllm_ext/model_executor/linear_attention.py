"""Linear-attention prefill of vLLM's layers by our operators: what is called in place of vLLM's kernels.

The state contract, where the caller gathers and scatters unless said otherwise:

| call | platform, vLLM | state | layout | dtype |
| --- | --- | --- | --- | --- |
| `GatedDeltaRulePrefill` | GPU, all | gathered [N, HV, V, K] | value first | the cache's; returned in FP32 |
| `gated_delta_rule_on_cpu` | CPU, 0.32 on | the pool [slots, HV, K, V], read and written by slot | key first | FP32 |
| | CPU, 0.23 | gathered [N, HV, K, V] | key first | FP32 |
| `kda_with_fused_gate`, `kda` | GPU, all | gathered [N, H, V, K] | value first | the cache's, also when returned |

A sequence's initial state is zero where its request begins and the stored one where it continues (a further chunk, a
prefix found in the cache, after preemption); vLLM decides which, from the request's metadata. An empty sequence returns
the state it came with. Where prefix caching wants the state at a block's end, vLLM ends the chunk there.

A layer of a model served with `--attention-backend ha_npu` carries a `LayerPrefill`; where vLLM's call sites are, and
how they find the layer, is in `linear_attention_hooks`. Decode stays vLLM's, and so do speculative tokens under check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_ext import compat
from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill, PrefillOperands, Result
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda


class GatedDeltaRulePrefill(torch.nn.Module):
    """Stands in for a layer's `ChunkGatedDeltaRule`: q, k [1, T, H, K] already normalised unless the flag says so,
    v [1, T, HV, V], g and beta [1, T, HV], initial_state [N, HV, V, K] gathered by the caller, who also scatters.
    """

    # The name vLLM's layer and metadata builder read: Triton's needs nothing precomputed beyond the metadata itself.
    gdn_prefill_backend = "triton"

    def __init__(self, prefill: LayerPrefill, stock: Callable[..., Any]) -> None:
        super().__init__()
        self.prefill = prefill
        self.stock = stock

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
        **precomputed: Any,
    ) -> Result:
        """`precomputed` (chunk indices and the like) is for the kernels that need it; ours do not."""
        operands = PrefillOperands(q, k, v, g, beta, initial_state, cu_seqlens)
        flags: dict[str, Any] = {
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }

        def ours(x: PrefillOperands) -> Result:
            return chunk_gated_delta_rule(**vars(x), **flags, state_v_first=True)

        def vllms() -> Result:
            result: Result = self.stock(**vars(operands), **flags, **precomputed)
            return result

        o, state = self.prefill.run(operands, ours, vllms)
        if core_attn_out is not None:
            core_attn_out.view(-1)[: o.numel()].copy_(o.reshape(-1))
        return o, state


def gated_delta_rule_on_cpu(
    prefill: LayerPrefill,
    stock: Callable[..., Any],
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Result:
    """Stands in for `vllm._custom_ops.chunk_gated_delta_rule_cpu`.

    query, key [1, T, H, K], value [1, T, HV, V], g and beta [1, T, HV]. initial_state is the pool [slots, HV, K, V],
    whose rows `initial_state_indices` are read and overwritten; without indices (0.23) a gathered [N, HV, K, V].
    eps is what vLLM's CPU kernels add under the root of the L2 norm, ten times what its GPU kernels do.
    """
    indices = None if initial_state_indices is None else initial_state_indices.long()
    states = initial_state if indices is None else initial_state[indices]
    operands = PrefillOperands(query, key, value, g, beta, states, cu_seqlens)

    def ours(x: PrefillOperands) -> Result:
        if head_first:
            raise ValueError("head_first layout is not supported; vLLM passes tokens first")
        wide = {name: getattr(x, name).float() for name in ("q", "k", "v")}
        if use_qk_l2norm_in_kernel:
            wide |= {n: wide[n] * torch.rsqrt(wide[n].square().sum(-1, keepdim=True) + eps) for n in ("q", "k")}
        o, state = chunk_gated_delta_rule(**{**vars(x), **wide}, output_final_state=True)
        return o.to(value.dtype), state

    def vllms() -> Result:
        pool = {} if initial_state_indices is None else {"initial_state_indices": initial_state_indices}
        result: Result = stock(
            query=query,
            key=key,
            value=value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            head_first=head_first,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            eps=eps,
            **pool,
        )
        return result if indices is None else (result[0], None)  # vLLM's kernel has written the pool

    o, state = prefill.run(operands, ours, vllms)
    if indices is None:
        return o, state
    if state is not None:
        initial_state[indices] = state.to(initial_state.dtype)
    return o, initial_state


def kda_gate(
    raw_g: torch.Tensor, A_log: torch.Tensor, g_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """Log decays [1, T, H, K] in FP32 from the gate projection: -exp(A) softplus(x + bias), or, with the safe gate,
    lower_bound * sigmoid(exp(A) (x + bias)); A per head, bias per channel.
    """
    heads, channels = raw_g.shape[-2:]
    x = raw_g.float()
    if g_bias is not None:
        x = x + g_bias.float().view(heads, channels)
    rate = A_log.float().reshape(heads, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * F.softplus(x)


def kda_with_fused_gate(
    prefill: LayerPrefill,
    stock: Callable[..., Any],
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_g: torch.Tensor,
    A_log: torch.Tensor,
    g_bias: torch.Tensor | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    out: torch.Tensor | None = None,
    **step: torch.Tensor,
) -> Result:
    """Stands in for vLLM's `chunk_kda_with_fused_gate`: q, k, v, raw_g [1, T, H, K] before the gate's activation,
    initial_state [N, H, V, K] gathered by the caller, who also scatters. `step` is beta or its projection (see compat).
    """
    beta = compat.kda_beta(**step)
    flags = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    operands = PrefillOperands(q, k, v, raw_g, beta, initial_state, cu_seqlens)

    def ours(x: PrefillOperands) -> Result:
        gate = kda_gate(x.g, A_log, g_bias, lower_bound)
        return _kda(x, gate, scale=scale, **flags)

    def vllms() -> Result:
        optional = {"lower_bound": lower_bound, "scale": scale}
        result: Result = stock(
            q=q,
            k=k,
            v=v,
            raw_g=raw_g,
            A_log=A_log,
            g_bias=g_bias,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            **flags,
            **step,
            **{name: value for name, value in optional.items() if value is not None},
        )
        return result

    return _finish_kda(prefill.run(operands, ours, vllms), initial_state, out)


def kda(
    prefill: LayerPrefill,
    stock: Callable[..., Any],
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **gate: Any,
) -> Result:
    """Stands in for vLLM's `chunk_kda`, whose gate the caller has applied: q, k, v, g [1, T, H, K], beta [1, T, H].

    `gate` says how (safe gate, lower bound), which lets vLLM's kernel choose products that cannot overflow; ours never
    do. initial_state as in `kda_with_fused_gate`.
    """
    flags = {
        "scale": scale,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
    }
    operands = PrefillOperands(q, k, v, g, beta, initial_state, cu_seqlens)

    def ours(x: PrefillOperands) -> Result:
        return _kda(x, x.g, **flags)

    def vllms() -> Result:
        result: Result = stock(**vars(operands), **flags, **gate)
        return result

    return _finish_kda(prefill.run(operands, ours, vllms), initial_state, None)


def _kda(x: PrefillOperands, g: torch.Tensor, **flags: Any) -> Result:
    return chunk_kda(
        x.q, x.k, x.v, g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, state_v_first=True, **flags
    )


def _finish_kda(result: Result, initial_state: torch.Tensor | None, out: torch.Tensor | None) -> Result:
    """The state in the cache's dtype, as vLLM's layers scatter it without a cast; o where the caller wants it."""
    o, state = result
    if state is not None and initial_state is not None:
        state = state.to(initial_state.dtype)
    return (o, state) if out is None else (out.copy_(o), state)
