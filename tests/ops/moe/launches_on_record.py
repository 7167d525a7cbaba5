"""Triton without a GPU or a compiler: what each launch asks of the driver is written down, however it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from vllm_ext.ops.moe.triton import direct_launch, replay, stream


@dataclass(frozen=True)
class Compiled:
    """A kernel as specialised for some arguments."""

    kernel: Any
    key: tuple[Any, ...]


@dataclass(frozen=True)
class Asked:
    """One launch: the compiled kernel, its grid, and its arguments, of which those that are tensors are addresses."""

    compiled: Compiled
    grid: tuple[int, ...]
    addresses: tuple[int | None, ...]
    values: tuple[Any, ...]


@dataclass
class Driver:
    """Launches that came through Triton, those that came directly, and the memory that torch gave out meanwhile.

    Tensors that Triton's launches were given are kept, so that no two stand at one address.
    """

    usual: list[Asked] = field(default_factory=list)
    direct: list[Asked] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    given_out: list[torch.Tensor] = field(default_factory=list)

    def clear(self) -> None:
        for one in (self.usual, self.direct, self.kept, self.given_out):
            one.clear()


def _specialised(value: Any) -> Any:
    """What Triton compiles another kernel for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape), repr(value.layout)
    if type(value) is int:
        return value == 1, value % 16 == 0
    return type(value)


def _through_triton(driver: Driver, kernel: Any, grid: tuple[int, ...], arguments: Any, named: Any) -> Compiled:
    rest = [named[name] for name in kernel.arg_names[len(arguments) :]]
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    values = [*arguments, *rest]
    constant = [parameter.is_constexpr for parameter in kernel.params]
    assert len(values) == len(constant)
    key = [value if same else _specialised(value) for value, same in zip(values, constant, strict=True)]
    addresses: list[int | None] = []
    passed: list[Any] = []
    for value, same in zip(values, constant, strict=True):
        base = getattr(value, "base", None)
        if isinstance(value, torch.Tensor):
            driver.kept.append(value)
            addresses.append(value.data_ptr() if value.numel() else 0)
            passed.append(None)
        elif base is not None:
            addresses.append(base.data_ptr())
            passed.append(_encoding(value, {"number": sum(isinstance(one, tuple) for one in passed)}))
            for size in (*value.shape, *value.strides):
                addresses.append(None)
                passed.append(size)
        else:
            addresses.append(None)
            passed.append(None if same else value)
    compiled = Compiled(kernel, (*map(repr, key), *sorted(options.items())))
    driver.usual.append(Asked(compiled, (*grid, 1, 1)[:3], tuple(addresses), tuple(passed)))
    return compiled


def _directly(driver: Driver, compiled: Compiled, form: list[tuple[bool, bool]], asked: tuple[Any, ...]) -> None:
    grid, (stream_, *arguments) = asked[:3], asked[3:]
    assert stream_ == 7
    addresses: list[int | None] = []
    passed: list[Any] = []
    for value, (is_address, constant) in zip(arguments, form, strict=True):
        if isinstance(value, Map):
            addresses.append(value.address)
            passed.append(value.encoded)
        else:
            addresses.append(value if is_address else None)
            passed.append(None if is_address or constant else value)
    driver.direct.append(Asked(compiled, grid, tuple(addresses), tuple(passed)))


@dataclass(frozen=True)
class Map:
    """An encoded tensor descriptor."""

    address: int
    encoded: tuple[Any, ...]


def _encoding(descriptor: Any, kernel: dict[str, int]) -> tuple[Any, ...]:
    return kernel["number"], tuple(descriptor.shape), tuple(descriptor.strides), tuple(descriptor.block_shape)


def _form(asked: Asked) -> list[tuple[bool, bool]]:
    """For each argument of the C function, whether it is an address and whether it is not looked at."""
    return [
        (address is not None, address is None and value is None)
        for address, value in zip(asked.addresses, asked.values, strict=True)
    ]


@contextmanager
def on_record() -> Iterator[Driver]:
    """Launches reach nothing but the record; calls of the layer on CPU tensors take the path of those on a GPU."""
    driver = Driver()
    empty = torch.empty

    def given_out(*args: Any, **kwargs: Any) -> torch.Tensor:
        driver.given_out.append(empty(*args, **kwargs))
        return driver.given_out[-1]

    def launcher(compiled: Compiled) -> direct_launch.Launcher:
        asked = next(one for one in reversed(driver.usual) if one.compiled is compiled)
        form, maps = _form(asked), sum(isinstance(value, tuple) for value in asked.values)
        return direct_launch.Launcher(
            lambda *arguments: _directly(driver, compiled, form, arguments),
            (),
            tuple({"number": number} for number in range(maps)),
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            JITFunction,
            "run",
            lambda kernel, *args, grid, warmup, **named: _through_triton(driver, kernel, grid, args, named),
        )
        patched.setattr(stream, "usable", lambda device: True)
        patched.setattr(stream, "_multiprocessors", lambda device: 132)
        patched.setattr(direct_launch, "serves", lambda tensor: True)
        patched.setattr(direct_launch, "launcher", launcher)
        patched.setattr(direct_launch, "encoding", _encoding)
        patched.setattr(direct_launch, "tensor_map", Map)
        patched.setattr(direct_launch, "stream_of", lambda device: 7)
        patched.setattr(torch, "empty", given_out)
        patched.setattr(replay, "_kinds", {})
        yield driver
