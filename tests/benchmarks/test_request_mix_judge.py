"""Who is off where two engines disagree about a state: what the judge of the GPU's request mixes lets pass."""

from __future__ import annotations

import pytest
import torch
from vllm_ext.benchmarks.request_mix_comparison import Comparison, Judge, Tolerance
from vllm_ext.benchmarks.request_mixes import Answer, Mix, MixRequest

TOLERANCE = Tolerance(states=(1e-2, 4e-2), log_prob=0.15)
MIX = Mix((MixRequest((5, 6, 7), 2, 0),), 8)
TRUTH = [torch.ones(2, 4, 4), torch.ones(2, 4, 4)]


def answer(*errors: float) -> Answer:
    """One whose states are off by these shares of their size after the prompt."""
    states = [truth * (1 + error) for truth, error in zip(TRUTH, errors, strict=True)]
    return Answer(tokens=[1], log_probs=[-1.0], margins=[1.0], finish_reason="length", states={(0, 3): states})


def judged(one: Answer, other: Answer) -> tuple[int, Judge]:
    """How many disagreements are held against the second, and the judge, who asks for the prompt alone in one step."""
    asked = []

    def run(mix: Mix) -> list[Answer]:
        asked.append(mix)
        return [Answer(states={(0, len(mix.requests[0].prompt_token_ids)): TRUTH})]

    judge = Judge(run)
    found = Comparison().disagreements([one], [other], TOLERANCE)
    held = judge.failures(MIX, [one], [other], found, TOLERANCE)
    for mix in asked:
        assert [request.prompt_token_ids for request in mix.requests] == [(5, 6, 7)]
        assert mix.budget == 3
    return len(held), judge


@pytest.mark.parametrize(
    ("stock", "ours", "held"),
    [
        ((0.0, 0.0), (0.009, 0.03), 0),  # within the tolerance: nobody is asked
        ((0.03, 0.0), (0.002, 0.0), 0),  # stock's rounding
        ((-0.012, 0.0), (0.016, 0.0), 0),  # both round; ours is 1.3 times as far from the truth
        ((0.0, 0.0), (0.016, 0.0), 1),
        ((0.0, 0.0), (0.0, 0.05), 1),
        # vLLM 0.23 continued a stale state in both engines, and ours passed, off by 23 times its size.
        ((23.57, 0.0), (23.90, 0.0), 1),
        ((0.0, 0.0), (float("nan"), 0.0), 1),
        ((float("nan"), float("nan")), (0.0, 0.0), 0),
        ((float("nan"), 0.0), (float("nan"), 0.0), 1),
    ],
)
def test_a_state_passes_only_when_it_is_rounding_that_sets_it_apart(stock, ours, held):
    found, judge = judged(answer(*stock), answer(*ours))
    assert found == held
    assert len([verdict for verdict in judge.verdicts if not verdict["acquitted"]]) == held


def test_a_token_that_rounding_cannot_explain_is_held_whatever_the_states_are():
    one, other = answer(0.03, 0.0), answer(0.0, 0.0)
    other.tokens = [2]
    assert judged(one, other)[0] == 1
    one.margins = [0.1]
    assert judged(one, other)[0] == 0
