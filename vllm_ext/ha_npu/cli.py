"""`vllm-ext plan`: a plan as a table, pictures, JSON or a kernel's constants; the comparison with the paper."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_ext.ha_npu.ascend_tiles import KERNEL_STRATEGY
from vllm_ext.ha_npu.chips import chip_names, load_chip
from vllm_ext.ha_npu.header import emit_header
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE
from vllm_ext.ha_npu.operators import OPERATORS
from vllm_ext.ha_npu.plan import Plan, make_plan
from vllm_ext.ha_npu.strategies import STRATEGIES

KIB, MIB = 2**10, 2**20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-ext plan", description="Plan the prefill of a linear-attention layer on a chip.", allow_abbrev=False
    )
    parser.add_argument("op", nargs="?", help=f"operator: {', '.join(sorted(OPERATORS))}")
    parser.add_argument("--chip", default="310p1", help=f"one of {', '.join(chip_names())} (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="number of heads (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="number of tokens (default: 4096, or the sum of --seq-lens)")
    parser.add_argument("--seq-lens", metavar="N,N,...", help="lengths of several sequences")
    parser.add_argument("--head-dim", type=int, default=128, help="key and value dimension (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=64, help="tokens a chunk (default: %(default)s)")
    parser.add_argument(
        "--strategy",
        default="ha-npu",
        help=f"one of {', '.join((*STRATEGIES, KERNEL_STRATEGY))} (default: %(default)s)",
    )
    parser.add_argument("--compare", action="store_true", help="all strategies side by side")
    parser.add_argument("--plot", metavar="FOLDER", help="draw the schedule, the buffers and the dataflow as PNG files")
    parser.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="the plan as JSON, to a file or the terminal"
    )
    parser.add_argument(
        "--emit-header",
        metavar="FILE",
        nargs="?",
        const="-",
        help="constants of a kernel; with --strategy ha-npu-kernel those of this project's Ascend C kernels",
    )
    parser.add_argument("--check-paper", action="store_true", help="the paper's figures and ours, with deviations")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 when the comparison with the paper fails, 2 on bad input or an unusable path."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    asked = (args.plot, args.json, args.emit_header, args.compare or None)
    if args.op is None and (not args.check_paper or any(value is not None for value in asked)):
        raise ValueError(f"name an operator ({', '.join(sorted(OPERATORS))}), or use --check-paper alone")
    streams = [args.json, args.emit_header].count("-")
    if streams + (args.compare or args.check_paper) > 1 and streams:
        raise ValueError("the terminal takes one of --json, --emit-header, --compare, --check-paper; name files")
    if args.op is not None:
        _outputs(args)
    if not args.check_paper:
        return 0
    # The comparison plans every configuration of the paper; the other commands need none of it.
    from vllm_ext.ha_npu.paper import report

    text, good = report()
    print(text)
    return 0 if good else 1


def _outputs(args: argparse.Namespace) -> None:
    """Everything is made before anything is written, so that an error leaves no half of it."""
    plan = _plan(args, args.strategy)
    texts = []
    if args.json is not None:
        texts.append((args.json, plan.to_json() + "\n"))
    if args.emit_header is not None:
        texts.append((args.emit_header, emit_header(plan)))
    if "-" not in (args.json, args.emit_header):
        texts.append(("-", (compare(args) if args.compare else table(plan)) + "\n"))
    if args.plot is not None:
        _draw(plan, args.plot)
    for target, text in texts:
        _write(target, text)


def _draw(plan: Plan, folder: str) -> None:
    from vllm_ext.ha_npu.plot import draw

    try:
        paths = draw(plan, Path(folder))
    except OSError as error:
        raise OSError(f"cannot draw into folder {folder!r}: {error.strerror or error}") from error
    for path in paths:
        print(path, file=sys.stderr)


def _plan(args: argparse.Namespace, strategy: str) -> Plan:
    seq_lens = _lengths(args.seq_lens) if args.seq_lens is not None else None
    tokens = args.tokens if args.tokens is not None else sum(seq_lens) if seq_lens else 4096
    return make_plan(
        args.op,
        chip=args.chip,
        num_heads=args.heads,
        num_tokens=tokens,
        head_dim=args.head_dim,
        chunk_size=args.chunk_size,
        strategy=strategy,
        seq_lens=seq_lens,
    )


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seq-lens takes whole numbers separated by commas, got {text!r}") from None


def _write(target: str, text: str) -> None:
    """To the terminal for "-", else to a file that is either complete or not touched."""
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        _write_file(Path(target).resolve(), text)
    except OSError as error:
        raise OSError(f"cannot write {target!r}: {error.strerror or error}") from error


def _write_file(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        # A device or a pipe is written to; replacing it would take it away. A folder refuses.
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as stream:
            stream.write(text)
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _names(plan: Plan, tier: str) -> str:
    pairs = plan.mapping.tiers[tier]
    if not pairs:
        return "none"
    if len(plan.seq_lens) > 1:
        return f"{len(pairs)} of (sequence, head)"
    heads = [head for _, head in pairs]
    return str(heads[0]) if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"


def table(plan: Plan) -> str:
    """The plan in words and numbers."""
    traffic, mapping = plan.traffic, plan.mapping
    cut = ", ".join(f"{parts} each" for parts in sorted(set(mapping.column_parts.values())))
    gain = 100 * (1 - mapping.makespan / mapping.head_only_makespan) if mapping.head_only_makespan else 0.0
    rows = [
        ("plan", f"{plan.strategy} {plan.op}, {plan.launches} launch" + ("es" if plan.launches > 1 else "")),
        ("chip", f"{plan.chip.name}: {plan.chip.title}"),
        ("work", f"{plan.num_heads} heads, {plan.num_tokens} tokens in {len(plan.seq_lens)} sequence(s), "
                 f"head_dim {plan.head_dim}, chunk_size {plan.chunk_size}"),
        ("MACs", f"{plan.macs / 1e9:.3f} G" + _more(traffic.tail.macs / 1e9, "G")),
        ("global memory", _mib(traffic.gm_bytes, traffic.tail.gm_bytes)),
        *((f"  {name}", _mib(moved)) for name, moved in traffic.gm_by_kernel.items()),
        *((("  missing paths", _mib(traffic.path_gm_bytes)),) if traffic.path_gm_bytes else ()),
        ("L1 to L0", _mib(traffic.l1_to_l0_bytes, traffic.tail.l1_to_l0_bytes)),
        ("device memory", _mib(traffic.device_bytes, traffic.tail.device_bytes)),
        ("layout transforms", f"{traffic.transforms} tiles ({len(plan.chunk.transforms)} a chunk of a head), "
                              f"{traffic.relaid_fractals} of 16x16"),
        *((f"peak {name.upper()}", _peak(plan, name)) for name in plan.peak_bytes),
        ("order", ", ".join(sorted({kernel.order_kind for kernel in plan.chunk.kernels}))),
        ("whole heads", _names(plan, WHOLE)),
        ("cut by columns", _names(plan, COLUMNS) + (f" in {cut}" if cut else "")),
        ("chunk-head-chunk", _names(plan, CHUNKS)),
        ("makespan (model)", f"{mapping.makespan / 1e3:.0f} thousand cycles, {gain:.1f}% below whole heads only"),
        ("idle (model)", f"{100 * mapping.idle_share:.1f}%"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _more(amount: float, unit: str) -> str:
    return f" + {amount:.2f} {unit} for cut heads" if amount else ""


def _mib(size: int, tail: int = 0) -> str:
    return f"{size / MIB:.2f} MiB" + _more(tail / MIB, "MiB")


def _peak(plan: Plan, name: str) -> str:
    usable = load_chip(plan.chip.name).buffers[name].usable
    return f"{plan.peak_bytes[name] / KIB:g} of {usable / KIB:g} KiB" if usable else "no such buffer"


COMPARED = ("launches", "GM MiB", "L1-L0 MiB", "device MiB", "GMAC", "transforms", "UB KiB")


def compare(args: argparse.Namespace) -> str:
    """One line a strategy; a strategy the chip cannot hold says why, unless it is the one asked for."""
    lines = [f"{'strategy':14}" + "".join(f"{name:>12}" for name in COMPARED)]
    for strategy in (*STRATEGIES, *((KERNEL_STRATEGY,) if args.strategy == KERNEL_STRATEGY else ())):
        try:
            plan = _plan(args, strategy)
        except ValueError as error:
            if strategy == args.strategy:
                raise
            lines.append(f"{strategy:14}  {error}")
            continue
        traffic = plan.traffic
        sizes = [size / MIB for size in (traffic.total_gm_bytes, traffic.l1_to_l0_bytes, traffic.device_bytes)]
        cells = [f"{plan.launches}", *(f"{size:.2f}" for size in sizes), f"{plan.macs / 1e9:.3f}"]
        cells += [f"{traffic.transforms}", f"{plan.peak_bytes['ub'] / KIB:g}"]
        lines.append(f"{strategy:14}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
