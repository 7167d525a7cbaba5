"""Linear-attention prefill of vLLM's layers by our operators: what is called in place of vLLM's kernels.

A layer of a model served with `--attention-backend ha_npu` carries a `LayerPrefill`; where vLLM's call sites are, and
how they find the layer, is in `linear_attention_hooks`. Decode stays vLLM's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from vllm_ext import compat
from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.dispatch import select_backend
from vllm_ext.ops.linear_attention.problem import Problem

logger = logging.getLogger("vllm.vllm_ext.linear_attention")
Result = TypeVar("Result")

_RULES = {"gdn": "gated delta rule", "kda": "Kimi delta attention"}


@dataclass
class LayerPrefill:
    """One layer's prefill. layer_name: vLLM's prefix; op: "gdn" or "kda"; fallback: vLLM's kernel when ours refuses."""

    layer_name: str
    op: str
    fallback: bool = False
    warned: bool = field(default=False, repr=False)

    def run(self, ours: Callable[[], Result], stock: Callable[[], Result]) -> Result:
        """Our kernel's result. It writes no operand before it has succeeded, so `stock` can still take over.

        Raises RuntimeError naming the layer and the rule when ours fails and no fallback was asked for.
        """
        try:
            return ours()
        except Exception as error:
            reason = f"{self.layer_name}: ha_npu prefill of the {_RULES[self.op]} failed: {error}"
            if not self.fallback:
                raise RuntimeError(
                    f"{reason}. Serve without --attention-backend ha_npu, or let vLLM's kernel take over such calls "
                    'with --additional-config \'{"vllm_ext": {"on_kernel_error": "fallback"}}\''
                ) from error
            if not self.warned:
                self.warned = True
                logger.warning("%s; vLLM's own kernel takes over for this layer where that happens", reason)
            return stock()


@functools.cache
def _announce(op: str, backend: str) -> None:
    logger.info("ha_npu: %s prefill by vllm_ext backend %s; decode and full attention stay vLLM's", op.upper(), backend)


def make_layer_prefill(layer_name: str, problem: Problem, fallback: bool) -> LayerPrefill | None:
    """The prefill of a layer with these sizes; None when nothing here can serve it and a fallback was asked for.

    Raises RuntimeError when nothing can serve it and none was.
    """
    prefill = LayerPrefill(layer_name, problem.op, fallback)
    choice = prefill.run(lambda: select_backend("ha_npu", "auto", problem), lambda: None)
    if choice is None:
        return None
    module, passed_over = choice
    _announce(problem.op, module.NAME)
    logger.debug(
        "%s: %s prefill by vllm_ext backend %s%s (%d key heads of %d, %d value heads of %d, %s)",
        layer_name,
        problem.op,
        module.NAME,
        f", because {passed_over}" if passed_over else "",
        problem.num_heads,
        problem.key_dim,
        problem.num_value_heads,
        problem.value_dim,
        problem.dtype,
    )
    return prefill


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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`precomputed` (chunk indices and the like) is for the kernels that need it; ours do not."""
        call: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "cu_seqlens": cu_seqlens,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }

        def ours() -> tuple[torch.Tensor, torch.Tensor | None]:
            o, state = chunk_gated_delta_rule(**call, state_v_first=True)
            if core_attn_out is not None:
                core_attn_out.view(-1)[: o.numel()].copy_(o.view(-1))
            return o, state

        return self.prefill.run(ours, lambda: self.stock(**call, core_attn_out=core_attn_out, **precomputed))


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `vllm._custom_ops.chunk_gated_delta_rule_cpu`.

    query, key [1, T, H, K], value [1, T, HV, V], g and beta [1, T, HV]. initial_state is the pool [slots, HV, K, V],
    whose rows `initial_state_indices` are read and overwritten; without indices (0.23) a gathered [N, HV, K, V].
    eps is what vLLM's CPU kernels add under the root of the L2 norm, ten times what its GPU kernels do.
    """

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        if head_first:
            raise ValueError("head_first layout is not supported; vLLM passes tokens first")
        indices = None if initial_state_indices is None else initial_state_indices.long()
        q, k, v = query.float(), key.float(), value.float()
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
        o, state = chunk_gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=initial_state if indices is None else initial_state[indices],
            output_final_state=True,
            cu_seqlens=cu_seqlens,
        )
        assert state is not None
        if indices is None:
            return o.to(value.dtype), state
        initial_state[indices] = state.to(initial_state.dtype)
        return o.to(value.dtype), initial_state

    def vllms() -> tuple[torch.Tensor, torch.Tensor]:
        pool = {} if initial_state_indices is None else {"initial_state_indices": initial_state_indices}
        result: tuple[torch.Tensor, torch.Tensor] = stock(
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
        return result

    return prefill.run(ours, vllms)


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands in for vLLM's `chunk_kda_with_fused_gate`: q, k, v, raw_g [1, T, H, K] before the gate's activation,
    initial_state [N, H, V, K] gathered by the caller, who also scatters. `step` is beta or its projection (see compat).
    """

    def ours() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, state = chunk_kda(
            q,
            k,
            v,
            kda_gate(raw_g, A_log, g_bias, lower_bound),
            compat.kda_beta(**step),
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            state_v_first=True,
        )
        if state is not None and initial_state is not None:
            state = state.to(initial_state.dtype)
        return (o, state) if out is None else (out.copy_(o), state)

    def vllms() -> tuple[torch.Tensor, torch.Tensor | None]:
        optional = {"lower_bound": lower_bound, "out": out, "scale": scale}
        result: tuple[torch.Tensor, torch.Tensor | None] = stock(
            q=q,
            k=k,
            v=v,
            raw_g=raw_g,
            A_log=A_log,
            g_bias=g_bias,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
            **step,
            **{name: value for name, value in optional.items() if value is not None},
        )
        return result

    return prefill.run(ours, vllms)
