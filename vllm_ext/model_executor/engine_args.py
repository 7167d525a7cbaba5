"""Wrap vLLM's `EngineArgs` so that our options reach every process inside `additional_config`, which pickles."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from typing import Any

from vllm_ext._wrapping import wrap_once
from vllm_ext.model_executor.attention_backend import is_ha_npu
from vllm_ext.options import NAMESPACE, SCHEME_KEYS, parse_options
from vllm_ext.quantization import QUANT_METHOD, Scheme

logger = logging.getLogger("vllm.vllm_ext.quantization")


def wrap_engine_args(arg_utils: Any) -> None:
    """Around `__post_init__`, `create_engine_config` and `add_cli_args` of `arg_utils.EngineArgs`."""
    cls = arg_utils.EngineArgs

    @wrap_once(cls, "__post_init__")
    def made(post_init: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        move_quantization_config(self)
        return post_init(self, *args, **kwargs)

    @wrap_once(cls, "create_engine_config")
    def created(create: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        move_attention_backend(self)
        check_options(self)
        config = create(self, *args, **kwargs)
        warn_of_unused_options(config)
        check_ranks(config)
        return config

    @wrap_once(cls, "add_cli_args")
    def added(add_cli_args: Any, parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        accept_scheme_keys(parser)
        return parser


def add_options(engine_args: Any, options: dict[str, Any]) -> None:
    """Merge `options` into `additional_config["vllm_ext"]` without changing the caller's dictionaries.

    Raises ValueError when `additional_config` is an object of another kind or already holds bad options.
    """
    current = engine_args.additional_config
    if current is not None and not isinstance(current, dict):
        raise ValueError(
            f"additional_config: vllm_ext's options {sorted(options)} need a dictionary, got {type(current).__name__}"
        )
    parse_options(current)  # its error is clearer than a failing merge's
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


def accept_scheme_keys(parser: Any) -> None:
    """Let `--quantization-config` take our scheme's keys too: vLLM checks the flag against its own while parsing."""
    for action in parser._actions:
        if action.dest == "quantization_config" and action.type is not None:
            parse = action.type
            action.type = functools.wraps(parse)(lambda text, parse=parse: _own_scheme(text) or parse(text))


def _own_scheme(text: str) -> dict[str, Any] | None:
    """The flag's options if they may be ours: one of our keys, or `ignore` alone, which vLLM's schema has as well."""
    try:
        given = json.loads(text)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    return given if set(given) & (set(SCHEME_KEYS) - {"ignore"}) or set(given) == {"ignore"} else None


def move_quantization_config(engine_args: Any) -> None:
    """Take our scheme's keys out of `quantization_config`, whose own schema does not know them."""
    given = getattr(engine_args, "quantization_config", None)
    if not isinstance(given, dict):
        return
    # vLLM takes a method's name in any case of letters.
    if str(engine_args.quantization).lower() != QUANT_METHOD:
        if ours := sorted(set(given) & (set(SCHEME_KEYS) - {"ignore"})):
            raise ValueError(
                f"--quantization-config: {', '.join(map(repr, ours))} belongs to {QUANT_METHOD}, and --quantization is "
                f"{engine_args.quantization!r}; add --quantization {QUANT_METHOD}, or drop the option"
            )
        return
    unknown = sorted(set(given) - set(SCHEME_KEYS))
    if unknown:
        raise ValueError(
            f"--quantization-config with {QUANT_METHOD}: unknown option {', '.join(map(repr, unknown))}; "
            f"allowed are {', '.join(SCHEME_KEYS)}"
        )
    add_options(engine_args, given)
    engine_args.quantization_config = None


def warn_of_unused_options(vllm_config: Any) -> None:
    """A warning where options are given that nobody reads without another one: most often a forgotten flag."""
    options = parse_options(vllm_config.additional_config)
    if options.on_kernel_error != "raise" and not options.linear_attn_backend:
        logger.warning(
            "vllm_ext: the option on_kernel_error has no effect without --attention-backend ha_npu; linear attention "
            "is served by vLLM's own kernels"
        )
    given = sorted(options.scheme)
    method = getattr(vllm_config.quant_config, "get_name", lambda: None)()
    if given and method != QUANT_METHOD:
        logger.warning(
            "vllm_ext: the options %s have no effect without --quantization %s; the model is served %s",
            ", ".join(given),
            QUANT_METHOD,
            f"as {method}" if method else "in 16 bits",
        )


def check_ranks(vllm_config: Any) -> None:
    """Raise ValueError where ranks cannot share an expert evenly; vLLM ends with a bare assertion, in each worker.

    Only where config.json calls the size `moe_intermediate_size`: another name may be that of dense layers.
    """
    parallel = vllm_config.parallel_config
    method = getattr(vllm_config.quant_config, "get_name", lambda: None)()
    size = getattr(getattr(vllm_config.model_config, "hf_text_config", None), "moe_intermediate_size", None)
    if method != QUANT_METHOD or not isinstance(size, int) or parallel.enable_expert_parallel:
        return
    # Without expert parallelism, the ranks of data parallelism share each expert too.
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if size % ranks:
        raise ValueError(
            f"{QUANT_METHOD}: {ranks} ranks ({parallel.tensor_parallel_size} by tensor, {parallel.data_parallel_size} "
            f"by data) do not divide the experts' moe_intermediate_size {size}; choose a number that does, or share "
            "whole experts out with --enable-expert-parallel"
        )


def check_options(engine_args: Any) -> None:
    """Raise ValueError on bad options, naming where they are set, before any process starts."""
    options = parse_options(engine_args.additional_config)
    try:
        Scheme.from_dict(options.scheme)
    except ValueError as error:
        raise ValueError(
            f'{error}. Correct it where it is set (additional_config["{NAMESPACE}"] or --quantization-config), or '
            "leave it out for its default"
        ) from None
