"""Stock vLLM reads an exported checkpoint, without the plugin: `python stock_export_runner.py FOLDER RESULT.pt`.

RESULT holds each routed layer's parameters as vLLM's own compressed-tensors method has them after loading. Its kernel
(Marlin) needs a GPU, so the engine is stopped there: what it would be handed is kept instead of being repacked.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch


class EveryLayerLoaded(Exception):
    """Ends the engine's start."""


def main(folder: str, result: str) -> None:
    """See the module."""
    from vllm import LLM
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    found: dict[str, dict[str, torch.Tensor]] = {}

    def keep(self: Any, layer: torch.nn.Module) -> None:
        found[layer.layer_name] = {name: tensor.detach().clone() for name, tensor in layer.named_parameters()}

    wna16.select_wna16_moe_backend = lambda **_: (wna16.WNA16MoEBackend.MARLIN, None)
    wna16.check_moe_marlin_supports_config = lambda *_, **__: True
    wna16.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = keep
    load_model = CPUModelRunner.load_model

    def load_and_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        raise EveryLayerLoaded

    CPUModelRunner.load_model = load_and_stop
    with contextlib.suppress(EveryLayerLoaded):
        LLM(model=folder, skip_tokenizer_init=True, max_model_len=256, enforce_eager=True)
    assert not any(name.startswith("vllm_ext") for name in sys.modules)
    torch.save(found, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
