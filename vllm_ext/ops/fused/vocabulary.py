"""What a sampler asks of the logits, in one pass over the vocabulary: probabilities are never stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.ops.fused.device import runs_triton


@dataclass(frozen=True)
class TokenStatistics:
    """Of softmax(z) a row: the largest probability, its index (the lowest of a tie), the entropy in nats, a sample.

    confidence, entropy FP32 [M]; argmax, sample int64 [M] (sample None without noise); processed [M, V] the logits z in
    the dtype asked for, None unless asked for; log_sum FP32 [M]: log of the sum of exp over `processed` (as rounded).
    """

    confidence: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    sample: torch.Tensor | None = None
    processed: torch.Tensor | None = None
    log_sum: torch.Tensor | None = None


def confidence_argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(confidence FP32, argmax int64, entropy FP32 in nats) of softmax(logits) over the last dimension of [..., V]."""
    found = token_statistics(logits.reshape(-1, logits.shape[-1]))
    lead = logits.shape[:-1]
    return found.confidence.view(lead), found.argmax.view(lead), found.entropy.view(lead)


def token_statistics(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    noise: torch.Tensor | None = None,
    processed: torch.Tensor | None = None,
) -> TokenStatistics:
    """Statistics of softmax(z), z = softcap * tanh(logits / softcap) / temperature, over [M, V].

    logits     FP32, BF16 or FP16; -inf marks words that cannot come; a row with NaN has NaN statistics
    noise      FP32 [M, V] drawn from the exponential distribution: the sample is argmax(p / noise), which is how
               `torch.multinomial` draws one sample, so its stream of random numbers gives its samples
    processed  [M, V], written with z in its own dtype: what a next step is conditioned on

    Raises ValueError where shapes do not fit, or temperature or softcap is not positive.
    """
    if logits.dim() != 2 or not logits.shape[1]:
        raise ValueError(f"token_statistics: logits must be [M, V >= 1], got {list(logits.shape)}")
    for name, tensor in (("noise", noise), ("processed", processed)):
        if tensor is not None and tensor.shape != logits.shape:
            raise ValueError(f"token_statistics: {name} must be {list(logits.shape)}, got {list(tensor.shape)}")
    for name, number in (("temperature", temperature), ("softcap", softcap)):
        if number is not None and not number > 0:
            raise ValueError(f"token_statistics: {name} must be positive, got {number}; argmax needs no temperature")
    if runs_triton(logits) and logits.shape[0]:
        from vllm_ext.ops.fused.triton.vocabulary import token_statistics as kernel

        return TokenStatistics(*kernel(logits, temperature, softcap, noise, processed))
    z = logits.float()
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    z = z / temperature
    logs = z - torch.logsumexp(z, -1, keepdim=True)
    p = logs.exp()
    entropy = -torch.where(p > 0, p * logs, 0.0 * p).sum(-1)
    sample = None if noise is None else (p / noise).argmax(-1)
    log_sum = None
    if processed is not None:
        processed.copy_(z)
        log_sum = torch.logsumexp(processed.float(), -1)
    # argmax of torch on CPUs and CUDA devices returns the first of equals.
    return TokenStatistics(p.amax(-1), z.argmax(-1), entropy, sample, processed, log_sum)


def probabilities(processed: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """exp(processed - log_sum) a row of [M, V], rounded into `out` and returned; a row with log_sum inf becomes 0."""
    if runs_triton(processed) and processed.numel():
        from vllm_ext.ops.fused.triton.vocabulary import probabilities as kernel

        return kernel(processed, log_sum, out)
    return out.copy_(torch.exp(processed.float() - log_sum[:, None]))
