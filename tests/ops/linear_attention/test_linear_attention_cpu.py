"""The chunked torch backend against the FP64 recurrence.

Tolerances are relative errors in the Frobenius norm. FP64 inputs compute in FP64, so 1e-12 leaves no room for a wrong
formula; FP32 and 16-bit inputs accumulate in FP32 (1e-5 is about 100 roundings), and a 16-bit output adds its own
unit roundoff, 2^-8 (BF16) or 2^-11 (FP16, doubled here: its small outputs are subnormal).
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda, cpu
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
OUTPUT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-8}
STATE_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


def offsets(lengths, dtype=torch.int64):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def check_against_reference(error, op, operands, dtype, **options):
    o, state = FUNCTIONS[op](**operands, output_final_state=True, backend="cpu", **options)
    wide = {name: x.double() for name, x in operands.items()}
    expected_o, expected_state = FUNCTIONS[op](**wide, output_final_state=True, backend="reference", **options)
    assert o.dtype == dtype
    assert o.shape == operands["v"].shape
    assert error(o, expected_o) < OUTPUT_TOLERANCE[dtype]
    assert error(state, expected_state) < STATE_TOLERANCE[dtype]
    return o, state


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(["gdn", "kda"]),
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 130]), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 8)]),
    dims=st.sampled_from([(16, 16), (8, 24), (33, 5), (64, 32)]),
    dtype=st.sampled_from(list(OUTPUT_TOLERANCE)),
    packed=st.booleans(),
    with_state=st.booleans(),
    state_v_first=st.booleans(),
    normalise=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_the_recurrence_for_any_shape(
    error, op, lengths, heads, dims, dtype, packed, with_state, state_v_first, normalise, seed
):
    batch, num_tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    operands = sample_operands(op, batch, num_tokens, *heads, *dims, dtype=dtype, normalised=not normalise, seed=seed)
    state = sample_state(len(lengths), heads[1], *dims, seed=seed)
    state = (state.transpose(-1, -2) if state_v_first else state) if with_state else None
    check_against_reference(
        error,
        op,
        operands,
        dtype,
        initial_state=state,
        cu_seqlens=offsets(lengths, torch.int32) if packed else None,
        use_qk_l2norm_in_kernel=normalise,
        state_v_first=state_v_first,
    )


@pytest.mark.parametrize(("heads", "num_tokens"), [((1, 2), 200), ((16, 32), 200), ((4, 16), 256)])
def test_head_size_128_with_grouped_value_heads(error, op, heads, num_tokens):
    operands = sample_operands(op, 1, num_tokens, *heads, 128, 128)
    check_against_reference(error, op, operands, torch.bfloat16, initial_state=sample_state(1, heads[1], 128, 128))


def test_workspace_limit_changes_how_the_work_is_cut_and_nothing_else(error, op, monkeypatch):
    """Many sequences and long ones are computed in groups and segments; forced here to be many of each."""
    lengths = [300, 0, 64, 513, 1, 129, 64, 2]
    operands = sample_operands(op, 1, sum(lengths), 1, 2, 16, 16, dtype=torch.float64)
    state = sample_state(len(lengths), 2, 16, 16)
    for limit in (1, 4, 6, 10_000):
        monkeypatch.setitem(cpu._CHUNK_HEADS, "cpu", limit)
        check_against_reference(error, op, operands, torch.float64, initial_state=state, cu_seqlens=offsets(lengths))


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 33, 63])
def test_prompt_shorter_than_a_chunk(error, op, num_tokens):
    operands = sample_operands(op, 2, num_tokens, 2, 2, 32, 32, dtype=torch.float32)
    check_against_reference(error, op, operands, torch.float32)


def test_state_at_a_ragged_end_is_after_the_last_token(error, op, function):
    """A kernel that stops at the last whole chunk returns the state of token 128 for 130 tokens."""
    operands = sample_operands(op, 1, 130, 1, 1, 16, 16, dtype=torch.float32)
    _, state = check_against_reference(error, op, operands, torch.float32)
    _, at_128 = function(**{name: x[:, :128] for name, x in operands.items()}, output_final_state=True)
    assert error(state, at_128) > 1e-2


@pytest.mark.parametrize("cu_seqlens", [[0, 0, 64], [0, 64, 64, 130], [0, 0, 0], [0]])
def test_empty_sequences_keep_their_initial_state(op, function, cu_seqlens):
    operands = sample_operands(op, 1, cu_seqlens[-1], 1, 2, 16, 8)
    initial = sample_state(len(cu_seqlens) - 1, 2, 16, 8)
    o, state = function(
        **operands, initial_state=initial, output_final_state=True, cu_seqlens=torch.tensor(cu_seqlens), backend="cpu"
    )
    assert bool(torch.isfinite(o).all())
    for index, (begin, end) in enumerate(pairwise(cu_seqlens)):
        assert torch.equal(state[index], initial[index]) == (begin == end)


@pytest.mark.parametrize("cuts", [[64], [1], [100], [63, 65, 128]])
def test_prompt_in_several_prefills_equals_one_shot(error, op, function, cuts):
    """Carrying the state into the second chunk of a prompt is where KDA serving broke elsewhere."""
    operands = sample_operands(op, 1, 200, 2, 4, 32, 32, dtype=torch.float32)
    expected, expected_state = function(**operands, output_final_state=True, backend="cpu")
    pieces, state = [], None
    for begin, end in zip([0, *cuts], [*cuts, 200], strict=True):
        part = {name: x[:, begin:end] for name, x in operands.items()}
        o, state = function(**part, initial_state=state, output_final_state=True, backend="cpu")
        pieces.append(o)
    assert error(torch.cat(pieces, dim=1), expected) < 1e-6
    assert error(state, expected_state) < 1e-6


def test_long_prompt_does_not_drift_when_cut(error, op, function):
    operands = sample_operands(op, 1, 32768, 1, 1, 16, 16, dtype=torch.float32)
    expected, expected_state = function(**operands, output_final_state=True, backend="cpu")
    pieces, state = [], None
    for begin in range(0, 32768, 8192):
        part = {name: x[:, begin : begin + 8192] for name, x in operands.items()}
        o, state = function(**part, initial_state=state, output_final_state=True, backend="cpu")
        pieces.append(o)
    assert error(torch.cat(pieces, dim=1), expected) < 1e-6
    assert error(state, expected_state) < 1e-6


def test_mixed_batch_equals_each_sequence_alone(error, op, function):
    """Three decodes and two prefills, one of them a continuation, packed into one call."""
    lengths = [1, 1, 1, 70, 129]
    operands = sample_operands(op, 1, sum(lengths), 2, 4, 32, 32, dtype=torch.float32)
    initial = sample_state(5, 4, 32, 32)
    initial[3] = 0
    bounds = offsets(lengths)
    o, state = function(**operands, initial_state=initial, output_final_state=True, cu_seqlens=bounds, backend="cpu")
    for index in range(5):
        rows = slice(int(bounds[index]), int(bounds[index + 1]))
        alone = {name: x[:, rows] for name, x in operands.items()}
        expected, expected_state = function(
            **alone, initial_state=initial[index : index + 1], output_final_state=True, backend="cpu"
        )
        assert error(o[:, rows], expected) < 1e-6
        assert error(state[index : index + 1], expected_state) < 1e-6


@pytest.mark.parametrize("decay", [-316.0, -1e30, float("-inf")])
def test_extreme_decays_stay_finite_and_right(error, op, decay):
    """exp(-G) of a chunk of -316 is e^20224: a kernel that forms it returns inf or NaN."""
    operands = sample_operands(op, 1, 150, 1, 2, 16, 16, dtype=torch.float32)
    operands["g"][:, ::3] = decay
    operands["g"][:, 70:100] = decay
    check_against_reference(error, op, operands, torch.float32, initial_state=sample_state(1, 2, 16, 16))


def test_small_decays_survive_beside_extreme_ones(error, op):
    """Cumulated in FP32, -0.001 after sixty tokens of -316 is lost to rounding (the sum's spacing is 0.002)."""
    operands = sample_operands(op, 1, 64, 1, 1, 16, 16, dtype=torch.float32)
    operands["g"][:, :48] = -316.0
    operands["g"][:, 48:] = -0.001
    check_against_reference(error, op, operands, torch.float32)


def test_nan_in_one_sequence_stays_there(op, function):
    operands = sample_operands(op, 1, 130, 1, 2, 16, 16)
    operands["v"][:, 3] = float("nan")
    o, state = function(**operands, output_final_state=True, cu_seqlens=torch.tensor([0, 10, 130]), backend="cpu")
    assert bool(o[:, 3:10].isnan().all())
    assert bool(state[0].isnan().any())
    assert bool(torch.isfinite(o[:, 10:]).all())
    assert bool(torch.isfinite(state[1]).all())


def test_operands_are_read_only_and_may_be_strided(op, function):
    operands = sample_operands(op, 1, 100, 2, 4, 16, 16, dtype=torch.float64)
    initial = sample_state(1, 4, 16, 16).double()
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in operands.items()}
    kept = {name: x.clone() for name, x in strided.items()}
    o, state = function(**strided, initial_state=initial, output_final_state=True, backend="cpu")
    expected, expected_state = function(**operands, initial_state=initial, output_final_state=True, backend="cpu")
    assert torch.equal(o, expected)
    assert torch.equal(state, expected_state)
    assert all(torch.equal(strided[name], kept[name]) for name in kept)
    assert torch.equal(initial, sample_state(1, 4, 16, 16).double())


def test_same_input_gives_the_same_bits(op, function):
    operands = sample_operands(op, 2, 150, 2, 4, 32, 32)
    runs = [function(**operands, output_final_state=True, backend="cpu") for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
