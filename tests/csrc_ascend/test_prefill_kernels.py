"""The prefill kernels on the simulator: right numbers in every situation, on every chip there are kernels for."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from itertools import pairwise

import pytest
import torch
from vllm_ext.benchmarks.ascend_problems import make_call
from vllm_ext.benchmarks.ascend_rounded import rounded_reference

import vllm_ext.ops.linear_attention as linear_attention
from vllm_ext.ops.linear_attention import reference
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill
from vllm_ext.ops.linear_attention.ascend_sim.tasks import Task, chunk_head_chunk_launches, make_tasks
from vllm_ext.ops.linear_attention.problem import Call

pytestmark = pytest.mark.usefixtures("prefill_kernels")
OPS = ("gdn", "kda")

# FP16 operands cost 1.5e-7 to 2e-7 for unit keys against FP64; twice that leaves room for unlucky draws.
UNROUNDED_NMSE = 4e-7
# With the operands' rounding taken out, what is left of outputs is their own rounding to FP16 (typically 4e-8 to 5e-8),
# and of states FP32 sums of gates and an operand now and then rounded the other way.
ROUNDED_NMSE, ROUNDED_STATE_NMSE = 8e-8, 1e-8


def nmse(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Squared error relative to the squared reference."""
    energy = wanted.double().square().sum().item()
    error = (got.double() - wanted.double()).square().sum().item()
    return error / energy if energy else error


def definition(op: str, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The token recurrence in FP64 on the FP16 operands, its output not rounded."""
    wide = dataclasses.replace(call, **{name: getattr(call, name).double() for name in ("q", "k", "v")})
    function = reference.chunk_gated_delta_rule if op == "gdn" else reference.chunk_kda
    o, state = function(wide)
    assert state is not None
    return o, state


def check(op: str, call: Call, **options) -> None:
    """Against the definition and against the rounded arithmetic."""
    result = run_prefill(op, call, **options)
    assert result.final_state is not None
    assert result.o.isfinite().all()
    assert result.final_state.isfinite().all()
    o, state = definition(op, call)
    assert nmse(result.o, o) < UNROUNDED_NMSE
    assert nmse(result.final_state, state) < UNROUNDED_NMSE
    o, state = rounded_reference(op, call)
    assert nmse(result.o, o) < ROUNDED_NMSE
    assert nmse(result.final_state, state) < ROUNDED_STATE_NMSE


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 200, "normalise": True},
        {"tokens": 200, "key_heads": 2, "value_heads": 4, "state_v_first": False},
        {"tokens": 130, "key_dim": 64, "value_dim": 64, "value_heads": 3, "normalise": True},
        {"tokens": 130, "key_dim": 64, "value_dim": 128, "state_v_first": False, "normalise": True},
        {"tokens": 130, "key_dim": 128, "value_dim": 64, "initial": False},
        {"tokens": 70, "batch": 2, "value_heads": 2, "steep": 0.0},
        {"tokens": 192, "steep": 0.6},
    ],
    ids=lambda options: "-".join(f"{key}{value}" for key, value in options.items()),
)
def test_outputs_and_states_match_fp64(op: str, options: dict) -> None:
    """Realistic gates down to -316, values to 24.8, a nonzero state, both state orders, both head sizes."""
    check(op, make_call(op, seed=7, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 200, "normalise": True},
        {"tokens": 130, "key_heads": 1, "value_heads": 2, "state_v_first": False, "steep": 0.3},
        {"tokens": 130, "key_dim": 64, "value_dim": 128, "steep": 0.0},
        {"tokens": 70, "key_dim": 128, "value_dim": 64, "value_heads": 12},
    ],
    ids=lambda options: "-".join(f"{key}{value}" for key, value in options.items()),
)
def test_operands_in_two_halves_leave_the_rounding_of_the_output_only(options: dict) -> None:
    """Against the definition itself: outputs as close as FP16 can hold them, states within the paper's 9.38e-12."""
    call = make_call("gdn", seed=7, **options)
    result = run_prefill("gdn", call, split_operands=True)
    o, state = definition("gdn", call)
    assert nmse(result.o, o) < 1.02 * nmse(o.half(), o)
    assert nmse(result.final_state, state) < 9.38e-12


def test_operands_in_two_halves_on_other_cores_and_chips() -> None:
    """Cut by columns, and on a 310B: the same bits. Where they are not offered the reason is given."""
    call = make_call("gdn", tokens=100, seed=17)
    head = Task(0, 100, 0, 0, 0, 128, 0)
    whole = run_prefill("gdn", call, blocks=[[head]], split_operands=True)
    parts = [[dataclasses.replace(head, column_begin=column, column_count=16)] for column in range(0, 128, 16)]
    cut = run_prefill("gdn", call, blocks=parts, split_operands=True)
    there = run_prefill("gdn", call, chip="310b1", split_operands=True)
    for other in (cut, there):
        assert torch.equal(other.o, whole.o)
        assert torch.equal(other.final_state, whole.final_state)
    with pytest.raises(ValueError, match="only gdn"):
        run_prefill("kda", make_call("kda", tokens=1), split_operands=True)
    with pytest.raises(ValueError, match="not by chunks"):
        run_prefill("gdn", call, launches=chunk_head_chunk_launches([head], 2, 2), split_operands=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 17, 63])
def test_a_prompt_shorter_than_a_chunk(op: str, tokens: int) -> None:
    """Rows past the sequence are neither read from global memory nor written to it."""
    check(op, make_call(op, tokens=tokens, value_heads=2, seed=tokens))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bounds", [[0, 0, 64], [0, 64, 64, 130], [0, 1, 2, 66, 66], [0, 0]])
def test_packed_sequences_with_empty_ones(op: str, bounds: list[int]) -> None:
    """The state of an empty sequence is its initial state, bit for bit."""
    call = make_call(op, tokens=bounds[-1], value_heads=2, bounds=bounds, seed=3)
    result = run_prefill(op, call)
    assert result.final_state is not None
    for sequence, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            assert torch.equal(result.final_state[sequence], call.initial_state[sequence])
    if bounds[-1]:
        check(op, call)


@pytest.mark.parametrize("op", OPS)
def test_the_state_at_a_ragged_end_is_after_the_last_token(op: str) -> None:
    """T = 130: after token 130, not after 128; elsewhere the last two tokens were lost."""
    call = make_call(op, tokens=130, seed=5)
    cut = {name: getattr(call, name)[:, :128] for name in ("q", "k", "v", "g", "beta")}
    ragged, whole = run_prefill(op, call), run_prefill(op, dataclasses.replace(call, **cut))
    assert ragged.final_state is not None
    assert whole.final_state is not None
    assert torch.equal(ragged.o[:, :128], whole.o)
    assert nmse(ragged.final_state, definition(op, call)[1]) < UNROUNDED_NMSE
    assert nmse(whole.final_state, ragged.final_state) > 1e-4


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("state_v_first", [True, False])
def test_a_prompt_in_parts_equals_one_shot(op: str, state_v_first: bool) -> None:
    """Parts that end on chunk borders carry an FP32 state and repeat every bit; a part that does not stays accurate."""
    call = make_call(op, tokens=320, value_heads=2, state_v_first=state_v_first, seed=11)
    whole = run_prefill(op, call)
    for cut, exact in ((128, True), (100, False)):
        state, outputs = call.initial_state, []
        for begin, end in ((0, cut), (cut, 320)):
            part = {name: getattr(call, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
            result = run_prefill(op, dataclasses.replace(call, initial_state=state, **part))
            state = result.final_state
            outputs.append(result.o)
        o = torch.cat(outputs, 1)
        assert whole.final_state is not None
        assert state is not None
        if exact:
            assert torch.equal(o, whole.o)
            assert torch.equal(state, whole.final_state)
        assert nmse(o, whole.o) < UNROUNDED_NMSE
        assert nmse(state, whole.final_state) < UNROUNDED_NMSE


@pytest.mark.parametrize(("op", "tokens"), [("gdn", 65536), ("kda", 65536)])
def test_a_long_prompt_in_quarters_does_not_drift(op: str, tokens: int) -> None:
    """Elsewhere chunked prefill drifted from one shot; here quarters repeat every bit, and the state stays accurate."""
    call = make_call(op, tokens=tokens, seed=61)
    whole = run_prefill(op, call)
    state, outputs = call.initial_state, []
    for begin in range(0, tokens, tokens // 4):
        part = {name: getattr(call, name)[:, begin : begin + tokens // 4] for name in ("q", "k", "v", "g", "beta")}
        result = run_prefill(op, dataclasses.replace(call, initial_state=state, **part))
        state = result.final_state
        outputs.append(result.o)
    assert torch.equal(torch.cat(outputs, 1), whole.o)
    assert torch.equal(state, whole.final_state)
    wide = [x.double() for x in (call.q, call.k, call.v, call.g, call.beta)]
    function = linear_attention.chunk_gated_delta_rule if op == "gdn" else linear_attention.chunk_kda
    options = {"initial_state": call.initial_state, "output_final_state": True, "state_v_first": True}
    o, final = function(*wide, backend="cpu", **options)
    assert nmse(whole.o, o) < UNROUNDED_NMSE
    assert nmse(whole.final_state, final) < UNROUNDED_NMSE


@pytest.mark.parametrize("op", OPS)
def test_an_fp16_state_costs_its_rounding_and_no_more(op: str) -> None:
    """vLLM-Ascend keeps FP16 states: what goes in and out is rounded, the arithmetic between is the same."""
    call = make_call(op, tokens=100, value_heads=2, seed=13)
    call = dataclasses.replace(call, initial_state=call.initial_state.half().float())
    wide, narrow = run_prefill(op, call), run_prefill(op, call, state_dtype=torch.float16)
    assert wide.final_state is not None
    assert narrow.final_state is not None
    assert torch.equal(narrow.o, wide.o)
    assert torch.equal(narrow.final_state, wide.final_state.half())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("state_v_first", [True, False])
def test_a_head_cut_by_columns_repeats_every_bit(op: str, state_v_first: bool) -> None:
    """Column parts need no reduction, so where a head is cut cannot change a result."""
    call = make_call(op, tokens=100, state_v_first=state_v_first, seed=17)
    whole = run_prefill(op, call, blocks=[[Task(0, 100, 0, 0, 0, 128, 0)]])
    for width in (16, 32, 64):
        parts = [[Task(0, 100, 0, 0, column, width, 0)] for column in range(0, 128, width)]
        cut = run_prefill(op, call, blocks=parts)
        assert torch.equal(cut.o, whole.o)
        assert torch.equal(cut.final_state, whole.final_state)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("state_v_first", [True, False])
def test_chunk_head_chunk_repeats_every_bit(op: str, state_v_first: bool) -> None:
    """Three launches through global memory, for the last heads of a tail: nothing but the place of the work changes."""
    bounds = [0, 70, 70, 300]
    call = make_call(op, tokens=300, value_heads=2, bounds=bounds, state_v_first=state_v_first, normalise=True, seed=43)
    heads = [task for block in make_tasks(bounds, 2, 128, 1) for task in block]
    whole = run_prefill(op, call, blocks=[heads])
    for parts, cores in ((1, 10), (4, 3)):
        spread = run_prefill(op, call, launches=chunk_head_chunk_launches(heads, parts, cores))
        assert torch.equal(spread.o, whole.o)
        assert torch.equal(spread.final_state, whole.final_state)
        assert spread.counters.gm_bytes > whole.counters.gm_bytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("heads", "lengths"), [(16, [128]), (3, [300]), (1, [640]), (4, [64, 0, 130])])
def test_the_planners_mapping_repeats_every_bit(op: str, heads: int, lengths: list[int]) -> None:
    """Whole heads, column parts and chunk-head-chunk as the plan deals them to ten cores."""
    tokens, bounds = sum(lengths), [0, *itertools.accumulate(lengths)]
    call = make_call(op, tokens=tokens, key_heads=heads, value_heads=heads, bounds=bounds, seed=59)
    planned = run_prefill(op, call)
    tasks = [task for block in make_tasks(bounds, heads, 128, 1) for task in block]
    whole = run_prefill(op, call, blocks=[tasks])
    assert torch.equal(planned.o, whole.o)
    assert torch.equal(planned.final_state, whole.final_state)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_every_head_is_computed_alike_on_any_number_of_cores(op: str, heads: int) -> None:
    """Heads with the same operands give the same bits wherever they run, whole or cut."""
    one = make_call(op, tokens=64, seed=19)
    call = dataclasses.replace(
        one,
        v=one.v.expand(-1, -1, heads, -1).contiguous(),
        g=one.g.repeat_interleave(heads, 2),
        beta=one.beta.repeat_interleave(heads, 2),
        initial_state=one.initial_state.repeat_interleave(heads, 1),
    )
    single, many = run_prefill(op, one), run_prefill(op, call)
    assert torch.equal(many.o, single.o.expand_as(many.o))
    assert torch.equal(many.final_state, single.final_state.expand_as(many.final_state))


@pytest.mark.parametrize("op", OPS)
def test_repeated_keys_do_not_break_the_inversion(op: str) -> None:
    """One key at every token, beta near 1, hardly a decay: powers of A outgrow FP16, its inverse stays within 1."""
    call = make_call(op, tokens=128, seed=23, steep=0.0)
    call = dataclasses.replace(
        call, k=call.k[:, :1].expand_as(call.k).contiguous(), g=call.g * 1e-4, beta=call.beta * 0 + 0.99
    )
    result = run_prefill(op, call)
    o, state = definition(op, call)
    # The values that V' must cancel down to are up to 100 times smaller than V, whose rounding is what is left.
    assert nmse(result.o, o) < 1e-5
    assert nmse(result.final_state, state) < 1e-5


@pytest.mark.parametrize("op", OPS)
def test_gates_of_minus_infinity_forget_everything(op: str) -> None:
    """Such gates appear where softplus overflows; the sums over a chunk must not turn into NaN."""
    call = make_call(op, tokens=100, seed=29)
    g = call.g.clone()
    g[:, [3, 40, 70]] = -float("inf")
    call = dataclasses.replace(call, g=g)
    result = run_prefill(op, call)
    o, state = definition(op, dataclasses.replace(call, g=g.clamp(min=-1e4)))
    assert nmse(result.o, o) < UNROUNDED_NMSE
    assert nmse(result.final_state, state) < UNROUNDED_NMSE


@pytest.mark.parametrize("op", OPS)
def test_backend_through_the_public_function(op: str) -> None:
    """FP32 state out as the interface promises; FP32 operands are refused with the dtype named."""
    call = make_call(op, tokens=70, key_heads=2, value_heads=4, seed=31)
    function = linear_attention.chunk_gated_delta_rule if op == "gdn" else linear_attention.chunk_kda
    options = {"scale": 0.1, "initial_state": call.initial_state, "output_final_state": True, "state_v_first": True}
    o, state = function(call.q, call.k, call.v, call.g, call.beta, backend="ascend-sim", **options)
    wanted, wanted_state = function(call.q, call.k, call.v, call.g, call.beta, backend="reference", **options)
    assert o.dtype == torch.float16
    assert state.dtype == torch.float32
    assert nmse(o, wanted) < UNROUNDED_NMSE
    assert nmse(state, wanted_state) < UNROUNDED_NMSE
    wide = [x.float() for x in (call.q, call.k, call.v)]
    with pytest.raises(RuntimeError, match=r"torch\.float32"):
        function(*wide, call.g, call.beta, backend="ascend-sim")


@pytest.mark.parametrize("op", OPS)
def test_values_beyond_fp16_are_not_lost_silently(op: str) -> None:
    """A state of 1e5 is no FP16 operand: infinite on the chip as well, and the caller is told."""
    call = make_call(op, tokens=5, seed=71)
    function = linear_attention.chunk_gated_delta_rule if op == "gdn" else linear_attention.chunk_kda
    operands, options = (call.q, call.k, call.v, call.g, call.beta), {"backend": "ascend-sim", "state_v_first": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*operands, initial_state=call.initial_state, **options)
    with pytest.warns(RuntimeWarning, match=r"ascend-sim: \d+ finite numbers.*65504"):
        function(*operands, initial_state=call.initial_state * 1e6, **options)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("chip", ["310p3", "310b1"])
def test_other_chips_give_the_same_bits(op: str, chip: str) -> None:
    """Eight cores instead of ten change nothing; nor does a 310B, where products leave L0C by Fixpipe, operands reach
    L1 through global memory, numbers are spread without Brcb, and products share an L0C half as large."""
    for call in (
        make_call(op, tokens=100, value_heads=3, seed=53),
        make_call(op, tokens=70, key_dim=64, value_dim=64, normalise=True, state_v_first=False, seed=54),
    ):
        here, there = run_prefill(op, call), run_prefill(op, call, chip=chip)
        assert torch.equal(here.o, there.o)
        assert torch.equal(here.final_state, there.final_state)


@pytest.mark.parametrize("op", OPS)
def test_chunk_head_chunk_on_a_310b(op: str) -> None:
    """Not planned for a single core, but the launches exist there as well."""
    call = make_call(op, tokens=130, normalise=True, seed=43)
    launches = chunk_head_chunk_launches([Task(0, 130, 0, 0, 0, 128, 0)], 2, 3)
    there = run_prefill(op, call, chip="310b1", launches=launches)
    assert torch.equal(there.o, run_prefill(op, call).o)


@pytest.mark.parametrize("op", OPS)
def test_kernels_of_another_family_are_refused(op: str) -> None:
    """A 910B has neither of the two ways; the message names the chips there are kernels for."""
    with pytest.raises(RuntimeError, match="no prefill kernels for 910b4"):
        run_prefill(op, make_call(op, tokens=1), chip="910b4")


def test_a_prefill_of_1024_tokens_and_16_heads_is_simulated_in_a_minute() -> None:
    """Two cores were promised 60 s; on idle ones it takes about 1 s for GDN and 2 s for KDA."""
    for op in OPS:
        call = make_call(op, tokens=1024, key_heads=16, value_heads=16, seed=41)
        begin = time.monotonic()
        run_prefill(op, call, threads=2)
        assert time.monotonic() - begin < 60


def test_tasks_cover_every_head_and_column_once() -> None:
    """Whole heads in full rounds, then as many heads cut in two as cores would idle."""
    for heads, cores in ((1, 10), (5, 10), (16, 10), (32, 10), (10, 10), (3, 1)):
        blocks = make_tasks([0, 100, 130], heads, 128, cores)
        assert len(blocks) <= cores
        seen = sorted(
            (t.sequence, t.head, c)
            for b in blocks
            for t in b
            for c in range(t.column_begin, t.column_begin + t.column_count)
        )
        assert seen == [(s, h, c) for s in range(2) for h in range(heads) for c in range(128)]
