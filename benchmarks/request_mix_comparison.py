"""How far two engines' answers to request mixes are apart, and which of them is off where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm_ext.benchmarks.request_mixes import Answer, Mix, MixRequest


@dataclass(frozen=True)
class Tolerance:
    """What rounding may move: a state relative to its size (Frobenius), by layer; a log-probability in nats."""

    states: tuple[float, ...]
    log_prob: float


@dataclass(frozen=True)
class Disagreement:
    """A request's state after a step (layer given) or its next token (layer None), further apart than allowed.

    generated, computed: tokens by then. error: relative for a state, the first engine's margin for a token.
    """

    request: int
    generated: int
    computed: int
    layer: int | None
    error: float
    allowed: float

    def __str__(self) -> str:
        if self.layer is None:
            return (
                f"request {self.request}: token {self.generated} differs, though the stock margin is {self.error:.3f}"
            )
        return (
            f"request {self.request}: state of linear layer {self.layer} after {self.computed} tokens "
            f"({self.generated} generated) is off by {self.error:.2e}, allowed {self.allowed:.0e}"
        )


@dataclass
class Comparison:
    """How far two engines' answers to mixes are apart; `failures` says what exceeds the tolerance."""

    state_errors: list[list[float]] = field(default_factory=list)
    log_prob_gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    diverged: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, one: list[Answer], other: list[Answer], tolerance: Tolerance) -> None:
        """Compare the answers to one mix: states and greedy tokens up to where a request's tokens part ways."""
        self.failures += [str(found) for found in self.disagreements(one, other, tolerance)]

    def disagreements(self, one: list[Answer], other: list[Answer], tolerance: Tolerance) -> list[Disagreement | str]:
        """As `add`, but what exceeds the tolerance is returned and not counted as a failure."""
        found: list[Disagreement | str] = []
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            common = next(
                (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y),
                min(len(a.tokens), len(b.tokens)),
            )
            found += self._compare_tokens(index, a, b, common, tolerance)
            found += self._compare_states(index, a, b, common, tolerance)
        return found

    def _compare_tokens(
        self, index: int, a: Answer, b: Answer, common: int, tolerance: Tolerance
    ) -> list[Disagreement | str]:
        found: list[Disagreement | str] = []
        gaps = [abs(x - y) for x, y in zip(a.log_probs[:common], b.log_probs[:common], strict=True)]
        self.log_prob_gaps += gaps
        self.tokens += common
        if common < len(a.tokens) or common < len(b.tokens):
            self.diverged += 1
            # An abort is by step, so both must have come equally far.
            if common >= min(len(a.tokens), len(b.tokens)):
                found.append(f"request {index}: {len(a.tokens)} tokens against {len(b.tokens)}")
            elif common < len(a.margins) and a.margins[common] > 2 * tolerance.log_prob:
                found.append(Disagreement(index, common, -1, None, a.margins[common], 2 * tolerance.log_prob))
        if a.finish_reason != b.finish_reason:
            found.append(f"request {index}: {a.finish_reason} against {b.finish_reason} ({b.stop_reason})")
        return found

    def _compare_states(
        self, index: int, a: Answer, b: Answer, common: int, tolerance: Tolerance
    ) -> list[Disagreement | str]:
        found: list[Disagreement | str] = []
        for generated, computed in sorted(a.states.keys() & b.states.keys()):
            if generated > common:
                continue
            pairs = zip(a.states[generated, computed], b.states[generated, computed], strict=True)
            errors = [relative_error(y, x) for x, y in pairs]
            self.state_errors.append(errors)
            for layer, (error, limit) in enumerate(zip(errors, tolerance.states, strict=True)):
                if not error <= limit:  # NaN too
                    found.append(Disagreement(index, generated, computed, layer, error, limit))
        return found

    def summary(self) -> dict[str, Any]:
        """Counts, and the median, 99th percentile and largest of every error."""
        layers = list(zip(*self.state_errors, strict=True))
        return {
            "states_compared": len(self.state_errors),
            "state_errors_by_layer": [_spread(list(errors)) for errors in layers],
            "tokens_compared": self.tokens,
            "requests_whose_tokens_part": self.diverged,
            "log_prob_gaps": _spread(self.log_prob_gaps),
            "failures": len(self.failures),
            "first_failures": self.failures[:5],
        }


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; 0 where both are zero."""
    size = float(expected.double().norm())
    error = float((got.double() - expected.double()).norm())
    return error / size if size else (0.0 if error == 0 else float("inf"))


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


@contextmanager
def replaced_kernels(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within, every ha_npu prefill runs `replace(operator)` in place of the operator."""
    import vllm_ext.model_executor.linear_attention as module

    right = {name: getattr(module, name) for name in ("chunk_gated_delta_rule", "chunk_kda")}
    for name, operator in right.items():
        setattr(module, name, replace(operator))
    try:
        yield
    finally:
        for name, operator in right.items():
            setattr(module, name, operator)


@dataclass
class Judge:
    """Says who is off where two engines disagree about a state.

    A state is computed once more by `run`, that of an ha_npu engine in this process without a prefix cache, from the
    request's tokens alone, all in one step, by the FP64 definition: neither the kernels in question nor any cached,
    gathered or continued state have part in it. `verdicts` keeps both engines' errors against that.
    """

    run: Callable[[Mix], list[Answer]]
    most: int = 3
    verdicts: list[dict[str, Any]] = field(default_factory=list)

    def failures(
        self, mix: Mix, one: list[Answer], other: list[Answer], found: list[Disagreement | str], tolerance: Tolerance
    ) -> list[str]:
        """What of `found` is held against the second engine; the worst `most` states of a mix are looked at.

        A state passes where it is as close to the truth as allowed, or no further from it than 1.5 times the first
        engine's: that one rounds, too. Past three times what is allowed it is no rounding, whatever the first engine's.
        """
        states = sorted(
            (f for f in found if isinstance(f, Disagreement) and f.layer is not None), key=lambda f: -f.error
        )
        held = [str(f) for f in found if not isinstance(f, Disagreement) or f.layer is None]
        for disagreement in states[: self.most]:
            layer = disagreement.layer
            assert layer is not None
            truth = self._truth(mix, one[disagreement.request], disagreement)[layer]
            key = disagreement.generated, disagreement.computed
            errors = [
                relative_error(answers[disagreement.request].states[key][layer], truth) for answers in (one, other)
            ]
            allowed = tolerance.states[layer]
            acquitted = errors[1] <= max(allowed, min(1.5 * errors[0], 3 * allowed))
            verdict = {"what": str(disagreement), "stock": errors[0], "ha_npu": errors[1], "acquitted": acquitted}
            self.verdicts.append(verdict)
            if not acquitted:
                held.append(f"{disagreement}; from the FP64 state it is {errors[1]:.2e}, stock {errors[0]:.2e}")
        return held

    def _truth(self, mix: Mix, answer: Answer, where: Disagreement) -> list[torch.Tensor]:
        tokens = (*mix.requests[where.request].prompt_token_ids, *answer.tokens)[: where.computed]
        with replaced_kernels(lambda operator: partial(operator, backend="reference")):
            alone = self.run(Mix((MixRequest(tokens, 1, 0),), len(tokens)))
        return alone[0].states[0, where.computed]


def judged(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """How many states were judged, how far from the truth each engine was, and the verdicts on the worst."""
    worst = sorted(verdicts, key=lambda verdict: -max(verdict["stock"], verdict["ha_npu"]))
    return {
        "states": len(verdicts),
        "acquitted": sum(verdict["acquitted"] for verdict in verdicts),
        "stock": _spread([verdict["stock"] for verdict in verdicts]),
        "ha_npu": _spread([verdict["ha_npu"] for verdict in verdicts]),
        "worst": worst[:5],
    }
