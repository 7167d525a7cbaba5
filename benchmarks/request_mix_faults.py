"""Kernels that are wrong on purpose, and what must come of them: a comparison that notices, one request that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm_ext.benchmarks.request_mix_comparison import Comparison, Judge, Tolerance, replaced_kernels
from vllm_ext.benchmarks.request_mixes import Answer, Mix, MixEngine, MixRequest

Change = Callable[..., dict[str, Any]]
"""change(**call): the operands a kernel gets in place of those of its call."""


@contextmanager
def wrong_kernel(engine: MixEngine, change: Change) -> Iterator[None]:
    """Within, every ha_npu prefill in the processes of the engine's workers gets `change(**call)` for its operands."""
    engine.engine.collective_rpc(_enter, args=(change,))
    try:
        yield
    finally:
        engine.engine.collective_rpc(_leave)


def _enter(worker: Any, change: Change) -> None:
    def changed(operator: Callable[..., Any]) -> Callable[..., Any]:
        names = ("q", "k", "v", "g", "beta")
        return lambda *args, **kwargs: operator(**change(**dict(zip(names, args, strict=False)), **kwargs))

    worker.wrong_kernel = replaced_kernels(changed)
    worker.wrong_kernel.__enter__()


def _leave(worker: Any) -> None:
    worker.wrong_kernel.__exit__(None, None, None)


REFUSED_LENGTH = 13


def refuse(**call: Any) -> dict[str, Any]:
    """A kernel that cannot do sequences of `REFUSED_LENGTH` tokens."""
    return refuse_length(REFUSED_LENGTH, **call)


def refuse_length(length: int, **call: Any) -> dict[str, Any]:
    """A kernel that cannot do sequences of so many tokens."""
    lengths = call["cu_seqlens"].diff().tolist()
    if length in lengths:
        raise ValueError(f"refused for a check: sequences of {lengths} tokens, among them one of {length}")
    return call


def forget_initial_state(**call: Any) -> dict[str, Any]:
    """A kernel that starts every chunk from nothing."""
    return {**call, "initial_state": call["initial_state"].new_zeros(call["initial_state"].shape)}


def swap_initial_states(**call: Any) -> dict[str, Any]:
    """A kernel that takes each sequence's state from its neighbour."""
    return {**call, "initial_state": call["initial_state"].roll(1, 0)}


def wrong_kernels_noticed(
    stock: MixEngine, ours: MixEngine, tolerance: Tolerance, judge: Judge | None = None
) -> dict[str, int]:
    """How many failures the comparison, and the judge if given, report of each kernel wrong on purpose: none may be 0.

    Two prompts whose chunks meet in one step, the first continued, the second new.
    """
    block = stock.mamba_block_size() if stock.cache_mode == "align" else 64
    source = random.Random(5)
    prompts = [tuple(source.randrange(256) for _ in range(2 * block + 10)) for _ in range(2)]
    mix = Mix(tuple(MixRequest(prompt, 2, 0) for prompt in prompts), 2 * block)
    right, noticed = stock.run(mix), {}
    for change in (forget_initial_state, swap_initial_states):
        with wrong_kernel(ours, change):
            wrong = ours.run(mix)
        found = Comparison().disagreements(right, wrong, tolerance)
        noticed[change.__name__] = len(judge.failures(mix, right, wrong, found, tolerance) if judge else found)
    return noticed


def refused_mix(engine: MixEngine) -> Mix:
    """Requests of which the third has a chunk of `REFUSED_LENGTH` tokens, beside running ones.

    With prefix caching that is what follows a block it shares with the last request, which comes later.
    """
    source = random.Random(7)
    aligned = engine.cache_mode == "align"
    block = engine.mamba_block_size() if aligned else 64
    common = tuple(source.randrange(256) for _ in range(block)) if aligned else ()

    def request(length: int, arrival: int, prefix: tuple[int, ...] = ()) -> MixRequest:
        return MixRequest(prefix + tuple(source.randrange(256) for _ in range(length)), 4, arrival)

    first = (request(20, 0), request(70, 1), request(REFUSED_LENGTH, 2, common))
    return Mix((*first, request(5, 2), request(9, 6, common)), 16 * block)


def judge_refusal(
    right: list[Answer], answers: list[Answer], comparison: Comparison, tolerance: Tolerance
) -> list[str]:
    """What is wrong with the answers to `refused_mix`, given the right ones: only the third may fail, saying why."""
    wrong = []
    refused = answers[2]
    if refused.finish_reason != "error" or "refused for a check" not in str(refused.stop_reason):
        wrong.append(f"the refused request ended with {refused.finish_reason}: {refused.stop_reason}")
    if "on_kernel_error" not in str(refused.stop_reason):
        wrong.append(f"the message names no way out: {refused.stop_reason}")
    comparison.add(right[:2] + right[3:], answers[:2] + answers[3:], tolerance)
    return wrong + comparison.failures


def check_refused_block(engine: MixEngine) -> list[str]:
    """What is wrong where the refused chunk is a whole block, which prefix caching would keep.

    A later request that begins with the block must not continue from it: it is refused for the same chunk.
    """
    source, block = random.Random(11), engine.mamba_block_size()
    shared, first, second = (tuple(source.randrange(256) for _ in range(size)) for size in (block, 5, 9))
    mix = Mix((MixRequest(shared + first, 4, 0), MixRequest(shared + second, 4, 3)), 2 * block)
    right = engine.run(mix)
    with wrong_kernel(engine, partial(refuse_length, block)):
        answers = engine.run(mix)
    wrong = [
        f"request {index} fails unrefused" for index, answer in enumerate(right) if answer.finish_reason == "error"
    ]
    for index, answer in enumerate(answers):
        if answer.finish_reason != "error":
            wrong.append(f"request {index} was answered from a block that no kernel filled ({answer.finish_reason})")
    return wrong


def check_refusal(engine: MixEngine, tolerance: Tolerance) -> list[str]:
    """What is wrong with how a refused sequence ends: its request alone fails, says why, and leaves nothing behind."""
    mix, comparison = refused_mix(engine), Comparison()
    right = engine.run(mix)
    with wrong_kernel(engine, refuse):
        answers = engine.run(mix)
    comparison.add(right, engine.run(mix), tolerance)
    return judge_refusal(right, answers, comparison, tolerance)
