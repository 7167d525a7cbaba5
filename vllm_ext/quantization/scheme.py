"""The options of 4-bit experts: `quantization_config` of a checkpoint and the options of quantising at load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from vllm_ext.quantization.names import REGEX_PREFIX, is_ignored, is_routed_experts
from vllm_ext.quantization.quantize import METHODS, ZERO_POINTS, quantize_weight
from vllm_ext.quantization.weight import QuantizedWeight, check_group_size

QUANT_METHOD = "w4a16-grouped"
VERSION = 1


@dataclass(frozen=True)
class Scheme:
    """How routed experts are quantised. Frozen, hashable and picklable: it travels to every worker.

    group_size_w13  columns of a group along the hidden size (gate and up projections), a positive multiple of 8
    group_size_w2   columns of a group along the intermediate size (down projection), a positive multiple of 8
    symmetric       no zero points; `zero_point` is then ignored
    zero_point      "float" or "int" (what compressed-tensors can store)
    method          "hqq" or "minmax"
    ignore          expert layers left as they are: names matched by component, or "re:" and a regular expression

    Raises ValueError on any other value.
    """

    group_size_w13: int = 128
    group_size_w2: int = 64
    symmetric: bool = False
    zero_point: str = "float"
    method: str = "hqq"
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("group_size_w13", "group_size_w2"):
            try:
                check_group_size(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{QUANT_METHOD}: {key}: {error}") from None
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"{QUANT_METHOD}: symmetric must be true or false, got {self.symmetric!r}")
        for key, allowed in (("zero_point", ZERO_POINTS), ("method", METHODS)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{QUANT_METHOD}: {key} must be one of {allowed}, got {getattr(self, key)!r}")
        object.__setattr__(self, "ignore", _checked_patterns(self.ignore))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Scheme:
        """The scheme of a `quantization_config` or of load options; absent keys take their defaults.

        Raises ValueError on an unknown key (naming it and the allowed ones), a bad value, another `quant_method`, or a
        `version` this package does not read.
        """
        allowed = ("quant_method", "version", *(field.name for field in fields(cls)))
        unknown = [key for key in options if key not in allowed]
        if unknown:
            raise ValueError(
                f"{QUANT_METHOD}: unknown option{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(map(repr, unknown))}; allowed: {', '.join(allowed)}"
            )
        method = options.get("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ValueError(f"{QUANT_METHOD}: quant_method must be {QUANT_METHOD!r}, got {method!r}")
        version = options.get("version", VERSION)
        if isinstance(version, bool) or version != VERSION:
            raise ValueError(
                f"{QUANT_METHOD}: version must be {VERSION}, got {version!r}; a newer vllm-ext may read this checkpoint"
            )
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` of this scheme, JSON-ready; `from_dict` gives the scheme back."""
        return {"quant_method": QUANT_METHOD, "version": VERSION, **asdict(self), "ignore": list(self.ignore)}

    @property
    def zero_point_kind(self) -> str | None:
        """ "float", "int", or None when symmetric."""
        return None if self.symmetric else self.zero_point

    def group_size(self, shard: str) -> int:
        """The group size of "w13" (gate and up, along the hidden size) or "w2" (down, along the intermediate size)."""
        if shard not in ("w13", "w2"):
            raise ValueError(f"{QUANT_METHOD}: shard must be 'w13' or 'w2', got {shard!r}")
        return self.group_size_w13 if shard == "w13" else self.group_size_w2

    def ignores(self, name: str) -> bool:
        """Whether an `ignore` pattern matches the module `name`."""
        return is_ignored(name, self.ignore)

    def covers(self, name: str) -> bool:
        """Whether the module `name` is a layer's routed experts and not ignored."""
        return is_routed_experts(name) and not self.ignores(name)

    def quantize(self, weight: torch.Tensor, shard: str, *, name: str | None = None) -> QuantizedWeight:
        """`quantize_weight` of [..., N, K] with this scheme's options for "w13" or "w2"."""
        return quantize_weight(
            weight,
            self.group_size(shard),
            symmetric=self.symmetric,
            zero_point=self.zero_point,
            method=self.method,
            name=name,
        )


def _checked_patterns(patterns: object) -> tuple[str, ...]:
    if not isinstance(patterns, (list, tuple)):
        raise ValueError(f"{QUANT_METHOD}: ignore must be a list of names, got {patterns!r}")
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"{QUANT_METHOD}: ignore holds names or 're:' patterns, got {pattern!r}")
        if pattern.startswith(REGEX_PREFIX):
            try:
                re.compile(pattern[len(REGEX_PREFIX) :])
            except re.error as error:
                raise ValueError(f"{QUANT_METHOD}: ignore: {pattern!r} is no regular expression: {error}") from None
    return tuple(patterns)
