"""Confidence, argmax, entropy and a sample over the vocabulary: each row in pieces, then the pieces of a row."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device

_NO_INDEX = tl.constexpr(2147483647)
# Programs in flight that keep the memory of a large GPU busy, and the least work worth a program.
_PROGRAMS = 2048
_BLOCK = 2048


@triton.jit
def _finite(m):
    # A piece of -inf only: any finite shift gives sums of zero instead of NaN.
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def _pieces_kernel(
    logits,
    noise,
    processed,
    partial,
    places,
    softcap,
    temperature,
    stride,
    COLUMNS,
    PIECE,
    PIECES,
    HAS_CAP: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    infinity = float("inf")
    softcap, temperature = tl.cast(softcap, tl.float32), tl.cast(temperature, tl.float32)
    # A running maximum, sums and first place of the maximum in every lane; lanes meet once, after the loop.
    top = tl.full([BLOCK], -infinity, tl.float32)
    place = tl.full([BLOCK], _NO_INDEX, tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    rounded_total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], -infinity, tl.float32)
    best_place = tl.full([BLOCK], _NO_INDEX, tl.int32)
    for start in range(0, PIECE, BLOCK):
        column = piece * PIECE + start + lane
        mask = (start + lane < PIECE) & (column < COLUMNS)
        x = tl.load(logits + row * stride + column, mask=mask, other=-infinity).to(tl.float32)
        if HAS_CAP:
            y = x / softcap
            x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))
        x = tl.where(mask, tl.div_rn(x, temperature), -infinity)
        higher = tl.maximum(top, x)
        shift = _finite(higher)
        keep = tl.exp(top - shift)
        e = tl.exp(x - shift)
        total = total * keep + e
        moment = moment * keep + tl.where(x > -infinity, x * e, 0.0)
        if HAS_PROCESSED:
            rounded = x.to(processed.dtype.element_ty)
            tl.store(processed + row * COLUMNS + column, rounded, mask=mask)
            rounded_total = rounded_total * keep + tl.exp(rounded.to(tl.float32) - shift)
        if HAS_NOISE:
            score = x - tl.log(tl.load(noise + row * COLUMNS + column, mask=mask, other=1.0))
            better = mask & (score > best)
            best = tl.where(better, score, best)
            best_place = tl.where(better, column, best_place)
        place = tl.where(mask & ((x > top) | ((place == _NO_INDEX) & (x == top))), column, place)
        # NaN compares false everywhere; through `total` it reaches the statistics.
        top = higher
    m = tl.max(top, axis=0)
    shift = _finite(m)
    keep = tl.where(top > -infinity, tl.exp(top - shift), 0.0)
    keep = tl.where(total == total, keep, total)
    out = partial + (row * PIECES + piece) * 5
    tl.store(out, m)
    tl.store(out + 1, tl.sum(total * keep, axis=0))
    tl.store(out + 2, tl.sum(moment * keep, axis=0))
    tl.store(out + 3, tl.sum(rounded_total * keep, axis=0))
    score = tl.max(best, axis=0)
    tl.store(out + 4, score)
    index = places + (row * PIECES + piece) * 2
    tl.store(index, tl.min(tl.where(top == m, place, _NO_INDEX), axis=0))
    tl.store(index + 1, tl.min(tl.where(best == score, best_place, _NO_INDEX), axis=0))


@triton.jit
def _rows_kernel(
    partial,
    places,
    confidence,
    argmax,
    entropy,
    sample,
    log_sum,
    PIECES,
    COLUMNS,
    HAS_NOISE: tl.constexpr,
    HAS_PROCESSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    mask = piece < PIECES
    infinity = float("inf")
    base = partial + (row * PIECES + piece) * 5
    top = tl.load(base, mask=mask, other=-infinity)
    m = tl.max(top, axis=0)
    shift = _finite(m)
    keep = tl.where(mask, tl.exp(top - shift), 0.0)
    total = tl.sum(tl.load(base + 1, mask=mask, other=0.0) * keep, axis=0)
    moment = tl.sum(tl.load(base + 2, mask=mask, other=0.0) * keep, axis=0)
    tl.store(confidence + row, tl.exp(m - shift) / total)
    tl.store(entropy + row, shift + tl.log(total) - moment / total)
    index = places + (row * PIECES + piece) * 2
    place = tl.load(index, mask=mask, other=_NO_INDEX)
    first = tl.min(tl.where(top == m, place, _NO_INDEX), axis=0)
    tl.store(argmax + row, tl.where(first == _NO_INDEX, 0, first).to(tl.int64))
    if HAS_PROCESSED:
        rounded = tl.sum(tl.load(base + 3, mask=mask, other=0.0) * keep, axis=0)
        tl.store(log_sum + row, shift + tl.log(rounded))
    if HAS_NOISE:
        score = tl.load(base + 4, mask=mask, other=-infinity)
        best_place = tl.load(index + 1, mask=mask, other=_NO_INDEX)
        found = tl.min(tl.where(score == tl.max(score, axis=0), best_place, _NO_INDEX), axis=0)
        tl.store(sample + row, tl.where(found == _NO_INDEX, 0, found).to(tl.int64))


@on_its_device
def token_statistics(
    logits: torch.Tensor,
    temperature: float,
    softcap: float | None,
    noise: torch.Tensor | None,
    processed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(confidence, argmax, entropy, sample, processed, log_sum)."""
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    pieces = max(1, min(64, triton.cdiv(columns, 2 * _BLOCK), _PROGRAMS // max(1, rows)))
    piece = triton.cdiv(triton.cdiv(columns, pieces), _BLOCK) * _BLOCK
    pieces = triton.cdiv(columns, piece)
    device = logits.device
    partial = torch.empty(rows, pieces, 5, dtype=torch.float32, device=device)
    places = torch.empty(rows, pieces, 2, dtype=torch.int32, device=device)
    numbers = [torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3)]
    indices = [torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2)]
    _pieces_kernel[(rows, pieces)](
        logits,
        logits if noise is None else noise.contiguous(),
        logits if processed is None else processed,
        partial,
        places,
        1.0 if softcap is None else softcap,
        temperature,
        logits.stride(0),
        columns,
        piece,
        pieces,
        HAS_CAP=softcap is not None,
        HAS_NOISE=noise is not None,
        HAS_PROCESSED=processed is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _rows_kernel[(rows,)](
        partial,
        places,
        numbers[0],
        indices[0],
        numbers[1],
        indices[1],
        numbers[2],
        pieces,
        columns,
        HAS_NOISE=noise is not None,
        HAS_PROCESSED=processed is not None,
        BLOCK=triton.next_power_of_2(pieces),
        num_warps=1,
    )
    sample = indices[1] if noise is not None else None
    return numbers[0], indices[0], numbers[1], sample, processed, numbers[2] if processed is not None else None


@triton.jit
def _probabilities_kernel(processed, log_sum, out, COLUMNS, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    x = tl.load(processed + row * COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.load(log_sum + row))
    tl.store(out + row * COLUMNS + column, p.to(out.dtype.element_ty), mask=mask)


@on_its_device
def probabilities(processed: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """exp(processed - log_sum) into `out`."""
    rows, columns = processed.shape
    _probabilities_kernel[(rows, triton.cdiv(columns, 4096))](processed, log_sum, out, columns, BLOCK=4096, num_warps=8)
    return out
