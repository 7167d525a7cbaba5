"""The requests of `serve_soak`: how they are drawn, asked, and asked alone, and when two answers are not the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

VOCABULARY = 256
Tokens = list[list[int]]


@dataclass(frozen=True)
class Request:
    """What is asked: random prompt tokens by `seed`, and how to sample."""

    seed: int
    length: int
    max_tokens: int
    samples: int
    temperature: float
    stop_tokens: tuple[int, ...]
    streamed: bool

    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        draw = random.Random(self.seed)
        return [draw.randrange(VOCABULARY) for _ in range(self.length)]

    def sampling(self, *, deltas: bool = False) -> Any:
        """vLLM's parameters; `deltas` streams what is new, otherwise all comes at the end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=self.samples,
            temperature=self.temperature,
            seed=self.seed if self.temperature else None,
            max_tokens=self.max_tokens,
            stop_token_ids=list(self.stop_tokens),
            logprobs=1 if not deltas else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY,
        )


def draw_requests(count: int, longest: int, seed: int = 0) -> list[Request]:
    """`count` requests: lengths from 1 to `longest`, short ones as often as long ones."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        temperature = draw.choice((0.0, 0.0, 0.8))
        made.append(
            Request(
                seed=1000 + index,
                length=max(1, min(longest, round(longest ** draw.random()))),
                max_tokens=draw.choice((1, 2, 5, 8, 16)),
                samples=draw.choice((1, 1, 1, 2, 3)) if temperature else 1,
                temperature=temperature,
                stop_tokens=tuple(draw.sample(range(VOCABULARY), 40)) if draw.random() < 0.3 else (),
                streamed=draw.random() < 0.5,
            )
        )
    return made


async def ask(engine: Any, request: Request, name: str, abort_after: int | None = None) -> dict[str, Any]:
    """One request's tokens by sample, and why each ended; `abort_after` tokens the caller goes away."""
    deltas = request.streamed or abort_after is not None
    tokens: Tokens = [[] for _ in range(request.samples)]
    ends: list[str | None] = [None] * request.samples
    stream = engine.generate({"prompt_token_ids": request.prompt()}, request.sampling(deltas=deltas), name)
    async for output in stream:
        for sample in output.outputs:
            tokens[sample.index].extend(sample.token_ids)
            ends[sample.index] = sample.finish_reason or ends[sample.index]
        if abort_after is not None and sum(map(len, tokens)) >= abort_after:
            await stream.aclose()
            break
    return {"tokens": tokens, "ends": ends, "aborted": abort_after is not None}


async def ask_alone(engine: Any, request: Request, name: str) -> dict[str, Any]:
    """One request by itself, with the margin between the chosen token and the best other one at each place."""
    stream = engine.generate({"prompt_token_ids": request.prompt()}, request.sampling(), name)
    async for output in stream:
        last = output
    tokens = [list(sample.token_ids) for sample in last.outputs]
    margins = []
    for sample in last.outputs:
        found = []
        for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
            others = [value.logprob for key, value in entry.items() if key != token]
            found.append(abs(entry[token].logprob - max(others)) if others else 0.0)
        margins.append(found)
    return {"tokens": tokens, "margins": margins}


def differs(alone: dict[str, Any], mixed: dict[str, Any], near: float | None, sampled: bool) -> str | None:
    """Why the answer in the mix is not the one alone, or None. `near` None: they must be equal."""
    for mine, expected, margins, end in zip(
        mixed["tokens"], alone["tokens"], alone["margins"], mixed["ends"], strict=True
    ):
        if not mine and not mixed["aborted"]:
            return "it has no tokens"
        if end in ("error", "abort") and not mixed["aborted"]:
            return f"it ended with {end!r}"
        wanted = expected[: len(mine)] if mixed["aborted"] else expected
        if mine == wanted:
            if end is None and not mixed["aborted"]:
                return "it did not end"
            continue
        place = next((i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), len(mine))
        if place in (len(mine), len(wanted)):
            return f"it has {len(mine)} tokens, alone {len(wanted)}"
        # A sampled token hangs on more than the margin of the best: without batch invariance it may be any.
        if near is not None and (sampled or (place < len(margins) and margins[place] < near)):
            continue
        return f"token {place} is {mine[place:][:1]}, alone {wanted[place:][:1]}, margin {margins[place:][:1]}"
    return None
