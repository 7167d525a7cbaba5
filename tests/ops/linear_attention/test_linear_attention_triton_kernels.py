"""The Triton kernels against the FP64 recurrence, on small shapes through Triton's interpreter.

Triton decides at its import whether it interprets, so these tests run in a process of their own, which
test_linear_attention_triton_interpreted.py starts. The interpreter has no BF16 products; BF16, and sizes as they are
served, are benchmarks/gpu_checks/linear_attention_checks.py's to check. FP16 operands are rounded to 2^-11 before
each of about six products: errors measured are 3e-4 to 6e-4.
"""

from __future__ import annotations

import importlib
import os
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.problem import Call
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_linear_attention_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

PACKAGE = "vllm_ext.ops.linear_attention.triton"
FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
TOLERANCE = 1.5e-3


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.backend")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that the backend allocates starts as NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def reference(op: str, operands: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = {name: x.double() for name, x in operands.items()}
    o, state = FUNCTIONS[op](**wide, output_final_state=True, backend="cpu", **options)
    assert state is not None
    return o, state


def check(
    error: Any, op: str, operands: dict[str, torch.Tensor], tolerance: float = TOLERANCE, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    o, state = FUNCTIONS[op](**operands, output_final_state=True, backend="triton", **options)
    expected, expected_state = reference(op, operands, **options)
    assert o.dtype == operands["v"].dtype
    assert state is not None
    assert state.dtype == torch.float32
    assert error(o, expected) < tolerance
    assert error(state, expected_state) < tolerance
    return o, state


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    op=st.sampled_from(["gdn", "kda"]),
    lengths=st.lists(st.sampled_from([0, 1, 15, 63, 64, 65, 130]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4)]),
    dims=st.sampled_from([(16, 16), (32, 16), (16, 32), (64, 64), (24, 40), (17, 1)]),
    packed=st.booleans(),
    with_state=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
    state_v_first=st.booleans(),
    normalise=st.booleans(),
    seed=st.integers(0, 2**16),
)
# Padded, whatever is drawn: as a batch, without a state, with one in 16 bits, without a token.
@example(
    op="kda", lengths=[65, 65], heads=(1, 2), dims=(17, 1), packed=False,
    with_state=torch.bfloat16, state_v_first=True, normalise=True, seed=0,
)  # fmt: skip
@example(
    op="gdn", lengths=[70, 70], heads=(2, 4), dims=(24, 40), packed=False,
    with_state=None, state_v_first=False, normalise=False, seed=0,
)  # fmt: skip
@example(
    op="gdn", lengths=[0, 0], heads=(1, 2), dims=(255, 129), packed=True,
    with_state=torch.float16, state_v_first=False, normalise=True, seed=0,
)  # fmt: skip
def test_equals_the_recurrence_for_any_shape(
    error: Any, op, lengths, heads, dims, packed, with_state, state_v_first, normalise, seed
):
    batch, num_tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    operands = sample_operands(
        op, batch, num_tokens, *heads, *dims, dtype=torch.float16, normalised=not normalise, seed=seed
    )
    state = None
    if with_state is not None:
        state = sample_state(len(lengths), heads[1], *dims, seed=seed)
        state = (state.transpose(-1, -2) if state_v_first else state).to(with_state)
    check(
        error,
        op,
        operands,
        initial_state=state,
        cu_seqlens=offsets(lengths) if packed else None,
        use_qk_l2norm_in_kernel=normalise,
        state_v_first=state_v_first,
    )


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_segments_change_nothing(error: Any, op: str, backend: ModuleType, with_state: bool, state_v_first: bool):
    """Sequences cut into segments of a few chunks; the initial state must be counted once, by the first."""
    plan = importlib.import_module(f"{PACKAGE}.plan")
    lengths = [200, 0, 64, 5]
    x = sample_operands(op, 1, sum(lengths), 1, 2, 16, 32, dtype=torch.float16)
    x["g"] *= 0.02  # states must still matter a segment later
    state = sample_state(4, 2, 16, 32)
    state = (state.transpose(-1, -2).contiguous() if state_v_first else state) if with_state else None
    options = {"initial_state": state, "cu_seqlens": offsets(lengths), "state_v_first": state_v_first}
    expected, expected_state = reference(op, x, **options)
    for segment_chunks in (1, 3) if with_state else (2,):
        mapping = plan.Mapping(plan.SEGMENTS, 16, segment_chunks)
        call = Call(x["q"], x["k"], x["v"], x["g"], x["beta"], 0.25, state, True, options["cu_seqlens"], False,
                    state_v_first)  # fmt: skip
        o, final = backend.run(call, op, mapping)
        assert error(o, expected) < TOLERANCE
        assert error(final, expected_state) < TOLERANCE


def test_segments_of_a_batch_that_only_just_need_composing(error: Any, op: str, backend: ModuleType):
    """Three segments are the fewest that have a state to compose; sequences of equal length have no offsets."""
    plan = importlib.import_module(f"{PACKAGE}.plan")
    x = sample_operands(op, 2, 150, 1, 2, 16, 16, dtype=torch.float16)
    x["g"] *= 0.02
    state = sample_state(2, 2, 16, 16)
    expected, expected_state = reference(op, x, initial_state=state)
    call = Call(*x.values(), 0.25, state, True, None, False, False)
    o, final = backend.run(call, op, plan.Mapping(plan.SEGMENTS, 16, 1))
    assert error(o, expected) < TOLERANCE
    assert error(final, expected_state) < TOLERANCE


def test_long_segments_of_states_that_last_are_as_exact(error: Any, op: str, backend: ModuleType):
    """Sampled gates wipe a state every 256 tokens and steps of 1/2 overwrite it: of a transition over 16 chunks nothing
    would be left to be wrong.
    """
    plan = importlib.import_module(f"{PACKAGE}.plan")
    x = sample_operands(op, 1, 64 * 36, 1, 1, 16, 16, dtype=torch.float16)
    x["g"] = 1e-4 * x["g"].clamp(min=-2)
    x["beta"] *= 0.02
    state = sample_state(1, 1, 16, 16)
    expected, expected_state = reference(op, x, initial_state=state)
    _, forgotten = reference(op, x)
    assert error(forgotten, expected_state) > 0.1
    call = Call(*x.values(), 0.25, state, True, None, False, False)
    o, final = backend.run(call, op, plan.Mapping(plan.SEGMENTS, 16, 16))
    assert error(o, expected) < TOLERANCE
    assert error(final, expected_state) < TOLERANCE


def test_more_sequences_than_are_searched_at_once(error: Any, op: str):
    """A program finds its sequence among 128 offsets at a time; most here are empty. Offsets may be strided."""
    lengths = [0] * 130 + [3, 0, 66] + [0] * 3
    operands = sample_operands(op, 1, sum(lengths), 1, 1, 16, 16, dtype=torch.float16)
    bounds = offsets(lengths).repeat_interleave(2)[::2]
    assert not bounds.is_contiguous()
    check(error, op, operands, initial_state=sample_state(len(lengths), 1, 16, 16), cu_seqlens=bounds)


@pytest.mark.parametrize("state_size", [0.0, 5e4])
def test_what_is_past_the_range_of_half_precision_stays_finite(op: str, function: Any, state_size: float):
    """The inverse, and what it is multiplied by, are in FP16: infinities would become NaN in all that follows.

    Keys of length 300 give an inverse with an entry of -9e4; keys of 0.25 everywhere read 2e5 from states of 5e4.
    """
    operands = sample_operands(op, 1, 2, 1, 1, 16, 16, dtype=torch.float16)
    operands["k"][:] = 0.25 if state_size else 75.0
    operands["beta"][:] = 1
    operands["q"] *= 1e-2
    operands["v"] *= 1e-3
    operands["g"][:] = 0
    initial = torch.full((1, 1, 16, 16), state_size)
    o, state = function(**operands, initial_state=initial, output_final_state=True, backend="triton")
    assert bool(torch.isfinite(o).all())
    assert bool(torch.isfinite(state).all())


def test_keys_and_queries_of_zeros_stay_zeros_when_normalised(error: Any, op: str):
    """Padding: 1 / sqrt(0) times 0 would be NaN."""
    operands = sample_operands(op, 1, 70, 1, 2, 16, 16, dtype=torch.float16, normalised=False)
    operands["k"][:, 5:20] = 0
    operands["q"][:, 15:40] = 0
    check(error, op, operands, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize("num_tokens", [1, 31, 63])
def test_prompt_shorter_than_a_chunk(error: Any, op: str, num_tokens: int):
    check(error, op, sample_operands(op, 2, num_tokens, 1, 1, 16, 16, dtype=torch.float16))


def test_state_at_a_ragged_end_is_after_the_last_token(error: Any, op: str, function: Any):
    """A kernel that stops at the last whole chunk returns the state of token 128 for 130 tokens."""
    operands = sample_operands(op, 1, 130, 1, 1, 16, 16, dtype=torch.float16)
    _, state = check(error, op, operands)
    short = {name: x[:, :128] for name, x in operands.items()}
    _, at_128 = function(**short, output_final_state=True, backend="triton")
    assert error(state, at_128) > 1e-2


@pytest.mark.parametrize("cu_seqlens", [[0, 0, 64], [0, 64, 64, 130], [0, 0, 0], [0]])
def test_empty_sequences_keep_their_initial_state(op: str, function: Any, cu_seqlens: list[int]):
    operands = sample_operands(op, 1, cu_seqlens[-1], 1, 2, 16, 16, dtype=torch.float16)
    initial = sample_state(len(cu_seqlens) - 1, 2, 16, 16)
    bounds = torch.tensor(cu_seqlens)
    o, state = function(**operands, initial_state=initial, output_final_state=True, cu_seqlens=bounds, backend="triton")
    assert bool(torch.isfinite(o).all())
    for index, (begin, end) in enumerate(pairwise(cu_seqlens)):
        assert torch.equal(state[index], initial[index]) == (begin == end)


@pytest.mark.parametrize("decay", [-316.0, -1e30, float("-inf")])
def test_extreme_decays_stay_finite_and_right(error: Any, op: str, decay: float):
    """exp(-G) of a chunk of -316 is e^20224: a kernel that forms it returns inf or NaN."""
    operands = sample_operands(op, 1, 100, 1, 2, 16, 16, dtype=torch.float16)
    operands["g"][:, ::3] = decay
    operands["g"][:, 70:90] = decay
    check(error, op, operands, initial_state=sample_state(1, 2, 16, 16))


def test_small_decays_survive_beside_extreme_ones(error: Any, op: str):
    """Cumulated as they come, -0.001 after sixty tokens of -316 is lost to rounding."""
    operands = sample_operands(op, 1, 64, 1, 1, 16, 16, dtype=torch.float16)
    operands["g"][:, :48] = -316.0
    operands["g"][:, 48:] = -0.001
    check(error, op, operands)


def test_repeated_keys_are_inverted_accurately(error: Any, op: str):
    """A prompt of one token repeated gives equal keys; powers of the chunk's matrix then have entries of 10^17.

    One key takes up the roundings of every token's value, up to 25, while all but the last of these are overwritten:
    an exact inverse still leaves an error of 2e-2 in FP16.
    """
    operands = sample_operands(op, 1, 128, 1, 1, 16, 16, dtype=torch.float16)
    operands["k"] = operands["k"][:, :1].expand(-1, 128, -1, -1).contiguous()
    operands["beta"][:] = 1
    operands["g"][:] = -1e-3
    check(error, op, operands, tolerance=6e-2)


def test_nan_in_one_sequence_stays_there(op: str, function: Any):
    """A chunk's rows past its sequence's end are the next sequence's; 0 times their NaN would be NaN."""
    operands = sample_operands(op, 1, 130, 1, 2, 16, 16, dtype=torch.float16)
    for name in ("q", "k", "v", "g", "beta"):
        operands[name][:, 13:] = float("nan")
    o, state = function(**operands, output_final_state=True, cu_seqlens=torch.tensor([0, 13, 130]), backend="triton")
    assert bool(torch.isfinite(o[:, :13]).all())
    assert bool(torch.isfinite(state[0]).all())
    assert bool(state[1].isnan().any())


def test_operands_are_read_only_and_may_be_strided(op: str, function: Any):
    operands = sample_operands(op, 1, 70, 2, 4, 16, 16, dtype=torch.float16)
    initial = sample_state(1, 4, 16, 16)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in operands.items()}
    o, state = function(**strided, initial_state=initial, output_final_state=True, backend="triton")
    expected, expected_state = function(**operands, initial_state=initial, output_final_state=True, backend="triton")
    assert torch.equal(o, expected)
    assert torch.equal(state, expected_state)
    assert all(torch.equal(strided[name], operands[name]) for name in operands)
    assert torch.equal(initial, sample_state(1, 4, 16, 16))


def test_what_the_kernels_do_not_take_is_named(op: str, function: Any):
    wide = sample_operands(op, 1, 20, 1, 1, 16, 16, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"triton: .*torch\.float32"):
        function(**wide, backend="triton")
    brain = sample_operands(op, 1, 20, 1, 1, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"interpreter .*bfloat16.*float16"):
        function(**brain, backend="triton")
    for what, dims in (("K", (264, 16)), ("V", (16, 264))):
        large = sample_operands(op, 1, 20, 1, 1, *dims, dtype=torch.float16)
        with pytest.raises(RuntimeError, match=rf"{what}=264.*up to 256"):
            function(**large, backend="triton")


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("dims", [(96, 192), (24, 16), (16, 40)])
def test_heads_of_a_size_without_tiles_are_right_and_keep_their_size(
    error: Any, op: str, function: Any, dims: tuple[int, int], state_v_first: bool
):
    """OLMo-hybrid's keys have 96 channels and its values 192; its steps go up to 2."""
    operands = sample_operands(op, 1, 130, 1, 2, *dims, dtype=torch.float16, normalised=False)
    operands["beta"] = 2 * operands["beta"]
    state = sample_state(2, 2, *dims)
    options = {
        "initial_state": state.transpose(-1, -2) if state_v_first else state,
        "cu_seqlens": offsets([65, 65]),
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": state_v_first,
    }
    o, final = check(error, op, operands, **options)
    assert o.shape == operands["v"].shape
    assert final.shape == options["initial_state"].shape
    assert o.is_contiguous()
    assert final.is_contiguous()
    assert function(**operands, **options, backend="triton")[1] is None
