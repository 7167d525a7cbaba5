"""A vLLM model loader whose checkpoint is drawn on the device while it loads: same bits in every engine, no file.

Engines name this module's `DrawsWeights` as their worker extension (`EXTENSION` in serve_engine), by which every worker
imports it and knows the load format. `model_loader_extra_config` says what is drawn: the family (`kind`), the `seed`,
the group size (`group`) in which routed experts are rounded to compressed-tensors, or None for 16 bits, and whether the
language model lies one level down, beside a vision tower (`nested`).
"""

from __future__ import annotations

import gc
import re
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm_ext.benchmarks.serve_checkpoints import draw, rounded
from vllm_ext.benchmarks.serve_engine import DRAWN


class DrawsWeights:
    """Mixed into vLLM's worker, so that it imports this module and answers these calls."""

    _trace: Any = None

    def start_trace(self) -> None:
        """Note every kernel that runs on this worker's device from now on; without a GPU, every operation."""
        self._trace = torch.profiler.profile(activities=[_traced()])
        self._trace.start()

    def stop_trace(self) -> list[tuple[str, float, float]]:
        """(name, begin, end) of what ran since `start_trace`, copies among them, in microseconds."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._trace.stop()
        events = self._trace.profiler.kineto_results.events()
        ran = [
            event for event in events if event.device_type().name == _traced().name and not event.is_user_annotation()
        ]
        begin = min((one.start_ns() for one in ran), default=0)
        return [(one.name(), (one.start_ns() - begin) / 1e3, (one.end_ns() - begin) / 1e3) for one in ran]

    def device_mib(self) -> float:
        """MiB that PyTorch holds on this worker's device."""
        return torch.cuda.memory_reserved() / (1 << 20) if torch.cuda.is_available() else 0.0


def _traced() -> torch.profiler.ProfilerActivity:
    kinds = torch.profiler.ProfilerActivity
    return kinds.CUDA if torch.cuda.is_available() else kinds.CPU


@register_model_loader(DRAWN)
class DrawnLoader(BaseModelLoader):
    """See the module."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """As vLLM's, with what stands before the model left out of the collections below: 0.4 s of each, once a GiB."""
        gc.freeze()
        try:
            model: torch.nn.Module = super().load_model(*args, **kwargs)
            return model
        finally:
            gc.unfreeze()

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Draw the model's weights on the device that is current."""
        asked = self.load_config.model_loader_extra_config
        device = str(next(tensor.device for tensor in model.parameters() if not tensor.is_meta))

        def take(held: dict[str, torch.Tensor]) -> None:
            weights = rounded(held, asked["group"])
            if asked.get("nested"):
                weights = {re.sub(r"^model\.", "model.language_model.", name): one for name, one in weights.items()}
            model.load_weights(iter(weights.items()))
            weights.clear()
            held.clear()
            # What loading leaves behind would fill the device: 86 GiB were reserved for a model of 7.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

        draw(asked["kind"], asked["config"], asked["seed"], device, take)
