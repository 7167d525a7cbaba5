"""Pictures of a plan: who works when, what lies where, and how tiles flow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ext.ha_npu.allocator import Allocation, allocate
from vllm_ext.ha_npu.layout import BLOCKED, DENSE
from vllm_ext.ha_npu.lowering import Program, lower
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE
from vllm_ext.ha_npu.plan import Plan
from vllm_ext.ha_npu.reorder import best_order, operator_order

KIB = 1024
TIER_COLOURS = {WHOLE: "#4c78a8", COLUMNS: "#f58518", CHUNKS: "#54a24b"}
TIER_LABELS = {WHOLE: "whole head", COLUMNS: "column part", CHUNKS: "chunk-head-chunk"}
UNIT_COLOURS = {"matrix": "#4c78a8", "solve": "#b279a2", "vector": "#eeca3b", "input": "#d9d9d9"}
LAYOUT_COLOURS = {DENSE: "#2f6f2f", BLOCKED: "#b3261e"}
LABELLED_PIECES = 400
LABELLED_CORES = 32


def draw(plan: Plan, folder: Path) -> list[Path]:
    """Write `schedule.png`, `occupancy.png` and `dataflow.png` into a folder, made if need be; return their paths.

    A strategy of several kernels has a schedule only. Raises RuntimeError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("vllm-ext plan --plot needs matplotlib: pip install matplotlib") from error
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
    for piece in mapping.pieces:
        start, length = piece.start / 1e3, (piece.end - piece.start) / 1e3
        colour = TIER_COLOURS[piece.tier]
        axis.barh(piece.core, length, left=start, height=0.85, color=colour, edgecolor="white", linewidth=0.5)
        if labelled and length > 0.02 * mapping.makespan / 1e3:
            text = f"{piece.sequence}:{piece.head}" if several else f"{piece.head}"
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
    program = plan.chunk.kernels[0].program
    two = lower(program.graph, program.chip, state_in_place=False)
    one = lower(program.graph, program.chip)
    kind = plan.chunk.kernels[0].order_kind
    panels = {"operators' order, two states (before reordering)": (two, operator_order(two))}
    if kind != "operator":
        panels["operators' order, state in place"] = (one, operator_order(one))
    panels[f"this plan ({kind} order, state in place)"] = (program, list(plan.order))
    if kind == "operator":
        panels["the order that needs least"] = (one, best_order(one)[0])
    figure, axes = _figure(12, 3.4 * len(panels), len(panels))
    maps = {title: (used, order, allocate(used, order)) for title, (used, order) in panels.items()}
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
    axis.add_patch(Rectangle((-0.6, 0), 1e3, program.static_bytes / KIB, color="#e0e0e0"))
    axis.text(0, 2, "staging queue, row vectors, broadcast block", fontsize=7)
    placements = [place for place in allocation.placements.values() if place.buffer == "ub"]
    for index, place in enumerate(sorted(placements, key=lambda place: place.start)):
        width, height = place.end - place.start + 0.9, place.nbytes / KIB
        corner = (place.start - 0.45, place.offset / KIB)
        axis.add_patch(Rectangle(corner, width, height, facecolor=colours[index % 20], edgecolor="white", alpha=0.75))
        name = place.item.split(":")[1]
        axis.text(corner[0] + width / 2, corner[1] + height / 2, name, ha="center", va="center", fontsize=6)


def _depths(plan: Plan) -> dict[str, int]:
    graph = plan.chunk.dataflow.graph
    depth = {tensor.name: 0 for tensor in graph.by_role("input", "state_in")}
    for node in graph.nodes.values():
        depth[node.name] = 1 + max(depth[name] for name in node.inputs)
    return depth


def draw_dataflow(plan: Plan) -> Any:
    """The graph of a chunk; edges show the layout a tile is used in, thick edges a transform."""
    graph = plan.chunk.dataflow.graph
    depth = _depths(plan)
    columns: dict[int, list[str]] = {}
    for name, level in depth.items():
        columns.setdefault(level, []).append(name)
    tallest = max(len(names) for names in columns.values())
    spots = {
        name: (level, (position + 0.5) * tallest / len(names))
        for level, names in columns.items()
        for position, name in enumerate(names)
    }
    figure, (axis,) = _figure(1.35 * (len(columns) + 1), 0.85 * tallest + 1)
    transforms = set(plan.layout_plan.transforms) if plan.layout_plan else set()
    for node in graph.nodes.values():
        for source in node.inputs:
            _edge(axis, plan, spots, source, node.name, transforms)
    for name, spot in spots.items():
        unit = graph.nodes[name].unit if name in graph.nodes else "input"
        box = {"boxstyle": "round,pad=0.35", "facecolor": UNIT_COLOURS[unit], "edgecolor": "#444444"}
        mark = "*" if any(tensor == name for tensor, _ in transforms) else ""
        axis.text(*spot, name + mark, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    handles = [_patch(colour, unit) for unit, colour in UNIT_COLOURS.items()]
    handles += [_line(colour, f"{layout} tile") for layout, colour in LAYOUT_COLOURS.items()]
    handles.append(_line("#bbbbbb", "row vector"))
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=8, fontsize=8)
    axis.set(xlim=(-0.6, len(columns) - 0.4), ylim=(tallest + 0.2, -0.2))
    axis.axis("off")
    count = f"; * transformed ({len(transforms)} a chunk)" if plan.layout_plan else ""
    axis.set_title(f"{plan.strategy} {plan.op} on {plan.chip.name}: dataflow of a chunk{count}")
    return figure


def _edge(
    axis: Any,
    plan: Plan,
    spots: Mapping[str, tuple[float, float]],
    source: str,
    target: str,
    transforms: set[tuple[str, str]],
) -> None:
    graph = plan.chunk.dataflow.graph
    node = graph.nodes[target]
    if graph.tensors[source].is_vector:
        colour, width = "#bbbbbb", 0.8
    else:
        layout = BLOCKED if node.unit != "vector" else plan.layouts.get(target, DENSE)
        colour, width = LAYOUT_COLOURS[layout], 2.6 if (source, layout) in transforms else 1.1
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 14, "shrinkB": 16}
    axis.annotate("", xy=spots[target], xytext=spots[source], arrowprops=arrow, zorder=1)
