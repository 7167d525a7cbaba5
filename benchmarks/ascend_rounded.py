"""The Ascend C kernels' arithmetic in FP64, with operands rounded to FP16 where the kernels round them, nowhere else.

Against the unrounded definition a kernel differs by what FP16 operands cost any kernel; against this it differs only by
FP32 sums and the FP16 output, so that a mistake of any other kind stands out.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from vllm_ext.ops.linear_attention.problem import Call

CHUNK, TILE = 64, 16
LOWEST_GATE = -104.0
L2_NORM_EPS = 1e-6

Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP16, back in FP64."""
    return x.half().double()


def inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of a strictly lower [64, 64]: diagonal tiles exactly, block rows by products of rounded factors."""
    tiles = [slice(TILE * i, TILE * (i + 1)) for i in range(CHUNK // TILE)]
    t = torch.zeros_like(a)
    for i, rows in enumerate(tiles):
        t[rows, rows] = half(torch.linalg.inv(torch.eye(TILE, dtype=a.dtype) + a[rows, rows]))
        for columns in tiles[:i]:
            between = slice(columns.start, rows.start)
            t[rows, columns] = half(t[rows, rows] @ half(half(-a[rows, between]) @ t[between, columns]))
    return t


def gdn_chunk(
    chunk: Chunk, norms: tuple[torch.Tensor, torch.Tensor], state: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [C, V], the next state [K, V]) of the gated delta rule; norms are 1/|q| and 1/|k| [C, 1]."""
    q, k, v, g, beta = chunk
    rq, rk = norms
    sums = g.clamp(min=LOWEST_GATE).cumsum(0)[:, None]
    decay = torch.exp((sums - sums.T).tril()).tril() * rk.T
    rounded = half(state)
    t = inverse((beta * rk * decay * (k @ k.T)).tril(-1))
    p = half(scale * rq * decay * (q @ k.T))
    values = t @ half(beta * v - beta * rk * sums.exp() * (k @ rounded))
    o = scale * rq * sums.exp() * (q @ rounded) + p @ half(values)
    tail = half(values * rk * torch.exp(sums[-1:] - sums))
    return o, sums[-1].exp() * state + k.T @ tail


def kda_chunk(
    chunk: Chunk, norms: tuple[torch.Tensor, torch.Tensor], state: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Likewise for Kimi Delta Attention, g [C, K]."""
    q, k, v, g, beta = chunk
    q, k = q * norms[0] * scale, k * norms[1]
    sums = g.clamp(min=LOWEST_GATE).cumsum(0)
    keys, queries = (_decayed_products(x, k, sums) for x in (k, q))
    rounded = half(state)
    t = inverse((beta * keys).tril(-1))
    values = half(t @ half(beta * (v - half(k * sums.exp()) @ rounded)))
    o = half(q * sums.exp()) @ rounded + half(queries.tril()) @ values
    tail = half(k * torch.exp(sums[-1:] - sums))
    return o, sums[-1].exp()[:, None] * state + tail.T @ values


def _decayed_products(x: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """x_i.k_j with decay exp(G_i - G_j), j <= i: through FP16 factors below the diagonal tiles, exactly within them."""
    out = x.new_zeros(CHUNK, CHUNK)
    for start in range(0, CHUNK, TILE):
        rows = slice(start, start + TILE)
        if start:
            last = sums[start - 1]
            left = half(x[rows] * torch.exp(sums[rows] - last))
            out[rows, :start] = left @ half(k[:start] * torch.exp(last - sums[:start])).T
        steps = torch.exp((sums[rows, None] - sums[None, rows]).clamp(max=0))
        out[rows, rows] = torch.einsum("ic,jc,ijc->ij", x[rows], k[rows], steps).tril()
    return out


def rounded_reference(op: str, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], final state) in FP64, the state in the call's order."""
    batch, tokens, key_heads, key_dim = call.q.shape
    value_heads, value_dim = call.v.shape[2:]
    q, k, v = (x.double().flatten(0, 1) for x in (call.q, call.k, call.v))
    g, beta = call.g.float().double().flatten(0, 1), call.beta.float().double().flatten(0, 1)
    bounds = call.sequence_bounds()
    step = gdn_chunk if op == "gdn" else kda_chunk
    o = v.new_zeros(batch * tokens, value_heads, value_dim)
    states = v.new_zeros(len(bounds) - 1, value_heads, key_dim, value_dim)
    if call.initial_state is not None:
        initial = call.initial_state.double()
        states.copy_(initial.transpose(-1, -2) if call.state_v_first else initial)
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        for head in range(value_heads):
            key_head = head // (value_heads // key_heads)
            for start in range(begin, end, CHUNK):
                stop = min(start + CHUNK, end)
                rows = (q[start:stop, key_head], k[start:stop, key_head], v[start:stop, head], g[start:stop, head])
                chunk = tuple(_padded(x) for x in (*rows, beta[start:stop, head, None]))
                norms = tuple(_inverse_norm(x, call.use_qk_l2norm_in_kernel) for x in chunk[:2])
                out, states[sequence, head] = step(chunk, norms, states[sequence, head], call.scale)  # type: ignore[arg-type]
                o[start:stop, head] = out[: stop - start]
    return o.view(call.v.shape), states.transpose(-1, -2).contiguous() if call.state_v_first else states


def _padded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(CHUNK - len(x), *x.shape[1:])])


def _inverse_norm(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    if not wanted:
        return x.new_ones(CHUNK, 1)
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
