"""What packing a checkpoint will do, decided from headers alone: which tensor goes where, in which form and size."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.quantization import compressed_tensors, packed
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import INTERLEAVED, Experts, Projection, find_experts
from vllm_ext.quantization.names import unmatched
from vllm_ext.quantization.packed_source import PackedProjection, find_packed
from vllm_ext.quantization.scheme import QUANT_METHOD, Scheme
from vllm_ext.quantization.tensor_file import CheckpointError, TensorRef, TensorSpec

FORMATS = (QUANT_METHOD, compressed_tensors.QUANT_METHOD)
UNSERVED_INTERLEAVED = "stock vLLM does not load interleaved experts (gpt-oss) from compressed-tensors names"


@dataclass(frozen=True)
class Target:
    """The form a projection is stored in. `kind` is its zero points': "float", "int" or None."""

    format: str
    group_size: int
    kind: str | None

    def specs(self, module: str, shape: tuple[int, int], store: str) -> list[TensorSpec]:
        """The tensors of a projection in this form."""
        maker = packed.specs if self.format == QUANT_METHOD else compressed_tensors.specs
        return maker(module, shape, self.group_size, self.kind, store)


@dataclass(frozen=True)
class Copy:
    """A tensor that stays as it is."""

    ref: TensorRef

    @property
    def position(self) -> tuple[str, int]:
        """Where reading begins, so that a file is read in order."""
        return self.ref.file.name, self.ref.start

    def specs(self) -> list[TensorSpec]:
        """The tensors it makes."""
        return [self.ref.spec]


@dataclass(frozen=True)
class Quantize:
    """A 16-bit projection to quantise, or a packed one to store in another form."""

    projection: Projection | PackedProjection
    target: Target

    @property
    def position(self) -> tuple[str, int]:
        """Where reading begins, so that a file is read in order."""
        ref = self._ref
        return ref.file.name, ref.start + (self.projection.index or 0)

    @property
    def _ref(self) -> TensorRef:
        source = self.projection
        return source.ref if isinstance(source, Projection) else source.refs[packed.CODES]

    def specs(self) -> list[TensorSpec]:
        """The tensors it makes."""
        source = self.projection
        stored = source.ref if isinstance(source, Projection) else source.refs[packed.SCALE]
        return self.target.specs(source.module, source.shape, packed.store_name(stored.dtype))


@dataclass(frozen=True)
class Shard:
    """One output file and the work that fills it."""

    name: str
    work: tuple[Copy | Quantize, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes read: the unit of progress."""
        return sum(_source_bytes(item) for item in self.work)

    def specs(self) -> list[TensorSpec]:
        """All tensors of the file."""
        return [spec for item in self.work for spec in item.specs()]


def _source_bytes(item: Copy | Quantize) -> int:
    return item.ref.nbytes if isinstance(item, Copy) else item.projection.nbytes


@dataclass(frozen=True)
class Plan:
    """Everything packing needs to know. `counts` is (layers, experts, projections) quantised."""

    source: Path
    scheme: Scheme
    format: str
    config: dict[str, Any]
    shards: tuple[Shard, ...]
    indexed: bool
    counts: tuple[int, int, int]
    requantises: bool
    warnings: tuple[str, ...] = field(default=())


def make_plan(checkpoint: Checkpoint, scheme: Scheme, format_name: str) -> Plan:
    """The plan for packing `checkpoint` with `scheme` in `format_name`.

    A packed checkpoint keeps its own groups and zero points; `scheme` then counts for its `method` alone, and the plan
    warns when it asks for others.
    Raises CheckpointError when nothing can be packed, or an unknown quantisation stands in the way.
    """
    if format_name not in FORMATS:
        raise ValueError(f"quantize: format must be one of {FORMATS}, got {format_name!r}")
    if checkpoint.quantization is None:
        return _plan_sixteen_bit(checkpoint, scheme, format_name)
    return _plan_packed(checkpoint, scheme, format_name)


def _plan_sixteen_bit(checkpoint: Checkpoint, scheme: Scheme, format_name: str) -> Plan:
    experts = find_experts(checkpoint)
    layers = {layer: found for layer, found in experts.layers.items() if not scheme.ignores(layer)}
    if not layers:
        ignored = f"; ignored by pattern: {sorted(experts.layers)[:4]}" if experts.layers else ""
        unknown = f"; in no known layout: {list(experts.unknown[:4])}" if experts.unknown else ""
        raise CheckpointError(
            f"{checkpoint.folder}: no routed experts found to quantise{ignored}{unknown}. The scheme is for "
            "mixture-of-experts models whose weights are named `...experts...`"
        )
    modules = [*experts.layers, *(name.rpartition(".")[0] for name in checkpoint.tensors)]
    warnings = [f"ignore pattern {pattern!r} matches nothing" for pattern in unmatched(scheme.ignore, modules)]
    warnings += [f"{name}: looks like experts, but in no known layout: left as it is" for name in experts.unknown]
    warnings += [f"{layer}: repeats the weights of a tied layer: stored once" for layer in experts.tied]
    if format_name == QUANT_METHOD:
        targets = {
            shard: Target(QUANT_METHOD, scheme.group_size(shard), scheme.zero_point_kind) for shard in ("w13", "w2")
        }
        quantization = scheme.to_dict()
    else:
        kind = None if scheme.symmetric else "int"
        group, warning = _common_group(layers, scheme.group_size_w13, scheme.group_size_w2)
        warnings += warning
        if any(p.interleaved for found in layers.values() for p in found):
            warnings.append(UNSERVED_INTERLEAVED)
        targets = dict.fromkeys(("w13", "w2"), Target(format_name, group, kind))
        ignore = _ignored_modules(checkpoint, experts, layers)
        quantization = compressed_tensors.make_config(group, symmetric=scheme.symmetric, ignore=ignore)
    work = [Quantize(p, targets[p.shard]) for found in layers.values() for p in found]
    consumed = {item.projection.ref.name for item in work if isinstance(item.projection, Projection)}
    dropped = consumed | _tied_names(checkpoint, experts.tied)
    copies = [Copy(ref) for name, ref in checkpoint.tensors.items() if name not in dropped]
    config = {**checkpoint.config, "quantization_config": quantization}
    return _assemble(checkpoint, scheme, format_name, config, [*copies, *work], layers, False, warnings)


def _plan_packed(checkpoint: Checkpoint, scheme: Scheme, format_name: str) -> Plan:
    layers = find_packed(checkpoint)
    if not layers:
        raise CheckpointError(f"{checkpoint.folder}: packed, but no quantised routed experts found")
    first = next(iter(layers.values()))[0]
    options = first.options
    if options.method == format_name:
        raise CheckpointError(f"{checkpoint.folder}: already packed as {format_name}")
    if scheme.ignore:
        raise ValueError(f"quantize: {checkpoint.folder} is packed: `ignore` cannot bring its 16-bit experts back")
    left = find_experts(checkpoint)
    sixteen_bit = left.layers
    kind = None if options.symmetric else "float" if first.refs[packed.ZERO_POINT].dtype in ("F16", "BF16") else "int"
    warnings: list[str] = []
    asked, defaults = (scheme.group_size_w13, scheme.group_size_w2, scheme.symmetric), Scheme()
    if asked not in (
        (options.group_size_w13, options.group_size_w2, options.symmetric),
        (defaults.group_size_w13, defaults.group_size_w2, defaults.symmetric),
    ):
        warnings.append("the checkpoint is packed already: it keeps its own groups and zero points")
    if format_name == QUANT_METHOD:
        sizes = {
            shard: options.group_size(shard) or next(p.shape[1] for f in layers.values() for p in f if p.shard == shard)
            for shard in ("w13", "w2")
        }
        targets = {shard: Target(QUANT_METHOD, size, kind) for shard, size in sizes.items()}
        scheme = Scheme(
            sizes["w13"],
            sizes["w2"],
            symmetric=options.symmetric,
            zero_point=kind or "int",
            method=scheme.method,
            ignore=tuple(sixteen_bit),
        )
        config = _without_quantization(checkpoint.config)
        config["quantization_config"] = scheme.to_dict()
        reencoded = False
    else:
        group, more = _common_group(layers, options.group_size_w13 or 0, options.group_size_w2 or 0)
        warnings += more
        if checkpoint.model_type in INTERLEAVED:
            warnings.append(UNSERVED_INTERLEAVED)
        reencoded = kind == "float"
        targets = dict.fromkeys(("w13", "w2"), Target(format_name, group, None if options.symmetric else "int"))
        ignore = _ignored_modules(checkpoint, left, layers)
        config = _without_quantization(checkpoint.config)
        config["quantization_config"] = compressed_tensors.make_config(
            group, symmetric=options.symmetric, ignore=ignore
        )
    work = [Quantize(p, targets[p.shard]) for found in layers.values() for p in found]
    consumed = {ref.name for found in layers.values() for p in found for ref in p.refs.values()}
    others = [name for name in checkpoint.tensors if name not in consumed]
    foreign = [name for name in others if name.endswith(f".{packed.CODES}")]
    if foreign and format_name == QUANT_METHOD:
        raise CheckpointError(
            f"{checkpoint.folder}: {len(foreign)} modules that are no routed experts are in 4 bits too, first "
            f"{foreign[0]}; {QUANT_METHOD} holds experts only"
        )
    copies = [Copy(checkpoint.tensors[name]) for name in others]
    return _assemble(checkpoint, scheme, format_name, config, [*copies, *work], layers, reencoded, warnings)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(config))
    for part in (result, result.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.pop("compression_config", None)
    return result


def _assemble(
    checkpoint: Checkpoint,
    scheme: Scheme,
    format_name: str,
    config: dict[str, Any],
    work: Iterable[Copy | Quantize],
    layers: Mapping[str, list[Any]],
    requantises: bool,
    warnings: list[str],
) -> Plan:
    by_file: dict[str, list[Copy | Quantize]] = {}
    for item in work:
        by_file.setdefault(item.position[0], []).append(item)
    shards = tuple(
        Shard(name, tuple(sorted(items, key=lambda item: item.position))) for name, items in sorted(by_file.items())
    )
    for shard in shards:
        shard.specs()  # what cannot be stored is found here, before anything is written
    warnings += [f"{path.name}: not in the index, left out" for path in checkpoint.stray]
    projections = sum(len(found) for found in layers.values())
    experts = sum(len({p.expert for p in found}) for found in layers.values())
    return Plan(
        checkpoint.folder,
        scheme,
        format_name,
        config,
        shards,
        checkpoint.indexed,
        (len(layers), experts, projections),
        requantises,
        tuple(warnings),
    )


def _common_group(layers: Mapping[str, list[Any]], *sizes: int) -> tuple[int, list[str]]:
    """The one group size compressed-tensors allows: it divides the wanted sizes and every projection's columns."""
    columns = {p.shape[1] for found in layers.values() for p in found}
    common = math.gcd(*sizes, *columns)
    if common % 8:
        raise CheckpointError(
            f"compressed-tensors: no multiple of 8 divides the groups {sizes} and the columns {sorted(columns)}"
        )
    served = next((size for size in compressed_tensors.SERVED_GROUPS if common % size == 0), None)
    if served is None:
        return common, [f"groups of {common}: stock vLLM serves compressed-tensors experts in groups of 32, 64 and 128"]
    return served, []


def _ignored_modules(checkpoint: Checkpoint, experts: Experts, layers: Mapping[str, list[Any]]) -> list[str]:
    """Linear modules left in 16 bits, one by one: patterns would have to be right for every model family."""
    names = set()
    for name, ref in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(ref.shape) == 2:
            names.add(module)
    names -= {projection.module for found in layers.values() for projection in found}
    kept = [found for layer, found in experts.layers.items() if layer not in layers]
    names |= {projection.module for found in kept for projection in found}
    return sorted(names)


def _tied_names(checkpoint: Checkpoint, tied: Iterable[str]) -> set[str]:
    prefixes = tuple(f"{layer}." for layer in tied)
    return {name for name in checkpoint.tensors if prefixes and name.startswith(prefixes)}
