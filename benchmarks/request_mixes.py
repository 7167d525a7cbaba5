"""Random mixes of requests through two engines of real vLLM that differ only in the linear-attention prefill.

A mix is drawn by whoever can draw whole numbers (a property-based test, a seeded generator): prompts of 1 token, of
1 + num_spec, around 1 to 3 blocks and between, some beginning alike, arriving at different steps, under a token budget
that cuts them, with requests preempted or aborted in the middle. Both engines run it step by step in this process.
After every step the recurrent state of every request that computed something is read from its slot in the cache, so
states are compared at every boundary of a chunk and of a block, not only at the end. Before a mix every slot is filled
as if a request had used it: who starts from what a slot holds shows it, in the first mix as after hours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_ext.compat import is_linear_attention

Integer = Callable[[int, int], int]
"""integer(low, high): a whole number in [low, high]."""


@dataclass(frozen=True)
class MixRequest:
    """prompt_token_ids; how many tokens to generate; the steps at which it arrives and, if ever, is aborted."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival: int
    abort: int | None = None


@dataclass(frozen=True)
class Mix:
    """Requests under a token budget a step; at each step of `preempt` the request that came last is preempted."""

    requests: tuple[MixRequest, ...]
    budget: int
    preempt: tuple[int, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The mix without its tokens."""
        requests = [{**asdict(r), "prompt_token_ids": len(r.prompt_token_ids)} for r in self.requests]
        return {"budget": self.budget, "preempt": list(self.preempt), "requests": requests}


@dataclass
class Answer:
    """What a request came to. margins: gap between the best two log-probabilities of each token, in nats.

    states: by (tokens generated, tokens computed) after a step, [layers] of a recurrent state in FP32.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    states: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)


def draw_mix(
    integer: Integer,
    *,
    block: int,
    num_spec: int = 0,
    least_budget: int = 8,
    vocabulary: int = 256,
    max_tokens: int = 6,
) -> Mix:
    """Draw a mix. block: tokens of a cache block (lengths go around 1 to 3 of them); least_budget: of a step."""
    common = _tokens(integer, 2 * block, vocabulary)
    requests = tuple(
        _draw_request(integer, common, block, num_spec, vocabulary, max_tokens) for _ in range(integer(1, 5))
    )
    budgets = [least_budget, least_budget + 1, block, block + 1, 2 * block - 1, 4 * block, 16 * block]
    budget = max(least_budget, budgets[integer(0, len(budgets) - 1)])
    preempt = tuple(sorted({integer(1, 12) for _ in range(integer(0, 2))}))
    return Mix(requests, budget, preempt)


def _draw_request(
    integer: Integer, common: tuple[int, ...], block: int, num_spec: int, vocabulary: int, max_tokens: int
) -> MixRequest:
    kind, shared = integer(0, 4), (0, block, 2 * block)[integer(0, 2)]
    if kind == 0:
        length = (1, 1 + num_spec, 1 + num_spec, 63, 64, 65)[integer(0, 5)]
    elif kind == 1:
        length = integer(2, 3 * block)
    elif kind == 2:
        length = shared + integer(1, block)
    else:
        length = integer(1, 3) * block + integer(-1, 1)
    shared = min(shared, length)
    tokens = common[:shared] + _tokens(integer, length - shared, vocabulary)
    abort = integer(1, 10) if integer(0, 3) == 0 else None
    return MixRequest(tokens, integer(1, max_tokens), integer(0, 9), abort)


def _tokens(integer: Integer, count: int, vocabulary: int) -> tuple[int, ...]:
    """Tokens of which every other sequence repeats itself, for proposers that look for repeats."""
    source = random.Random(integer(0, 2**16))
    period = source.choice((3, 7, max(count, 1)))
    once = [source.randrange(vocabulary) for _ in range(period)]
    return tuple(once[index % period] for index in range(count))


class MixEngine:
    """A vLLM engine that runs mixes step by step. Needs VLLM_ENABLE_V1_MULTIPROCESSING=0, and speculation one worker.

    left_behind: what slots hold before a mix. Of two engines to be compared it must differ, or not be a number.
    """

    def __init__(self, llm: Any, *, read_states: bool = True, left_behind: float = float("nan")) -> None:
        self.engine = llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.read_states = read_states
        self.left_behind = left_behind
        self.num_spec = getattr(self.scheduler, "num_spec_tokens", 0)
        self.continuations: dict[tuple[int, ...], list[int]] = {}
        if self.num_spec:
            drafter = core.model_executor.driver_worker.worker.model_runner.drafter
            drafter.batch_propose = self._propose
        self.cache_mode = core.vllm_config.cache_config.mamba_cache_mode
        self._answers: dict[str, Answer] = {}
        self._count = 0
        update = self.scheduler.update_from_output

        def observed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # The step has run, and no block of it has been given back yet.
            if self.read_states:
                self._read_states(scheduler_output)
            return update(scheduler_output, *args, **kwargs)

        self.scheduler.update_from_output = observed

    def _propose(self, num_requests: int, rows: list[int], lengths: Any, token_ids: Any, *_: Any) -> list[list[int]]:
        """Drafts for a speculative engine: `continuations` (what the prompts are known to lead to), every third wrong.

        Every row that may draft does: vLLM 0.23 and 0.32 lose track of the state's slot when a step has no draft.
        """
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        for row in rows:
            context = token_ids[row, : lengths[row]].tolist()
            known = max(
                (prompt for prompt in self.continuations if tuple(context[: len(prompt)]) == prompt),
                key=len,
                default=(),
            )
            ahead = (self.continuations.get(known, []) + [0] * (len(context) + self.num_spec))[
                len(context) - len(known) :
            ]
            drafts[row] = [
                (token + 1) % 256 if (len(context) + place) % 3 == 0 else token
                for place, token in enumerate(ahead[: self.num_spec])
            ]
        return drafts

    def mamba_block_size(self) -> int:
        """Tokens a cache block of the linear-attention layers holds the state after."""
        return next(spec.block_size for _, spec in self._mamba_groups())

    def run(self, mix: Mix, *, known: list[Answer] | None = None, deadline: float | None = None) -> list[Answer]:
        """The answer of each request of the mix, in its order.

        known: answers of an engine without speculation, which a speculative one drafts from. Raises TimeoutError past
        `deadline` (monotonic).
        """
        from vllm import SamplingParams

        self.scheduler.reset_prefix_cache()
        self.engine.collective_rpc(fill_slots, args=(self.left_behind,))
        self.scheduler.max_num_scheduled_tokens = mix.budget
        self._count += 1
        names = [f"mix{self._count}-{index}" for index in range(len(mix.requests))]
        self._answers = {name: Answer() for name in names}
        self.continuations = {
            request.prompt_token_ids: answer.tokens for request, answer in zip(mix.requests, known or (), strict=False)
        }
        step, last = 0, max(request.arrival for request in mix.requests)
        while step <= last or self.engine.has_unfinished_requests():
            for name, request in zip(names, mix.requests, strict=True):
                if request.arrival == step:
                    sampling = SamplingParams(
                        temperature=0, max_tokens=request.max_tokens, ignore_eos=True, logprobs=2, detokenize=False
                    )
                    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
                    self.engine.add_request(name, prompt, sampling)
                if request.abort == step and request.arrival < step:
                    self.engine.abort_request([name])
            if step in mix.preempt:
                self._preempt_last()
            if self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    self._note(output)
            step += 1
            if step > 2000 or (deadline is not None and time.monotonic() > deadline):
                raise TimeoutError(f"a mix is not done after {step} steps: {mix.describe()}")
        return [self._answers[name] for name in names]

    def _preempt_last(self) -> None:
        if self.scheduler.running:
            request = self.scheduler.running.pop()
            self.scheduler._preempt_request(request, time.monotonic())
            # A request that leaves and returns between two steps is new to the worker.
            self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def _note(self, output: Any) -> None:
        answer, completion = self._answers[output.request_id], output.outputs[0]
        answer.tokens = list(completion.token_ids)
        answer.cached_tokens = output.num_cached_tokens or 0
        answer.finish_reason, answer.stop_reason = completion.finish_reason, completion.stop_reason
        best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in completion.logprobs or ()]
        answer.log_probs = [values[0] for values in best]
        answer.margins = [values[0] - values[1] for values in best]

    def _mamba_groups(self) -> Iterable[tuple[int, Any]]:
        for index, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups):
            if hasattr(group.kv_cache_spec, "mamba_type"):
                yield index, group.kv_cache_spec

    def _read_states(self, scheduler_output: Any) -> None:
        places: list[tuple[Answer, tuple[int, int], list[tuple[str, int]]]] = []
        for internal, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(internal)
            if request is None or request.is_finished():
                continue
            computed = request.num_computed_tokens
            generated = request.num_output_tokens
            # Where drafts are checked the state's slot depends on how many were accepted, which is known only later.
            if self.num_spec and computed > request.num_prompt_tokens:
                continue
            name = self._name_of(internal)
            if name is not None and scheduled:
                places.append((self._answers[name], (generated, computed), self._slots_of(internal, computed)))
        if places:
            slots = [slot for *_, own in places for slot in own]
            by_rank = self.engine.collective_rpc(read_slots, args=(slots,))
            states = iter([torch.cat(parts) for parts in zip(*by_rank, strict=True)])
            for answer, after, own in places:
                answer.states[after] = [next(states) for _ in own]

    def _name_of(self, internal: str) -> str | None:
        """The name a request was added under; vLLM may have made its own id unique by a suffix."""
        if internal in self._answers:
            return internal
        return next((name for name in self._answers if internal.startswith(f"{name}-")), None)

    def _slots_of(self, internal: str, computed: int) -> list[tuple[str, int]]:
        """The slot of a request's state in each linear-attention layer: (layer, slot)."""
        blocks = self.scheduler.kv_cache_manager.get_block_ids(internal)
        found = []
        for index, spec in self._mamba_groups():
            column = (computed - 1) // spec.block_size if self.cache_mode == "align" else 0
            for name in self.scheduler.kv_cache_config.kv_cache_groups[index].layer_names:
                found.append((name, blocks[index][column]))
        return found


def fill_slots(worker: Any, value: float) -> None:
    """Fill a worker's slots of linear-attention states, all but the first, which vLLM pads batches with."""
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if is_linear_attention(layer):
            for cache in layer.kv_cache:
                cache[1:] = value


def read_slots(worker: Any, slots: list[tuple[str, int]]) -> list[torch.Tensor]:
    """A worker's heads of the recurrent states in the slots of (layer, slot), in FP32: [heads, ...] each."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    return [layers[name].kv_cache[1][slot].float().cpu().clone() for name, slot in slots]


def situations(mixes: Iterable[tuple[Mix, list[Answer]]], num_spec: int = 0) -> dict[str, int]:
    """How often each serving situation came up, so that a run can show that it met them."""
    counts = dict.fromkeys(
        (
            "requests",
            "one_token",
            "one_plus_num_spec",
            "continued_chunks",
            "prefix_hits",
            "preempting_mixes",
            "aborted",
        ),
        0,
    )
    for mix, answers in mixes:
        counts["preempting_mixes"] += bool(mix.preempt)
        for request, answer in zip(mix.requests, answers, strict=True):
            length = len(request.prompt_token_ids)
            counts["requests"] += 1
            counts["one_token"] += length == 1
            counts["one_plus_num_spec"] += bool(num_spec) and length == 1 + num_spec
            counts["continued_chunks"] += sum(0 < computed < length for _, computed in answer.states)
            counts["prefix_hits"] += answer.cached_tokens > 0
            counts["aborted"] += answer.finish_reason is None
    return counts
