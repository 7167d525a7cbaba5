"""What `vllm-ext bench serve --profile` reads from a trace of an engine's GPU: the kernels of one layer, in their order
and with the gaps between them, and how much of a step the GPU is busy.

A kernel is (name, begin, end) in microseconds. Which kernels are an arm's own is told by their names: what some arm of
the same cell never runs.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.serve_report import BASE, PEER

Kernel = tuple[str, float, float]
_LONGEST_NAME = 60


def marker(kernels: list[Kernel], layers: int, steps: int) -> str | None:
    """The first kernel that runs once in every layer of every step; of every step but the first, where prompts are read
    by other kernels. None where nothing does."""
    counts = Counter(name for name, _, _ in kernels)
    wanted = (layers * steps, layers * (steps - 1))
    return next((name for name, _, _ in kernels if counts[name] in wanted and counts[name]), None)


def busy(kernels: list[Kernel], begin: float, end: float) -> float:
    """Microseconds of [begin, end) in which some kernel runs; they may overlap."""
    total, reached = 0.0, begin
    for _, start, stop in kernels:
        start, stop = max(start, reached), min(stop, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def profile(kernels: list[Kernel], layers: int, steps: int) -> dict[str, Any]:
    """Of a trace of `steps` steps, by the median over its later half: a step's period, and the part of it in which the
    GPU is busy; and of the layers that run the commonest sequence of kernels, each one's time and the gap before it.

    A gap below 0 is an overlap. The last layer of a step is left out: the vocabulary's head follows it.
    """
    kernels = sorted(kernels, key=lambda one: one[1])
    name = marker(kernels, layers, steps)
    if name is None:
        return {"kernels": _by_name(kernels)}
    places = [place for place, kernel in enumerate(kernels) if kernel[0] == name]
    count = len(places) // layers
    firsts = [kernels[places[step * layers]][1] for step in range(count)]
    spans = list(pairwise(firsts))[(count - 1) // 2 :]
    found: dict[str, Any] = {"kernels": _by_name(kernels)}
    if spans:
        found["step_us"] = statistics.median(end - begin for begin, end in spans)
        found["busy_us"] = statistics.median(busy(kernels, begin, end) for begin, end in spans)
    inner = [kernels[first:last] for number, (first, last) in enumerate(pairwise(places)) if (number + 1) % layers]
    later = inner[len(inner) // 2 :]
    if not later:
        return found
    (usual, _), *_ = Counter(tuple(one[0] for one in layer) for layer in later).most_common(1)
    alike = [layer for layer in later if tuple(one[0] for one in layer) == usual]
    found["layer"] = [
        {
            "kernel": short(usual[place]),
            "us": statistics.median(layer[place][2] - layer[place][1] for layer in alike),
            "gap_us": statistics.median(layer[place][1] - layer[place - 1][2] for layer in alike) if place else None,
        }
        for place in range(len(usual))
    ]
    found["layers_alike"] = len(alike)
    found["layer_us"] = statistics.median(busy(layer, layer[0][1], max(one[2] for one in layer)) for layer in alike)
    return found


def _by_name(kernels: list[Kernel]) -> dict[str, list[float]]:
    """[runs, microseconds in all] of each kernel."""
    found: dict[str, list[float]] = {}
    for name, begin, end in kernels:
        entry = found.setdefault(short(name), [0, 0.0])
        entry[0] += 1
        entry[1] += end - begin
    return found


def short(name: str) -> str:
    """A kernel's name without its arguments and the namespaces before it; CUTLASS's are told by what they run."""
    if inner := re.search(r"device_kernel<(?:\w+::)*(\w+)", name):
        return inner[1][:_LONGEST_NAME]
    bare = re.split(
        r"[<(]", re.sub(r"^(void|int|float) ", "", name.replace("(anonymous namespace)::", "")), maxsplit=1
    )[0]
    return (bare.rpartition("::")[2].strip() or name)[:_LONGEST_NAME]


def mark_own(cell: dict[str, dict[str, Any]]) -> None:
    """Mark, in the profiles of a cell by arm, the kernels that not every arm runs, and add their time in a layer: what
    the shared ones leave of it, so that a launch which waits beside the kernel before it is not counted twice."""
    names = [{row["kernel"] for row in profile.get("layer", ())} for profile in cell.values()]
    shared = set.intersection(*names) if names else set()
    for found in cell.values():
        for row in found.get("layer", ()):
            row["own"] = row["kernel"] not in shared
        if "layer" in found:
            found["own_us"] = found["layer_us"] - sum(row["us"] for row in found["layer"] if not row["own"])


def step_by_rate(row: dict[str, Any]) -> float:
    """Microseconds of a step by the rate that was measured without tracing; a decode cell's prompts are part of it."""
    tokens = row["inputs"] if row["outputs"] == 1 else row["batch"]
    return float(1e6 * tokens / row["tokens_per_second"])


def in_order(document: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The profiles by cell and arm, cells in the order of the rates."""
    cells = list(dict.fromkeys(row["cell"] for row in document["rows"]))
    return dict(sorted(document["profile"].items(), key=lambda one: cells.index(one[0]) if one[0] in cells else -1))


def table(document: dict[str, Any]) -> str:
    """The profiles as Markdown: one line a cell and arm, with how many times faster it is by the GPU's time alone."""
    rows = {(row["cell"], row["arm"]): row for row in document["rows"]}
    arms = list(dict.fromkeys(arm for cell in document["profile"].values() for arm in cell))
    others = [arm for arm in (BASE, PEER) if arm in arms]
    head = ["", "arm", "a step by its rate, us", "GPU busy, us", "busy in a layer, us", "the arm's own kernels, us"]
    lines = [[*head, *(f"times {other}, by GPU" for other in others)]]
    for cell, found in in_order(document).items():
        for arm, one in found.items():
            row = rows.get((cell, arm))
            figures = [step_by_rate(row) if row else None, *(one.get(key) for key in ("busy_us", "layer_us", "own_us"))]
            shown = ["" if figure is None else f"{figure:,.0f}" for figure in figures]
            for other in others:
                known = "busy_us" in one and "busy_us" in found.get(other, {})
                shown.append(f"{found[other]['busy_us'] / one['busy_us']:.2f}x" if known else "")
            lines.append([cell, arm, *shown])
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text.insert(1, "| --- | --- |" + " ---: |" * (len(lines[0]) - 2))
    return "\n".join(text)


def chart(document: dict[str, Any], path: Path) -> None:
    """GPU time of a step by cell and arm, in units of BF16's: the arm's own kernels, the rest, and the step's length by
    the rate, whose distance from the bar is the time in which the GPU waits for the host."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    profiles = {cell: arms for cell, arms in in_order(document).items() if "busy_us" in arms.get(BASE, {})}
    rows = {(row["cell"], row["arm"]): row for row in document["rows"]}
    arms = list(dict.fromkeys(arm for cell in profiles.values() for arm in cell))
    layers = document["options"]["layers"]
    figure, axis = plt.subplots(figsize=(1.9 * max(3, len(profiles)) + 1, 4.4))
    width = 0.8 / max(1, len(arms))
    for index, arm in enumerate(arms):
        for number, (cell, found) in enumerate(profiles.items()):
            if "busy_us" not in found.get(arm, {}):
                continue
            unit = found[BASE]["busy_us"]
            busy_part, own = found[arm]["busy_us"] / unit, layers * found[arm].get("own_us", 0.0) / unit
            place = number + (index - (len(arms) - 1) / 2) * width
            label = arm if number == 0 else None
            axis.bar(place, own, width * 0.92, color=f"C{index}", label=label)
            axis.bar(place, busy_part - own, width * 0.92, bottom=own, color=f"C{index}", alpha=0.35)
            above = {"xytext": (0, 1), "textcoords": "offset points"}
            axis.annotate(f"{busy_part:.2f}", (place, busy_part), fontsize=7, ha="center", **above)
            if (cell, arm) in rows:
                length = step_by_rate(rows[cell, arm]) / unit
                axis.plot([place - width / 2, place + width / 2], [length, length], color="black", linewidth=1)
    axis.bar(0, 0, color="gray", alpha=0.35, label="kernels that all arms run")
    axis.plot([], [], color="black", linewidth=1, label="a step by the rate")
    axis.set(xticks=range(len(profiles)), xticklabels=profiles, ylabel="GPU time of a step, BF16's = 1")
    axis.set_title(f"{document['options']['shape']}, {layers} layers", fontsize=10)
    axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
    axis.legend(fontsize=7, loc="upper left", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
