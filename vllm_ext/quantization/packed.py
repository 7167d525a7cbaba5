"""How a `w4a16-grouped` checkpoint stores a quantised projection: names, dtypes and shapes of its tensors.

For a module "model.layers.3.mlp.experts.7.gate_proj" of shape [N, K] in G groups:
weight_packed      U8 [N, K / 2], low nibble first, plain column order
weight_scale       16-bit float [N, G]
weight_zero_point  [N, G], the scale's dtype or U8; absent when symmetric
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_ext.quantization.tensor_file import CheckpointError, TensorSpec
from vllm_ext.quantization.weight import QuantizedWeight, group_count

CODES, SCALE, ZERO_POINT = "weight_packed", "weight_scale", "weight_zero_point"
ROLES = (CODES, SCALE, ZERO_POINT)


def store_name(dtype: str) -> str:
    """The safetensors dtype of scales for a weight of safetensors dtype `dtype`."""
    return dtype if dtype in ("F16", "BF16") else "BF16"


def specs(module: str, shape: tuple[int, int], group_size: int, kind: str | None, store: str) -> list[TensorSpec]:
    """The tensors of a projection; `kind` is "float", "int" or None. Raises ValueError on an odd number of columns."""
    rows, columns = shape
    if columns % 2:
        raise ValueError(f"{module}: packed checkpoints need an even number of columns, got {columns}")
    groups = (rows, group_count(columns, group_size))
    tensors = [
        TensorSpec(f"{module}.{CODES}", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.{SCALE}", store, groups),
    ]
    if kind is not None:
        tensors.append(TensorSpec(f"{module}.{ZERO_POINT}", "U8" if kind == "int" else store, groups))
    return tensors


def to_tensors(module: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a quantised projection [N, K] by name."""
    tensors = {f"{module}.{CODES}": weight.packed, f"{module}.{SCALE}": weight.scale}
    if weight.zero_point is not None:
        tensors[f"{module}.{ZERO_POINT}"] = weight.zero_point
    return tensors


def from_tensors(
    module: str, tensors: Mapping[str, torch.Tensor], group_size: int, *, symmetric: bool
) -> QuantizedWeight:
    """The quantised weight [..., N, K] of tensors by role. Zero points of a symmetric checkpoint are ignored.

    Raises CheckpointError naming a missing tensor, or one whose shape does not fit.
    """
    needed = (CODES, SCALE) if symmetric else ROLES
    absent = [role for role in needed if role not in tensors]
    if absent:
        raise CheckpointError(f"{module}: lacks {', '.join(absent)}")
    packed = tensors[CODES]
    shape = torch.Size((*packed.shape[:-1], packed.shape[-1] * 2))
    zero = None if symmetric else tensors[ZERO_POINT]
    try:
        return QuantizedWeight(packed, tensors[SCALE], zero, group_size, shape)
    except ValueError as error:
        raise CheckpointError(f"{module}: {error}") from error
