"""Wrap vLLM's `EngineArgs` so that our options reach every process inside `additional_config`, which pickles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from vllm_ext.model_executor.attention_backend import is_ha_npu
from vllm_ext.options import NAMESPACE, SCHEME_KEYS, parse_options

METHOD_NAME = "w4a16-grouped"
_MARK = "_vllm_ext_wrapped"


def wrap_engine_args(arg_utils: Any) -> None:
    """Wrap `__post_init__` and `create_engine_config` of `arg_utils.EngineArgs` once."""
    cls = arg_utils.EngineArgs
    if getattr(cls, _MARK, False):
        return
    post_init, create = cls.__post_init__, cls.create_engine_config

    @functools.wraps(post_init)
    def wrapped_post_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        move_quantization_config(self)
        return post_init(self, *args, **kwargs)

    @functools.wraps(create)
    def wrapped_create(self: Any, *args: Any, **kwargs: Any) -> Any:
        move_attention_backend(self)
        check_options(self)
        return create(self, *args, **kwargs)

    cls.__post_init__, cls.create_engine_config = wrapped_post_init, wrapped_create
    setattr(cls, _MARK, True)


def add_options(engine_args: Any, options: dict[str, Any]) -> None:
    """Merge `options` into `additional_config["vllm_ext"]` without changing the caller's dictionaries.

    Raises ValueError when `additional_config` is an object of another kind, which cannot carry options.
    """
    current = engine_args.additional_config
    if current is not None and not isinstance(current, dict):
        raise ValueError(
            f"additional_config: vllm_ext's options {sorted(options)} need a dictionary, got {type(current).__name__}"
        )
    current = dict(current or {})
    current[NAMESPACE] = {**(current.get(NAMESPACE) or {}), **options}
    engine_args.additional_config = current


def move_attention_backend(engine_args: Any) -> None:
    """Turn ha_npu, given as `attention_backend` or in `attention_config`, into our option and automatic selection."""
    config = engine_args.attention_config
    in_flag = is_ha_npu(engine_args.attention_backend)
    in_config = is_ha_npu(getattr(config, "backend", None))
    if not in_flag and not in_config:
        return
    if in_flag:
        engine_args.attention_backend = None
    if in_config:
        engine_args.attention_config = dataclasses.replace(config, backend=None)
    add_options(engine_args, {"linear_attn_backend": "ha_npu"})


def move_quantization_config(engine_args: Any) -> None:
    """Take our scheme's keys out of `quantization_config`, whose own schema does not know them."""
    given = getattr(engine_args, "quantization_config", None)
    if engine_args.quantization != METHOD_NAME or not isinstance(given, dict):
        return
    unknown = sorted(set(given) - set(SCHEME_KEYS))
    if unknown:
        raise ValueError(
            f"--quantization-config with {METHOD_NAME}: unknown option {', '.join(map(repr, unknown))}; "
            f"allowed are {', '.join(SCHEME_KEYS)}"
        )
    add_options(engine_args, given)
    engine_args.quantization_config = None


def check_options(engine_args: Any) -> None:
    """Refuse bad options before any process starts."""
    options = parse_options(engine_args.additional_config)
    if options.scheme:
        from vllm_ext.quantization.scheme import Scheme

        Scheme.from_dict(options.scheme)
