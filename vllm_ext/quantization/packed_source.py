"""Finds and reads the quantised experts of a packed checkpoint, of this package's format or of compressed-tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_ext.quantization import compressed_tensors, packed
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import W2, W13, check_complete, natural
from vllm_ext.quantization.names import is_routed_experts
from vllm_ext.quantization.packed import CODES, SCALE
from vllm_ext.quantization.scheme import QUANT_METHOD, Scheme
from vllm_ext.quantization.slicing import slice_quantized
from vllm_ext.quantization.tensor_file import CheckpointError, TensorRef
from vllm_ext.quantization.weight import QuantizedWeight

_ROLE = r"(?P<role>packed|scale|zero_point|shape|g_idx)"
_PER_EXPERT = re.compile(rf"(?P<layer>.+\.experts|experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight_{_ROLE}")
_FUSED = re.compile(rf"(?P<layer>.+\.experts|experts)\.(?P<projection>[a-z0-9_]+?)(?:[._]weight)?_{_ROLE}")
_SPLIT = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


@dataclass(frozen=True)
class PackedOptions:
    """How a packed checkpoint stores its experts. A group of None is one group a row."""

    method: str
    group_size_w13: int | None
    group_size_w2: int | None
    symmetric: bool

    def group_size(self, shard: str) -> int | None:
        """The group size of "w13" or "w2"."""
        return self.group_size_w13 if shard == "w13" else self.group_size_w2


@dataclass(frozen=True)
class PackedProjection:
    """One quantised matrix [N, K] of one expert, and where in the checkpoint its tensors are.

    `index` and `part` pick the expert and the rows where experts, or gate and up, share one tensor.
    """

    layer: str
    expert: int
    name: str
    shard: str
    refs: Mapping[str, TensorRef]
    options: PackedOptions
    index: int | None = None
    part: str = "all"

    @property
    def module(self) -> str:
        """The projection's module name, to which ".weight_packed" and its like are added."""
        return f"{self.layer}.{self.expert}.{self.name}"

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K], from the shapes in the files' headers and, where columns were padded, `weight_shape`."""
        rows, width = self.refs[CODES].shape[-2:]
        columns = width * (2 if self.refs[CODES].dtype == "U8" else compressed_tensors.NIBBLES)
        if compressed_tensors.SHAPE in self.refs:
            columns = int(self.refs[compressed_tensors.SHAPE].read().flatten()[-1])
        return (rows if self.part == "all" else rows // 2), columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes and metadata in the source."""
        share = 1 if self.part == "all" else 2
        return sum(ref.nbytes // (1 if self.index is None else ref.shape[0]) for ref in self.refs.values()) // share

    def read(self) -> QuantizedWeight:
        """The quantised matrix. Raises CheckpointError when tensors are missing or do not fit."""
        tensors = {}
        for role, ref in self.refs.items():
            if self.index is not None and len(ref.shape) == 3:
                rows = ref.shape[1]
                tensors[role] = ref.read_rows(self.index * rows, rows)
            else:
                tensors[role] = ref.read()
        group, symmetric = self.options.group_size(self.shard), self.options.symmetric
        if self.options.method == QUANT_METHOD:
            assert group is not None
            weight = packed.from_tensors(self.module, tensors, group, symmetric=symmetric)
        else:
            weight = compressed_tensors.from_tensors(self.module, tensors, group, symmetric=symmetric)
        if self.part == "all":
            return weight
        half = weight.shape[0] // 2
        return slice_quantized(weight, 0, half if self.part == "up" else 0, half)


def packed_options(checkpoint: Checkpoint) -> PackedOptions:
    """The options in a packed checkpoint's config.json. Raises CheckpointError on another quantisation method."""
    config = checkpoint.quantization or {}
    method = config.get("quant_method")
    if method == QUANT_METHOD:
        scheme = Scheme.from_dict(config)
        return PackedOptions(method, scheme.group_size_w13, scheme.group_size_w2, scheme.symmetric)
    if method == compressed_tensors.QUANT_METHOD:
        options = compressed_tensors.parse_config(config)
        return PackedOptions(method, options.group_size, options.group_size, options.symmetric)
    raise CheckpointError(
        f"{checkpoint.folder}: already quantised (quant_method {method!r}); start from the 16-bit checkpoint"
    )


def find_packed(checkpoint: Checkpoint) -> dict[str, list[PackedProjection]]:
    """The quantised routed experts of a packed checkpoint, by layer.

    Raises CheckpointError when tensors or experts are missing, contradict each other, or are in no form read here.
    """
    options = packed_options(checkpoint)
    grouped: dict[tuple[str, int | None, str], dict[str, TensorRef]] = {}
    for name, ref in checkpoint.tensors.items():
        match = _PER_EXPERT.fullmatch(name) or _FUSED.fullmatch(name)
        if match and is_routed_experts(match["layer"]):
            expert = match.groupdict().get("expert")
            key = (match["layer"], None if expert is None else int(expert), match["projection"])
            grouped.setdefault(key, {})[f"weight_{match['role']}"] = ref
    layers: dict[str, list[PackedProjection]] = {}
    for (layer, number, name), refs in grouped.items():
        if "weight_g_idx" in refs:
            raise CheckpointError(f"{refs['weight_g_idx'].name}: columns ordered by activation are not read")
        for role in (CODES, SCALE):
            if role not in refs:
                module = f"{layer}.{name}" if number is None else f"{layer}.{number}.{name}"
                raise CheckpointError(f"{module}: {role} is missing; the checkpoint is incomplete")
        if refs[SCALE].dtype not in ("F16", "BF16"):
            raise CheckpointError(f"{refs[SCALE].name}: is {refs[SCALE].dtype}; only FP16 and BF16 scales are read")
        halves = _SPLIT.get(name)
        names = ((name, "all"),) if halves is None else ((halves[0], "gate"), (halves[1], "up"))
        fused = number is None
        for expert in range(refs[CODES].shape[0]) if fused else (number or 0,):
            for projection, part in names:
                if projection not in W13 and projection not in W2:
                    raise CheckpointError(f"{layer}: {projection} is no known projection of an expert")
                shard = "w13" if projection in W13 else "w2"
                index = expert if fused else None
                found = PackedProjection(layer, expert, projection, shard, refs, options, index, part)
                layers.setdefault(layer, []).append(found)
    for layer, projections in layers.items():
        check_complete(layer, projections)
    return dict(sorted(layers.items(), key=lambda item: natural(item[0])))


def added_error(exact: QuantizedWeight, stored: QuantizedWeight) -> tuple[float, float]:
    """Sums of squares of (stored - exact) and of exact: what re-rounding a quantised weight costs."""
    reference = exact.dequantize(torch.float64)
    difference = stored.dequantize(torch.float64) - reference
    return float(difference.square().sum()), float(reference.square().sum())
