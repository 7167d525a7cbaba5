"""The persistent kernels against FP64 of the dequantised weights, on torch instead of a GPU.

Each GEMM is compared for itself, from what it reads, slot by slot: so a tolerance is that of one rounding or two.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from experts_on_torch import ExpertsMachine, Kernel
from gluon_on_torch import Shared
from moe_samples import Layer, assert_close, make_layer

from vllm_ext.ops.moe import CallOptions
from vllm_ext.ops.moe.activation import apply_activation
from vllm_ext.ops.moe.triton import backend, stream
from vllm_ext.ops.moe.triton.align import Alignment
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig
from vllm_ext.ops.moe.triton.dequant import CodeForm

PACKAGE = "vllm_ext.ops.moe.triton"
MODULES = (
    "stream_kernel",
    "stream_producer",
    "wide_kernel",
    "wide_producer",
    "persistent",
    "share",
    "dequant",
    "activation",
)
FAR_OUTSIDE = -(1 << 20)
B, H = torch.bfloat16, torch.float16
# Results are rounded to 16 bits once: in BF16 by 2^-9 at most and about 1.7e-3 as a norm, in FP16 an eighth of that.
# Where scales multiply codes, those products are rounded as well.
TOLERANCE = {(B, "sum"): 2e-3, (H, "sum"): 3e-4, (B, "operand"): 3e-3, (H, "operand"): 4.5e-4}


@dataclass(frozen=True)
class Case:
    """A layer, how it is launched, and how many slots each expert gets."""

    gate_up: GemmConfig
    down: GemmConfig
    counts: tuple[int, ...]
    layer: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    multiprocessors: int = 2


def some(block: int) -> tuple[int, ...]:
    """A nearly empty last block, an expert without slots, a full block, a nearly empty only one."""
    return (2 * block + 1, 0, block, 3, block // 2 + 1)


def streamed(tokens: int, rows: int, warps: int, programs: int, stages: int = 2, **more: Any) -> GemmConfig:
    return GemmConfig(tokens, rows, warps, stages, programs=programs, **more)


def wide(tokens: int, rows: int, warps: int, programs: int, stages: int = 2) -> GemmConfig:
    return GemmConfig(tokens, rows, warps, stages, "operand", programs=programs)


CASES = {
    "few, split": Case(
        streamed(8, 64, 4, 4, 3, split=True), streamed(8, 64, 4, 4, split=True), some(8), multiprocessors=3
    ),
    "a piece split in many": Case(
        streamed(16, 128, 4, 5, split=True), streamed(8, 256, 4, 3, 3, split=True), (0, 5, 0, 0, 0),
        {"dtype": H, "zero_point": "int", "hidden": 512}, multiprocessors=3,
    ),
    "more rows": Case(streamed(8, 256, 8, 2), streamed(8, 256, 8, 1), some(8), {"dtype": H, "hidden": 512}),
    "four warps": Case(
        streamed(16, 128, 4, 3, 3), streamed(16, 128, 4, 3), some(16), {"zero_point": None}, {"activation": "gelu"}
    ),
    "some": Case(
        streamed(32, 128, 4, 2), streamed(32, 128, 8, 2), some(32), {"dtype": H, "zero_point": None},
        {"activation": "gelu_tanh"},
    ),
    "words apart": Case(
        streamed(8, 128, 4, 4, 3, apart=True), streamed(8, 64, 4, 4, apart=True), some(8), {"zero_point": "int"}
    ),
    "guess": Case(streamed(8, 64, 4, 4, guess=True), streamed(8, 64, 4, 4), some(8), multiprocessors=4),
    "guess apart": Case(
        streamed(8, 256, 4, 2, 3, guess=True, apart=True), streamed(8, 128, 4, 2, apart=True), some(8), {"dtype": H}
    ),
    "guess, other blocks": Case(
        streamed(16, 128, 4, 1, guess=True), streamed(8, 64, 4, 1, apart=True), (0, 17, 0, 1, 0)
    ),
    "groups of 64": Case(
        streamed(16, 128, 8, 2), streamed(16, 64, 4, 3, 3, apart=True), some(16),
        {"groups": (64, 64), "intermediate": 192},
        {"activation": "swigluoai", "swiglu_alpha": 1.7, "swiglu_limit": 1.0},
    ),
    "wide, some": Case(wide(64, 128, 4, 2), wide(64, 128, 4, 2, 3), some(64)),
    "wide, many": Case(wide(128, 128, 8, 1, 3), wide(128, 256, 8, 1), some(128), {"zero_point": "int"}),
    "wide, FP16": Case(wide(32, 256, 8, 2), wide(64, 256, 8, 1), some(32), {"dtype": H, "zero_point": None}),
    "wide, groups of 64": Case(
        wide(32, 256, 8, 1, 3), wide(16, 256, 8, 2), some(32), {"groups": (64, 64), "intermediate": 192}
    ),
    "wide, FP16 groups of 64": Case(
        wide(16, 256, 8, 2), wide(128, 256, 8, 1, 3), some(16),
        {"groups": (64, 64), "intermediate": 192, "dtype": H, "zero_point": "int"}, {"activation": "relu2"},
    ),
    "streamed, then wide": Case(
        streamed(8, 64, 4, 3, 3, guess=True), wide(32, 128, 4, 2), some(8), {"groups": (64, 128)}
    ),
    "wide, then streamed": Case(wide(16, 256, 4, 1), streamed(32, 128, 4, 2), some(16), {"groups": (128, 64)}),
    "one tile a piece": Case(
        streamed(8, 128, 4, 4), streamed(8, 128, 4, 4), some(8),
        {"hidden": 128, "intermediate": 64, "groups": (128, 64)},
    ),
    "one tile a piece, wide": Case(
        wide(64, 128, 4, 2), wide(32, 256, 8, 2), some(8), {"hidden": 256, "intermediate": 64, "groups": (128, 64)}
    ),
    "nothing routed": Case(streamed(8, 64, 4, 4, guess=True), wide(32, 128, 4, 2), (0, 0, 0, 0, 0)),
}  # fmt: skip


@contextmanager
def on(machine: ExpertsMachine, multiprocessors: int) -> Iterator[None]:
    """Launches run on the machine."""
    modules = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "_multiprocessors", lambda device: multiprocessors)
        for name in ("stream_kernel", "wide_kernel"):
            kernel = Kernel(machine, getattr(modules[name], name), list(modules.values()))
            patched.setattr(modules[name], name, kernel)
        yield


def layer_of(case: Case) -> Layer:
    """Two slots a token in random order; the first token is not routed and holds NaN."""
    generator = torch.Generator().manual_seed(0)
    experts = [expert for expert, count in enumerate(case.counts) for _ in range(count)]
    experts += [-1] * (len(experts) % 2)
    ids = torch.tensor(experts, dtype=torch.int32)[torch.randperm(len(experts), generator=generator)]
    ids = torch.cat((torch.tensor([-1, 7], dtype=torch.int32), ids)).view(-1, 2)
    sizes = {"experts": len(case.counts), "hidden": 384, "intermediate": 256, "groups": (128, 128)}
    layer = make_layer(**{**sizes, "tokens": len(ids)} | case.layer)
    layer.x[0] = float("nan")
    return replace(layer, ids=ids)


def planes(columns: int, form: CodeForm, plane: int) -> torch.Tensor:
    """What activations are multiplied by before a GEMM reads them."""
    odd = torch.arange(columns) // plane % 2 == 1
    return torch.where(odd, 2.0 ** (form.activation_exponent - form.plane_step), 2.0**form.activation_exponent).double()


def blocks_of(counts: tuple[int, ...], size: int, sparse: bool, limit: int) -> torch.Tensor:
    """The block table as `align` leaves it: what no block needs is far outside, but for its number of slots."""
    starts = torch.tensor((0, *counts)).cumsum(0).tolist()
    found = [
        (expert, starts[expert] + done, min(size, count - done))
        for expert, count in enumerate(counts)
        for done in range(0, max(count, int(sparse)), size)
    ]
    if sparse:
        begun = [next(block for block in found if block[0] == expert) for expert in range(len(counts))]
        found = begun + [block for block in found if block not in begun]
    table = torch.full((max(limit, len(found), 1) + 2, 4), FAR_OUTSIDE, dtype=torch.int32)
    table[:, 2] = 0
    for place, block in enumerate(found):
        table[place, :3] = torch.tensor(block)
    table[0, 3] = len(found)
    return table


def aligned_for(case: Case, layer: Layer, config: LaunchConfig, prepared: Any) -> Alignment:
    """What `align` makes of the call; slots past the routed ones are far outside."""
    sparse = backend._sparse(config)
    meta, plane = prepared.meta, prepared.tensors["w13_words"].shape[3]
    form = backend._form(config.gate_up, layer.x.dtype, meta.group_size_w13, plane)
    order = [s for e in range(len(case.counts)) for s, given in enumerate(layer.ids.flatten().tolist()) if given == e]
    slots = torch.full((layer.ids.numel(),), FAR_OUTSIDE, dtype=torch.int32)
    slots[: len(order)] = torch.tensor(order, dtype=torch.int32)
    tables = [
        blocks_of(case.counts, gemm.block_tokens, listed, layer.ids.numel())
        for gemm, listed in zip((config.gate_up, config.down), sparse, strict=True)
    ]
    x = (layer.x.double() * planes(meta.hidden_size, form, plane)).to(layer.x.dtype)
    width = stream.sum_width(meta.group_size_w13, plane)
    sums = layer.x.float().view(len(x), -1, width).sum(-1)
    flags = sum(stream.flag_count(gemm, x.device) for gemm in (config.gate_up, config.down))
    return Alignment(slots, *tables, x, sums, torch.zeros(flags, dtype=torch.int32), sparse)


@dataclass
class Results:
    """Both GEMMs' results, and what they should be."""

    inner: torch.Tensor
    sums: torch.Tensor
    slots: torch.Tensor
    expected_inner: torch.Tensor
    expected_sums: torch.Tensor
    expected_slots: torch.Tensor
    routed: torch.Tensor


def run(case: Case, machine: ExpertsMachine) -> Results:
    """Both GEMMs as `backend.run` launches them; the second one's expectation is of the first one's result."""
    layer, options = layer_of(case), CallOptions(**case.options)
    config = LaunchConfig(case.gate_up, case.down)
    with on(machine, case.multiprocessors):
        prepared = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), layer.x.dtype)
        aligned = aligned_for(case, layer, config, prepared)
        inner, sums = backend.gate_up(config, prepared, layer.weights, aligned, 2, options)
        slots = backend.down(config, inner, sums, prepared, aligned)
    assert aligned.flags.count_nonzero() == 0, "flags are left as they were found"
    count, order = sum(case.counts), aligned.sorted_slots.long()
    meta, plane = prepared.meta, prepared.tensors["w2_words"].shape[3]
    form = backend._form(config.down, layer.x.dtype, meta.group_size_w2, plane)
    inner = inner.double() / planes(inner.shape[1], form, plane)
    w13, w2 = layer.w13.dequantize(torch.float64), layer.w2.dequantize(torch.float64)
    expected_inner, expected_slots = torch.full_like(inner, float("nan")), torch.full_like(slots.double(), float("nan"))
    for place in range(count):
        slot = int(order[place])
        expert = int(layer.ids.flatten()[slot])
        first = w13[expert] @ layer.x[slot // 2].double()
        expected_inner[place] = apply_activation(first, True, options)
        expected_slots[slot] = w2[expert] @ inner[place]
    width = inner.shape[1] // sums.shape[1]
    return Results(
        inner, sums.double(), slots.double(), expected_inner, inner.view(*sums.shape, width).sum(-1), expected_slots,
        order[:count],
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_both_gemms_equal_the_products_of_the_weights(poison: None, name: str) -> None:
    """Nothing that no program wrote may be read, nothing may be written that is nobody's: all memory starts as NaN.
    And bits do not depend on when copies come or who runs first.
    """
    case = CASES[name]
    found = run(case, ExpertsMachine())
    dtype = case.layer.get("dtype", B)
    count, routed = len(found.routed), found.routed
    assert_close("gate up", found.inner[:count], found.expected_inner[:count], TOLERANCE[dtype, case.gate_up.scaling])
    torch.testing.assert_close(found.sums[:count], found.expected_sums[:count], rtol=0, atol=1e-5)
    assert_close("down", found.slots[routed], found.expected_slots[routed], TOLERANCE[dtype, case.down.scaling])
    others = torch.ones(len(found.slots), dtype=torch.bool)
    others[routed] = False
    assert bool(found.inner[count:].isnan().all())
    assert bool(found.sums[count:].isnan().all())
    assert bool(found.slots[others].isnan().all())
    again = run(case, ExpertsMachine(late=False))
    assert torch.equal(again.inner[:count], found.inner[:count])
    assert torch.equal(again.sums[:count], found.sums[:count])
    assert torch.equal(again.slots[routed], found.slots[routed])


class Hasty(ExpertsMachine):
    """A machine on which groups of warps do not wait where they should."""

    def __init__(self, consumer: bool = False, producer: bool = False, product: bool = False) -> None:
        super().__init__()
        self.consumer, self.producer, self.one_more = consumer, producer, product

    def wait(self, barrier: Shared, parity: Any) -> None:
        if not (self.producer if self.here.group else self.consumer):
            super().wait(barrier, parity)

    def end_products(self, pending: int, deps: Sequence[Any] = ()) -> Any:
        return super().end_products(pending + int(self.one_more and pending > 0), deps)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("few, split", "consumer"),
        ("few, split", "producer"),
        ("words apart", "consumer"),
        ("words apart", "producer"),
        ("guess apart", "product"),
        ("wide, many", "consumer"),
        ("wide, many", "producer"),
        ("wide, many", "product"),
        ("wide, groups of 64", "product"),
    ],
)
def test_a_group_that_does_not_wait_is_noticed(poison: None, name: str, fault: str) -> None:
    """What the test above cannot see it does not test: stages read before they are full, filled or given back while
    they are read."""
    with pytest.raises(AssertionError, match=r"changed under it|before it was waited for|missing >= 0|not finite"):
        run(CASES[name], Hasty(**{fault: True}))
