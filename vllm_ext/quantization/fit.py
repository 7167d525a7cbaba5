"""Scales, zero points and codes of a block of groups: plain rounding ("minmax") and the data-free search ("hqq").

Every function works on `groups`, floating [R, G, g]: R rows, G groups of g columns. Per-group tensors are [R, G].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.quantization.weight import LEVELS, SYMMETRIC_ZERO

TOP = LEVELS - 1
# Chosen by the loss of a model trained on full-precision weights: docs/quantization.md.
NARROW = 0.95
ROUNDING = 2e-6


@dataclass(frozen=True)
class Grid:
    """Where codes lie: value = scale * (code - zero). Both are FP32 tensors [R, G] that hold 16-bit values."""

    scale: torch.Tensor
    zero: torch.Tensor


def round_scale(scale: torch.Tensor, store: torch.dtype) -> torch.Tensor:
    """FP32 scales rounded to `store`, kept positive: FP16's denormals round up (nearest would clip up to half a
    group's range there), BF16's are replaced by the smallest normal number, which kernels do not flush."""
    if store == torch.bfloat16:
        return scale.clamp(torch.finfo(store).tiny, torch.finfo(store).max).to(store).float()
    step = torch.finfo(store).smallest_normal * torch.finfo(store).eps
    denormal = torch.ceil(scale / step).clamp(min=1) * step
    nearest = scale.clamp(max=torch.finfo(store).max).to(store).float()
    return torch.where(scale < torch.finfo(store).smallest_normal, denormal, nearest)


def round_zero(zero: torch.Tensor, kind: str, store: torch.dtype) -> torch.Tensor:
    """FP32 zero points rounded to what is stored: an integer 0..15 ("int") or the dtype `store` ("float")."""
    if kind == "int":
        return zero.round().clamp(0, TOP)
    limit = torch.finfo(store).max
    return zero.clamp(-limit, limit).to(store).float()


def minmax_grid(low: torch.Tensor, high: torch.Tensor, kind: str | None, store: torch.dtype) -> Grid:
    """The grid that covers [low, high], FP32 [R, G]. `kind` is "float", "int" or None (symmetric).

    An integer zero point lies in 0..15 and so cannot leave zero out: the range is widened to hold it. The symmetric
    scale is absmax / 7.5: the one code that is missing on the positive side costs half a step, as rounding does.
    """
    if kind is None:
        scale = round_scale(torch.maximum(-low, high) / (TOP / 2), store)
        return Grid(scale, torch.full_like(scale, SYMMETRIC_ZERO))
    if kind == "int":
        low, high = low.clamp(max=0), high.clamp(min=0)
    # Divided before they are subtracted: the range of an FP32 or BF16 group may overflow.
    scale = round_scale(high / TOP - low / TOP, store)
    return Grid(scale, round_zero(0.0 - low / scale, kind, store))


def constant_grid(low: torch.Tensor, high: torch.Tensor, grid: Grid, kind: str | None, store: torch.dtype) -> Grid:
    """`grid` with the groups of a single value as exact as one stored number is: the scale is that value, and codes
    are one above or below the zero. Their range of zero would make a scale of nothing and a zero point without end."""
    constant = low == high
    value = torch.where(low == 0, torch.full_like(low, torch.finfo(store).tiny), low.abs())
    scale = torch.where(constant, round_scale(value, store), grid.scale)
    if kind is None:
        return Grid(scale, grid.zero)
    return Grid(scale, torch.where(constant, (low < 0).float(), grid.zero))


def steps(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The weights in units of the scale and relative to code 0, FP32 [R, G, g]: codes before rounding."""
    return torch.addcmul(grid.zero[..., None], groups, grid.scale.reciprocal()[..., None])


def round_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes nearest to `values`, FP32."""
    return values.round().clamp_(0, TOP)


def search_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes to take moments of: bytes where a core's cache bounds the search, FP32 on a GPU, where sums over bytes take
    more than twice as long and each conversion is one more pass over memory."""
    codes = round_codes(values)
    return codes.to(torch.uint8) if values.device.type == "cpu" else codes


@dataclass(frozen=True)
class Moments:
    """Sums over each group of the weights t, in units of a reference grid, and of their codes q; all FP32 [R, G]."""

    count: int
    t: torch.Tensor
    tt: torch.Tensor
    q: torch.Tensor
    qq: torch.Tensor
    tq: torch.Tensor

    @classmethod
    def of(cls, t: torch.Tensor, t_sum: torch.Tensor, t_square: torch.Tensor, codes: torch.Tensor) -> Moments:
        """The moments of `codes`, uint8 or FP32 [R, G, g], and `t` FP32 [R, G, g]; `t_sum` and `t_square` are t's."""
        if codes.dtype == torch.uint8:
            # 15 * 15 fits in uint8, so the squares are summed without a wider copy.
            squares = (codes * codes).sum(-1, dtype=torch.float32)
        else:
            squares = torch.linalg.vector_norm(codes, dim=-1).square()
        return cls(t.shape[-1], t_sum, t_square, codes.sum(-1, dtype=torch.float32), squares, (t * codes).sum(-1))

    def excess(self, reference: Grid, grid: Grid) -> torch.Tensor:
        """Squared error of `grid`, in units of the reference, less the sum of t^2, which all candidates share."""
        slope = grid.scale / reference.scale
        shift = reference.zero - slope * grid.zero
        square = slope * slope * self.qq + self.count * shift * shift + 2 * slope * shift * self.q
        return square - 2 * slope * self.tq - 2 * shift * self.t


def refit(m: Moments, reference: Grid, zero: torch.Tensor, kind: str | None, store: torch.dtype) -> Grid:
    """The grid that keeps a group's mean and its gain, for given codes: sum w * value = sum w * w about the zero.

    The error is then uncorrelated with the weights, as rounding's is. Least squares makes it uncorrelated with the
    codes' values instead: each group shrinks by its relative squared error, all of them in the same direction, which
    costs more loss than its lower error saves. With a float zero point both sums are taken about the means; otherwise
    about `zero`, which stays.
    """
    if kind == "float":
        same, cross = m.tt - m.t * m.t / m.count, m.tq - m.t * m.q / m.count
    else:
        same = m.tt - 2 * reference.zero * m.t + m.count * reference.zero**2
        cross = m.tq - zero * m.t - reference.zero * (m.q - m.count * zero)
    slope = torch.where((cross > 0) & (same > 0), same / cross, 1.0)
    grid = Grid(round_scale(slope * reference.scale, store), zero)
    return recentre(m, reference, grid, store) if kind == "float" else grid


def recentre(m: Moments, reference: Grid, grid: Grid, store: torch.dtype) -> Grid:
    """`grid` with the float zero point that keeps each group's mean, which is also the one of least squared error."""
    mean = (m.t - m.count * reference.zero) * (reference.scale / grid.scale)
    return Grid(grid.scale, round_zero((m.q - mean) / m.count, "float", store))


def narrowed(m: Moments, reference: Grid, grid: Grid, kind: str | None, store: torch.dtype) -> Grid:
    """`grid` with its scale times `NARROW`, about the group's mean (float zero point) or about the zero."""
    grid = Grid(round_scale(grid.scale * NARROW, store), grid.zero)
    return recentre(m, reference, grid, store) if kind == "float" else grid


def fit(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, kind: str | None, method: str, store: torch.dtype
) -> tuple[torch.Tensor, Grid]:
    """Codes uint8 [R, G, g] and the grid of `groups`, whose least and greatest values are `low` and `high`.

    "hqq" alternates, as half-quadratic quantisation does, between codes for a grid and a grid for codes: once over the
    whole range and once over a narrower one, which clips a few outliers and serves all others with finer steps.
    Groups whose squared error that does not lower keep their "minmax" codes and scale, so it is never above it.
    """
    plain = constant_grid(low, high, minmax_grid(low, high, kind, store), kind, store)
    t = steps(groups, plain)
    if method == "minmax":
        return round_codes(t).to(torch.uint8), plain
    codes = search_codes(t)
    t_sum = t.sum(-1)
    t_square = torch.linalg.vector_norm(t, dim=-1).square()
    first = Moments.of(t, t_sum, t_square, codes)
    grid = narrowed(first, plain, refit(first, plain, plain.zero, kind, store), kind, store)
    ratio = plain.scale / grid.scale
    shift = grid.zero - plain.zero * ratio
    found = search_codes(torch.addcmul(shift[..., None], t, ratio[..., None]))
    last = Moments.of(t, t_sum, t_square, found)
    grid = refit(last, plain, grid.zero, kind, store)
    # The sums are FP32 and cancel: a gain within their rounding is none.
    better = last.excess(plain, grid) < first.excess(plain, plain) - ROUNDING * t_square
    codes = torch.where(better[..., None], found, codes).to(torch.uint8)
    kept = recentre(first, plain, plain, store).zero if kind == "float" else plain.zero
    return codes, Grid(torch.where(better, grid.scale, plain.scale), torch.where(better, grid.zero, kept))
