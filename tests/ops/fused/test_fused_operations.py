"""The fused operations against their FP64 definitions; test_fused_interpreted runs them again as Triton kernels."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.ops.fused import (
    activation_and_mul,
    add_rms_norm,
    confidence_argmax,
    norm_chain,
    norm_rope_heads,
    probabilities,
    rms_norm,
    softmax_topk,
    token_statistics,
)
from vllm_ext.ops.fused import reference as exact
from vllm_ext.ops.moe.activation import pointwise

# Rounding to BF16 errs by 2^-9 of the value; Triton's interpreter cuts off instead of rounding, and errs by 2^-8.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ONE_ROUNDING = 2**-7 if INTERPRETED else 2**-8


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, roundings: int = 1) -> None:
    error = (found.double() - wanted).abs()
    bound = roundings * ONE_ROUNDING * wanted.abs().clamp(min=2**-6)
    assert torch.isfinite(found).all()
    assert (error <= bound).all(), float((error / bound).max())


@pytest.mark.parametrize("columns", [1, 8, 96, 704])
@pytest.mark.parametrize("form", ["plain", "gemma", "llama", "no weight"])
def test_rms_norm_equals_its_definition(form: str, columns: int) -> None:
    """Gemma adds one to the weight, Llama rounds before it multiplies; Gemma 4's values have no weight at all."""
    x, weight = draw(2, 5, columns), draw(columns, seed=1)
    offset = 1.0 if form == "gemma" else 0.0
    given_weight = None if form == "no weight" else weight
    found = rms_norm(x, given_weight, 1e-6, weight_offset=offset, round_before_weight=form == "llama")
    close(found, exact.rms_norm(x, given_weight, 1e-6, offset), 2)


def test_rms_norm_returns_the_rounded_sum_with_a_residual() -> None:
    """What the next residual connection adds to is the sum as 16 bits hold it, so the norm must see that too."""
    x, residual, weight = draw(7, 64), draw(7, 64, seed=1, scale=30), draw(64, seed=2)
    found, total = add_rms_norm(x, residual, weight)
    torch.testing.assert_close(total, x + residual, rtol=2**-7 if INTERPRETED else 0, atol=0)
    close(found, exact.rms_norm(total, weight, 1e-6))


def test_rms_norm_reads_heads_out_of_a_wider_product() -> None:
    """q, k and v of one product are slices of its rows: copying them first would cost what the fusion saves."""
    wide = draw(2, 3, 10, 32)
    heads = wide[:, :, 4:8]
    close(rms_norm(heads, None), exact.rms_norm(heads, None, 1e-6))


def test_rms_norm_refuses_a_weight_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"weight must be \[64\]"):
        rms_norm(draw(2, 64), draw(32))


@pytest.mark.parametrize("branches", [False, True])
def test_norm_chain_equals_the_modules_one_after_another(branches: bool) -> None:
    """Roundings between the steps are part of what a layer computes; left out, outputs drift from the stock model's."""
    x, residual, weight = draw(6, 96), draw(6, 96, seed=1), draw(96, seed=2)
    other = (draw(96, seed=3), draw(6, 96, seed=4), draw(96, seed=5)) if branches else None
    scale = torch.tensor([0.75], dtype=torch.bfloat16)
    nexts = [draw(96, seed=6), None]
    h, first, second = norm_chain(x, residual, weight, nexts, branches=other, scale=scale)
    value = x.double()
    if other is not None:
        value = exact.rms_norm(x, other[0], 1e-6) + exact.rms_norm(other[1], other[2], 1e-6)
    wanted = (residual.double() + exact.rms_norm(value, weight, 1e-6)) * 0.75
    assert float((h.double() - wanted).abs().max()) < 4 * ONE_ROUNDING * float(wanted.abs().max())
    close(first, exact.rms_norm(h, nexts[0], 1e-6))
    close(second, exact.rms_norm(h, None, 1e-6))


@pytest.mark.parametrize("values", [2, 0])
def test_heads_are_normed_rotated_and_placed(values: int) -> None:
    """Without a projection of their own, values are the keys before norm and rotation (Gemma 4's full attention)."""
    batch, length, heads, kv, dim = 2, 3, 4, 2, 16
    qkv = draw(batch * length, (heads + kv + values) * dim)
    q_weight, k_weight = draw(dim, seed=1), draw(dim, seed=2)
    cos, sin = draw(1, length, dim, seed=3), draw(1, length, dim, seed=4)
    query = torch.full((batch, heads, length, dim), float("nan"), dtype=torch.bfloat16)
    key, value = (torch.full((batch, kv, 8, dim), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    norm_rope_heads(qkv, query, key, value, q_weight, k_weight, cos, sin)
    every = qkv.view(batch, length, -1, dim)
    k = every[:, :, heads : heads + kv]
    v = every[:, :, heads + kv :] if values else k
    angles = cos[:, :, None], sin[:, :, None]
    wanted = [
        exact.rotate(exact.rms_norm(every[:, :, :heads], q_weight, 1e-6), *angles),
        exact.rotate(exact.rms_norm(k, k_weight, 1e-6), *angles),
        exact.rms_norm(v, None, 1e-6),
    ]
    for found, right in zip((query, key[:, :, :length], value[:, :, :length]), wanted, strict=True):
        # A difference of two rounded products: the error scales with the terms, not with what is left of them.
        assert float((found.double() - right.transpose(1, 2)).abs().max()) < 4 * ONE_ROUNDING * float(right.abs().max())
    assert key[:, :, length:].isnan().all(), "positions past the canvas belong to the cache"


@settings(max_examples=12, deadline=None)
@given(
    experts=st.integers(2, 40),
    top_k=st.integers(1, 8),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 99),
    scaled=st.booleans(),
)
def test_router_picks_the_best_and_the_first_of_equals(
    experts: int, top_k: int, tokens: int, seed: int, scaled: bool
) -> None:
    top_k = min(top_k, experts)
    logits = draw(tokens, experts, seed=seed, dtype=torch.float32).mul(4).round().div(2)
    scale = draw(experts, seed=seed + 1).abs() if scaled else None
    weights, ids = softmax_topk(logits, top_k, scale)
    order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    assert torch.equal(ids.long(), order.indices[:, :top_k])
    wanted = torch.softmax(order.values[:, :top_k], -1) * (1 if scale is None else scale.double()[ids.long()])
    torch.testing.assert_close(weights.double(), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 31), (2, 5000), (4, 8192 + 7)])
def test_confidence_argmax_and_entropy(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Indices exactly, the lowest of a tie; confidence within 1e-3 relative is what the published kernel promised."""
    logits = draw(rows, vocabulary, dtype=dtype, scale=3)
    confidence, index, entropy = confidence_argmax(logits)
    wanted = exact.statistics(logits)
    assert torch.equal(index, wanted[1])
    torch.testing.assert_close(confidence.double(), wanted[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy.double(), wanted[2], rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lowest_index_and_forbidden_words_never_come() -> None:
    """BF16 logits of a large vocabulary tie all the time; -inf marks words a processor has ruled out."""
    logits = torch.full((3, 6001), -2.0)
    # 2065 meets 17 in one lane of a program, 4097 and 5999 in another program.
    logits[0, [5999, 4097, 2065, 17]] = 3.5
    logits[1, :4500] = float("-inf")
    logits[2] = float("-inf")
    logits[2, 77] = 0.0
    confidence, index, entropy = confidence_argmax(logits)
    assert index.tolist() == [17, 4500, 77]
    wanted = exact.statistics(logits)
    torch.testing.assert_close(entropy.double(), wanted[2], rtol=1e-5, atol=1e-5)
    assert confidence[2] == 1.0


def test_a_row_with_nan_says_so() -> None:
    logits = draw(2, 300, dtype=torch.float32)
    logits[1, 5] = float("nan")
    confidence, _, entropy = confidence_argmax(logits)
    assert confidence.isnan().tolist() == [False, True]
    assert entropy.isnan().tolist() == [False, True]


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"softcap": 0.0}])
def test_numbers_that_would_make_every_statistic_nan_are_refused(wrong: dict[str, float]) -> None:
    """Temperature 0, which some samplers take for argmax, gave rows of NaN."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be positive"):
        token_statistics(torch.zeros(2, 5), **wrong)


def test_sampling_draws_what_multinomial_would() -> None:
    """The same seed must give the stock sampler's tokens, or an A/B compares two different generations."""
    logits = draw(5, 4099, dtype=torch.float32, scale=4)
    softcap, temperature = 30.0, 0.6
    processed = torch.full((5, 4099), float("nan"), dtype=torch.bfloat16)
    z = (torch.tanh(logits / softcap) * softcap) / temperature
    torch.manual_seed(11)
    wanted = torch.multinomial(torch.softmax(z, -1), 1)[:, 0]
    torch.manual_seed(11)
    noise = torch.empty_like(logits).exponential_(1)
    found = token_statistics(logits, temperature=temperature, softcap=softcap, noise=noise, processed=processed)
    assert torch.equal(found.sample, wanted)
    right = exact.statistics(exact.process_logits(logits, softcap, temperature))
    assert torch.equal(found.argmax, right[1])
    torch.testing.assert_close(found.entropy.double(), right[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(processed.float(), z.bfloat16().float(), rtol=2**-7, atol=1e-6)
    sums = torch.logsumexp(processed.double(), -1)
    torch.testing.assert_close(found.log_sum.double(), sums, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_and_mul_rounds_like_two_modules(activation: str) -> None:
    gate_up = draw(3, 2 * 70)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = pointwise(gate, activation) * up
    found = activation_and_mul(gate_up, activation).double()
    assert float((found - wanted).abs().max()) < 2 * ONE_ROUNDING * float(wanted.abs().max())


def test_probabilities_come_back_from_logits_and_their_sum() -> None:
    """The first step of a canvas is conditioned on nothing: a row whose sum is infinite has no probabilities."""
    logits = draw(3, 5000, scale=3)
    log_sum = torch.logsumexp(logits.float(), -1)
    log_sum[1] = float("inf")
    out = torch.full((3, 5000), float("nan"), dtype=torch.bfloat16)
    probabilities(logits, log_sum, out)
    assert not out[1].any()
    close(out[[0, 2]], torch.softmax(logits[[0, 2]].double(), -1))
