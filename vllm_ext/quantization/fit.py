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
MEAN_ROUNDING = 1e-5
# How far from plain rounding's a scale is searched. A gain beyond it is the quotient of two sums that cancelled: where
# a float zero point in the thousands was rounded, a whole group may be clipped to one code.
FARTHEST = 2.0
# For fewer rows cuBLAS may take another kernel of its matrix-vector product, which adds in another order.
PRODUCT_ROWS = 1 << 16


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


def on_gpu(values: torch.Tensor) -> bool:
    """Whether to use the forms made for a GPU, where each pass over memory counts. They find the same codes."""
    return values.is_cuda


def steps(groups: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The weights in units of the scale and relative to code 0: codes before rounding. Overwrites `groups`, FP32."""
    return torch.addcmul(grid.zero[..., None], groups, grid.scale.reciprocal()[..., None], out=groups)


def round_codes(values: torch.Tensor, lowest: int = 0) -> torch.Tensor:
    """The nearest of the 16 codes from `lowest` on, FP32."""
    highest = lowest + TOP
    if on_gpu(values):
        # Rounds and clamps in one kernel, ties to even as the other form does.
        return torch.fake_quantize_per_tensor_affine(values, 1.0, 0, lowest, highest)
    return values.round().clamp_(lowest, highest)


def search_codes(values: torch.Tensor, lowest: int = 0) -> torch.Tensor:
    """Codes to take moments of: bytes where a core's cache bounds the search, FP32 on a GPU, where sums over bytes take
    more than twice as long and each conversion is one more pass over memory."""
    codes = round_codes(values, lowest)
    return codes if on_gpu(values) else codes.to(torch.int8 if lowest else torch.uint8)


def ones_for(groups: torch.Tensor) -> torch.Tensor:
    """Ones [g], FP32, for `total`: one launch a search. Not kept from one search to the next: what is allocated while
    vLLM loads weights lies in the memory that its sleep mode gives away, and comes back with other contents."""
    return torch.ones(groups.shape[-1], dtype=torch.float32, device=groups.device)


def total(values: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """The sum of each group [R, G, g], FP32 [R, G]; `ones` is `ones_for` such groups."""
    if on_gpu(values):
        rows = values.flatten(0, 1)
        if rows.shape[1] & (rows.shape[1] - 1):
            # For groups of 96 cuBLAS was seen to add in an order that depends on the number of groups.
            return rows.sum(-1).view(values.shape[:-1])
        # A product with ones: at 64 a group it takes 0.6 of the time of sum's kernel, which is made for longer rows.
        # Few rows are filled up with zeros, so that a group's sum does not depend on what it is quantised with.
        count = len(rows)
        if count < PRODUCT_ROWS:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, PRODUCT_ROWS - count))
        return torch.mv(rows, ones)[:count].view(values.shape[:-1])
    return values.sum(-1, dtype=torch.float32)


def total_square(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each group [R, G, g], FP32 [R, G]."""
    if values.is_floating_point():
        return torch.linalg.vector_norm(values, dim=-1).square_()
    # 15 * 15 fits in uint8 and 8 * 8 in int8, so the squares are summed without a wider copy.
    return (values * values).sum(-1, dtype=torch.float32)


def choose(first: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The groups of `one` where `first` [R, G] holds, else those of `other`; codes [R, G, g] of one dtype."""
    wide = torch.complex128 if one.is_floating_point() else torch.int64
    if one.shape[-1] * one.element_size() % wide.itemsize:
        return torch.where(first[..., None], one, other)
    # Several codes at a time: where's kernel spends its time on finding each element's condition.
    return torch.where(first[..., None], one.view(wide), other.view(wide)).view(one.dtype)


@dataclass(frozen=True)
class Moments:
    """Sums over each group of the weights t, in units of the grid `unit`, and of their codes q; all FP32 [R, G]."""

    count: int
    unit: Grid
    t: torch.Tensor
    tt: torch.Tensor
    q: torch.Tensor
    qq: torch.Tensor
    tq: torch.Tensor

    def gain_scale(self, zero: torch.Tensor, kind: str) -> torch.Tensor:
        """The scale that keeps a group's gain, for given codes: sum w * value = sum w * w.

        The error is then uncorrelated with the weights, as rounding's is. Least squares makes it uncorrelated with the
        codes' values instead: each group shrinks by its relative squared error, all of them in the same direction,
        which costs more loss than its lower error saves. With a float zero point both sums are taken about the means;
        otherwise about `zero`, which stays.
        """
        if kind == "float":
            same = torch.addcmul(self.tt, self.t, self.t, value=-1 / self.count)
            cross = torch.addcmul(self.tq, self.t, self.q, value=-1 / self.count)
        else:
            own = self.unit.zero
            same = torch.addcmul(self.tt, own, (own * self.count).sub_(self.t, alpha=2))
            cross = torch.addcmul(self.tq, zero, self.t, value=-1)
            cross.addcmul_(own, torch.sub(self.q, zero, alpha=self.count), value=-1)
        gain = same.div_(cross).clamp_(1 / FARTHEST, FARTHEST).nan_to_num_(nan=1.0)
        return gain.mul_(self.unit.scale)

    def mean_zero(self, scale: torch.Tensor, store: torch.dtype) -> torch.Tensor:
        """The float zero point that keeps each group's mean, which is also the one of least squared error."""
        mean = torch.sub(self.t, self.unit.zero, alpha=self.count)
        total = torch.addcmul(self.q, mean, self.unit.scale / scale, value=-1)
        return round_zero(total.div_(self.count), "float", store)

    def excess(self, grid: Grid) -> torch.Tensor:
        """Squared error of `grid`, in squares of the unit's scale, less the sum of t^2, which all candidates share."""
        slope = grid.scale / self.unit.scale
        shift = torch.addcmul(self.unit.zero, slope, grid.zero, value=-1)
        # A code stands for slope * q + shift: its square less twice its product with t.
        codes = (slope * self.qq).sub_(torch.addcmul(self.tq, shift, self.q, value=-1), alpha=2)
        return torch.addcmul(slope * codes, shift, (shift * self.count).sub_(self.t, alpha=2))


def fit(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, kind: str | None, method: str, store: torch.dtype
) -> tuple[torch.Tensor, Grid]:
    """Codes uint8 [R, G, g] and the grid of `groups`, FP32, whose least and greatest values are `low` and `high`.

    Overwrites `groups`.
    """
    plain = constant_grid(low, high, minmax_grid(low, high, kind, store), kind, store)
    if method == "minmax":
        return round_codes(steps(groups, plain)).to(torch.uint8), plain
    if kind is None:
        return search_symmetric(groups, plain, store)
    return search(steps(groups, plain), plain, kind, store)


def search(t: torch.Tensor, plain: Grid, kind: str, store: torch.dtype) -> tuple[torch.Tensor, Grid]:
    """Codes and a grid of no higher error than `plain`'s, for weights `t` in its units.

    Alternates, as half-quadratic quantisation does, between codes for a grid and a grid for codes: once over the whole
    range and once over a narrower one, which clips a few outliers and serves all others with finer steps. Groups whose
    squared error that does not lower keep their plain codes and scale.
    """
    ones = ones_for(t)
    t_sum, t_square = total(t, ones), total_square(t)

    def moments(codes: torch.Tensor) -> Moments:
        products = total(t * codes, ones)
        return Moments(t.shape[-1], plain, t_sum, t_square, total(codes, ones), total_square(codes), products)

    codes = search_codes(t)
    first = moments(codes)
    scale = narrowed(first.gain_scale(plain.zero, kind), store)
    zero = first.mean_zero(scale, store) if kind == "float" else plain.zero
    ratio = plain.scale / scale
    shift = torch.addcmul(zero, plain.zero, ratio, value=-1)
    found = search_codes(torch.addcmul(shift[..., None], t, ratio[..., None]))
    last = moments(found)
    scale = round_scale(last.gain_scale(zero, kind), store)
    zero = last.mean_zero(scale, store) if kind == "float" else zero
    # `first.excess(plain)`, whose slope is one and whose shift is none.
    plain_excess = torch.sub(first.qq, first.tq, alpha=2)
    better = is_better(last.excess(Grid(scale, zero)), plain_excess, t_square)
    kept = plain.zero
    if kind == "float":
        # The mean that plain codes leave, in steps. Where it is rounding alone, what is exact stays so.
        mean = torch.nn.functional.hardshrink((t_sum - first.q).div_(t.shape[-1]), MEAN_ROUNDING)
        kept = round_zero(plain.zero - mean, kind, store)
    codes = choose(better, found, codes).to(torch.uint8)
    return codes, Grid(torch.where(better, scale, plain.scale), torch.where(better, zero, kept))


def search_symmetric(groups: torch.Tensor, plain: Grid, store: torch.dtype) -> tuple[torch.Tensor, Grid]:
    """As `search`, for grids whose zero is code 8: counted from there, no sums but those of products are needed.

    Overwrites `groups`.
    """
    t = groups.mul_(plain.scale.reciprocal()[..., None])
    ones, t_square = ones_for(t), total_square(t)
    codes = search_codes(t, -SYMMETRIC_ZERO)
    first_product, first_square = total(t * codes, ones), total_square(codes)
    scale = narrowed(torch.where(first_product > 0, t_square / first_product, 1.0).mul_(plain.scale), store)
    found = search_codes(t * (plain.scale / scale)[..., None], -SYMMETRIC_ZERO)
    product, square = total(t * found, ones), total_square(found)
    scale = round_scale(torch.where(product > 0, t_square / product, 1.0).mul_(plain.scale), store)
    slope = scale / plain.scale
    excess = (slope * square).sub_(product, alpha=2).mul_(slope)
    better = is_better(excess, first_square.sub_(first_product, alpha=2), t_square)
    codes = choose(better, found, codes).to(torch.int8).add_(SYMMETRIC_ZERO).view(torch.uint8)
    return codes, Grid(torch.where(better, scale, plain.scale), plain.zero)


def narrowed(scale: torch.Tensor, store: torch.dtype) -> torch.Tensor:
    """`scale` times `NARROW`, as it is stored."""
    return round_scale(round_scale(scale, store) * NARROW, store)


def is_better(excess: torch.Tensor, plain_excess: torch.Tensor, t_square: torch.Tensor) -> torch.Tensor:
    """Where a squared error is below that of plain rounding: their sums are FP32 and cancel, and a gain within their
    rounding is none."""
    return excess < torch.sub(plain_excess, t_square, alpha=ROUNDING)
