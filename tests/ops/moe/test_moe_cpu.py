"""The CPU experts, with our kernel and with PyTorch's, against the FP64 reference and against themselves."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_samples import TOLERANCE, Layer, assert_close, make_layer

from vllm_ext.ops.moe import PreparedExperts, cpu_native
from vllm_ext.ops.moe.experts import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=["native", "pytorch"])
def kernel(request, monkeypatch) -> str:
    """Both kernels, where this machine has ours."""
    if request.param == "pytorch":
        monkeypatch.setattr(cpu_native, "load", lambda: (None, "left out by the test"))
    elif cpu_native.load()[0] is None:
        pytest.skip(f"our kernel: {cpu_native.load()[1]}")
    return request.param


@pytest.fixture(params=["grouped", "joined"])
def hint(request) -> dict[str, int]:
    """Options of prepare_experts that lead to either layout."""
    return {} if request.param == "grouped" else {"top_k": 8}


@st.composite
def cases(draw):
    gated = draw(st.booleans())
    return (
        {
            "experts": draw(st.integers(1, 6)),
            "hidden": draw(st.integers(8, 200)),
            "intermediate": draw(st.integers(8, 150)),
            "top_k": draw(st.integers(1, 4)),
            "tokens": draw(st.sampled_from([0, 1, 2, 7, 33, 90])),
            "groups": (draw(st.sampled_from([8, 16, 32, 40, 64, 128])), draw(st.sampled_from([8, 24, 32, 64, 256]))),
            "dtype": draw(st.sampled_from(DTYPES)),
            "gated": gated,
            "zero_point": draw(st.sampled_from(["float", "int", None])),
            "bias": draw(st.booleans()),
            "distinct": False,
            "seed": draw(st.integers(0, 1000)),
        },
        {
            "activation": draw(st.sampled_from(ACTIVATIONS if gated else ACTIVATIONS[:-1])),
            "apply_router_weight_on_input": draw(st.booleans()),
            "batch_invariant": draw(st.booleans()),
        },
        draw(st.sampled_from([None, 8])),
    )


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_equals_the_reference(native: bool, case) -> None:
    shape, options, top_k = case
    layer = make_layer(**shape)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(cpu_native, "load", lambda: (None, "left out by the test"))
        got = layer.run(layer.prepare(backend="cpu", top_k=top_k), **options)
    assert got.dtype == shape["dtype"]
    assert_close("cpu", got, layer.expected(**options), TOLERANCE[shape["dtype"]])
    unrouted = ((layer.ids < 0) | (layer.ids >= shape["experts"])).all(1)
    assert got[unrouted].count_nonzero() == 0


@pytest.mark.parametrize("tokens", [1, 3, 6, 7, 12, 13, 64, 65, 191, 193])
def test_real_sizes_equal_the_reference(kernel: str, hint, tokens: int, monkeypatch) -> None:
    """SmolLM2's experts, outputs poisoned first. Our kernel takes 192 rows at once; PyTorch's path changes at 64."""
    layer = make_layer(tokens=tokens, top_k=8, groups=(32, 128))
    expected = layer.expected()
    experts = layer.prepare(**hint)
    empty = torch.empty

    def poisoned(*shape, **options):
        out = empty(*shape, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    assert_close("cpu", layer.run(experts), expected, TOLERANCE[torch.bfloat16])


def test_long_prefill_is_cut_into_chunks_without_a_seam(kernel: str, monkeypatch) -> None:
    from vllm_ext.ops.moe import cpu

    layer = make_layer(hidden=64, intermediate=32, tokens=150, distinct=False)
    experts = layer.prepare()
    whole = layer.run(experts, batch_invariant=True)
    monkeypatch.setattr(cpu, "_TOKENS_AT_ONCE", 40)
    assert torch.equal(layer.run(experts, batch_invariant=True), whole)


def _padded(layer: Layer, ids: torch.Tensor) -> Layer:
    """The layer with other ids; what the padding rows hold besides is garbage."""
    x = layer.x.clone()
    x[(ids < 0).all(1)] = float("nan")
    weights = layer.weights.clone()
    weights[ids < 0] = float("nan")
    return replace(layer, x=x, weights=weights, ids=ids)


@pytest.mark.parametrize("tokens", [16, 100, 128])
@pytest.mark.parametrize("top_k", [2, 8])
def test_rows_of_padding_are_zero_and_change_nothing_else(kernel: str, hint, tokens: int, top_k: int) -> None:
    """C08: CUDA graphs and idle data-parallel ranks pad with -1; the padding must not reach the other rows."""
    layer = make_layer(tokens=tokens, top_k=top_k)
    experts = layer.prepare(**hint)
    ids = layer.ids.clone()
    ids[1::2] = -1
    padded = _padded(layer, ids)
    before = padded.ids.clone(), padded.weights.clone()
    out = padded.run(experts)
    assert torch.equal(padded.ids, before[0])
    assert torch.equal(padded.weights.view(torch.int32), before[1].view(torch.int32))
    assert out[1::2].count_nonzero() == 0
    assert torch.equal(out[0::2], layer.rows(slice(0, None, 2)).run(experts))


def test_an_extra_slot_of_padding_changes_no_bit(kernel: str, hint) -> None:
    layer = make_layer(tokens=16, top_k=7)
    experts = layer.prepare(**hint)
    for extra in (-1, 8, 2**31 - 1):
        wider = replace(
            layer,
            ids=torch.cat((layer.ids, torch.full((16, 1), extra, dtype=torch.int32)), 1),
            weights=torch.cat((layer.weights, torch.full((16, 1), float("nan"))), 1),
        )
        assert torch.equal(wider.run(experts), layer.run(experts))


def test_nothing_routed_is_exactly_zero(kernel: str, hint) -> None:
    layer = make_layer(tokens=130, bias=True)
    out = _padded(layer, torch.full_like(layer.ids, -1)).run(layer.prepare(**hint))
    assert out.count_nonzero() == 0


def test_an_expert_that_overflows_reaches_only_the_rows_routed_to_it(kernel: str, hint) -> None:
    """0 * inf is NaN: a layout that multiplies every row by every expert must not mask by multiplying."""
    layer = make_layer(tokens=4, top_k=2, bias=True)
    layer.biases["w13_bias"][7] = float("inf")
    layer.ids = torch.tensor([[0, 1], [7, 1], [2, 3], [5, 6]])
    out = layer.run(layer.prepare(**hint))
    assert torch.isfinite(out.float()).all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
def test_batch_invariant_rows_do_not_depend_on_the_others(kernel: str, hint, dtype, activation: str) -> None:
    layer = make_layer(hidden=128, intermediate=96, tokens=131, top_k=8, dtype=dtype)
    experts = layer.prepare(**hint)
    options = {"activation": activation, "batch_invariant": True}
    whole = layer.run(experts, **options)
    for rows in (slice(0, 1), slice(3, 10), slice(64, 131)):
        assert torch.equal(layer.rows(rows).run(experts, **options), whole[rows])


def test_our_kernel_is_batch_invariant_without_being_asked(hint) -> None:
    if cpu_native.load()[0] is None:
        pytest.skip(cpu_native.load()[1])
    layer = make_layer(tokens=400, top_k=8)
    experts = layer.prepare(**hint)
    whole = layer.run(experts)
    for rows in (slice(0, 1), slice(5, 13), slice(100, 300)):
        assert torch.equal(layer.rows(rows).run(experts), whole[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bit(hint, dtype) -> None:
    """torch cuts elementwise work into equal parts for its threads; at a cut inside a vector, erf rounds differently.
    FP32 shows that, through PyTorch's kernel; BF16 rounds it away but for a rare row, through ours.
    """
    if dtype == torch.bfloat16 and cpu_native.load()[0] is None:
        pytest.skip(cpu_native.load()[1])
    layer = make_layer(hidden=64, intermediate=64, tokens=401, top_k=8, dtype=dtype)
    experts = layer.prepare(**hint)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(layer.run(experts, activation="gelu", batch_invariant=True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def _digest(pytorch_kernel: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if pytorch_kernel:
            patch.setattr(cpu_native, "load", lambda: (None, "left out by the test"))
        digest = hashlib.sha256()
        for tokens, top_k in ((1, 8), (9, 2), (150, 8)):
            layer = make_layer(tokens=tokens, top_k=top_k)
            for hint in (None, 8):
                digest.update(layer.run(layer.prepare(top_k=hint)).view(torch.int16).numpy().tobytes())
        return digest.hexdigest()


def test_equal_calls_give_equal_bits_across_processes() -> None:
    """C09: sums through atomics differ from run to run."""
    code = "import test_moe_cpu as t; print(t._digest(False), t._digest(True))"
    here = Path(__file__).parent
    other = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=300)
    assert other.stdout.split() == [_digest(False), _digest(True)], other.stderr
    assert other.stdout.split() == [_digest(False), _digest(True)]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_ranks_of_expert_parallelism_add_up_to_the_whole(kernel: str, id_dtype) -> None:
    """Two ranks of four experts, ids past the map and holes in it included, against one rank of eight."""
    layer = make_layer(hidden=128, intermediate=96, tokens=20, top_k=3, dtype=torch.float32, distinct=False)
    layer.ids = layer.ids.to(id_dtype)
    total = torch.zeros_like(layer.x)
    for first in (0, 4):
        local = replace(layer, w13=_experts(layer.w13, first), w2=_experts(layer.w2, first))
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[first : first + 4] = torch.arange(4, dtype=torch.int32)
        ids = layer.ids.clone()
        total += local.run(local.prepare(), expert_map=expert_map)
        assert torch.equal(layer.ids, ids)
    assert_close("sum of ranks", total, layer.run(layer.prepare()), 2 * TOLERANCE[torch.float32])


def _experts(weight, first: int):
    part = slice(first, first + 4)
    zero = weight.zero_point[part]
    return replace(
        weight, packed=weight.packed[part], scale=weight.scale[part], zero_point=zero, shape=(4, *weight.shape[1:])
    )


def test_a_map_without_experts_routes_nothing(kernel: str, hint) -> None:
    layer = make_layer()
    for expert_map in (torch.full((8,), -1), torch.empty(0, dtype=torch.int64), torch.full((8,), 8)):
        assert layer.run(layer.prepare(**hint), expert_map=expert_map).count_nonzero() == 0


def test_every_expert_weight_reaches_the_output(kernel: str, hint) -> None:
    """C22: experts that a forward goes past go unnoticed; changing any expert's code must change the result."""
    layer = make_layer(tokens=3, top_k=8)
    before = layer.run(layer.prepare(**hint))
    for name in ("w13", "w2"):
        for expert in (0, 7):
            weight = getattr(layer, name)
            packed = weight.packed.clone()
            packed[expert, 5] ^= 0x77
            changed = replace(layer, **{name: replace(weight, packed=packed)})
            assert not torch.equal(changed.run(changed.prepare(**hint)), before)


def test_hidden_states_need_not_be_contiguous(kernel: str, hint) -> None:
    layer = make_layer(tokens=5)
    strided = torch.randn(5, 2 * 576).to(torch.bfloat16)[:, ::2]
    experts = layer.prepare(**hint)
    assert torch.equal(replace(layer, x=strided).run(experts), replace(layer, x=strided.contiguous()).run(experts))


def test_arguments_are_not_written_to(kernel: str, hint) -> None:
    layer = make_layer(tokens=20, top_k=4, bias=True, distinct=False)
    experts: PreparedExperts = layer.prepare(**hint)
    tensors = [layer.x, layer.weights, layer.ids, *experts.tensors.values()]
    before = [tensor.clone() for tensor in tensors]
    layer.run(experts, apply_router_weight_on_input=True)
    layer.run(experts)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_torchs_defaults_do_not_matter(kernel: str, hint) -> None:
    """vLLM loads models under another default dtype and device; a buffer that follows them would be overrun."""
    from vllm_ext.ops.moe import cpu_int4

    layer = make_layer(tokens=9, top_k=4, bias=True, distinct=False)
    expected = layer.run(layer.prepare(**hint))
    cpu_int4.packed_block.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            experts = layer.prepare(**hint)
            out, on_input = (layer.run(experts, apply_router_weight_on_input=flag) for flag in (False, True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)
    assert torch.isfinite(on_input.float()).all()


def test_four_bits_stay_four_bits_in_memory(kernel: str, hint) -> None:
    """Prepared SmolLM2 experts: 4 bits a weight, and a 16-bit scale and zero for every 128 (64 where 576 forces it)."""
    layer = make_layer()
    weights = 8 * 3 * 192 * 576
    assert layer.prepare(**hint).nbytes <= weights * (4 + 32 / 64) / 8
