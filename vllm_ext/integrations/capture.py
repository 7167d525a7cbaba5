"""CUDA graphs of a denoising forward: what it computes stays, the launches of thousands of kernels become one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_WARMUPS = 2  # kernels are compiled and tuned by then


def capture(call: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(graph, output of `call`, rewritten by each replay). `call` must read and write fixed memory of `device` only."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        return graph, out


class CapturedForward:
    """A DiffusionGemma model's own forward of a canvas, over its own modules, replayed from a CUDA graph.

    Takes the arguments `generate` gives it. A graph belongs to one shape of canvas and prompt; another shape captures
    anew. `new_canvas()` says that the cache has changed. Logits are overwritten by the next call.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.key: tuple[Any, ...] | None = None
        self.captures = 0
        self._changed = True

    def new_canvas(self) -> None:
        """The prompt's keys and values have changed since the last call."""
        self._changed = True

    @torch.no_grad()
    def __call__(
        self,
        decoder_input_ids: torch.Tensor,
        self_conditioning_logits: torch.Tensor | None,
        decoder_attention_mask: Any,
        past_key_values: Any,
        decoder_position_ids: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        """The model's output with `logits` FP32 [B, L, V]."""
        masked = isinstance(decoder_attention_mask, dict) and any(
            m is not None for m in decoder_attention_mask.values()
        )
        if kwargs or masked or past_key_values.is_compileable or not decoder_input_ids.is_cuda:
            return self.model.forward(
                decoder_input_ids=decoder_input_ids,
                self_conditioning_logits=self_conditioning_logits,
                decoder_attention_mask=decoder_attention_mask,
                past_key_values=past_key_values,
                decoder_position_ids=decoder_position_ids,
                **kwargs,
            )
        key = (tuple(decoder_input_ids.shape), tuple(tuple(layer.keys.shape) for layer in past_key_values.layers))
        if key != self.key:
            self._record(key, decoder_input_ids, decoder_attention_mask, past_key_values, decoder_position_ids)
        if self._changed:
            for mine, given in zip(self.cache.layers, past_key_values.layers, strict=True):
                mine.keys.copy_(given.keys)
                mine.values.copy_(given.values)
            self._changed = False
        self.ids.copy_(decoder_input_ids)
        self.positions.copy_(decoder_position_ids)
        self.conditioned.fill_(self_conditioning_logits is not None)
        if self_conditioning_logits is not None:
            self.conditioning.copy_(self_conditioning_logits)
        self.graph.replay()
        return self.out

    def _record(self, key: tuple[Any, ...], ids: Any, masks: Any, cache: Any, positions: Any) -> None:
        embed = self.model.model.decoder.embed_tokens.weight
        self.key, self.cache, self._changed = key, copy.deepcopy(cache), True
        self.ids, self.positions = ids.clone(), positions.clone()
        self.conditioning = torch.zeros(*ids.shape, embed.shape[0], dtype=embed.dtype, device=embed.device)
        self.conditioned = torch.zeros(ids.shape[0], dtype=torch.bool, device=embed.device)
        self.captures += 1
        self.graph, self.out = capture(
            lambda: self.model.forward(
                decoder_input_ids=self.ids,
                self_conditioning_logits=self.conditioning,
                self_conditioning_mask=self.conditioned,
                decoder_attention_mask=masks,
                past_key_values=self.cache,
                decoder_position_ids=self.positions,
            ),
            ids.device,
        )
