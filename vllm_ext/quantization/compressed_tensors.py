"""The compressed-tensors format "pack-quantized" for 4-bit groups: written, and read back exactly.

For a module of shape [N, K] in G groups, eight nibbles in an int32, the first column lowest:
weight_packed      I32 [N, ceil(K / 8)]; codes 0..15, a symmetric weight's zero being 8
weight_scale       float [N, G]
weight_zero_point  I32 [ceil(N / 8), G], packed along the rows; absent when symmetric
weight_shape       I64 [2]
Codes and zero points mean what they mean in `QuantizedWeight`, so nothing is re-rounded; only integer ones fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.quantization.packed import CODES, SCALE, ZERO_POINT
from vllm_ext.quantization.tensor_file import CheckpointError, TensorSpec
from vllm_ext.quantization.weight import QuantizedWeight, group_count, pack_nibbles, unpack_nibbles

QUANT_METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
SHAPE = "weight_shape"
ROLES = (CODES, SCALE, ZERO_POINT, SHAPE)
NIBBLES = 8
SERVED_GROUPS = (128, 64, 32)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Packed nibbles uint8 [..., n] as little-endian words int32 [..., ceil(n / 4)]."""
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    # Flat first: a dimension of size one may keep a stride that no wider dtype allows.
    flat = padded.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.int32).reshape(*packed.shape[:-1], -(-packed.shape[-1] // 4))


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Undo `_words`, padding included: int32 [..., n] to uint8 [..., 4 n]."""
    flat = words.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])


def specs(module: str, shape: tuple[int, int], group_size: int, kind: str | None, store: str) -> list[TensorSpec]:
    """The tensors of a projection. Raises ValueError on float zero points and groups that do not divide the columns."""
    rows, columns = shape
    if kind == "float":
        raise ValueError(f"{module}: compressed-tensors stores integer zero points only")
    if columns % group_size:
        raise ValueError(f"{module}: compressed-tensors groups must divide the columns: {columns} % {group_size} != 0")
    groups = group_count(columns, group_size)
    tensors = [
        TensorSpec(f"{module}.{CODES}", "I32", (rows, -(-columns // NIBBLES))),
        TensorSpec(f"{module}.{SCALE}", store, (rows, groups)),
        TensorSpec(f"{module}.{SHAPE}", "I64", (2,)),
    ]
    if kind == "int":
        tensors.append(TensorSpec(f"{module}.{ZERO_POINT}", "I32", (-(-rows // NIBBLES), groups)))
    return tensors


def to_tensors(module: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a quantised [..., N, K] projection by name. Raises ValueError on float zero points."""
    if weight.zero_point_kind == "float":
        raise ValueError(f"{module}: compressed-tensors stores integer zero points only; re-round them first")
    tensors = {
        f"{module}.{CODES}": _words(weight.packed),
        f"{module}.{SCALE}": weight.scale,
        f"{module}.{SHAPE}": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if weight.zero_point is not None:
        turned = weight.zero_point.transpose(-1, -2).contiguous()
        tensors[f"{module}.{ZERO_POINT}"] = _words(pack_nibbles(turned)).transpose(-1, -2).contiguous()
    return tensors


def from_tensors(
    module: str, tensors: Mapping[str, torch.Tensor], group_size: int | None, *, symmetric: bool
) -> QuantizedWeight:
    """The quantised weight [..., N, K] of tensors by role; 3-D tensors are experts fused in one tensor.

    `group_size` None is one group a row ("channel"). A symmetric checkpoint's zero points are ignored: some writers
    store dummies. Raises CheckpointError naming a missing tensor, or one whose dtype or shape does not fit.
    """
    needed = (CODES, SCALE) if symmetric else (CODES, SCALE, ZERO_POINT)
    absent = [role for role in needed if role not in tensors]
    if absent:
        raise CheckpointError(f"{module}: lacks {', '.join(absent)}")
    words, scale = tensors[CODES], tensors[SCALE]
    columns = int(tensors[SHAPE].flatten()[-1]) if SHAPE in tensors else words.shape[-1] * NIBBLES
    if words.dtype != torch.int32 or words.shape[-1] != -(-columns // NIBBLES):
        raise CheckpointError(
            f"{module}: {CODES} must be int32 [..., {-(-columns // NIBBLES)}], got {words.dtype} {tuple(words.shape)}"
        )
    packed = _nibbles(words)[..., : -(-columns // 2)].contiguous()
    rows = words.shape[-2]
    group = columns if group_size is None else group_size
    zero = None
    if not symmetric:
        stored = tensors[ZERO_POINT]
        expected = (*words.shape[:-2], -(-rows // NIBBLES), group_count(columns, group))
        if stored.dtype != torch.int32 or tuple(stored.shape) != expected:
            raise CheckpointError(
                f"{module}: {ZERO_POINT} must be int32 {expected}, packed along the rows, got {stored.dtype} "
                f"{tuple(stored.shape)}"
            )
        zero = unpack_nibbles(_nibbles(stored.transpose(-1, -2)), rows).transpose(-1, -2).contiguous()
    try:
        return QuantizedWeight(packed, scale, zero, group, torch.Size((*words.shape[:-1], columns)))
    except ValueError as error:
        raise CheckpointError(f"{module}: {error}") from error


@dataclass(frozen=True)
class GroupOptions:
    """What a compressed-tensors configuration says of its 4-bit weights; `group_size` None is one group a row."""

    group_size: int | None
    symmetric: bool
    ignore: tuple[str, ...]


def parse_config(config: Mapping[str, Any]) -> GroupOptions:
    """The options of a compressed-tensors W4A16 `quantization_config`.

    Raises CheckpointError on what is no weight-only 4-bit integer format, on activation ordering, and on several
    different groups.
    """
    groups = config.get("config_groups")
    if config.get("format", FORMAT) != FORMAT or not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"compressed-tensors: only format {FORMAT!r} is read, got {config.get('format')!r}")
    found = set()
    for name, group in groups.items():
        weights = group.get("weights") or {}
        if group.get("input_activations") is not None or (weights.get("num_bits"), weights.get("type", "int")) != (
            4,
            "int",
        ):
            raise CheckpointError(f"compressed-tensors: {name} is not weight-only 4-bit integer: {dict(group)}")
        if weights.get("actorder") in (True, "group", "dynamic"):
            raise CheckpointError(
                f"compressed-tensors: {name} orders columns by activation (actorder {weights['actorder']!r}), which "
                "groups of neighbouring columns cannot express; serve it with vLLM's own compressed-tensors"
            )
        strategy = weights.get("strategy", "group")
        if strategy not in ("group", "channel"):
            raise CheckpointError(f"compressed-tensors: {name}: strategy must be group or channel, got {strategy!r}")
        size = None if strategy == "channel" or weights.get("group_size") in (None, -1) else weights["group_size"]
        found.add((size, bool(weights.get("symmetric", True))))
    if len(found) > 1:
        raise CheckpointError(
            f"compressed-tensors: groups with different options are not read: {sorted(map(str, found))}"
        )
    size, symmetric = found.pop()
    return GroupOptions(size, symmetric, tuple(config.get("ignore") or ()))


def make_config(group_size: int, *, symmetric: bool, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in this format; `ignore` names every linear module left in 16 bits."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": QUANT_METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
