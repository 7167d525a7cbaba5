"""The arms of `vllm-ext bench serve`: which checkpoint each serves, with which options, and its engine."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.benchmarks.registry import write_json
from vllm_ext.benchmarks.serve_checkpoints import BF16, PACKED, ServedShape, config_of
from vllm_ext.benchmarks.serve_engine import DRAWN, OUR_METHOD, EngineProcess

BASE = "BF16"
# Long prompts asked at once, each a step of its own: one alone would time the request's way through the engine too.
PREFILLS = 4
# Near the sizes by which vLLM's BF16 experts choose their launch.
WARM_LENGTHS = (300, 500, 1000, 1500, 2000, 3000, 4000, 6000)


@dataclass(frozen=True)
class Arm:
    """One way to serve: which checkpoint, with which engine options. `same_bits` arms share their weights' bits."""

    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)
    same_bits: bool = False


ARMS = {
    BASE: Arm(BF16),
    "w4a16-grouped": Arm(BF16, {"quantization": OUR_METHOD}),
    "w4a16-grouped, packed": Arm(PACKED, {"quantization": OUR_METHOD}, same_bits=True),
    "Marlin, packed": Arm(PACKED, same_bits=True),
}


# How engines are laid out on the host, the same for all arms: the environment and options that they have besides what
# a run needs. vLLM's own layout leaves the GPU waiting where layers are few: figures in docs/vllm.md.
_NEWER, _OLDER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_TOGETHER, _APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {"distributed_executor_backend": "mp"}
# A model of sliding and full attention has six groups of layers otherwise, each with tables of its own.
_ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {"environment": {}, "options": {}},
    # Front, scheduler and worker in one process, or each in its own.
    "one": {"environment": _NEWER | _TOGETHER, "options": _ONE_GROUP},
    "three": {"environment": _NEWER, "options": _ONE_GROUP | _APART},
    # The same with the older runner, which samples greedily in fewer launches.
    "one-v1": {"environment": _OLDER | _TOGETHER, "options": _ONE_GROUP},
    "three-v1": {"environment": _OLDER, "options": _ONE_GROUP | _APART},
    # Blocks of 128 tokens: tables of an eighth, which change in an eighth of the steps.
    "three-v1-long": {"environment": _OLDER, "options": _ONE_GROUP | _APART | {"block_size": 128}},
}


def kv_cache_bytes(config: dict[str, Any], args: argparse.Namespace) -> int:
    """What all requests of the largest batch, or the long prompts, take in 16 bits, and a fifth more."""
    heads, size = config["num_key_value_heads"], config["head_dim"]
    long = PREFILLS * max(args.prefill, *args.prompts, 0)
    tokens = max(long, max(args.batches) * (args.input_tokens + args.output_tokens), 4096)
    return int(1.2 * tokens * config["num_hidden_layers"] * 2 * heads * size * 2)


def engine_options(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What all arms of a shape have in common: vLLM's defaults, but for what the requests that are timed ask for."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # rounds repeat their prompts
        "max_model_len": max(args.prefill, *args.prompts, args.checked_tokens, args.input_tokens + args.output_tokens)
        + 1,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": max(args.prefill, 2048),
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": kv_cache_bytes(config, args),  # engines side by side would count each other as used
        "enforce_eager": args.eager,
    }
    if args.attention_backend:
        options["attention_backend"] = args.attention_backend
    if not args.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted(set(args.batches))}
    return options


@dataclass
class Serving:
    """One shape's run: its engines by arm, its document, and what was measured."""

    shape: ServedShape
    output: Path
    document: dict[str, Any]
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    rounds: list[dict[str, dict[str, dict[str, float]]]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What tells it from the others of a run."""
        return f"{self.document['options']['shape']} {self.document['options'].get('layout', '')}".strip()

    def drop(self, name: str, reason: str) -> None:
        """Go on without an arm, and keep its log beside the document."""
        print(f"{self.label}, {name}: {reason}", file=sys.stderr, flush=True)
        self.document["failed"][name] = reason
        engine = self.engines.pop(name)
        engine.close(1)
        if engine.log.exists():
            self.output.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(engine.log, self.output.with_name(f"{self.output.stem}.{engine.log.name}"))
        write_json(self.output, self.document)


def start_arms(
    args: argparse.Namespace, serving: Serving, context: Any, paths: dict[str, Path], folder: Path, apart: float
) -> None:
    """Start every arm's engine, `apart` seconds after the one before, without waiting for it."""
    config = config_of(serving.shape, args.layers)
    for number, name in enumerate(args.arms):
        time.sleep(apart if number else 0)
        arm = ARMS[name]
        plugins = "vllm_ext" if arm.options.get("quantization") == OUR_METHOD else ""
        options = {**engine_options(config, args), **serving.document["host"]["options"], **arm.options}
        if not args.files:
            group = serving.shape.group if arm.checkpoint == PACKED else None
            drawn = {"kind": serving.shape.kind, "config": config, "seed": 0, "group": group}
            options |= {"load_format": DRAWN, "model_loader_extra_config": drawn}
        spec = {"model": str(paths[arm.checkpoint]), "options": options, "vocabulary": config["vocab_size"]}
        spec["warm"] = {
            "cells": [{key: cell[key] for key in ("batch", "inputs", "outputs")} for cell in cells(args)],
            "lengths": [length for length in WARM_LENGTHS if length < args.prefill],
        }
        environment = {"VLLM_PLUGINS": plugins, **serving.document["host"]["environment"]}
        serving.engines[name] = EngineProcess(context, name, spec, folder, environment, folder.parent / "inspected")


def await_arms(serving: Serving, deadline: float) -> None:
    """Drop the engines that are not ready by `deadline`, of time.monotonic()."""
    for name, engine in list(serving.engines.items()):
        try:
            seconds = engine.answer(max(1.0, deadline - time.monotonic()))["ready_seconds"]
        except RuntimeError as error:
            serving.drop(name, str(error))
        else:
            serving.document["ready_seconds"][name] = seconds
            print(f"{serving.label}, {name}: ready after {seconds:.0f} s", flush=True)


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is timed: decoding at each batch size, shorter prompts, alone and a few at once, and a few long ones."""
    decode = [
        {"cell": f"batch {batch}", "batch": batch, "inputs": args.input_tokens, "outputs": args.output_tokens}
        for batch in args.batches
    ]
    shorter = [
        {"cell": name, "batch": batch, "inputs": inputs, "outputs": 1}
        for inputs in args.prompts
        for name, batch in ((f"prompt of {inputs}", 1), (f"{PREFILLS} prompts of {inputs}", PREFILLS))
    ]
    prefill = {"cell": f"prefill {args.prefill}", "batch": PREFILLS, "inputs": args.prefill, "outputs": 1}
    return [*decode, *shorter, *([prefill] if args.prefill else [])]
