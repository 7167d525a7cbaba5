"""Scales, zero points and codes of a block of groups: plain rounding ("minmax") and the data-free search ("hqq").

Every function works on `groups`, floating [R, G, g]: R rows, G groups of g columns. Per-group tensors are [R, G].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.quantization.weight import LEVELS, SYMMETRIC_ZERO

TOP = LEVELS - 1
REFINEMENTS = 2


@dataclass(frozen=True)
class Grid:
    """Where codes lie: value = scale * (code - zero). Both are FP32 tensors [R, G] that hold 16-bit values."""

    scale: torch.Tensor
    zero: torch.Tensor


def round_scale(scale: torch.Tensor, store: torch.dtype) -> torch.Tensor:
    """FP32 scales rounded to `store`, kept positive: FP16's denormals round up (nearest would clip up to half a
    group's range there), BF16's are replaced by the smallest normal number, which kernels do not flush."""
    if store == torch.bfloat16:
        return scale.clamp(min=torch.finfo(store).tiny).to(store).float()
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
    """`grid` with the groups of a single value made exact: scale |value|, codes one above or one below the zero."""
    constant = low == high
    value = low.abs()
    exact = constant & (value.to(store).float() == value) & (value > 0)
    scale = torch.where(exact, value, grid.scale)
    scale = torch.where(constant & (value == 0), torch.full_like(scale, torch.finfo(store).tiny), scale)
    if kind is None:
        return Grid(scale, grid.zero)
    return Grid(scale, torch.where(exact, (low < 0).float(), grid.zero))


def steps(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The weights in units of the scale and relative to code 0, FP32 [R, G, g]: codes before rounding."""
    return torch.addcmul(grid.zero[..., None], groups, grid.scale.reciprocal()[..., None])


def round_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes uint8 nearest to `values`."""
    return values.round().clamp_(0, TOP).to(torch.uint8)


@dataclass(frozen=True)
class Moments:
    """Sums over each group of codes q and of the weights t in units of a reference grid: enough for any refit."""

    count: int
    t: torch.Tensor
    q: torch.Tensor
    qq: torch.Tensor
    tq: torch.Tensor

    def excess(self, slope: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Sum of (t - slope * q - shift)^2 less the sum of t^2, which is common to all candidates."""
        square = slope * slope * self.qq + self.count * shift * shift + 2 * slope * shift * self.q
        return square - 2 * slope * self.tq - 2 * shift * self.t


def moments(t: torch.Tensor, t_sum: torch.Tensor, codes: torch.Tensor) -> Moments:
    """The moments of `codes` uint8 [R, G, g] and `t` FP32 [R, G, g]; `t_sum` is t's own sum."""
    # 15 * 15 fits in uint8, so the squares are summed without a wider copy.
    squares = (codes * codes).sum(-1, dtype=torch.float32)
    return Moments(t.shape[-1], t_sum, codes.sum(-1, dtype=torch.float32), squares, (t * codes).sum(-1))


def refit(m: Moments, reference: Grid, current: Grid, kind: str | None, store: torch.dtype) -> Grid:
    """The least-squares grid for given codes, or `current` for the groups where rounding to 16 bits made it worse.

    With a float zero point this is a regression with an intercept, so each group's mean is kept up to the rounding
    of the zero point; with an integer one the nearest integer to the intercept is taken.
    """

    def candidate(zero: torch.Tensor) -> Grid:
        """Best scale for this zero: sum (t - reference.zero) (q - zero) / sum (q - zero)^2, in reference units."""
        cross = m.tq - zero * m.t - reference.zero * (m.q - m.count * zero)
        norm = m.qq - 2 * zero * m.q + m.count * zero * zero
        return Grid(round_scale(torch.where(norm > 0, cross / norm, 1.0).clamp(min=0.1) * reference.scale, store), zero)

    candidates = [candidate(current.zero)] if kind != "float" else []
    if kind is not None:
        spread = m.count * m.qq - m.q * m.q
        slope = torch.where(spread > 0, (m.count * m.tq - m.t * m.q) / spread, 1.0).clamp(min=0.1)
        scale = round_scale(slope * reference.scale, store)
        ratio = scale / reference.scale
        zero = round_zero((m.q - (m.t - m.count * reference.zero) / ratio) / m.count, kind, store)
        candidates.append(Grid(scale, zero) if kind == "float" else candidate(zero))

    best = current
    least = _excess(m, reference, current)
    for grid in candidates:
        excess = _excess(m, reference, grid)
        better = excess < least
        least = torch.where(better, excess, least)
        best = Grid(torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best


def _excess(m: Moments, reference: Grid, grid: Grid) -> torch.Tensor:
    ratio = grid.scale / reference.scale
    return m.excess(ratio, reference.zero - ratio * grid.zero)


def fit(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, kind: str | None, method: str, store: torch.dtype
) -> tuple[torch.Tensor, Grid]:
    """Codes uint8 [R, G, g] and the grid of `groups`, whose least and greatest values are `low` and `high`.

    "hqq" alternates, as half-quadratic quantisation does, between codes for a grid and a grid for codes, here by
    least squares. No step raises a group's squared error, so the result is never worse than "minmax".
    """
    grid = constant_grid(low, high, minmax_grid(low, high, kind, store), kind, store)
    if method == "minmax":
        return round_codes(steps(groups, grid)), grid
    reference = grid
    t = steps(groups, reference)
    t_sum = t.sum(-1)
    codes = round_codes(t)
    for step in range(REFINEMENTS):
        grid = refit(moments(t, t_sum, codes), reference, grid, kind, store)
        if step + 1 < REFINEMENTS:
            ratio = reference.scale / grid.scale
            shift = grid.zero - reference.zero * ratio
            codes = round_codes(torch.addcmul(shift[..., None], t, ratio[..., None]))
    return codes, grid
