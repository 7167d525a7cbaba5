"""Which launchers are called directly: those that Triton 3.6 makes for CUDA, and nothing that only looks like one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm_ext.ops.moe.triton import direct_launch

ENCODING = {
    "swizzle": 3,
    "elem_size": 2,
    "elem_type": 9,
    "block_size": [64, 64],
    "fp4_padded": False,
}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    direct_launch.known.cache_clear()
    yield
    direct_launch.known.cache_clear()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch.triton, "__version__", "3.6.0")
    monkeypatch.setattr(direct_launch, "_runtime", SimpleNamespace(interpret=False))


def expanding(launcher: Any, tensordesc_meta: Any) -> Callable[..., Any]:
    """As `wrap_handle_tensordesc` of Triton's driver returns it."""

    def inner(*args: Any) -> Any:
        return launcher(*args, tensordesc_meta)

    return inner


def compiled(module: str = "triton.backends.nvidia.driver", **changed: Any) -> Any:
    """A kernel as Triton 3.6 leaves it."""
    made = {
        "launch": operator.add,
        "launch_cooperative_grid": False,
        "launch_pdl": True,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
    }
    launcher = type("CudaLauncher", (), {**made, "__module__": module} | changed)()
    launcher.launch = {**made, **changed}["launch"]
    return SimpleNamespace(run=launcher, function=1234, packed_metadata=(4, 1, 0))


@pytest.mark.parametrize(
    ("version", "usable"),
    [("3.6.0", True), ("3.6.1+git7", True), ("3.5.1", False), ("3.7.0", False), ("3.60.0", False), ("4.6.0", False)],
)
def test_other_versions_are_not_known(monkeypatch: pytest.MonkeyPatch, known: None, version: str, usable: bool) -> None:
    monkeypatch.setattr(direct_launch.triton, "__version__", version)
    assert direct_launch.known() is usable
    assert (direct_launch.launcher(compiled()) is not None) is usable


def test_other_platforms_and_the_interpreter_are_not_known(monkeypatch: pytest.MonkeyPatch, known: None) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.4")
        assert not direct_launch.known()
    direct_launch.known.cache_clear()
    monkeypatch.setattr(direct_launch, "_runtime", SimpleNamespace(interpret=True))
    assert not direct_launch.known()


def test_tensors_elsewhere_are_not_served(monkeypatch: pytest.MonkeyPatch, known: None) -> None:
    assert not direct_launch.serves(torch.zeros(1))
    on_a_gpu: Any = SimpleNamespace(is_cuda=True)
    assert direct_launch.serves(on_a_gpu)
    direct_launch.known.cache_clear()
    monkeypatch.setattr(direct_launch.triton, "__version__", "3.5.0")
    assert not direct_launch.serves(on_a_gpu)


def test_the_c_function_is_found(known: None) -> None:
    """Its arguments after grid and stream: function, two of the launch, two pieces of scratch memory, what the kernel
    was compiled to, what watchers are told, and the two of them."""
    found = direct_launch.launcher(compiled())
    assert found is not None
    assert found == (operator.add, (1234, False, True, None, None, (4, 1, 0), None, None, None), ())


def test_the_c_function_is_found_behind_tensor_descriptors(known: None) -> None:
    found = direct_launch.launcher(compiled(launch=expanding(operator.add, [ENCODING, ENCODING])))
    assert found is not None
    assert found.run is operator.add
    assert found.descriptors == (ENCODING, ENCODING)


@pytest.mark.parametrize(
    "changed",
    [
        {"module": "triton.backends.amd.driver"},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"launch": expanding(print.__call__, [ENCODING])},
        {"launch": expanding(lambda *args: None, [ENCODING])},
        {"launch": expanding(operator.add, [None])},
        {"launch": SimpleNamespace()},
        {"launch": lambda *args: None},
    ],
)
def test_other_launchers_are_not_taken(known: None, changed: dict[str, Any]) -> None:
    """Scratch memory is allocated by the launcher; descriptors that are not encoded are passed in pieces."""
    assert direct_launch.launcher(compiled(**changed)) is None


def test_what_is_not_a_kernel_has_no_launcher(known: None) -> None:
    """The interpreter returns nothing."""
    assert direct_launch.launcher(None) is None


def descriptor(**changed: Any) -> Any:
    return SimpleNamespace(**{"shape": [640, 64], "strides": [64, 1], "padding": "zero"} | changed)


def test_descriptors_are_encoded_as_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit integers are 9 to kernels and 8 to the driver's library."""
    encoded = direct_launch.encoding(descriptor(), ENCODING)
    assert encoded == (3, 2, 8, (64, 64), (640, 64), (64, 1), 0)
    asked: list[Any] = []
    utils = SimpleNamespace(fill_tma_descriptor=lambda *args: asked.append(args) or len(asked))
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(direct_launch.triton.runtime, "driver", active)
    direct_launch.tensor_map.cache_clear()
    try:
        assert [direct_launch.tensor_map(address, encoded) for address in (4096, 8192, 4096)] == [1, 2, 1]
    finally:
        direct_launch.tensor_map.cache_clear()
    assert asked == [(4096, *encoded), (8192, *encoded)]


@pytest.mark.parametrize(
    ("changed", "kernel"), [({"padding": "nan"}, ENCODING), ({}, {**ENCODING, "fp4_padded": True})]
)
def test_other_descriptors_are_refused(changed: dict[str, Any], kernel: dict[str, Any]) -> None:
    """A call with one is launched as usual."""
    with pytest.raises(LookupError, match="plain tiles"):
        direct_launch.encoding(descriptor(**changed), kernel)


def test_the_stream_is_the_current_one_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 100 + device))
    monkeypatch.setattr(direct_launch.triton.runtime, "driver", active)
    assert [direct_launch.stream_of(device) for device in (0, 3)] == [100, 103]
