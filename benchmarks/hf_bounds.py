"""What faster experts can give a denoising step: Amdahl's law over measured arms, and a model by byte count."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from vllm_ext.benchmarks.hf_arms import ARMS

# Bytes a second of the machine the published experiment ran on (GB10), for the model by byte count.
SMALL_MACHINE = 250e9
BOUNDS = {
    "free": "were experts free",
    "floor": "were they read once at this GPU's bandwidth",
    "kernel": "at our layer's own speed",
}


def best(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The median time of all runs of an arm, None where it did not run."""
    times = [time for row in rows if row["arm"] == name for time in row.get("runs_ms", [row["step_ms"]])]
    return statistics.median(times) if times else None


def ratio(rows: Sequence[dict[str, Any]], slow: str, fast: str) -> float | None:
    """How often `fast` fits into `slow`: the median of the rounds' ratios where both took turns, else of medians."""
    runs = [[row for row in rows if row["arm"] == name] for name in (slow, fast)]
    if not all(runs):
        return None
    if all(not ARMS[name].patched for name in (slow, fast)) and all("runs_ms" in rows[0] for rows in runs):
        return statistics.median(a / b for a, b in zip(runs[0][0]["runs_ms"], runs[1][0]["runs_ms"], strict=True))
    first, second = best(rows, slow), best(rows, fast)
    assert first is not None
    assert second is not None
    return first / second


def amdahl(rows: Sequence[dict[str, Any]], layer_ms: dict[str, float], layers: int) -> list[dict[str, Any]]:
    """Speed-up of the swap beside its bounds, eager and captured.

    layer_ms  of one layer's experts alone: "stock", "ours", and "floor", the time to read the packed weights once

    bound_free      experts cost nothing: stock / free, both measured
    bound_floor     experts cost the time to read them once: stock / (free + layers * floor); captured only
    bound_kernel    experts cost what our layer costs alone in a CUDA graph: stock / (free + layers * ours); captured
                    only
    """
    found = []
    for arm, suffix in (("experts", ""), ("experts-launched", ""), ("experts", "-captured")):
        stock = best(rows, f"stock{suffix}")
        speedup, bound = ratio(rows, f"stock{suffix}", f"{arm}{suffix}"), ratio(rows, f"stock{suffix}", f"free{suffix}")
        if stock is None or speedup is None:
            continue
        row: dict[str, Any] = {"arm": arm, "mode": suffix.lstrip("-") or "eager", "speedup": speedup}
        if bound is not None:
            row["bound_free"] = bound
            # Eager waits for the host, which the experts' own time on the GPU does not lengthen.
            for name, alone in (("floor", "floor"), ("kernel", "ours")) if suffix else ():
                if alone in layer_ms:
                    row[f"bound_{name}"] = 1 / (1 / bound + layers * layer_ms[alone] / stock)
        for name in BOUNDS:
            if f"bound_{name}" in row:
                row[f"share_of_{name}"] = speedup / row[f"bound_{name}"]
        found.append(row)
    return found


def by_byte_count(model: Any, experts_bytes: tuple[int, int], bandwidth: float = SMALL_MACHINE) -> dict[str, Any]:
    """A model, no measurement: a step as the time to read every byte it reads once at `bandwidth`.

    All experts are read (at 256 tokens and 8 of 128 every expert is hit), the decoder's dense weights once, the
    embedding twice (self-conditioning and head), and the logits' passes are left out.
    """
    decoder = model.model.decoder
    embed = decoder.embed_tokens.weight.nbytes
    unique = {p.data_ptr(): p.nbytes for name, p in decoder.named_parameters() if "experts" not in name}
    dense = sum(unique.values()) - embed
    stock, ours = (size + dense + 2 * embed for size in experts_bytes)
    return {
        "model_only": True,
        "bytes_per_second": bandwidth,
        "stock_gb": stock / 1e9,
        "experts_swapped_gb": ours / 1e9,
        "stock_ms": 1e3 * stock / bandwidth,
        "experts_swapped_ms": 1e3 * ours / bandwidth,
        "speedup": stock / ours,
    }
