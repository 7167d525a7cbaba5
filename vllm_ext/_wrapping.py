"""Put a function of ours around one of vLLM's, once, however often a hook is run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
_MARK = "_vllm_ext_wrapped"


def _around(former: Function, wrap: Callable[[Function], Function]) -> Function:
    return wrap(former)


def wrap_once(
    owner: Any, name: str, *, through: Callable[[Function, Callable[[Function], Function]], Function] = _around
) -> Callable[[Function], Function]:
    """Decorator: `owner.name(*args)`, of a class or a module, becomes `function(former, *args)`.

    Nothing changes where the same function, by module and qualified name, was put there before. Others around it keep
    what it is known by, as `functools.wraps` does. A static method stays one. through(former, wrap): applies `wrap`
    elsewhere than to the former itself.
    """

    def decorate(function: Function) -> Function:
        key = f"{function.__module__}.{function.__qualname__}"
        former = getattr(owner, name)
        known: frozenset[str] = getattr(former, _MARK, frozenset())
        if key in known:
            return function

        def wrap(inner: Function) -> Function:
            @functools.wraps(inner)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                return function(inner, *args, **kwargs)

            return wrapped

        replacement: Any = through(former, wrap)
        setattr(replacement, _MARK, known | {key})
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if static else replacement)
        return function

    return decorate
