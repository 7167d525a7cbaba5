"""DiffusionGemma's own sampling step over fused statistics: the same random numbers, the same rules, one pass.

Stock transformers walks the vocabulary some twenty-five times a step (soft cap, temperature, softmax, multinomial,
argmax, two entropies); here one kernel does, and draws the tokens `torch.multinomial` would draw.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_ext.ops.fused import TokenStatistics, token_statistics

_SAMPLER, _TEMPERATURE = "EntropyBoundSampler", "LinearTemperatureScheduleLogitsProcessor"
_STOPPING = "StableAndConfidentStoppingCriteria"


def supports(sampler: Any, processors: Any, stopping: Any) -> str | None:
    """Why the step cannot be fused for these, or None. Subclasses may do anything, so exact classes are asked for."""
    if type(sampler).__name__ != _SAMPLER:
        return f"sampler {type(sampler).__name__}"
    if len(processors) > 1 or any(type(p).__name__ != _TEMPERATURE for p in processors):
        return "logits processors of the caller"
    if stopping is not None and type(stopping).__name__ != _STOPPING:
        return f"stopping criteria {type(stopping).__name__}"
    return None


def temperature(processors: Any, cur_step: int) -> float:
    """The step's temperature as stock code computes it, in FP32."""
    for processor in processors:
        step = torch.tensor(cur_step, dtype=torch.int32)
        return float(processor.t_min + ((processor.t_max - processor.t_min) * (step / processor.max_denoising_steps)))
    return 1.0


class CanvasSampler:
    """One denoising step's choice of tokens. Holds the buffer of random numbers."""

    def __init__(self) -> None:
        self.noise = torch.empty(0)

    def statistics(
        self, logits: torch.Tensor, softcap: float | None, heat: float, processed: torch.Tensor
    ) -> TokenStatistics:
        """Of [B * L, V] logits before the soft cap; `processed` is written."""
        if self.noise.shape != logits.shape or self.noise.device != logits.device:
            self.noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        self.noise.exponential_(1)
        return token_statistics(logits, temperature=heat, softcap=softcap, noise=self.noise, processed=processed)

    @staticmethod
    def choose(
        found: TokenStatistics,
        canvas: torch.Tensor,
        argmax_canvas: torch.Tensor,
        finished: torch.Tensor,
        sampler: Any,
        stopping: Any,
        cur_step: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(canvas, argmax canvas, finished) after the step, each [B, ...]."""
        assert found.sample is not None
        sample, argmax = found.sample.view(canvas.shape), found.argmax.view(canvas.shape)
        entropy = found.entropy.view(canvas.shape)
        ordered, order = torch.sort(entropy, dim=-1)
        # The bound on the tokens' mutual information: all entropies so far without the largest.
        chosen = torch.cumsum(ordered, dim=-1) - ordered <= sampler.entropy_bound
        sampler.accepted_token_mask = torch.zeros_like(chosen).scatter(-1, order, chosen)
        accepted = torch.where(sampler.accepted_token_mask, sample, canvas)
        following = sampler.renoise_canvas(accepted, cur_step)
        if stopping is None:
            return following, argmax, finished
        argmax = torch.where(finished[:, None], argmax_canvas, argmax)
        following = torch.where(finished[:, None], canvas, following)
        confident = entropy.mean(-1) < stopping.confidence_threshold
        return following, argmax, finished | (_stable(stopping, argmax) & confident)


def _stable(stopping: Any, argmax: torch.Tensor) -> torch.Tensor:
    """Whether the argmax canvas has been the same over the criterion's history, which is brought up to date."""
    if stopping.stability_threshold == 0:
        return torch.ones(argmax.shape[0], dtype=torch.bool, device=argmax.device)
    history = stopping.argmax_canvas_history
    if history is None:
        history = argmax.new_full((stopping.stability_threshold, *argmax.shape), -1)
    stable = (history == argmax[None]).all(dim=-1).all(dim=0)
    stopping.argmax_canvas_history = torch.cat((history[1:], argmax[None]))
    return stable
