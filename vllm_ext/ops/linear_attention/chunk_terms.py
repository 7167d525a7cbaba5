"""The chunk-parallel half of the computation: everything about a chunk that does not read the state.

HA-NPU paper, sections 2.1 (the map) and 5 (GEMM-first: the state is multiplied by [K; Q] before the inverse is applied,
V' = T diag(beta) (V - decay K S), so the product W = T diag(beta) decay K is never formed).
A decay between two tokens is exp of a sum of log decays g <= 0. Those sums are built up, over blocks of doubling size,
never taken as differences of a longer sum: no exponent is positive, and a small sum keeps its digits beside decays of
-316 (or of -inf) elsewhere in the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

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


def gdn_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkTerms:
    """q, k [c, H, C, K]; v [c, H, R, C, V]; g, beta [c, H, R, C]."""
    rows = q.shape[-2]
    between = torch.full((*g.shape, rows), -torch.inf, dtype=g.dtype, device=g.device)
    between.diagonal(dim1=-2, dim2=-1).zero_()
    for half, prefix, suffix in _block_sums(g.unsqueeze(-1)):
        if half < rows:
            torch.add(prefix, suffix.transpose(-1, -2), out=_lower_left(between, half))
    decay, read, tail = between.exp_(), prefix.exp(), suffix.exp()
    key_query = torch.cat((k, q), dim=-2)
    products = (key_query @ k.transpose(-1, -2)).unsqueeze(2)
    coupling, scores = products[..., :rows, :] * decay, products[..., rows:, :] * decay
    return ChunkTerms(
        key_query=key_query,
        read_decay=read,
        value=v,
        inverse=_inverse(coupling, beta),
        scores=scores,
        tail_key=k,
        tail_decay=tail,
        state_decay=read[..., -1:, :].transpose(2, 3),
    )


def kda_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> ChunkTerms:
    """q, k, g [c, HV, C, K]; v [c, HV, C, V]; beta [c, HV, C].

    The decay sits inside the products sum_channels x_i k_j exp(sum of g over j+1..i), x = k (strictly causal) or q
    (causal). A block of 2b rows is cut in halves: for i in the lower and j in the upper one that sum is what remains of
    the upper half after j plus what the lower half has up to i, so the quarter is a product of two decayed matrices.
    """
    *outer, rows, channels = k.shape
    coupling, scores = (k.new_zeros(*outer, rows, rows) for _ in range(2))
    scores.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    for half, prefix, suffix in _block_sums(g):
        if half == rows:
            break
        k_blocks, q_blocks = (x.view(*outer, -1, 2, half, channels) for x in (k, q))
        left, right = k_blocks[..., 0, :, :] * suffix.exp(), prefix.exp()
        for x_blocks, result in ((k_blocks, coupling), (q_blocks, scores)):
            _lower_left(result, half).copy_(_products(x_blocks[..., 1, :, :] * right, left))
    read, tail = prefix.exp_(), suffix.exp_()
    return ChunkTerms(
        key_query=torch.cat((k * read, q * read), dim=-2),
        read_decay=None,
        value=v.unsqueeze(2),
        inverse=_inverse(coupling, beta).unsqueeze(2),
        scores=scores.unsqueeze(2),
        tail_key=k * tail,
        tail_decay=None,
        state_decay=read[..., -1:, :].transpose(-1, -2).unsqueeze(-1),
    )


def _block_sums(g: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For half = 1, 2, .. C / 2: (half, prefix, suffix) of the halves of blocks of 2 half rows of g [..., C, K].

    prefix [..., C / 2 half, half, K]: sums over each lower half up to and including a row;
    suffix, same shape: sums over each upper half after a row. Last, (C, prefix, suffix) of the whole chunk [..., C, K].
    What is yielded is overwritten when the next is asked for.
    """
    *outer, rows, channels = g.shape
    prefix, suffix, total = g.clone(), torch.zeros_like(g), g
    half = 1
    while half < rows:
        halves = (*outer, rows // (2 * half), 2, half, channels)
        lower, upper = prefix.view(halves)[..., 1, :, :], suffix.view(halves)[..., 0, :, :]
        yield half, lower, upper
        totals = total.view(*halves[:-2], 1, channels)
        lower.add_(totals[..., 0, :, :])
        upper.add_(totals[..., 1, :, :])
        total = totals.sum(-3)
        half *= 2
    yield rows, prefix, suffix


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
