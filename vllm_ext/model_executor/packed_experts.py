"""Load a layer's packed experts, tensor by tensor as vLLM hands them over, into this rank's part of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from vllm_ext.quantization import QuantizedWeight, Scheme, compressed_tensors, packed, slice_quantized
from vllm_ext.quantization.weight import group_count

_FIELDS = ("packed", "scale", "zero_point")


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint stores its experts: our own format, or compressed-tensors' `pack-quantized`.

    `group_size_*` None is one group a row. Picklable: it is part of vLLM's configuration.
    """

    group_size_w13: int | None
    group_size_w2: int | None
    zero_point: str | None
    ignore: tuple[str, ...]
    compressed_tensors: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PackedFormat:
        """Read a checkpoint's `quantization_config`. Raises ValueError on what is no 4-bit format known here."""
        if config.get("quant_method") == "compressed-tensors":
            options = compressed_tensors.parse_config(config)
            kind = None if options.symmetric else "int"
            return cls(options.group_size, options.group_size, kind, options.ignore, compressed_tensors=True)
        scheme = Scheme.from_dict(config)
        return cls(scheme.group_size_w13, scheme.group_size_w2, scheme.zero_point_kind, scheme.ignore)

    def roles(self) -> tuple[str, ...]:
        """Suffixes of the tensors of one projection."""
        roles = (packed.CODES, packed.SCALE) if self.zero_point is None else packed.ROLES
        return (*roles, compressed_tensors.SHAPE) if self.compressed_tensors else roles

    def read(self, module: str, tensors: Mapping[str, torch.Tensor], shard_id: str) -> QuantizedWeight:
        """The whole projection [N, K] from its tensors by role."""
        group = self.group_size_w2 if shard_id == "w2" else self.group_size_w13
        symmetric = self.zero_point is None
        if self.compressed_tensors:
            return compressed_tensors.from_tensors(module, tensors, group, symmetric=symmetric)
        assert group is not None
        try:
            weight = packed.from_tensors(module, tensors, group, symmetric=symmetric)
        except ValueError as error:
            raise ValueError(
                f"{error}; config.json says groups of {group}: restore its quantization_config, or pack the checkpoint "
                "again"
            ) from None
        if weight.zero_point_kind != self.zero_point:
            raise ValueError(
                f"{module}: config.json says zero_point {self.zero_point!r}, the checkpoint holds "
                f"{weight.zero_point_kind!r} ones; restore its quantization_config, or pack the checkpoint again"
            )
        return weight


@dataclass
class PackedExpertsLoader:
    """Collects the tensors of a projection, and copies this rank's part of it once the last has arrived.

    A projection is cut whole, because its scales need not be cut where its codes are: a rank's share of the down
    projection may begin inside a group.
    """

    layer: Any
    prefix: str
    packed: PackedFormat
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.waiting: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self.arrived: set[tuple[int, str]] = set()
        self.device = torch.device("cpu")
        parallel = self.layer.moe_config.moe_parallel_config
        self.start = parallel.tp_rank * self.intermediate_size
        hidden, local = self.hidden_size, self.intermediate_size
        group = self.packed.group_size_w2
        whole = local * parallel.tp_size
        # The rank's own groups: what `slice_quantized` makes of a share that begins inside a group of the checkpoint.
        self.group_w2 = _local_group(whole if group is None else group, self.start)
        self.group_w13 = hidden if self.packed.group_size_w13 is None else self.packed.group_size_w13
        self.rows_w13 = (2 if self.gated else 1) * local

    def create_parameters(self, has_bias: bool, attributes: Mapping[str, Any]) -> None:
        """Register this rank's tensors on the layer, with our loader; biases load as vLLM's own do."""
        from vllm.model_executor.utils import set_weight_attrs

        sizes = {
            "w13": (self.rows_w13, self.hidden_size, self.group_w13),
            "w2": (self.hidden_size, self.intermediate_size, self.group_w2),
        }
        for shard, (rows, columns, group) in sizes.items():
            groups = group_count(columns, group)
            zero_dtype = torch.uint8 if self.packed.zero_point == "int" else self.dtype
            tensors = {
                packed.CODES: torch.zeros(self.num_experts, rows, -(-columns // 2), dtype=torch.uint8),
                packed.SCALE: torch.empty(self.num_experts, rows, groups, dtype=self.dtype),
                packed.ZERO_POINT: torch.zeros(self.num_experts, rows, groups, dtype=zero_dtype),
                compressed_tensors.SHAPE: torch.empty(self.num_experts, 2, dtype=torch.int64),
            }
            self.device = tensors[packed.CODES].device
            for role, tensor in tensors.items():
                if role == packed.ZERO_POINT and self.packed.zero_point is None and not self.packed.compressed_tensors:
                    continue
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                self.layer.register_parameter(f"{shard}_{role}", parameter)
                set_weight_attrs(parameter, {**attributes, "weight_loader": self.load})
        for name, width in (("w13_bias", self.rows_w13), ("w2_bias", self.hidden_size)):
            if has_bias:
                bias = torch.nn.Parameter(torch.zeros(self.num_experts, width, dtype=self.dtype), requires_grad=False)
                self.layer.register_parameter(name, bias)
                set_weight_attrs(bias, attributes)

    def load(
        self,
        param: torch.nn.Parameter | None,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's weight loader: one tensor of one projection of one expert. Foreign experts are declined."""
        expert = self.layer._map_global_expert_id_to_local_expert_id(expert_id)
        if expert == -1:
            return False if return_success else None
        role = next((role for role in _ALL_ROLES if weight_name.endswith(role)), None)
        if role is None:
            raise ValueError(
                f"w4a16-grouped, layer {self.prefix}: unexpected tensor {weight_name}; expected are {_ALL_ROLES}"
            )
        key = (expert, shard_id)
        tensors = self.waiting.setdefault(key, {})
        # Rearranged on the device: the host's threads cost more than they do on tensors this small. Shapes are read.
        tensors[role] = loaded_weight if role == compressed_tensors.SHAPE else loaded_weight.to(self.device)
        if set(self.packed.roles()) <= set(tensors):
            self._store(expert, shard_id, self.waiting.pop(key), f"{self.prefix}.{expert_id}.{shard_id}")
            self.arrived.add(key)
        return True if return_success else None

    def _store(self, expert: int, shard_id: str, tensors: Mapping[str, torch.Tensor], module: str) -> None:
        whole = self.packed.read(module, tensors, shard_id)
        intermediate = self.intermediate_size * self.layer.moe_config.moe_parallel_config.tp_size
        expected = (self.hidden_size, intermediate) if shard_id == "w2" else (intermediate, self.hidden_size)
        if tuple(whole.shape) != expected:
            raise ValueError(
                f"{module}: the checkpoint's projection is {tuple(whole.shape)}, config.json makes it {expected}"
            )
        dim = 1 if shard_id == "w2" else 0
        part = slice_quantized(whole, dim, self.start, self.intermediate_size)
        first = self.intermediate_size if shard_id == "w3" else 0
        shard = "w2" if shard_id == "w2" else "w13"
        for role, field in zip(packed.ROLES, _FIELDS, strict=True):
            source = getattr(part, field)
            if source is not None:
                target = getattr(self.layer, f"{shard}_{role}").data[expert]
                target[first : first + source.shape[0]].copy_(source)

    def missing(self) -> list[str]:
        """Projections of local experts that are not complete."""
        shards = ("w1", "w2", "w3") if self.gated else ("w1", "w2")
        return [
            f"expert {expert} {shard}: {', '.join(sorted(set(self.packed.roles()) - set(self.waiting.get(key, {}))))}"
            for expert in range(self.num_experts)
            for shard in shards
            if (key := (expert, shard)) not in self.arrived
        ]

    def take(self, *, whole: bool = True) -> tuple[QuantizedWeight, QuantizedWeight]:
        """The layer's experts w13 [E, rows, H] and w2 [E, H, I]; the loading parameters are removed.

        whole  every tensor must have arrived; false where vLLM draws weights instead of reading them

        Raises ValueError naming what the checkpoint lacks.
        """
        if whole and (missing := self.missing()):
            raise ValueError(
                f"w4a16-grouped, layer {self.prefix}: {len(missing)} projections of the packed checkpoint did not "
                f"arrive, first local {missing[0]}; pack the checkpoint again with `vllm-ext quantize`"
            )
        weights = []
        for shard, columns, group in (
            ("w13", self.hidden_size, self.group_w13),
            ("w2", self.intermediate_size, self.group_w2),
        ):
            found = {role: getattr(self.layer, f"{shard}_{role}", None) for role in _ALL_ROLES}
            for role, parameter in found.items():
                if parameter is not None:
                    delattr(self.layer, f"{shard}_{role}")
            codes, scale = found[packed.CODES].data, found[packed.SCALE].data  # type: ignore[union-attr]
            zero = None if self.packed.zero_point is None else found[packed.ZERO_POINT].data  # type: ignore[union-attr]
            for role, tensor in ((packed.SCALE, scale), (packed.ZERO_POINT, zero)):
                if whole and tensor is not None and tensor.is_floating_point():
                    self._check_finite(shard, role, tensor)
            shape = torch.Size((*codes.shape[:-1], columns))
            weights.append(QuantizedWeight(codes, scale, zero, group, shape))
        return weights[0], weights[1]

    def _check_finite(self, shard: str, role: str, tensor: torch.Tensor) -> None:
        finite = tensor.isfinite()
        if not bool(finite.all()):
            broken = int((~finite.flatten(1).all(1)).nonzero()[0])
            raise ValueError(
                f"w4a16-grouped, layer {self.prefix}: {shard} {role} of local expert {broken} holds NaN or infinite "
                "values; the packed checkpoint is damaged: copy it again, or pack the 16-bit one again"
            )


_ALL_ROLES = (*packed.ROLES, compressed_tensors.SHAPE)


def _local_group(group: int, start: int) -> int:
    return group if start % group == 0 else gcd(start, group)
