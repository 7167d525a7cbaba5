"""Pictures of a plan: who works when, and what lies where; how tiles flow is in `plot_dataflow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_ext.ha_npu.allocator import Allocation, allocate
from vllm_ext.ha_npu.first_fit import Placement
from vllm_ext.ha_npu.lowering import Program, lower
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE
from vllm_ext.ha_npu.plan import Plan
from vllm_ext.ha_npu.plot_dataflow import draw_dataflow
from vllm_ext.ha_npu.reorder import best_order, operator_order

KIB = 1024
TIER_COLOURS = {WHOLE: "#4c78a8", COLUMNS: "#f58518", CHUNKS: "#54a24b"}
TIER_LABELS = {WHOLE: "whole head", COLUMNS: "column part", CHUNKS: "chunk-head-chunk"}
LABELLED_PIECES = 400
LABELLED_CORES = 32
CHARACTER_SHARE = 0.009
"""Width of a character of a piece's label, as a share of the axis."""


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Write `schedule.png`, `occupancy.png` and `dataflow.png` into a folder, made if need be; return their paths.

    A strategy of several kernels has a schedule only. Raises RuntimeError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("pictures need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawings = {"schedule": draw_schedule}
    if len(plan.chunk.kernels) == 1:
        drawings |= {"occupancy": draw_occupancy, "dataflow": draw_dataflow}
    paths = []
    for name, drawing in drawings.items():
        figure = drawing(plan)
        path = folder / f"{plan.op}_{plan.chip.name}_{plan.strategy}_{name}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight")
        paths.append(path)
    return paths


def _figure(width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def draw_schedule(plan: Plan) -> Any:
    """Core by time. Time is the model's, in thousands of cycles."""
    mapping = plan.mapping
    cores = mapping.cores
    height = min(2 + 0.32 * cores, 14)
    figure, (axis,) = _figure(11, height)
    labelled = len(mapping.pieces) <= LABELLED_PIECES and cores <= LABELLED_CORES
    several = len(plan.seq_lens) > 1
    span = max(mapping.makespan, mapping.head_only_makespan) / 1e3
    for piece in mapping.pieces:
        start, length = piece.start / 1e3, (piece.end - piece.start) / 1e3
        colour = TIER_COLOURS[piece.tier]
        axis.barh(piece.core, length, left=start, height=0.85, color=colour, edgecolor="white", linewidth=0.5)
        text = f"{piece.sequence}:{piece.head}" if several else f"{piece.head}"
        if labelled and length > CHARACTER_SHARE * (len(text) + 1) * span:
            axis.text(start + length / 2, piece.core, text, ha="center", va="center", fontsize=7, color="white")
    handles = [_patch(TIER_COLOURS[tier], TIER_LABELS[tier]) for tier, names in mapping.tiers.items() if names]
    if mapping.head_only_makespan > mapping.makespan:
        axis.axvline(mapping.head_only_makespan / 1e3, color="black", linestyle="--", linewidth=1)
        handles.append(_line("black", "whole heads only", "--"))
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.65 / height), ncol=4, fontsize=8)
    axis.set(xlabel="thousand cycles (model)", ylabel="core", ylim=(cores - 0.4, -0.6))
    if cores <= LABELLED_CORES:
        axis.set_yticks(range(cores))
    number = "" if not labelled else "; number = sequence:head" if several else "; number = head"
    axis.set_title(
        f"{plan.strategy} {plan.op} on {plan.chip.name}: {plan.num_heads} heads, {plan.num_tokens} tokens{number}; "
        f"idle {100 * mapping.idle_share:.1f}%"
    )
    return figure


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)


def _line(colour: str, label: str, style: str = "-") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([0], [0], color=colour, linestyle=style, label=label)


def draw_occupancy(plan: Plan) -> Any:
    """UB over the steps of a chunk: with a second state, as planned, and in the order that needs least."""
    program, planned = plan.chunk.kernels[0].program, plan.chunk.kernels[0].allocation
    kind = plan.chunk.kernels[0].order_kind
    if kind == "kernel":
        return _occupancy_figure(plan, {"the kernel's tiles": (program, list(plan.order), planned)})
    two = lower(program.graph, program.chip, state_in_place=False)
    one = lower(program.graph, program.chip)
    panels = {"operators' order, two states (before reordering)": (two, operator_order(two))}
    if kind != "operator":
        panels["operators' order, state in place"] = (one, operator_order(one))
    panels[f"this plan ({kind} order, state in place)"] = (program, list(plan.order))
    if kind == "operator":
        panels["the order that needs least"] = (one, best_order(one)[0])
    return _occupancy_figure(
        plan, {title: (used, order, allocate(used, order)) for title, (used, order) in panels.items()}
    )


def _occupancy_figure(plan: Plan, maps: Mapping[str, tuple[Program, list[str], Allocation]]) -> Any:
    figure, axes = _figure(12, 3.4 * len(maps), len(maps))
    top = max(allocation.peak["ub"] for _, _, allocation in maps.values()) / KIB
    for axis, (title, (used, order, allocation)) in zip(axes, maps.items(), strict=True):
        _memory_map(axis, used, allocation)
        axis.plot(
            range(len(order)), [value / KIB for value in allocation.occupancy["ub"]], color="black", linewidth=1.5
        )
        usable = plan.chip.buffers["ub"].usable / KIB
        axis.axhline(usable, color="red", linewidth=1.2)
        axis.text(0, usable + 4, f"usable {usable:g} KiB", color="red", fontsize=8)
        axis.set(ylim=(0, 1.08 * max(top, usable)), xlim=(-0.6, len(order) - 0.4), ylabel="UB offset, KiB")
        axis.set_title(f"{title}: peak {allocation.peak['ub'] / KIB:g} KiB", fontsize=10)
        axis.set_xticks(range(len(order)), order, rotation=90, fontsize=6)
    figure.suptitle(f"{plan.op} on {plan.chip.name}: where tiles lie in UB (black: bytes in use)", y=1.0)
    figure.tight_layout()
    return figure


def _memory_map(axis: Any, program: Program, allocation: Allocation) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colours = colormaps["tab20"].colors
    names = {item.tensor for item in program.items.values()}
    # The same tile has the same colour in every order.
    colour_of = {name: colours[index % 20] for index, name in enumerate(sorted({*program.graph.tensors, *names}))}
    static = program.static_bytes / KIB
    axis.add_patch(Rectangle((-0.6, 0), 1e3, static, color="#e0e0e0"))
    axis.text(0, static / 2, ", ".join(program.static).replace("_", " "), va="center", fontsize=7)
    placements = [place for place in allocation.placements.values() if place.buffer == "ub"]
    for place in placements:
        width, height = _shown_end(place, placements) - place.start + 0.9, place.nbytes / KIB
        corner = (place.start - 0.45, place.offset / KIB)
        name = place.item.split(":")[1]
        axis.add_patch(Rectangle(corner, width, height, facecolor=colour_of[name], edgecolor="white", alpha=0.75))
        text = axis.text(corner[0] + width / 2, corner[1] + height / 2, name, ha="center", va="center", fontsize=6)
        text.set(zorder=5, path_effects=[_halo()])


def _shown_end(place: Placement, others: Sequence[Placement]) -> int:
    """An item's last step; the step before that if another takes its place in it."""
    heirs = [
        other
        for other in others
        if place.start < other.start == place.end
        and place.offset < other.offset + other.nbytes
        and other.offset < place.offset + place.nbytes
    ]
    return place.end - 1 if heirs else place.end


def _halo() -> Any:
    from matplotlib.patheffects import withStroke

    return withStroke(linewidth=1.5, foreground="white")
