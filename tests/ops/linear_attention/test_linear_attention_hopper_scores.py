"""GDN's scores made by the recurrence that reads them, for compute capability 9.0, on torch instead of a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from linear_attention_on_torch import FUNCTIONS, HEADS, TOLERANCE, VALUE_HEADS, prepare, recur

from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state
from vllm_ext.ops.linear_attention.triton.slots import slot_count

DIM = 128


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def expected(
    x: dict[str, torch.Tensor], bounds: torch.Tensor, state: torch.Tensor | None, state_v_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return FUNCTIONS["gdn"](
        **{name: value.double() for name, value in x.items()}, initial_state=state, cu_seqlens=bounds,
        output_final_state=True, state_v_first=state_v_first, backend="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "with_state", "state_v_first", "stages"),
    [
        ((70, 0, 1, 64), True, False, 3),
        ((5, 330, 0, 64), True, True, 3),
        ((250, 1), False, True, 3),
        ((1, 200), False, True, 2),
    ],
)
def test_equals_the_recurrence(
    error: Any,
    kernels: Any,
    together: int,
    lengths: tuple[int, ...],
    with_state: bool,
    state_v_first: bool,
    stages: int,
) -> None:
    """All memory starts as NaN."""
    x = sample_operands("gdn", 1, sum(lengths), HEADS, VALUE_HEADS, DIM, 128)
    state = sample_state(len(lengths), VALUE_HEADS, DIM, 128) if with_state else None
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    bounds = offsets(lengths)
    w = prepare(kernels, "gdn", x, bounds, False, together, later=True)
    o, final = recur(kernels, "gdn", x, bounds, w, state, 2, None, stages=stages, state_v_first=state_v_first)
    wanted, wanted_state = expected(x, bounds, state, state_v_first)
    assert error(o.view(x["v"].shape), wanted) < TOLERANCE
    assert error(final, wanted_state) < TOLERANCE


@pytest.mark.parametrize("columns", [128, 256])
def test_gives_the_bits_that_prepared_scores_give(kernels: Any, columns: int) -> None:
    """The same products, rounded as often, for every 128 columns anew."""
    x = sample_operands("gdn", 1, 330, HEADS, VALUE_HEADS, DIM, columns)
    bounds = offsets((200, 130))
    found = []
    for later in (False, True):
        w = prepare(kernels, "gdn", x, bounds, False, later=later)
        found.append(recur(kernels, "gdn", x, bounds, w, None, 2, None, stages=3))
    for prepared, made in zip(*found, strict=True):
        assert bool(torch.isfinite(prepared).all())
        assert torch.equal(prepared, made)


def test_parts_of_a_call_carry_the_states_on(error: Any, kernels: Any) -> None:
    lengths = (70, 0, 200, 1, 64)
    x = sample_operands("gdn", 1, sum(lengths), HEADS, VALUE_HEADS, DIM, 128)
    bounds = offsets(lengths)
    results = None
    slots = slot_count(sum(lengths), len(lengths), True, 64)
    for first in range(0, slots, 4):
        part = range(first, min(first + 4, slots))
        w = prepare(kernels, "gdn", x, bounds, False, 2, part, later=True)
        results = recur(kernels, "gdn", x, bounds, w, None, 2, None, part, results, stages=3)
    assert results is not None
    wanted, wanted_state = expected(x, bounds, None, True)
    assert error(results[0].view(x["v"].shape), wanted) < TOLERANCE
    assert error(results[1], wanted_state) < TOLERANCE


@pytest.mark.parametrize("length", [13, 63])
def test_nan_of_the_next_sequence_stays_there(monkeypatch: pytest.MonkeyPatch, kernels: Any, length: int) -> None:
    """Keys behind a sequence's end, be it one, are zeroed by a group of warps, however late: scores must wait for it,
    and take nothing of what gates and queries hold there.
    """
    zero_past, products = kernels.recurrence_hopper.zero_past, kernels.recurrence_feed_hopper.warpgroup_mma
    order: list[tuple[str, int]] = []

    def late(tile: Any, *counts: Any) -> None:
        time.sleep(0.2)
        zero_past(tile, *counts)
        order.append(("zeroed", kernels.machine.program[0]))

    def noted(*operands: Any, **options: Any) -> Any:
        order.append(("multiplied", kernels.machine.program[0]))
        return products(*operands, **options)

    monkeypatch.setattr(kernels.recurrence_hopper, "zero_past", late)
    monkeypatch.setattr(kernels.recurrence_feed_hopper, "warpgroup_mma", noted)
    x = sample_operands("gdn", 1, length + 70, HEADS, VALUE_HEADS, DIM, 128)
    for value in x.values():
        value[:, length:] = float("nan")
    bounds = offsets((length, 70))
    w = prepare(kernels, "gdn", x, bounds, False, later=True)
    order.clear()
    o, final = recur(kernels, "gdn", x, bounds, w, None, 2, None, stages=3)
    assert bool(torch.isfinite(o[:length]).all())
    assert bool(torch.isfinite(final[0]).all())
    assert bool(final[1].isnan().any())
    # Of the first sequence's one chunk the keys are zeroed first, by whichever group comes first.
    for program in range(VALUE_HEADS):
        of_program = [what for what, number in order if number == program]
        assert of_program.count("zeroed") == 3
        assert of_program[-1] == "multiplied"


def test_nan_of_the_next_sequence_stays_there_in_parts(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """A part's first chunk is not the sequence's: that its last one is the ragged one goes by the sequence's length."""
    zero_past = kernels.recurrence_hopper.zero_past

    def late(*operands: Any) -> None:
        time.sleep(0.1)
        zero_past(*operands)

    monkeypatch.setattr(kernels.recurrence_hopper, "zero_past", late)
    x = sample_operands("gdn", 1, 140, HEADS, VALUE_HEADS, DIM, 128)
    for value in x.values():
        value[:, 70:] = float("nan")
    bounds, results = offsets((70, 70)), None
    for part in (range(1), range(1, 2)):
        w = prepare(kernels, "gdn", x, bounds, False, 2, part, later=True)
        results = recur(kernels, "gdn", x, bounds, w, None, 2, None, part, results, stages=3)
    assert results is not None
    assert bool(torch.isfinite(results[0][:70]).all())
    assert bool(torch.isfinite(results[1][0]).all())


def test_no_output_takes_scores_that_are_not_there_yet(
    monkeypatch: pytest.MonkeyPatch, error: Any, kernels: Any
) -> None:
    """However late they are made; what was there before is another chunk's, or NaN."""
    products = kernels.recurrence_feed_hopper.warpgroup_mma

    def late(*operands: Any, **options: Any) -> Any:
        time.sleep(0.03)
        return products(*operands, **options)

    monkeypatch.setattr(kernels.recurrence_feed_hopper, "warpgroup_mma", late)
    x = sample_operands("gdn", 1, 330, HEADS, VALUE_HEADS, DIM, 128)
    bounds = offsets((330,))
    w = prepare(kernels, "gdn", x, bounds, False, later=True)
    o, _ = recur(kernels, "gdn", x, bounds, w, None, 2, None, stages=3)
    assert error(o.view(x["v"].shape), expected(x, bounds, None, True)[0]) < TOLERANCE


@pytest.mark.parametrize("decay", [-316.0, -1e30])
def test_extreme_decays_stay_finite_and_right(error: Any, kernels: Any, decay: float) -> None:
    x = sample_operands("gdn", 1, 70, HEADS, VALUE_HEADS, DIM, 128)
    x["g"][:, :40] = decay
    x["g"][:, 40:] = -1e-3
    bounds = offsets((70,))
    w = prepare(kernels, "gdn", x, bounds, False, later=True)
    o, final = recur(kernels, "gdn", x, bounds, w, None, 2, None, stages=3)
    wanted, wanted_state = expected(x, bounds, None, True)
    assert error(o.view(x["v"].shape), wanted) < TOLERANCE
    assert error(final, wanted_state) < TOLERANCE
