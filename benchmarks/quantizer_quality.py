"""Which quantiser loses least: error, loss and KL divergence on a language model whose weights were never quantised.

Trains the small mixture-of-experts model of `quantizer_model` on the spot, keeps its experts in BF16, and replaces them
in turn by what each quantiser keeps of them. The arithmetic is FP32, so the differences come from the weights alone.

    vllm-ext bench quantizer-quality --out build/quality               # minutes on one GPU
    vllm-ext bench quantizer-quality --out build/quality --size smoke  # seconds on a CPU: does it run

Writes quantizer_quality.json and quantizer_quality.png. The relative squared error is over all experts' weights; loss
is in nats a byte on held-out text; KL is the mean over positions of KL(BF16 || quantised), with its standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks.quantizer_model import CPU, FULL, SMOKE, LanguageModel, Size, corpus, train
from vllm_ext.benchmarks.quantizer_peers import clip_search, gptqmodel_package, half_quadratic, hqq_package
from vllm_ext.benchmarks.registry import describe_run

from vllm_ext.quantization import quantize_weight

SIZES = {"full": FULL, "cpu": CPU, "smoke": SMOKE}
GROUPS = ((128, 128), (128, 64), (64, 64), (32, 32))
KINDS = {"float": "float zero", "int": "integer zero", None: "symmetric"}
Quantiser = Callable[[torch.Tensor, int], "torch.Tensor | None"]


@dataclass(frozen=True)
class Arm:
    """One way to keep the experts. `kind` is "float", "int" or None (symmetric)."""

    method: str
    groups: tuple[int, int]
    kind: str | None
    quantise: Quantiser
    code_bits: int = 4

    @property
    def bits(self) -> float:
        """Bits a weight, for as many gate and up weights as twice the down ones."""
        meta = {"float": 32, "int": 24, None: 16}[self.kind]
        return self.code_bits + (2 * meta / self.groups[0] + meta / self.groups[1]) / 3


def ours(weight: torch.Tensor, group_size: int, *, kind: str | None, method: str) -> torch.Tensor:
    """This package's quantiser and back."""
    quantised = quantize_weight(weight, group_size, symmetric=kind is None, zero_point=kind or "float", method=method)
    return quantised.dequantize(torch.float32)


def theirs(weight: torch.Tensor, group_size: int, *, method: Quantiser) -> torch.Tensor | None:
    """A peer's quantiser and back; None where its groups would have to divide the columns and do not."""
    return None if weight.shape[-1] % group_size else method(weight, group_size)


def arms() -> list[Arm]:
    """Every combination of ours, and the peers where they apply."""
    found = []
    for groups in GROUPS:
        for kind in KINDS:
            for method in ("minmax", "hqq"):
                found.append(Arm(method, groups, kind, partial(ours, kind=kind, method=method)))
        found.append(Arm("HQQ (paper)", groups, "float", partial(theirs, method=half_quadratic)))
        found.append(Arm("HQQ (package)", groups, "float", partial(theirs, method=hqq_package)))
        found.append(Arm("clip search", groups, "int", partial(theirs, method=clip_search)))
        symmetric = partial(clip_search, symmetric=True)
        found.append(Arm("clip search", groups, None, partial(theirs, method=symmetric)))
        found.append(Arm("gptqmodel", groups, "int", partial(theirs, method=gptqmodel_package)))
        symmetric = partial(gptqmodel_package, symmetric=True)
        found.append(Arm("gptqmodel", groups, None, partial(theirs, method=symmetric)))
        two_bits = partial(theirs, method=partial(half_quadratic, bits=2))
        found.append(Arm("2 bits (HQQ)", groups, "float", two_bits, code_bits=2))
    return found


@torch.inference_mode()
def log_probabilities(model: LanguageModel, rows: torch.Tensor) -> torch.Tensor:
    """[B, T, 256] of rows [B, T + 1]."""
    return torch.cat([model(part[:, :-1]).log_softmax(-1) for part in torch.split(rows, 32)])


def measure(size: Size, device: str) -> dict[str, Any]:
    """Train, run every arm, and return the results with a description of the machine."""
    start = time.monotonic()
    text, held_out = corpus(size.text_bytes)
    model, losses = train(size, text, device)
    trained = time.monotonic() - start
    return {
        "benchmark": "quantizer_quality",
        "model": {**vars(size), "parameters": sum(p.numel() for p in model.parameters())},
        "training_loss": losses,
        "training_seconds": trained,
        **evaluate(model, held_out, device),
        "device": torch.cuda.get_device_name(0) if device != "cpu" else "cpu",
        "machine": describe_run(),
    }


def evaluate(model: LanguageModel, held_out: torch.Tensor, device: str) -> dict[str, Any]:
    """Run every arm on `model`, whose weights are overwritten."""
    torch.backends.cuda.matmul.allow_tf32 = False
    sequence = model.size.sequence
    begin = torch.linspace(0, len(held_out) - sequence - 2, max(4, 200_000 // sequence)).long()
    if device == "cpu":
        begin = begin[:: max(1, len(begin) // 96)]
    rows = held_out[begin[:, None] + torch.arange(sequence + 1)].long().to(device)
    targets = rows[:, 1:, None]
    originals = [(shard, weight, weight.detach().bfloat16()) for shard, weight in model.expert_weights()]
    for _, weight, original in originals:
        weight.data.copy_(original)
    base = log_probabilities(model, rows)
    base_loss = float(-base.gather(-1, targets).mean())
    results = []
    chosen = arms()
    for number, arm in enumerate(chosen, 1):
        print(f"\rarm {number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
        row = run_arm(arm, model, originals, rows, base)
        if row is not None:
            results.append({**row, "loss_increase": row["loss"] - base_loss})
    print(file=sys.stderr)
    return {
        "expert_parameters": sum(weight.numel() for _, weight, _ in originals),
        "held_out_positions": targets.numel(),
        "loss_bf16": base_loss,
        "rows": results,
    }


def run_arm(
    arm: Arm, model: LanguageModel, originals: list[Any], rows: torch.Tensor, base: torch.Tensor
) -> dict[str, Any] | None:
    """One arm's error, loss and KL, or None where its method is not installed."""
    error = norm = 0.0
    for shard, weight, original in originals:
        value = arm.quantise(original, arm.groups[0 if shard == "w13" else 1])
        if value is None:
            return None
        error += float((value - original.float()).square().sum())
        norm += float(original.float().square().sum())
        weight.data.copy_(value)
    result = log_probabilities(model, rows)
    divergence = (base.exp() * (base - result)).sum(-1).mean(-1)
    return {
        "method": arm.method,
        "group_size_w13": arm.groups[0],
        "group_size_w2": arm.groups[1],
        "zero_point": KINDS[arm.kind],
        "bits": arm.bits,
        "relative_squared_error": error / norm,
        "loss": float(-result.gather(-1, rows[:, 1:, None]).mean()),
        "kl": float(divergence.mean()),
        "kl_standard_error": float(divergence.std() / len(divergence) ** 0.5),
    }


def markdown(results: dict[str, Any]) -> str:
    """The rows as a table, best KL first within a pair of groups."""
    lines = [
        "| groups (gate/up, down) | zero point | method | bits | squared error | loss increase | KL x 1000 |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in sorted(results["rows"], key=lambda r: (-r["group_size_w13"], -r["group_size_w2"], r["kl"])):
        lines.append(
            f"| {row['group_size_w13']}, {row['group_size_w2']} | {row['zero_point']} | {row['method']} | "
            f"{row['bits']:.2f} | {row['relative_squared_error']:.5f} | {row['loss_increase']:+.5f} | "
            f"{1000 * row['kl']:.3f} ± {1000 * row['kl_standard_error']:.3f} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, Any], path: Path) -> None:
    """KL against bits a weight (what it costs) and against squared error (whether error predicts it), 4 bits only: two
    bits lie twenty times higher and would press all others together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(KINDS.values(), ("tab:blue", "tab:orange", "tab:green"), strict=True))
    rows = [row for row in results["rows"] if row["bits"] > 4]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    markers = dict(zip(methods, "oXsD^vP*", strict=False))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained", sharey=True)
    for row in rows:
        style = {
            "color": colours[row["zero_point"]],
            "marker": markers[row["method"]],
            "linestyle": "none",
            "markersize": 7,
            "markerfacecolor": colours[row["zero_point"]] if row["method"] == "hqq" else "none",
        }
        left.errorbar(row["bits"], 1000 * row["kl"], 1000 * row["kl_standard_error"], **style)
        right.errorbar(row["relative_squared_error"], 1000 * row["kl"], **style)
    left.set_xlabel("bits a weight, metadata included")
    left.set_ylabel("KL(BF16 || quantised) x 1000, nats a byte")
    right.set_xlabel("relative squared error of the experts' weights")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    handles = [pyplot.Line2D([], [], color=c, marker="o", linestyle="none", label=k) for k, c in colours.items()]
    handles += [
        pyplot.Line2D([], [], color="black", marker=markers[m], linestyle="none", fillstyle="none", label=m)
        for m in methods
    ]
    right.legend(handles=handles, fontsize=8)
    figure.suptitle(
        f"Quantised experts of a mixture-of-experts model trained here ({results['expert_parameters'] / 1e6:.0f} M "
        f"expert parameters, BF16 loss {results['loss_bf16']:.3f} nats a byte)"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vllm-ext bench quantizer-quality", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the picture")
    parser.add_argument("--size", choices=SIZES, help="default: full with a GPU, cpu without")
    parser.add_argument("--device", help="default: cuda where there is one")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    results = measure(SIZES[options.size or ("cpu" if device == "cpu" else "full")], device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quantizer_quality.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot(results, options.out / "quantizer_quality.png")
    print(markdown(results))
    print(f"\nWrote {options.out}/quantizer_quality.json and .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
