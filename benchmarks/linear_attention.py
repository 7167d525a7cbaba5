"""Linear-attention prefill on a GPU: ours against fla-core and FlashQLA, one process, in CUDA graphs where they allow.

Every row is checked against FP64 first, on the value heads of the first and of the last key head and their final
states, with gates down to -316 and values up to 25, in memory that held NaN: ours failing stops the run, a peer failing
or absent is reported with the reason.
Both ceilings, memory and tensor cores, are measured in the run.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks import probes
from vllm_ext.benchmarks.linear_attention_common import FUNCTIONS, HEAD_DIM, Row, end_heads, errors, make_call
from vllm_ext.benchmarks.linear_attention_peers import PEERS, PUBLISHED
from vllm_ext.benchmarks.moe_common import graph_milliseconds, matrix_rate, memory_bandwidth
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.triton.backend import prepare, recur
from vllm_ext.ops.linear_attention.triton.chunks import Sizes
from vllm_ext.ops.linear_attention.triton.plan import map_prefill

TOLERANCE = 6e-3
PEER_TOLERANCE = 2e-2
GDN_HEADS = ((2, 8), (4, 16), (8, 32), (16, 64), (16, 32))
KDA_HEADS = ((32, 32), (16, 16))
SHAPES = ((512,), (2048,), (8192,), (32768,), (2048,) * 4, (1024,) * 8, (8192,) * 4)
KDA_SHAPES = ((2048,), (8192,), (32768,), (2048,) * 4)
MEMORY_TOKENS = 65536
# In a graph, one after the other: the published times are means over many calls in one graph, and of a replayed call
# alone 3 to 12 us are the graph's launch.
CALLS = 8


def _rows(args: argparse.Namespace) -> list[Row]:
    rows = [Row("gdn", *heads, lengths) for heads in GDN_HEADS for lengths in SHAPES]
    rows += [Row("kda", *heads, lengths) for heads in KDA_HEADS for lengths in KDA_SHAPES]
    return [row for row in rows if not args.rows or any(text in row.name for text in args.rows)]


def _peers(args: argparse.Namespace, row: Row) -> list[str]:
    """FlashQLA on every GDN row; FLA, which tunes every head configuration for minutes, on those asked for."""
    names = []
    if "FLA" in args.peers and (row.op == "kda" or f"{row.heads}/{row.value_heads}" in args.fla_heads):
        names.append("FLA")
    if "FlashQLA" in args.peers and row.op == "gdn":
        names.append("FlashQLA")
    return names


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--rows", nargs="+", help="only rows whose name contains one of these, as 'gdn 2/8 1x2048'")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--fla-heads", nargs="*", default=["16/32"], help="GDN head configurations to time FLA at")
    parser.add_argument(
        "--compile-seconds", type=float, default=900.0, help="what has not compiled by then is left out"
    )
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--replays", type=int, default=15)


def _warm(task: tuple[list[Row], str | None]) -> str:
    """Compile what rows need in a worker, whose kernels land in caches on disk."""
    rows, peer = task
    try:
        for row in rows:
            call = make_call(row)
            if peer is None:
                FUNCTIONS[row.op](**call, backend="triton")
            else:
                PEERS[peer](row.op, call)()
            torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{row.name}, {peer or 'ours'}: {type(error).__name__}: {str(error)[:200]}"


Task = tuple[list[Row], str | None]


def _tasks(args: argparse.Namespace) -> list[Task]:
    """What to compile, the peers' first: FlashQLA's kernels depend on the row, FLA's on the heads, ours on how the row
    is mapped and on value heads a key head.
    """
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tasks: dict[tuple[Any, ...], Task] = {}
    for row in _rows(args):
        for peer in _peers(args, row):
            several = peer == "FlashQLA" and len(row.lengths) > 1
            rows = tasks.setdefault((peer, row.op, row.heads, row.value_heads, several), ([], peer))[0]
            if peer == "FlashQLA" or not rows:
                rows.append(row)
    for row in _rows(args):
        count = len(row.lengths)
        mapping = map_prefill(row.tokens, count, row.value_heads, HEAD_DIM, HEAD_DIM, multiprocessors, 128, row.op)
        ratio = row.value_heads // row.heads
        kind = (None, row.op, ratio, mapping.block_columns, mapping.segment_chunks is None)
        tasks.setdefault(kind, ([row], None))
    return list(tasks.values())


def finish(pool: Pool, function: Callable[[Task], str], tasks: list[Task], seconds: float) -> list[Task]:
    """The tasks that the pool has not finished after so many seconds; it goes on with them until it is ended."""
    pending = [(task, pool.apply_async(function, (task,))) for task in tasks]
    end = time.monotonic() + seconds
    while pending and time.monotonic() < end:
        for _, result in [each for each in pending if each[1].ready()]:
            pending = [each for each in pending if each[1] is not result]
            failed = result.get()
            left = f"compiled {len(tasks) - len(pending)} of {len(tasks)}"
            print(f"{left}{': ' if failed else ''}{failed}", file=sys.stderr, flush=True)
        time.sleep(0.05)
    return [task for task, _ in pending]


def left_out(unfinished: list[Task], row: Row, peer: str) -> bool:
    """Whether a row is to do without a peer: FLA's kernels are those of all rows with the same heads."""
    same = [
        each
        for rows, name in unfinished
        if name == peer
        for each in rows
        if (each.op, each.heads, each.value_heads) == (row.op, row.heads, row.value_heads)
    ]
    return bool(same) if peer == "FLA" else row in same


def check(args: argparse.Namespace) -> None:
    """A GPU, and kernels compiled by several processes; each row is checked when it is measured. Rows whose peer has
    not compiled in --compile-seconds are measured without it, and say so.
    """
    probes.check(args)
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        args.unfinished = finish(pool, _warm, _tasks(args), args.compile_seconds)


def _event_milliseconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _milliseconds(call: Callable[[], object], repeats: int) -> tuple[float, str]:
    """Median time of one of CALLS in a CUDA graph or, where capture fails, of one as launched."""
    try:
        return graph_milliseconds([call] * CALLS, repeats), "graph"
    except Exception:
        torch.cuda.synchronize()
        return _event_milliseconds(call, repeats), "events"


def _split(row: Row, call: dict[str, Any], repeats: int) -> dict[str, float]:
    """Milliseconds of ours by what it does: preparing all chunks, and carrying the state through them; each alone in
    its graph, whose launch is part of them.
    """
    given = Call(**call, use_qk_l2norm_in_kernel=False)
    sizes = Sizes(len(row.lengths), row.tokens, True, row.heads, row.value_heads, HEAD_DIM, HEAD_DIM)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    mapping = map_prefill(row.tokens, len(row.lengths), row.value_heads, HEAD_DIM, HEAD_DIM, cores, 128, row.op)
    chunks = prepare(given, row.op, sizes, call["cu_seqlens"], mapping=mapping)
    o, final = torch.empty_like(call["v"]), torch.empty_like(call["initial_state"])
    operands = (mapping, call["cu_seqlens"], chunks, o, final)
    return {
        "prepare_ms": graph_milliseconds(
            [lambda: prepare(given, row.op, sizes, call["cu_seqlens"], mapping=mapping)], repeats
        ),
        "recurrence_ms": graph_milliseconds([lambda: recur(given, row.op, sizes, *operands)], repeats),
    }


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """What torch.empty allocates holds NaN: an earlier row's results in it could pass for results of this one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _measure(row: Row, args: argparse.Namespace, bandwidth: float, rate: float) -> list[dict[str, Any]]:
    call = make_call(row)
    expected = end_heads(row, call)
    floor = {"memory": row.bytes() / bandwidth * 1e3, "tensor cores": row.flops() / rate * 1e3}
    bound = max(floor, key=lambda name: floor[name])
    measured: list[dict[str, Any]] = []
    arms: list[tuple[str, Callable[[], Any], float]] = [
        ("ours", lambda: FUNCTIONS[row.op](**call, backend="triton"), TOLERANCE)
    ]
    common = {"row": row.name, "op": row.op, "heads": f"{row.heads}/{row.value_heads}", "shape": row.shape}
    for name in _peers(args, row):
        if left_out(args.unfinished, row, name):
            reason = f"had not compiled after {args.compile_seconds:g} s"
            measured.append({**common, "arm": name, "failed": reason})
            continue
        try:
            arms.append((name, PEERS[name](row.op, call), PEER_TOLERANCE))
        except Exception as error:
            measured.append({**common, "arm": name, "failed": f"{type(error).__name__}: {str(error)[:200]}"})
    for name, function, tolerance in arms:
        try:
            with new_memory_is_nan():
                result = function()
            o_error, state_error = errors(result, expected)
            if not (o_error <= tolerance and state_error <= tolerance):  # NaN is neither
                raise CheckFailed(f"{row.name}, {name}: relative errors {o_error:.2e}, {state_error:.2e}")
            ms, how = _milliseconds(function, args.replays)
            found = {"ms": ms, "timed": how, "error": o_error, "state_error": state_error, "failed": None}
            share: dict[str, Any] = {"floor_ms": floor[bound], "bound": bound, "share": floor[bound] / ms}
            if name == "ours":
                share |= _split(row, call, args.replays)
            measured.append({**common, "arm": name, **found, **share})
        except Exception as error:
            if name == "ours":
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            measured.append({**common, "arm": name, "failed": reason})
    published = PUBLISHED.get((row.heads, row.value_heads), {}).get(row.shape) if row.op == "gdn" else None
    if published is not None:
        for name, ms in zip(("FlashQLA, published", "FlashInfer, published", "FLA, published"), published, strict=True):
            measured.append({**common, "arm": name, "ms": ms, "timed": "published", "failed": None})
    return measured


def _memory(op: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory of one call over what its operands take, 65536 tokens of 16/32 heads (KDA: 32/32)."""
    heads = (16, 32) if op == "gdn" else (32, 32)
    row = Row(op, *heads, (MEMORY_TOKENS,))
    call = make_call(row)
    measured = []
    functions: dict[str, Callable[[], Any]] = {"ours": lambda: FUNCTIONS[op](**call, backend="triton")}
    if "FLA" in _peers(args, row) and not left_out(args.unfinished, row, "FLA"):
        functions["FLA"] = PEERS["FLA"](op, call)
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        measured.append(
            {"arm": name, "op": op, "row": f"{row.name} memory", "operands": before, "peak": peak, "failed": None}
        )
    return measured


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a problem and arm; the two measured ceilings come first, peak memory last."""
    device = torch.device("cuda", 0)
    bandwidth, rate = memory_bandwidth(device), matrix_rate(device)
    rows: list[dict[str, Any]] = []
    for row in _rows(args):
        rows += _measure(row, args, bandwidth, rate)
        times = {r["arm"]: r["ms"] for r in rows if r["row"] == row.name and r["failed"] is None}
        print("  ".join([row.name, *(f"{arm} {ms:.4f}" for arm, ms in times.items())]), file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    _compare(rows)
    if not args.rows:
        for op in ("gdn", "kda"):
            try:
                rows += _memory(op, args)
            except Exception as error:
                rows.append({"arm": "memory", "op": op, "row": f"{op} memory", "failed": str(error)[:200]})
    ceilings = {"arm": "ceilings", "row": "", "failed": None, "bytes_per_s": bandwidth, "flop_per_s": rate}
    return [ceilings, *rows]


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add to the rows of "ours" the best peer, live or published, how many times faster ours is, and the target."""
    for ours in rows:
        if ours["arm"] != "ours":
            continue
        peers = [r for r in rows if r["row"] == ours["row"] and r["arm"] != "ours" and r["failed"] is None]
        live = {r["arm"] for r in peers}
        # A peer measured here counts as measured; its published time only stands in where it was not.
        peers = [r for r in peers if r["arm"].partition(",")[0] not in live or r["timed"] != "published"]
        if not peers:
            continue
        best = min(peers, key=lambda r: r["ms"])
        ours["best_peer"], ours["times_best"] = best["arm"], best["ms"] / ours["ms"]
        ours["target"] = 2.0 if ours["op"] == "kda" else 1.0
        ours["reached"] = ours["times_best"] >= ours["target"]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a row: ours, live peers, the best of all and the factor, the error, the share of the ceiling."""
    lines = [f"copy {rows[0]['bytes_per_s'] / 1e12:.2f} TB/s, BF16 product {rows[0]['flop_per_s'] / 1e12:.0f} TFLOP/s"]
    lines.append(f"{'row':24}{'ours':>9}{'FLA':>9}{'FlashQLA':>10}{'best':>9}{'factor':>8}  {'error':>9}{'share':>7}")
    by = {(r["row"], r["arm"]): r for r in rows[1:] if r["failed"] is None and "ms" in r}
    for name in dict.fromkeys(row for row, _ in by):
        ours = by[name, "ours"]
        cells = [by.get((name, arm), {}).get("ms") for arm in ("FLA", "FlashQLA")]
        text = "".join(f"{ms:9.4f}" if ms else " " * 9 for ms in cells)
        best = (
            f"{ours['ms'] * ours['times_best']:10.4f}{ours['times_best']:7.2f}x" if "times_best" in ours else " " * 18
        )
        lines.append(f"{name:24}{ours['ms']:9.4f}{text}{best}  {ours['error']:9.1e}{ours['share']:7.0%}")
    for row in rows[1:]:
        if "peak" in row:
            lines.append(
                f"{row['row']}, {row['arm']}: peak {row['peak'] / 2**30:.2f} GiB ({row['operands'] / 2**30:.2f} before)"
            )
        if row["failed"] is not None:
            lines.append(f"failed: {row['row']}, {row['arm']}: {row['failed']}")
    return "\n".join(lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Ours over the best peer's time, a bar a row, in panels of head configurations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = [row for row in rows[1:] if row["arm"] == "ours" and "times_best" in row]
    groups = list(dict.fromkeys((row["op"], row["heads"]) for row in ours))
    figure, axes = plt.subplots(
        1, max(1, len(groups)), figsize=(2.3 * max(1, len(groups)) + 1, 4.2), squeeze=False, sharey=True
    )
    for axis, (op, heads) in zip(axes[0], groups, strict=False):
        mine = [row for row in ours if (row["op"], row["heads"]) == (op, heads)]
        colours = ["#2a7f62" if row["reached"] else "#b5533c" for row in mine]
        axis.bar(range(len(mine)), [row["times_best"] for row in mine], color=colours)
        axis.set_xticks(range(len(mine)), [row["shape"] for row in mine], rotation=70, fontsize=8)
        axis.axhline(mine[0]["target"], color="black", linewidth=1, linestyle="--")
        axis.set_title(f"{op.upper()} {heads}", fontsize=10)
        axis.grid(True, axis="y", alpha=0.3)
    axes[0][0].set_ylabel("times faster than the best peer")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


BENCHMARK = Benchmark(
    "linear-attention", "GDN and KDA prefill on a GPU against FLA and FlashQLA", arguments, check, run, table, chart
)
