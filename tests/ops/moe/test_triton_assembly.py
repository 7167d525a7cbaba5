"""What 16-bit operands are on a GPU: the kernels' assembly, emulated, and whole layers with it in the interpreter.

Runs in a process of its own, which test_triton_interpreted.py starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs in a process with TRITON_INTERPRET=1: test_triton_interpreted.py", allow_module_level=True)
pytest.importorskip("triton")

from emulated_assembly import emulate, run_assembly
from moe_samples import assert_close, make_layer

from vllm_ext.ops.moe import CallOptions
from vllm_ext.ops.moe.triton import dequant
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig

EXPAND = {torch.bfloat16: dequant._BF16_EXPAND.value, torch.float16: dequant._FP16_EXPAND.value}
PAIRS = {
    torch.bfloat16: (dequant._BF16_EXPAND_LOW.value, dequant._BF16_EXPAND_HIGH.value),
    torch.float16: (dequant._FP16_EXPAND_LOW.value, dequant._FP16_EXPAND_HIGH.value),
}
# Seen with random layers: 2.7e-3 to 2.9e-3 and 3.6e-3 to 4.1e-3 in BF16 (the codes times their scale are rounded as
# well), an eighth of that in FP16; and a fifth more.
TOLERANCE = {
    (torch.bfloat16, "sum"): 3.5e-3,
    (torch.bfloat16, "operand"): 5e-3,
    (torch.float16, "sum"): 4.5e-4,
    (torch.float16, "operand"): 6.5e-4,
}


def _planes(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Random words, and their four nibble planes as the assembly makes them."""
    words = torch.randint(-(1 << 15), 1 << 15, (4096,), generator=torch.Generator().manual_seed(0)).to(torch.int16)
    planes = run_assembly(EXPAND[dtype], [words.numpy().view(np.uint32)], 4)
    return words, [torch.from_numpy(plane.view(np.int16)).view(dtype) for plane in planes]


@pytest.mark.parametrize("scaling", ["sum", "operand", "column"])
@pytest.mark.parametrize("dtype", EXPAND)
def test_masked_nibbles_are_the_numbers_the_form_says(dtype: torch.dtype, scaling: str) -> None:
    """Times the scaled activation, a plane must be the codes' product; a neighbour's bits must not reach it."""
    form = dequant.code_form(dtype, True, scaling)
    words, planes = _planes(dtype)
    for number, plane in enumerate(planes):
        code = (words >> 4 * number & 0xF).double()
        odd = number % 2 == 1 and form.plane_step > 0
        activation = 2.0 ** (form.activation_exponent - (form.plane_step if odd else 0))
        product = (plane.double() * 2.0**form.unit - form.offset * (16 if odd else 1)) * activation
        assert torch.equal(product, code * 2.0**form.activation_exponent)
    in_range = form.activation_exponent + form.scale_exponent - form.unit
    assert in_range == (0 if scaling != "sum" or dtype == torch.float16 else -63)


@pytest.mark.parametrize("dtype", PAIRS)
def test_pairs_of_planes_are_expanded_as_all_four(dtype: torch.dtype) -> None:
    """The persistent kernels expand a tile's lower and upper planes apart."""
    words, planes = _planes(dtype)
    for text, expected in zip(PAIRS[dtype], (planes[:2], planes[2:]), strict=True):
        for found, plane in zip(run_assembly(text, [words.numpy().view(np.uint32)], 2), expected, strict=True):
            assert torch.equal(torch.from_numpy(found.view(np.int16)), plane.view(torch.int16))


@pytest.mark.parametrize(
    ("groups", "zero_point"),
    [((128, 64), "float"), ((128, 64), "int"), ((128, 64), None), ((32, 16), "float"), ((24, 24), "float")],
)
@pytest.mark.parametrize("scaling", ["sum", "operand"])
@pytest.mark.parametrize("dtype", EXPAND)
def test_layers_are_computed_as_a_gpu_does(
    backend: ModuleType,
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    scaling: str,
    groups: tuple[int, int],
    zero_point: str | None,
) -> None:
    """Subnormal codes against activations scaled up, offsets of 1024, sums in BF16 parts: nearer to FP64 than the plain
    interpreter, whose BF16 truncates, can show. Groups of 24 are scaled column by column."""
    emulate(monkeypatch, backend)
    layer = make_layer(
        experts=3, hidden=192, intermediate=112, tokens=4, groups=groups, dtype=dtype, zero_point=zero_point
    )
    gemm = GemmConfig(16, 64, 4, 2, scaling)
    experts = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), dtype)
    launch = LaunchConfig(gemm, replace(gemm, block_tokens=32))
    out = backend.run(launch, layer.x, experts, layer.weights, layer.ids, None, CallOptions())
    tolerance = TOLERANCE[dtype, "operand" if groups[0] == 24 else scaling]
    assert_close("layer", out, layer.expected(), tolerance)
