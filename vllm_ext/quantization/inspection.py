"""What a checkpoint's routed experts are made of, layer by layer, and how far they are from where they came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import Projection, find_experts, natural
from vllm_ext.quantization.packed import SCALE, ZERO_POINT
from vllm_ext.quantization.packed_source import PackedProjection, find_packed
from vllm_ext.quantization.tensor_file import CheckpointError
from vllm_ext.quantization.weight import QuantizedWeight, group_count


@dataclass(frozen=True)
class LayerReport:
    """One layer. `errors` are relative RMS errors by projection, when there was something to compare with."""

    name: str
    experts: int
    projections: dict[str, tuple[int, int]]
    group_sizes: dict[str, int]
    bits: int
    zero_point: str
    nbytes: int
    weights: int
    errors: dict[str, float]

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight takes, metadata included."""
        return 8 * self.nbytes / self.weights


def inspect_checkpoint(
    folder: Path, against: Path | None = None, tick: Callable[[int, int], None] = lambda done, total: None
) -> list[LayerReport]:
    """Reports of every layer of routed experts in `folder`, packed or not, compared with those in `against`.

    `tick(done, total)` is told of progress in bytes. Raises CheckpointError when there are no routed experts, or when
    one checkpoint has experts that the other lacks.
    """
    layers = _experts(folder)
    reference = {} if against is None else {p.module: p for found in _experts(against).values() for p in found}
    present = {p.module for found in layers.values() for p in found}
    if lost := [module for module in reference if module not in present]:
        raise CheckpointError(f"{folder}: lacks {len(lost)} projections that {against} has, first {lost[0]}")
    total = sum(p.nbytes for found in layers.values() for p in found)
    done = 0
    reports = []
    for name, found in sorted(layers.items(), key=lambda item: natural(item[0])):
        found.sort(key=lambda projection: (projection.expert, projection.shard == "w2", projection.name))
        squares: dict[str, list[float]] = {}
        for projection in found:
            if against is not None:
                if projection.module not in reference:
                    raise CheckpointError(f"{against}: has no {projection.module} to compare with")
                sums = squares.setdefault(projection.name, [0.0, 0.0])
                for i, value in enumerate(_squared_error(projection, reference[projection.module])):
                    sums[i] += value
            done += projection.nbytes
            tick(done, total)
        errors = {key: (error / norm) ** 0.5 if norm else 0.0 for key, (error, norm) in squares.items()}
        reports.append(_report(name, found, errors))
    return reports


def _experts(folder: Path) -> dict[str, list[Any]]:
    checkpoint = Checkpoint.open(folder)
    layers: dict[str, list[Any]] = {}
    if checkpoint.quantization is not None:
        layers.update(find_packed(checkpoint))
    for name, found in find_experts(checkpoint).layers.items():
        layers.setdefault(name, []).extend(found)
    if not layers:
        raise CheckpointError(f"{folder}: has no routed experts")
    return layers


def _read(projection: Projection | PackedProjection) -> torch.Tensor:
    value = projection.read()
    return value.dequantize(torch.float32) if isinstance(value, QuantizedWeight) else value.float()


def _squared_error(projection: Any, reference: Any) -> tuple[float, float]:
    if projection.shape != reference.shape:
        raise CheckpointError(f"{projection.module}: is {projection.shape}, was {reference.shape}")
    before = _read(reference)
    difference = _read(projection) - before
    return float(difference.square().sum(dtype=torch.float64)), float(before.square().sum(dtype=torch.float64))


def _report(name: str, found: Sequence[Projection | PackedProjection], errors: dict[str, float]) -> LayerReport:
    first = found[0]
    found = sorted(found, key=lambda projection: (projection.shard == "w2", projection.name))
    shapes = {projection.name: projection.shape for projection in found}
    groups: dict[str, int] = {}
    if isinstance(first, PackedProjection):
        for projection in found:
            if isinstance(projection, PackedProjection):
                groups[projection.name] = projection.options.group_size(projection.shard) or projection.shape[1]
                expected = group_count(projection.shape[1], groups[projection.name])
                if projection.refs[SCALE].shape[-1] != expected:
                    raise CheckpointError(
                        f"{projection.module}: {projection.refs[SCALE].shape[-1]} groups a row, expected {expected}"
                    )
        zero = first.refs.get(ZERO_POINT)
        symmetric = first.options.symmetric or zero is None
        kind = "none" if symmetric else "float" if zero is not None and zero.dtype in ("F16", "BF16") else "int"
        bits = 4
    else:
        kind, bits = "-", 8 * first.nbytes // (first.shape[0] * first.shape[1])
    return LayerReport(
        name=name,
        experts=len({projection.expert for projection in found}),
        projections=shapes,
        group_sizes=groups,
        bits=bits,
        zero_point=kind,
        nbytes=sum(projection.nbytes for projection in found),
        weights=sum(projection.shape[0] * projection.shape[1] for projection in found),
        errors=errors,
    )


def table(reports: Sequence[LayerReport]) -> str:
    """The reports as text, a row a layer, with a last row of totals."""
    rows = [("layer", "experts", "projections", "group", "bits", "zero", "bytes", "bits/w", "relative error")]
    for report in reports:
        shapes = " ".join(f"{name} {rows_}x{columns}" for name, (rows_, columns) in report.projections.items())
        groups = "/".join(map(str, dict.fromkeys(report.group_sizes.values()))) or "-"
        errors = " ".join(f"{name} {error:.4f}" for name, error in report.errors.items()) or "-"
        rows.append(
            (
                report.name,
                str(report.experts),
                shapes,
                groups,
                str(report.bits),
                report.zero_point,
                size(report.nbytes),
                f"{report.bits_per_weight:.2f}",
                errors,
            )
        )
    nbytes, weights = sum(r.nbytes for r in reports), sum(r.weights for r in reports)
    experts = sum(r.experts for r in reports)
    rows.append(
        (f"{len(reports)} layers", str(experts), "", "", "", "", size(nbytes), f"{8 * nbytes / weights:.2f}", "")
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def size(nbytes: int) -> str:
    """Bytes for people: three digits and a binary unit."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def plot_errors(reports: Sequence[LayerReport], path: Path) -> None:
    """A picture of the relative error by layer, a line a projection."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for report in reports for name in report.errors))
    if not names:
        raise ValueError("inspect: --plot shows errors: give the 16-bit checkpoint with --against")
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.22 * len(reports) + 3), 4), layout="constrained")
    # Gate and up are often equal to the eye: open markers of different sizes keep both in sight.
    for i, name in enumerate(names):
        values = [report.errors.get(name, math.nan) for report in reports]
        axes.plot(values, marker="osD^"[i % 4], markersize=9 - 2 * min(i, 3), fillstyle="none", label=name)
    step = max(1, len(reports) // 24)
    positions = list(range(0, len(reports), step))
    axes.set_xticks(positions, [_short(reports[i].name) for i in positions])
    axes.set_xlabel("layer")
    axes.set_ylabel("relative RMS error of the experts' weights")
    highest = max(error for report in reports for error in report.errors.values())
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _short(name: str) -> str:
    numbers = [part for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else name
