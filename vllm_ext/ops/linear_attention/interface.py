"""The public operators. Shapes and meaning follow flash-linear-attention's functions of the same names."""

from __future__ import annotations

import torch

from vllm_ext.ops.linear_attention.dispatch import select_backend
from vllm_ext.ops.linear_attention.problem import Call, check_call, check_kinds

Result = tuple[torch.Tensor, torch.Tensor | None]


@torch.no_grad()
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    backend: str = "auto",
) -> Result:
    """Gated delta rule over whole sequences; for inference, no gradient.

    Per value head, from the state S [K, V] before token t:
    S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale * S^T q_t.

    Args:
        q, k: [B, T, H, K], BF16, FP16 or FP32 (FP64 for the plain-torch backends).
        v: [B, T, HV, V], same dtype; HV a multiple of H, value head i reads key head i // (HV // H).
        g: [B, T, HV], natural-log decay, at most 0. Above 0 it is refused on a CPU; elsewhere that would mean to wait
            for the device, so it is not looked at, and the result is undefined.
        beta: [B, T, HV], step size.
        scale: of q; K**-0.5 when None.
        initial_state: [N, HV, K, V], or [N, HV, V, K] when state_v_first; zeros when None. Never written.
        output_final_state: also return the state after each sequence's last token.
        cu_seqlens: int32 or int64 [N + 1], token offsets of N packed sequences; then B must be 1. N is B without it.
            Offsets on a CPU are looked at; on another device, as g, they are not, and ones that fall or pass T read and
            write memory that is not the call's.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) first.
        backend: "auto", "reference", "cpu", "triton", "ascend-sim" or "npu".

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state in FP32 (FP64 for FP64 inputs) in initial_state's shape and
        order, or None.

    Raises:
        TypeError: what is no tensor where one is asked for, or an unknown keyword.
        ValueError: contradicting shapes, dtypes or offsets, or a backend name that does not exist.
        RuntimeError: the backend cannot be used here, with the reason.
    """
    check_kinds("chunk_gated_delta_rule", scale, initial_state, cu_seqlens, q=q, k=k, v=v, g=g, beta=beta)
    call = Call(
        q, k, v, g, beta, _scale(scale, q), initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel, state_v_first,
    )  # fmt: skip
    problem = check_call("chunk_gated_delta_rule", "gdn", call)
    module, _ = select_backend("chunk_gated_delta_rule", backend, problem)
    result: Result = module.chunk_gated_delta_rule(call)
    return result


@torch.no_grad()
def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    backend: str = "auto",
) -> Result:
    """Kimi Delta Attention over whole sequences; for inference, no gradient.

    The gated delta rule with a decay for each key channel: S <- diag(exp(g_t)) S, the rest as in
    `chunk_gated_delta_rule`, which also describes every argument not named here.

    Args:
        g: [B, T, HV, K], natural-log decay of each key channel, at most 0 (above: as there).

    Raises:
        TypeError, ValueError, RuntimeError: as `chunk_gated_delta_rule`.
    """
    check_kinds("chunk_kda", scale, initial_state, cu_seqlens, q=q, k=k, v=v, g=g, beta=beta)
    call = Call(
        q, k, v, g, beta, _scale(scale, q), initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel, state_v_first,
    )  # fmt: skip
    problem = check_call("chunk_kda", "kda", call)
    module, _ = select_backend("chunk_kda", backend, problem)
    result: Result = module.chunk_kda(call)
    return result


def _scale(scale: float | None, q: torch.Tensor) -> float:
    if scale is not None:
        return float(scale)
    return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
