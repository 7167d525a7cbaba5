"""The kernels that ours are compared with, and what their authors published for the H200.

fla-core's and flash-qla's functions are imported when they are asked for. FlashInfer's Hopper kernel compiles itself at
run time for longer than a benchmark can wait: its published times stand in, from FlashQLA's benchmark (torch 2.9.1,
CUDA graphs, FlashInfer 0.6.13, fla 0.5.1, head size 128).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]

# (key heads, value heads): {shape: (FlashQLA, FlashInfer, FLA) in ms}
PUBLISHED: dict[tuple[int, int], dict[str, tuple[float, float, float]]] = {
    (2, 8): {
        "1x2048": (0.061, 0.109, 0.081),
        "1x8192": (0.119, 0.417, 0.234),
        "1x32768": (0.320, 1.655, 0.902),
        "2048x4": (0.106, 0.105, 0.126),
        "1024x8": (0.061, 0.058, 0.131),
        "8192x4": (0.281, 0.396, 0.467),
    },
    (4, 16): {
        "1x2048": (0.083, 0.109, 0.098),
        "1x8192": (0.175, 0.418, 0.316),
        "1x32768": (0.496, 1.657, 1.241),
        "2048x4": (0.111, 0.104, 0.244),
        "1024x8": (0.095, 0.061, 0.252),
        "8192x4": (0.394, 0.391, 0.935),
    },
    (8, 32): {
        "1x2048": (0.108, 0.106, 0.131),
        "1x8192": (0.280, 0.394, 0.466),
        "1x32768": (0.885, 1.555, 1.885),
        "2048x4": (0.168, 0.108, 0.478),
        "1024x8": (0.178, 0.117, 0.493),
        "8192x4": (0.609, 0.419, 1.886),
    },
    (16, 64): {
        "1x2048": (0.113, 0.105, 0.220),
        "1x8192": (0.397, 0.392, 0.814),
        "1x32768": (1.521, 1.552, 3.331),
        "2048x4": (0.321, 0.220, 0.829),
        "1024x8": (0.341, 0.232, 0.854),
        "8192x4": (1.214, 0.827, 3.362),
    },
    (16, 32): {
        "1x2048": (0.109, 0.106, 0.132),
        "1x8192": (0.280, 0.394, 0.472),
        "1x32768": (0.877, 1.550, 1.890),
        "2048x4": (0.167, 0.111, 0.485),
        "1024x8": (0.178, 0.119, 0.501),
        "8192x4": (0.611, 0.425, 1.898),
    },
}


@functools.cache
def _compile_candidates_in_threads() -> None:
    """Let Triton's autotuner compile all it is about to try at once: one after the other takes FLA minutes."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    tune = Autotuner.run

    def compile_all(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        named = {name: value for name, value in {**self.nargs, **kwargs}.items() if name in self.arg_names}
        key = [named[name] for name in self.keys if name in named]
        key += [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
        if len(self.configs) == 1 or tuple(key) in self.cache:
            return
        with ThreadPoolExecutor(8) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in self.prune_configs(kwargs):
                with contextlib.suppress(Exception):
                    self.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What does not compile here is left out, or reported, when it is tried.
        with contextlib.suppress(Exception):
            compile_all(self, *args, **kwargs)
        return tune(self, *args, **kwargs)

    Autotuner.run = run


def fla_function(op: str) -> Callable[..., Any]:
    """fla-core's own operator: where FlashQLA is installed it would hand the gated delta rule to that."""
    os.environ["FLA_FLASH_QLA"] = "0"
    if op == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    else:
        from fla.ops.kda import chunk_kda as function
    return function


def fla(op: str, call: dict[str, Any]) -> Call:
    """fla-core's chunked kernels."""
    _compile_candidates_in_threads()
    function = fla_function(op)
    lengths = {"cu_seqlens": call["cu_seqlens"].long(), "cu_seqlens_cpu": call["cu_seqlens"].long().cpu()}
    return lambda: function(**{**call, **lengths})


def flash_qla(op: str, call: dict[str, Any]) -> Call:
    """FlashQLA's fused kernels, with the segments it chooses itself; the gated delta rule only."""
    if op != "gdn":
        raise ValueError("flash_qla has no KDA kernel")
    from flash_qla import chunk_gated_delta_rule as function

    beta = {"beta": call["beta"].float()}
    return lambda: function(**{**call, **beta}, auto_cp=True)


PEERS = {"FLA": fla, "FlashQLA": flash_qla}
