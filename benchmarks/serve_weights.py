"""A vLLM model loader whose checkpoint is drawn on the device while it loads: same bits in every engine, no file.

Engines name this module's `DrawsWeights` as their worker extension (`EXTENSION` in serve_engine), by which every worker
imports it and knows the load format. `model_loader_extra_config` says what is drawn: the family (`kind`), the `seed`,
and the group size (`group`) in which routed experts are rounded to compressed-tensors, or None for 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm_ext.benchmarks.serve_checkpoints import families, packed_tensors
from vllm_ext.benchmarks.serve_engine import DRAWN

# Handed to the model at once: enough that a model's look at its own parameters costs little.
BATCH_BYTES = 1 << 30
Named = tuple[str, torch.Tensor]


class DrawsWeights:
    """Mixed into vLLM's worker, so that it imports this module."""

    def device_mib(self) -> float:
        """MiB that PyTorch holds on this worker's device."""
        return torch.cuda.memory_reserved() / (1 << 20) if torch.cuda.is_available() else 0.0


class Batches(dict[str, torch.Tensor]):
    """Tensors by name that are given away, a batch at a time, before a new one would make too many."""

    def __init__(self, take: Callable[[list[Named]], None]) -> None:
        super().__init__()
        self.take = take

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self and sum(held.nbytes for held in self.values()) >= BATCH_BYTES:
            self.give()
        super().__setitem__(name, tensor)

    def give(self) -> None:
        """Give away what is held."""
        held = list(self.items())
        self.clear()
        self.take(held)


def draw(
    kind: str, config: dict[str, Any], seed: int, device: str, group: int | None, take: Callable[[list[Named]], None]
) -> None:
    """Draw the checkpoint of `config`, a family's config.json, and hand it to `take` in batches."""
    _, make_weights = families()[kind]
    from tiny_model_parts import Weights

    weights = Weights(seed, device, store=device)

    def give(held: list[Named]) -> None:
        take([pair for name, tensor in held for pair in rounded(name, tensor)])

    def rounded(name: str, tensor: torch.Tensor) -> Iterator[Named]:
        if group is None or ".experts." not in name:
            yield name, tensor
        else:
            yield from packed_tensors(name, tensor, group).items()

    weights.tensors = Batches(give)
    make_weights(weights, config)
    weights.tensors.give()


@register_model_loader(DRAWN)
class DrawnLoader(BaseModelLoader):
    """See the module."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Draw the model's weights on the device that is current."""
        asked = self.load_config.model_loader_extra_config
        device = str(next(tensor.device for tensor in model.parameters() if not tensor.is_meta))
        draw(asked["kind"], asked["config"], asked["seed"], device, asked["group"], model.load_weights)
