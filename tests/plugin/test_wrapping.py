"""Functions of ours around vLLM's: each once, though several modules of ours wrap the same method."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ext._wrapping import wrap_once


@pytest.fixture
def worker() -> Any:
    class Worker:
        def step(self, batch: int, scale: int = 1) -> list[Any]:
            """vLLM's."""
            return [batch * scale]

        @staticmethod
        def parse(text: str) -> list[Any]:
            return [text]

    return Worker


def first(cls: Any) -> None:
    @wrap_once(cls, "step")
    def wrapped(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return ["first", *step(self, *args, **kwargs)]


def second(cls: Any) -> None:
    @wrap_once(cls, "step")
    def wrapped(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return ["second", *step(self, *args, **kwargs)]


def test_each_function_is_put_around_once_in_whatever_order(worker: Any) -> None:
    for hook in (first, second, first, second, second, first):
        hook(worker)
    assert worker().step(2, scale=3) == ["second", "first", 6]


def test_once_holds_where_someone_else_has_wrapped_since(worker: Any) -> None:
    first(worker)
    ours = worker.step
    worker.step = functools.wraps(ours)(lambda self, *args, **kwargs: ["theirs", *ours(self, *args, **kwargs)])
    first(worker)
    assert worker().step(2) == ["theirs", "first", 2]


def test_a_class_that_inherits_the_method_is_not_wrapped_again(worker: Any) -> None:
    first(worker)
    derived = type("CpuWorker", (worker,), {})
    first(derived)
    assert "step" not in vars(derived)
    assert derived().step(2) == ["first", 2]


def test_name_signature_and_kind_of_method_stay(worker: Any) -> None:
    signature = inspect.signature(worker.step)
    first(worker)
    assert inspect.signature(worker.step) == signature
    assert (worker.step.__name__, worker.step.__doc__) == ("step", "vLLM's.")

    @wrap_once(worker, "parse")
    def parsed(parse: Any, text: str) -> Any:
        return ["parsed", *parse(text)]

    assert worker.parse("a") == worker().parse("a") == ["parsed", "a"]


def test_a_function_of_a_module_may_be_wrapped_elsewhere_than_outermost() -> None:
    """vLLM's graph breaks replay what lies inside their decorator."""
    module = SimpleNamespace(kernel=lambda x: [x])

    def beneath(former: Any, wrap: Any) -> Any:
        inner = wrap(former)
        return lambda x: ["decorator", *inner(x)]

    for _ in range(2):

        @wrap_once(module, "kernel", through=beneath)
        def noted(kernel: Any, x: int) -> Any:
            return ["noted", *kernel(x)]

    assert module.kernel(1) == ["decorator", "noted", 1]
