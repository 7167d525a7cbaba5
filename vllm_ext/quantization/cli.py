"""`vllm-ext quantize` and `vllm-ext inspect`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_ext.quantization.inspection import inspect_checkpoint, plot_errors, size, table
from vllm_ext.quantization.pack import Result, pack_checkpoint
from vllm_ext.quantization.pack_shard import PackError
from vllm_ext.quantization.plan import FORMATS
from vllm_ext.quantization.progress import Progress
from vllm_ext.quantization.quantize import METHODS, ZERO_POINTS
from vllm_ext.quantization.scheme import QUANT_METHOD, Scheme

FAILED, INTERRUPTED = 1, 130
PICTURES = (".png", ".svg", ".pdf")


def quantize_main(argv: Sequence[str]) -> int:
    """Pack a checkpoint's routed experts. Returns the exit status: 0, 1 on an error told on stderr, 130 on ^C."""
    return _guarded("vllm-ext quantize", lambda: _quantize(_quantize_parser().parse_args(argv)))


def inspect_main(argv: Sequence[str]) -> int:
    """Tell what a checkpoint's routed experts are made of. Returns the exit status."""
    return _guarded("vllm-ext inspect", lambda: _inspect(_inspect_parser().parse_args(argv)))


def _guarded(program: str, action: Callable[[], None]) -> int:
    try:
        action()
    except (ValueError, OSError, PackError, RuntimeError) as error:
        print(f"\n{program}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted; what is finished is kept: run again with --resume", file=sys.stderr)
        return INTERRUPTED
    return 0


def _quantize_parser() -> argparse.ArgumentParser:
    defaults = Scheme()
    parser = argparse.ArgumentParser(
        "vllm-ext quantize", description="Pack the routed experts of a mixture-of-experts checkpoint into 4 bits."
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder with config.json and *.safetensors; only read")
    parser.add_argument("destination", type=Path, metavar="DST", help="folder to make; must not exist")
    parser.add_argument("--format", choices=FORMATS, default=QUANT_METHOD, help="default: %(default)s")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, each packing one shard at a time")
    where.add_argument("--ray", metavar="ADDRESS", help='spread shards over this Ray cluster ("auto": the local one)')
    parser.add_argument("--resume", action="store_true", help="go on where a run stopped; finished shards are verified")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if there is one"
    )
    for key, what in (("group_size_w13", "gate and up"), ("group_size_w2", "down")):
        parser.add_argument(
            f"--{key.replace('_', '-')}",
            type=int,
            default=getattr(defaults, key),
            metavar="G",
            help=f"columns of a group of the {what} projections, a multiple of 8 (default: %(default)s)",
        )
    parser.add_argument("--symmetric", action="store_true", help="no zero points")
    parser.add_argument(
        "--zero-point",
        choices=ZERO_POINTS,
        help=f"default: {defaults.zero_point}, or int where the format has no other",
    )
    parser.add_argument("--method", choices=METHODS, default=defaults.method, help="default: %(default)s")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="NAME",
        help="experts to leave in 16 bits: part of a module's path (layers.0), or re:EXPRESSION; may be repeated",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _quantize(options: argparse.Namespace) -> None:
    if options.format != QUANT_METHOD and options.zero_point == "float":
        raise ValueError(f"--format {options.format} stores integer zero points only; drop --zero-point float")
    scheme = Scheme(
        options.group_size_w13,
        options.group_size_w2,
        symmetric=options.symmetric,
        zero_point=options.zero_point or ("float" if options.format == QUANT_METHOD else "int"),
        method=options.method,
        ignore=tuple(options.ignore),
    )
    result = pack_checkpoint(
        options.source,
        options.destination,
        scheme,
        format_name=options.format,
        jobs=options.jobs,
        ray_address=options.ray,
        resume=options.resume,
        device=options.device,
        progress=not options.quiet,
        warn=lambda text: print(f"vllm-ext quantize: warning: {text}", file=sys.stderr),
    )
    print(_summary(result, options.destination))


def _summary(result: Result, destination: Path) -> str:
    if result.complete_before:
        return f"{destination}: already complete, {result.reused} files verified"
    layers, experts, projections = result.plan.counts
    lines = [
        f"{destination}: {layers} layers, {experts} experts, {projections} projections in {result.plan.format}",
        f"{size(result.source_bytes)} -> {size(result.packed_bytes)}"
        + (f", {result.reused} of {len(result.plan.shards)} files kept from before" if result.reused else ""),
    ]
    if result.plan.requantises:
        error = 0.0 if result.added_error is None else result.added_error
        lines.append(
            "float zero points do not fit this format: re-rounded to integers, which adds a relative RMS error of "
            f"{error:.4f}"
        )
    return "\n".join(lines)


def _inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "vllm-ext inspect",
        description="Show a checkpoint's routed experts, layer by layer: shapes, groups, bytes, error.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint, packed or not")
    parser.add_argument(
        "--against", type=Path, metavar="SRC", help="the 16-bit checkpoint to measure the error against"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the error by layer; needs --against")
    return parser


def _inspect(options: argparse.Namespace) -> None:
    if options.plot is not None and options.against is None:
        raise ValueError("--plot shows errors: give the 16-bit checkpoint with --against")
    if options.plot is not None:
        if options.plot.suffix.lower() not in PICTURES:
            raise ValueError(f"--plot {options.plot}: draws {', '.join(PICTURES)}")
        if not options.plot.absolute().parent.is_dir():
            raise ValueError(f"--plot {options.plot}: no such folder")
    bar: Progress | None = None

    def tick(done: int, total: int) -> None:
        nonlocal bar
        if options.against is not None:
            bar = bar or Progress("compare", total)
            bar.update(done)

    reports = inspect_checkpoint(options.folder, options.against, tick)
    print(table(reports))
    if options.plot is not None:
        plot_errors(reports, options.plot)
        print(f"{options.plot}: error by layer")
