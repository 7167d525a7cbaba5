"""The chunk-parallel half of the computation: everything about a chunk that does not read the state.

HA-NPU paper, sections 2.1 (the map) and 5 (GEMM-first: the state is multiplied by [K; Q] before the inverse is applied,
V' = T diag(beta) (V - decay K S), so the product W = T diag(beta) decay K is never formed).
Every exponent taken is a difference G_i - G_j of cumulative log decays with i >= j, hence at most 0 for g <= 0.
Differences are formed in FP64, because |G| reaches 64 * 316 in practice and FP32 would lose the small ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# exp(-10_000) is 0 in every dtype: the bound changes no result, and makes a decay to exactly zero (g = -inf) finite.
_MIN_LOG_DECAY = -1.0e4
# Smaller blocks are multiplied element-wise: matrix products that small are slower.
_SMALL_BLOCK = 4


@dataclass(frozen=True)
class ChunkTerms:
    """What one pass of the recurrence reads, for c chunks of C rows.

    H heads each own R value heads: GDN has the operator's own H; KDA decays inside the products, so there H is HV, R 1.
    key_query [c, H, 2C, K]: K above Q (scaled), to be multiplied by the state;
    read_decay [c, H, R, C, 1]: factor of those products, None where it is already inside key_query (KDA);
    value [c, H, R, C, V]; inverse [c, H, R, C, C]: T diag(beta); scores [c, H, R, C, C]: decayed, causal Q K^T;
    tail_key [c, H, C, K] and tail_decay [c, H, R, C, 1] (None for KDA): what carries V' into the next state;
    state_decay [c, H, K or 1, R, 1]: factor of the old state.
    """

    key_query: torch.Tensor
    read_decay: torch.Tensor | None
    value: torch.Tensor
    inverse: torch.Tensor
    scores: torch.Tensor
    tail_key: torch.Tensor
    tail_decay: torch.Tensor | None
    state_decay: torch.Tensor


def cumulative_decay(g: torch.Tensor, dim: int) -> torch.Tensor:
    """Inclusive cumulative sum of log decays in FP64."""
    return g.double().clamp(min=_MIN_LOG_DECAY).cumsum(dim)


def gdn_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkTerms:
    """q, k [c, H, C, K]; v [c, H, R, C, V]; g, beta [c, H, R, C]."""
    rows = q.shape[-2]
    total = cumulative_decay(g, -1)
    difference = (total[..., :, None] - total[..., None, :]).to(q.dtype)
    upper = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    decay = difference.masked_fill_(upper, -torch.inf).exp_()
    key_query = torch.cat((k, q), dim=-2)
    products = (key_query @ k.transpose(-1, -2)).unsqueeze(2)
    coupling, scores = products[..., :rows, :] * decay, products[..., rows:, :] * decay
    last = total[..., -1:]
    return ChunkTerms(
        key_query=key_query,
        read_decay=total.to(q.dtype).exp().unsqueeze(-1),
        value=v,
        inverse=_inverse(coupling, beta),
        scores=scores,
        tail_key=k,
        tail_decay=(last - total).to(q.dtype).exp_().unsqueeze(-1),
        state_decay=last.to(q.dtype).exp().transpose(-1, -2).unsqueeze(-1),
    )


def kda_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkTerms:
    """q, k, g [c, HV, C, K]; v [c, HV, C, V]; beta [c, HV, C]."""
    total = cumulative_decay(g, -2)
    coupling, scores = _decayed_products(k, q, total)
    read = total.to(q.dtype).exp()
    last = total[..., -1:, :]
    return ChunkTerms(
        key_query=torch.cat((k * read, q * read), dim=-2),
        read_decay=None,
        value=v.unsqueeze(2),
        inverse=_inverse(coupling, beta).unsqueeze(2),
        scores=scores.unsqueeze(2),
        tail_key=k * (last - total).to(q.dtype).exp_(),
        tail_decay=None,
        state_decay=last.to(q.dtype).exp().transpose(-1, -2).unsqueeze(-1),
    )


def _decayed_products(k: torch.Tensor, q: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For x = k (strictly causal) and x = q (causal): sum over channels of x_i k_j exp(G_i - G_j).

    A block of 2b rows is split in halves: its lower-left quarter is a product of x exp(G_i - G_m) and k exp(G_m - G_j),
    m the last row of the upper half, both exponents at most 0 since j <= m < i. Halving again gives the other two
    quarters, down to single rows. All arguments [..., C, K]; results [..., C, C].
    """
    *outer, rows, channels = k.shape
    coupling, scores = (k.new_zeros(*outer, rows, rows) for _ in range(2))
    scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    half = rows // 2
    while half:
        k_blocks, q_blocks, blocks = (x.view(*outer, -1, 2, half, channels) for x in (k, q, total))
        anchor = blocks[..., 0, -1:, :]
        left = k_blocks[..., 0, :, :] * (anchor - blocks[..., 0, :, :]).to(k.dtype).exp_()
        decay = (blocks[..., 1, :, :] - anchor).to(k.dtype).exp_()
        for x_blocks, result in ((k_blocks, coupling), (q_blocks, scores)):
            _lower_left(result, half).copy_(_products(x_blocks[..., 1, :, :] * decay, left))
        half //= 2
    return coupling, scores


def _products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x y^T for [..., b, K] blocks."""
    if x.shape[-2] >= _SMALL_BLOCK:
        return x @ y.transpose(-1, -2)
    return (x.unsqueeze(-2) * y.unsqueeze(-3)).sum(-1)


def _lower_left(matrix: torch.Tensor, half: int) -> torch.Tensor:
    """The lower-left quarters [..., C / 2b, b, b] of the diagonal blocks of 2b rows of [..., C, C], as a view."""
    *outer, rows, _ = matrix.shape
    blocks = matrix.view(*outer, rows // (2 * half), 2, half, rows // (2 * half), 2, half)
    return blocks[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _inverse(coupling: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """(I + strictlower(diag(beta) coupling))^-1 diag(beta) for [..., C, C], C a power of two; `coupling` is used up.

    Bottom up over diagonal blocks: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']], the primes being inverses.
    """
    rows = coupling.shape[-1]
    inverse = torch.zeros_like(coupling)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    coupling.mul_(beta.unsqueeze(-1))
    half = 1
    while half < rows:
        blocks = inverse.view(*inverse.shape[:-2], rows // half, half, rows // half, half)
        diagonal = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        upper, lower = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
        corner = _lower_left(coupling, half)
        if half == 1:
            _lower_left(inverse, half).copy_(-corner)
        else:
            _lower_left(inverse, half).copy_(-(lower @ (corner @ upper)))
        half *= 2
    return inverse.mul_(beta.unsqueeze(-2))
