"""What `vllm-ext bench serve` prints and draws: rates, ratios, targets, and how much the experts alone can give.

The bound is Amdahl's: with the experts taking a share s of BF16's time and an arm's experts r times faster, the arm can
be 1 / (1 - s + s / r) times faster. The experts' time is that of all steps, the prompts' and the outputs', by the layer
times in results/moe_h200.json; BF16's time is this run's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import RESULTS
from vllm_ext.benchmarks.serve_checkpoints import ServedShape

LAYER_TIMES = RESULTS / "moe_h200.json"
TARGETS = {"batch 1": 1.0, "batch 8": 1.4, "batch 64": 1.7, "batch 256": 1.25, "prefill 8192": 1.0}
BASE, PEER = "BF16", "Marlin, packed"
OURS = ("w4a16-grouped", "w4a16-grouped, packed")
# The layer benchmark's name of what an arm runs.
LAYER_ARMS = {BASE: "BF16", OURS[0]: "ours", OURS[1]: "ours", PEER: "Marlin, zero points"}


def layer_milliseconds(shape: ServedShape) -> dict[tuple[str, int], float]:
    """Time of one MoE layer by the layer benchmark's arm and number of tokens; empty where it was not measured."""
    if shape.layer is None or not LAYER_TIMES.exists():
        return {}
    rows = json.loads(LAYER_TIMES.read_text(encoding="utf-8"))["rows"]
    return {(row["arm"], row["tokens"]): row["ms"] for row in rows if row.get("shape") == shape.layer and "ms" in row}


def at_tokens(times: dict[tuple[str, int], float], arm: str, tokens: int) -> float | None:
    """The layer's time at `tokens`: between measured sizes on a straight line, beyond the largest in proportion."""
    sizes = sorted(count for name, count in times if name == arm)
    below = max((size for size in sizes if size <= tokens), default=None)
    if below is None:
        return None
    above = min((size for size in sizes if size >= tokens), default=None)
    if above is None:
        return times[arm, below] * tokens / below
    part = (tokens - below) / max(1, above - below)
    return (1 - part) * times[arm, below] + part * times[arm, above]


def experts_milliseconds(
    times: dict[tuple[str, int], float], arm: str, row: dict[str, Any], largest_step: int
) -> float | None:
    """One layer's experts over a whole request of a cell: its prompts in steps of `largest_step`, then its outputs."""
    full, rest = divmod(row["batch"] * row["inputs"], largest_step)
    steps = {largest_step: full, rest: 1, row["batch"]: 0}
    steps[row["batch"]] += row["outputs"] - 1
    total = 0.0
    for tokens, count in steps.items():
        if tokens and count:
            found = at_tokens(times, arm, tokens)
            if found is None:
                return None
            total += count * found
    return total


def add_bounds(
    rows: list[dict[str, Any]], shape: ServedShape, layers: int, largest_step: int = 8192
) -> list[dict[str, Any]]:
    """Add to each row the experts' share of BF16's time, and the arm's and the free experts' Amdahl bounds."""
    times = layer_milliseconds(shape)
    base = {row["cell"]: row["tokens_per_second"] for row in rows if row["arm"] == BASE}
    for row in rows:
        plain = experts_milliseconds(times, "BF16", row, largest_step)
        mine = experts_milliseconds(times, LAYER_ARMS[row["arm"]], row, largest_step)
        if plain is None or mine is None or row["cell"] not in base:
            continue
        counted = row["batch"] * (row["inputs"] if row["outputs"] == 1 else row["outputs"])
        share = min(1.0, layers * plain / (1e3 * counted / base[row["cell"]]))
        row["experts_share"] = share
        row["bound"] = 1 / (1 - share + share * mine / plain)
        row["bound_free_experts"] = 1 / (1 - share) if share < 1 else None
    return rows


def _shown(cell: dict[str, dict[str, Any]], arm: str, key: str, form: str) -> str:
    """A figure of a cell's row, or nothing where an arm failed before it."""
    return form.format(cell[arm][key]) if key in cell.get(arm, {}) else ""


def table(document: dict[str, Any]) -> str:
    """The results as Markdown: one line a cell."""
    by_cell: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        by_cell.setdefault(row["cell"], {})[row["arm"]] = row
    arms = list(dict.fromkeys(row["arm"] for row in document["rows"]))
    bounded = [arm for arm in arms if arm != BASE]
    compared = [arm for arm in OURS if arm in arms] or bounded
    head = ["", *(f"{arm}, tokens/s" for arm in arms)]
    for arm in compared:
        head += [f"{arm} / {other}" for other in (BASE, PEER) if other in arms and other != arm]
    lines = [[*head, *(f"{arm}, bound" for arm in bounded), "experts' share of BF16", "wanted"]]
    for cell, found in by_cell.items():
        line = [cell, *(_shown(found, arm, "tokens_per_second", "{:,.0f}") for arm in arms)]
        for arm in compared:
            others = [other for other in (BASE, PEER) if other in arms and other != arm]
            line += [_shown(found, arm, f"times {other}", "{:.2f}x") for other in others]
        line += [_shown(found, arm, "bound", "{:.2f}x") for arm in bounded]
        shares = [row["experts_share"] for row in found.values() if "experts_share" in row]
        line.append(f"{shares[0]:.0%}" if shares else "")
        line.append(f"{TARGETS[cell]:.2f}x" if cell in TARGETS else "")
        lines.append(line)
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "| --- |" + " ---: |" * (len(lines[0]) - 1))
    for name, reason in document.get("failed", {}).items():
        text.append(f"\nfailed: {name}: {reason.splitlines()[0]}")
    for name, row in document.get("loading", {}).items():
        text.append(f"loading {name}: {row}")
    return "\n".join(text)


def chart(document: dict[str, Any], path: Path) -> None:
    """Ratios to BF16 by cell, a bar an arm, with the Amdahl bounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in document["rows"] if f"times {BASE}" in row]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    figure, axis = plt.subplots(figsize=(1.9 * max(3, len(cells)) + 1, 4.4))
    width = 0.8 / max(1, len(arms))
    for index, arm in enumerate(arms):
        mine = {row["cell"]: row for row in rows if row["arm"] == arm}
        places = {cell: number + (index - (len(arms) - 1) / 2) * width for number, cell in enumerate(cells)}
        places = {cell: place for cell, place in places.items() if cell in mine}
        heights = [mine[cell][f"times {BASE}"] for cell in places]
        bars = axis.bar(list(places.values()), heights, width * 0.92, label=arm)
        axis.bar_label(bars, fmt="%.2f", fontsize=8, color="white", label_type="center")
        for cell, place in places.items():
            if bound := mine[cell].get("bound"):
                axis.plot([place - width / 2, place + width / 2], [bound, bound], color="black", linewidth=1)
                axis.annotate(
                    f"{bound:.2f}", (place, bound), (0, 2), textcoords="offset points", fontsize=7, ha="center"
                )
    axis.plot([], [], color="black", linewidth=1, label="Amdahl bound by layer times")
    wanted = [(number, TARGETS[cell]) for number, cell in enumerate(cells) if cell in TARGETS]
    if wanted:
        axis.plot(*zip(*wanted, strict=True), "k*", label="wanted", markersize=8)
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set(xticks=range(len(cells)), xticklabels=cells, ylabel="times BF16's tokens per second")
    axis.set_title(f"{document['options']['shape']}, {document['options']['layers']} layers", fontsize=10)
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
    axis.legend(fontsize=7, loc="upper left", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
