"""Module names: which `ignore` patterns match, and which modules are routed experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

REGEX_PREFIX = "re:"
ROUTED = "experts"


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the module `name`, a part of its path, or a parent of it.

    A plain pattern is compared component by component: "layers.1" is found in "model.layers.1.mlp.experts" and not in
    "model.layers.11.mlp.experts"; "mlp.gate" is not found in "model.layers.1.mlp.gate_proj". A pattern that starts
    with "re:" is a regular expression matched from the start of the name, as in compressed-tensors.
    """
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern[len(REGEX_PREFIX) :], name) is not None
    wanted, parts = pattern.split("."), name.split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether any of `patterns` matches the module `name`."""
    return any(matches(pattern, name) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns that match none of `names`: most often a typing error, so callers warn about them."""
    return [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]


def is_routed_experts(name: str) -> bool:
    """Whether `name` is a layer's set of routed experts, such as "model.layers.3.mlp.experts".

    Routers, gates, and shared or dense experts ("shared_expert", "shared_experts", "mlp.gate") are not.
    """
    parts = name.split(".")
    return parts[-1] == ROUTED and not any(part.startswith("shared") for part in parts)
