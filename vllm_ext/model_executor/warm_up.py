"""Compile the experts' kernels while an engine starts, not on the first request that meets them.

vLLM runs a model once at its largest step and once at every size it captures as a graph. Steps between the two are
served by other launch configurations, which change at powers of two and their middles, and by other sorting kernels,
which change at powers of two slots: six slots a token, and steps of 683 tokens meet the configuration of 512 with a
sort that none of these sizes had.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from vllm_ext._wrapping import wrap_once

# Up to so many slots they are sorted by one kernel.
_FEWEST_SLOTS = 128

logger = logging.getLogger("vllm.vllm_ext.quantization")


def hook_worker(gpu_worker: Any) -> None:
    """Have vLLM's worker compile our kernels where it compiles its own: after profiling, before capturing graphs."""

    @wrap_once(gpu_worker, "kernel_warmup")
    def with_experts(warm_up: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
        warm_up(worker, *args, **kwargs)
        warm_up_experts(worker.get_model(), largest_step(worker.vllm_config), captured_up_to(worker.vllm_config))


def largest_step(vllm_config: Any) -> int:
    """Most tokens that reach a rank's experts at once: under data parallelism, those of all ranks."""
    tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
    return tokens * int(vllm_config.parallel_config.data_parallel_size)


def captured_up_to(vllm_config: Any) -> int:
    """The largest step that vLLM pads to a size it captures, and so runs before it serves; 0 without graphs."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    if vllm_config.model_config.enforce_eager or getattr(mode, "name", None) == "NONE":
        return 0
    return int(compilation.max_cudagraph_capture_size or 0)


def step_sizes(largest: int, captured: int, top_k: int) -> list[int]:
    """Sizes above `captured`: powers of two, the middles between them, the last size before each change of the sorting
    kernels and the first one after, and `largest`."""
    sizes = {part << power for power in range(largest.bit_length()) for part in (1, 3)}
    sizes |= {(_FEWEST_SLOTS << power) // top_k + after for power in range(largest.bit_length()) for after in (0, 1)}
    return sorted({size for size in sizes if captured < size <= largest} | {largest})


def warm_up_experts(model: torch.nn.Module, largest: int, captured: int) -> None:
    """Run one layer of each kind at every size that vLLM does not run by itself."""
    begin = time.perf_counter()
    seen = set()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        kind = getattr(method, "meta", None)
        if kind is None or kind in seen or not getattr(method, "compiles_on_call", False):
            continue
        seen.add(kind)
        top_k: Any = layer.top_k
        for tokens in step_sizes(largest, captured, top_k):
            method.run_idle(layer, tokens)
    if seen:
        logger.info("w4a16-grouped: kernels for all step sizes are ready (%.1f s)", time.perf_counter() - begin)
