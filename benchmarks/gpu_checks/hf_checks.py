"""The Hugging Face path on a GPU: kernels against FP64, arms against each other, then every measurement of the kit.

    python benchmarks/gpu_checks/hf_checks.py --out DIR [--size true] [--only kernels numbers steps ...]

Each part is run for itself, a failure is printed in full and the next part goes on; results are written after each.
With `--size tiny` the parts that need no GPU run without one.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm_ext.benchmarks import ab, fused_ops, hf_negatives, hf_profile, hf_steps, probes, roofline
from vllm_ext.benchmarks.hf_arms import ARMS, Switch
from vllm_ext.benchmarks.hf_model import SIZES, random_model
from vllm_ext.benchmarks.registry import describe_run, write_json

from vllm_ext.integrations.accelerate import _probe, accelerate_generate
from vllm_ext.integrations.layer_graphs import LayerGraphs
from vllm_ext.integrations.transformers import quantize_experts
from vllm_ext.ops.fused import confidence_argmax, probabilities, reference, token_statistics


def kernels(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Fused operations at full size; the indices and samples of a vocabulary exactly."""
    fused_ops.check(SimpleNamespace())
    place = ab.device()
    rows, vocabulary = (8, 1000) if options.size == "tiny" else (256, 262144)
    logits = (torch.randn(rows, vocabulary, device=place) * 3).bfloat16()
    confidence, index, entropy = confidence_argmax(logits)
    wanted = reference.statistics(logits)
    z = torch.tanh(logits.float() / 30) * 30 / 0.6
    torch.manual_seed(3)
    drawn = torch.multinomial(torch.softmax(z, -1), 1)[:, 0]
    torch.manual_seed(3)
    noise = torch.empty(logits.shape, device=place).exponential_(1)
    processed = torch.empty_like(logits)
    found = token_statistics(logits, temperature=0.6, softcap=30.0, noise=noise, processed=processed)
    assert found.log_sum is not None
    assert found.sample is not None
    p = probabilities(processed, found.log_sum, torch.empty_like(processed))
    return {
        "wrong_indices": int((index != wanted[1]).sum()),
        "confidence_error": float(((confidence.double() - wanted[0]) / wanted[0]).abs().max()),
        "entropy_error": float((entropy.double() - wanted[2]).abs().max()),
        "samples_equal_to_multinomial": int((found.sample == drawn).sum()),
        "rows": len(drawn),
        "probabilities_error": float((p.double().sum(-1) - 1).abs().max()),
    }


def numbers(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Every form's logits, and the stock modules' own, against FP32 over the same dequantised weights.

    Two layers of true width: thirty random ones amplify a rounding until nothing is left to compare.
    """
    model = random_model(SIZES["tiny" if options.size == "tiny" else "shallow"], ab.device())
    prompt = hf_steps.prompt_ids(model)
    exact = copy.deepcopy(model).float()
    exact.set_experts_implementation("eager")
    bf16 = _probe(model, prompt)
    report = quantize_experts(model, progress=False)
    for layer in report.layers:
        w13, w2 = model.get_submodule(layer.name).quantized()
        module = exact.get_submodule(layer.name)
        module.gate_up_proj.data.copy_(w13.dequantize(torch.float32))
        module.down_proj.data.copy_(w2.dequantize(torch.float32))
    wanted = _probe(exact, prompt)
    del exact
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    def against(logits: torch.Tensor) -> dict[str, float]:
        return {
            "error": float((logits - wanted).norm() / wanted.norm()),
            "same_argmax": float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
        }

    found: dict[str, Any] = {"experts in BF16 (quantisation itself)": against(bf16)}
    found["stock modules"] = against(_probe(model, prompt))
    if torch.cuda.is_available():
        found["replayed layers equal launched ones"] = _replays_equal(model)
    parts: dict[str, dict[str, Any]] = {
        "norms and projections": {"fused_layers": False, "capture": False, "sampler": False},
        "captured modules": {"fused_layers": False, "norms": False, "projections": False, "sampler": False},
        "fused layers": {"capture": False, "sampler": False},
        "kit": {},
    }
    for name, keywords in parts.items():
        done = accelerate_generate(model, experts=False, progress=False, **keywords)
        found[name] = against(_probe(model, prompt))
        print(name, found[name], done.notes, flush=True)
        done.undo()
    return found


def _replays_equal(model: Any) -> bool:
    """A layer replayed from its own graph gives the bits of its launches, for several inputs and shapes."""
    experts = model.model.decoder.layers[0].experts
    experts.graphs = LayerGraphs()
    same = True
    with torch.no_grad():
        for turn in range(12):
            rows = (64, 256)[turn % 2]
            x = torch.randn(rows, experts.hidden_dim, device="cuda").bfloat16()
            ids = torch.rand(rows, experts.num_experts, device="cuda").topk(8).indices
            weights = torch.rand(rows, 8, device="cuda")
            kept = experts.routed(x, ids, weights)
            experts.routed(x + 1, ids, weights)
            same &= torch.equal(kept, experts.computed(x, ids, weights))
    return same and len(experts.graphs.graphs) == 2 and not experts.graphs.broken


def agreement(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Logits of the whole depth by arm, against the stock modules over the same 4-bit experts."""
    switch = state["switch"]
    prompt = hf_steps.prompt_ids(switch.model)
    wanted, found = None, {}
    arms = ["experts-launched", "experts", "experts-captured", "kit-no-layers", "kit-no-capture", "kit", "kit-encoder"]
    for name in [*arms, "stock"]:
        switch.to(ARMS[name])
        # The third forward of a layer records it, so the second probe is the one that replays.
        logits = [_probe(switch.model, prompt) for _ in range(2)][-1]
        wanted = logits if wanted is None else wanted
        found[name] = {
            "difference": float((logits - wanted).norm() / wanted.norm()),
            "same_argmax": float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()),
        }
        print(f"{name:18} {found[name]}", flush=True)
    return found


def eager(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """The arms that take turns; `steps` adds the others and the bounds."""
    arms = [name for name in options.arms if not ARMS[name].patched]
    state["eager"] = hf_steps.run_arms(state["switch"], arms, options.steps, options.repeats)
    print(state["switch"].report, flush=True)
    return state["eager"]


def steps(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Arms, bounds, and the model by byte count."""
    done = state.get("eager", [])
    arms = [name for name in options.arms if all(name != row["arm"] for row in done)]
    rows = [*done, *hf_steps.run_arms(state["switch"], arms, options.steps, options.repeats)]
    rows = hf_steps.with_bounds(state["switch"], rows)
    print(hf_steps.table(rows), flush=True)
    return rows


def profile(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Components of the stock step and of the swapped one."""
    rows = [row for arm in ("stock", "experts-launched") for row in hf_profile.measure(state["switch"], arm, 3)]
    print(hf_profile.table(rows), flush=True)
    return rows


def generate(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """A, B, B, A of whole generate() calls on built-in prompts."""
    found = {}
    for arm, order in (("kit", "ABBA"), ("experts", "ABBA")):
        args = SimpleNamespace(
            a="stock", b=arm, order=order, gsm8k=None, human_eval=False, execute=False, limit=1, max_new_tokens=256,
            steps=None, seed=0,
        )  # fmt: skip
        found[arm] = ab.measure(args, state["switch"].model, None, state["switch"])
        print(ab.table(found[arm]), flush=True)
    return found


def operations(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Fused operations against torch and torch.compile."""
    rows = fused_ops.run(SimpleNamespace(no_compile=False))
    print(fused_ops.table(rows), flush=True)
    return rows


def roof(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """Probes and roofline."""
    print(probes.table(probes.run(SimpleNamespace())), flush=True)
    rows = roofline.run(SimpleNamespace(tokens=list(roofline.TOKENS)))
    print(roofline.table(rows), flush=True)
    return rows


def negatives(options: argparse.Namespace, state: dict[str, Any]) -> Any:
    """What does not pay."""
    rows = hf_negatives.run(SimpleNamespace(tokens=256))
    print(hf_negatives.table(rows), flush=True)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace, dict[str, Any]], Any]] = {
    f.__name__: f for f in (kernels, numbers, eager, steps, agreement, profile, generate, operations, roof, negatives)
}
NEEDS_MODEL = ("eager", "steps", "agreement", "profile", "generate")
NEEDS_GPU = ("roof", "negatives")


def main(argv: list[str] | None = None) -> int:
    """Run the parts; the exit status is the number of failed ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(hf_steps.DEFAULT_ARMS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    state: dict[str, Any] = {}
    results: dict[str, Any] = {"run": describe_run(), "size": options.size}
    failed = 0
    for name in options.only:
        if name in NEEDS_GPU and not torch.cuda.is_available():
            print(f"== {name} needs a GPU", flush=True)
            continue
        start = time.monotonic()
        try:
            if name in NEEDS_MODEL and "switch" not in state:
                state["switch"] = Switch(random_model(SIZES[options.size], ab.device()))
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                print(f"model made in {time.monotonic() - start:.1f} s", flush=True)
            results[name] = PARTS[name](options, state)
            print(f"== {name}: {time.monotonic() - start:.1f} s", flush=True)
        except Exception:
            failed += 1
            results[name] = {"failed": traceback.format_exc()[-2000:]}
            print(f"== {name} FAILED after {time.monotonic() - start:.1f} s\n{traceback.format_exc()}", flush=True)
        write_json(options.out / "hf_checks.json", results)
    print(
        json.dumps({k: results[k] for k in ("kernels", "numbers", "agreement") if k in results}, indent=1), flush=True
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
