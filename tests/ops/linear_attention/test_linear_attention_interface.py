from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_ext.ops.linear_attention import backend_status
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state


@pytest.fixture
def operands(op):
    return sample_operands(op, 1, 20, 2, 4, 16, 8)


def test_unknown_keyword_is_a_type_error(function, operands):
    """Upstream's **kwargs once swallowed a renamed argument, and the state was silently not returned."""
    with pytest.raises(TypeError, match="output_final_states"):
        function(**operands, output_final_states=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(1, 20, 2, 8, dtype=torch.bfloat16)}, "q and k must both be"),
        ({"q": torch.zeros(20, 2, 16), "k": torch.zeros(20, 2, 16)}, "add the batch dimension"),
        ({"v": torch.zeros(1, 19, 4, 8, dtype=torch.bfloat16)}, "v must be"),
        ({"v": torch.zeros(1, 20, 3, 8, dtype=torch.bfloat16)}, "multiple of"),
        ({"beta": torch.zeros(1, 20, 2)}, "beta must be"),
        ({"g": torch.zeros(1, 20, 5)}, "g must be"),
        ({"v": torch.zeros(1, 20, 4, 8)}, "share a dtype"),
        ({"beta": torch.zeros(1, 20, 4, dtype=torch.int8)}, "torch.int8"),
        ({"q": torch.zeros(1, 20, 2, 16).to(torch.float8_e4m3fn)}, "float8"),
        ({"initial_state": torch.zeros(1, 4, 8, 16)}, "initial_state must be"),
        ({"initial_state": torch.zeros(1, 4, 16, 8), "state_v_first": True}, "initial_state must be"),
        ({"initial_state": torch.zeros(1, 4, 16, 8, device="meta")}, "meta"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "T=20"),
        ({"cu_seqlens": torch.tensor([0, 15, 10, 20])}, "falling"),
        ({"cu_seqlens": torch.tensor([1, 20])}, "rise from 0"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "int32 or int64"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "int32 or int64"),
        ({"scale": float("nan")}, "scale"),
        ({"backend": "cuda"}, "choose one of auto, reference, cpu"),
    ],
)
def test_contradicting_values_are_refused_by_name(function, operands, change, message):
    with pytest.raises(ValueError, match=message) as refusal:
        function(**{**operands, **change})
    assert function.__name__ in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q must be a tensor, got NoneType"),
        ({"beta": [0.5]}, "beta must be a tensor, got list"),
        ({"cu_seqlens": [0, 20]}, "cu_seqlens must be a tensor, got list; pass torch.as_tensor"),
        ({"initial_state": 0.0}, "initial_state must be a tensor, got float"),
        ({"scale": "K**-0.5"}, "scale must be a number, got str"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(function, operands, change, message):
    """Offsets in a list ended in an AttributeError that named neither the call nor the argument."""
    with pytest.raises(TypeError, match=message.replace("*", r"\*")) as refusal:
        function(**{**operands, **change})
    assert function.__name__ in str(refusal.value)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_decays_in_place_of_their_logarithms_are_refused(function, operands, backend):
    """The commonest mistake: states would grow by e to the power of 1 a token, and overflow much later."""
    decays = operands["g"].exp()
    decays[:, :7] = 0
    with pytest.raises(ValueError, match=r"g must be at most 0.* at \[0, 7, 0.*pass g\.log\(\)") as refusal:
        function(**{**operands, "g": decays}, backend=backend)
    assert f"got {float(decays.max()):.4g} at" in str(refusal.value)
    assert f"{int((decays > 0).sum())} of {decays.numel()} above 0" in str(refusal.value)


def test_decays_of_one_and_of_nothing_are_decays(function, operands):
    """Logarithms of 0 and minus infinity are the two ends; NaN is not above 0."""
    for end in (0.0, -0.0, float("-inf"), float("nan")):
        function(**{**operands, "g": torch.full_like(operands["g"], end)})


def test_packed_sequences_need_one_row(op, function):
    with pytest.raises(ValueError, match="B=2"):
        function(**sample_operands(op, 2, 10, 1, 1, 8, 8), cu_seqlens=torch.tensor([0, 10]))


@pytest.mark.parametrize("backend", ["npu", "ascend-sim", "triton"])
def test_backend_that_cannot_run_says_why(function, operands, backend):
    if backend_status("cpu")[backend][0]:
        pytest.skip(f"{backend} can run here")
    with pytest.raises(RuntimeError, match=f"{backend}: .+"):
        function(**operands, backend=backend)


def test_no_backend_serves_a_meta_tensor(function, operands):
    with pytest.raises(RuntimeError, match=r"cpu: .+ not on meta"):
        function(**{name: x.to("meta") for name, x in operands.items()})


def test_scale_defaults_to_inverse_square_root_of_the_key_size(function, operands):
    o, _ = function(**operands)
    explicit, _ = function(**operands, scale=16**-0.5)
    doubled, _ = function(**operands, scale=2 * 16**-0.5)
    assert torch.equal(o, explicit)
    torch.testing.assert_close(doubled, 2 * o)


def test_final_state_is_returned_only_when_asked_and_always_wide(function, operands):
    assert function(**operands)[1] is None
    initial = sample_state(1, 4, 16, 8).to(torch.bfloat16)
    for backend in ("reference", "cpu"):
        _, state = function(**operands, initial_state=initial, output_final_state=True, backend=backend)
        assert state.dtype == torch.float32


def test_importing_the_package_imports_no_kernel_compiler():
    """On an Ascend 310P Triton has no target, and importing it at package import took the server down."""
    code = (
        "import sys, vllm_ext.ops.linear_attention as la, torch\n"
        "la.chunk_kda(*[torch.zeros(1, 3, 1, 4)] * 4, torch.zeros(1, 3, 1))\n"
        "print([name for name in ('triton', 'torch_npu', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
