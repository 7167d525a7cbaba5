"""Finds the routed experts of a 16-bit checkpoint in every layout model families store them in.

Per expert: `experts.3.gate_proj.weight` (or up_proj, down_proj, w1, w3, w2), [N, K]; `experts.3.gate_up_proj.weight`.
Fused: `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I]; without a gate `experts.up_proj` [E, I, H].
Transposed: the same as [E, H, 2I] and [E, I, H]; interleaved: gate and up alternate (gpt-oss, with biases).
Any prefix may stand before `experts`. Routers, gates and shared experts are never taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.names import is_routed_experts
from vllm_ext.quantization.tensor_file import TORCH_DTYPES, CheckpointError, TensorRef

W13 = ("gate_proj", "up_proj", "w1", "w3")
W2 = ("down_proj", "w2")
INTERLEAVED = ("gpt_oss", "openai_privacy_filter")
# Two names for one set of weights in models that tie them; a loader accepts either.
TIED_PREFIXES = (("encoder.language_model.", "decoder."),)

_PER_EXPERT = re.compile(r"(?P<layer>.+\.experts|experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
_FUSED = re.compile(
    r"(?P<layer>.+\.experts|experts)\.(?P<projection>gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:\.weight)?"
)


@dataclass(frozen=True)
class Projection:
    """One matrix [N, K] of one expert, and where in the checkpoint it is.

    layer    the experts' module, such as "model.layers.3.mlp.experts"
    name     the projection, as loaders know it ("gate_proj", "w1", ...)
    shard    "w13" or "w2"
    part     which rows of the stored matrix: all, or the half of a fused gate and up
    """

    layer: str
    expert: int
    name: str
    shard: str
    shape: tuple[int, int]
    ref: TensorRef
    index: int | None = None
    part: str = "all"
    transposed: bool = False
    interleaved: bool = False

    @property
    def module(self) -> str:
        """The projection's module name, to which ".weight_packed" and its like are added."""
        return f"{self.layer}.{self.expert}.{self.name}"

    @property
    def nbytes(self) -> int:
        """Bytes of this matrix in the source."""
        return self.shape[0] * self.shape[1] * (self.ref.nbytes // max(1, _numel(self.ref.shape)))

    def read(self) -> torch.Tensor:
        """The matrix [N, K] in its own dtype; nothing else is read where rows lie together."""
        rows = self.ref.shape[-2]
        base = (self.index or 0) * rows
        if not self.transposed and not self.interleaved:
            first = self.shape[0] if self.part == "up" else 0
            return self.ref.read_rows(base + first, self.shape[0])
        matrix = self.ref.read_rows(base, rows)
        matrix = matrix.t() if self.transposed else matrix
        if self.part != "all":
            offset = int(self.part == "up")
            half = matrix.shape[0] // 2
            matrix = matrix[offset::2] if self.interleaved else matrix[offset * half : (offset + 1) * half]
        return matrix.contiguous()


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


@dataclass(frozen=True)
class Experts:
    """The routed experts of a checkpoint: projections by layer, names left out as copies of tied ones, and weights
    that look like experts but are in no known layout."""

    layers: dict[str, list[Projection]]
    tied: tuple[str, ...]
    unknown: tuple[str, ...]


def find_experts(checkpoint: Checkpoint) -> Experts:
    """All routed experts of a 16-bit checkpoint. Raises CheckpointError on shapes that contradict each other."""
    layers: dict[str, list[Projection]] = {}
    fused: dict[str, dict[str, TensorRef]] = {}
    unknown = []
    for name, ref in checkpoint.tensors.items():
        per_expert, whole = _PER_EXPERT.fullmatch(name), _FUSED.fullmatch(name)
        if per_expert and is_routed_experts(per_expert["layer"]):
            found = list(_per_expert(per_expert, ref))
            if found:
                layers.setdefault(per_expert["layer"], []).extend(found)
            elif len(ref.shape) > 1:
                unknown.append(name)
        elif whole and len(ref.shape) == 3 and is_routed_experts(whole["layer"]):
            fused.setdefault(whole["layer"], {})[whole["projection"]] = ref
        elif len(ref.shape) == 3 and ("expert" in name or "moe" in name) and name.endswith(("weight", "proj")):
            unknown.append(name)
    for layer, refs in fused.items():
        interleaved = checkpoint.model_type in INTERLEAVED
        biased = any(f"{layer}.{projection}_bias" in checkpoint.tensors for projection in refs)
        layers.setdefault(layer, []).extend(_fused(layer, refs, _hidden_size(checkpoint), interleaved, biased))
    for layer, projections in layers.items():
        _check_layer(projections)
        check_complete(layer, projections)
    tied = _tied(layers)
    for layer in tied:
        del layers[layer]
    return Experts(dict(sorted(layers.items(), key=lambda item: natural(item[0]))), tuple(tied), tuple(unknown))


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _hidden_size(checkpoint: Checkpoint) -> int | None:
    text = checkpoint.config.get("text_config")
    for config in (text if isinstance(text, dict) else {}, checkpoint.config):
        if isinstance(config.get("hidden_size"), int):
            return config["hidden_size"]
    return None


def _per_expert(match: re.Match[str], ref: TensorRef) -> Iterable[Projection]:
    name, layer, expert = match["projection"], match["layer"], int(match["expert"])
    if len(ref.shape) != 2:
        return
    rows, columns = ref.shape
    if name in W13 or name in W2:
        yield Projection(layer, expert, name, "w13" if name in W13 else "w2", (rows, columns), ref)
    elif name in ("gate_up_proj", "w13"):
        gate, up = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("w1", "w3")
        for part, projection in (("gate", gate), ("up", up)):
            yield Projection(layer, expert, projection, "w13", (rows // 2, columns), ref, part=part)


def _fused(
    layer: str, refs: dict[str, TensorRef], hidden: int | None, interleaved: bool, biased: bool
) -> Iterable[Projection]:
    down = refs.get("down_proj") or refs.get("w2")
    if down is None or len(refs) < 2:
        raise CheckpointError(
            f"{layer}: fused experts need gate_up_proj (or up_proj) and down_proj, got only {sorted(refs)}"
        )
    first = next(ref for ref in refs.values() if ref is not down)
    gated = first.name.removesuffix(".weight").endswith(("gate_up_proj", "w13"))
    transposed = _is_transposed(layer, first.shape, down.shape, gated, hidden)
    interleaved = gated and transposed and (interleaved or biased)
    for projection, ref in refs.items():
        experts, *matrix = ref.shape
        rows, columns = reversed(matrix) if transposed else matrix
        if ref is down:
            parts = [(projection, "all", rows)]
        elif projection == "gate_up_proj":
            parts = [("gate_proj", "gate", rows // 2), ("up_proj", "up", rows // 2)]
        elif projection == "w13":
            parts = [("w1", "gate", rows // 2), ("w3", "up", rows // 2)]
        else:
            parts = [(projection, "all", rows)]
        for expert in range(experts):
            for name, part, count in parts:
                shard = "w2" if ref is down else "w13"
                shape = (count, columns)
                yield Projection(layer, expert, name, shard, shape, ref, expert, part, transposed, interleaved)


def _is_transposed(layer: str, first: tuple[int, ...], down: tuple[int, ...], gated: bool, hidden: int | None) -> bool:
    """Told from both shapes: [E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]; no size satisfies both."""
    (_, a, b), (_, c, d) = first, down
    factor = 2 if gated else 1
    straight, turned = (a == factor * d and b == c), (b == factor * c and a == d)
    if first[0] != down[0] or not (straight or turned):
        raise CheckpointError(f"{layer}: shapes {first} and {down} are no gate/up and down projections of one layer")
    if straight and turned:
        return hidden is not None and b != hidden and a == hidden
    return turned


def _check_layer(projections: list[Projection]) -> None:
    """Raise CheckpointError on weights that are not floating, or empty."""
    for projection in projections:
        if projection.ref.dtype not in TORCH_DTYPES or not TORCH_DTYPES[projection.ref.dtype].is_floating_point:
            raise CheckpointError(
                f"{projection.ref.file}: {projection.ref.name} is {projection.ref.dtype}; only FP16, BF16 and FP32 "
                "experts can be quantised: start from the unquantised checkpoint"
            )
        if 0 in projection.shape:
            raise CheckpointError(f"{projection.module}: is empty, {projection.shape}")


class Part(Protocol):
    """A projection of an expert, in 16 bits or packed."""

    @property
    def expert(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int]: ...


def check_complete(layer: str, projections: Sequence[Part]) -> None:
    """Every expert of a layer must have the same projections, once each, in shapes that agree."""
    shapes: dict[str, tuple[int, int]] = {}
    experts: dict[int, set[str]] = {}
    for projection in projections:
        shape = projection.shape
        if shapes.setdefault(projection.name, shape) != shape:
            raise CheckpointError(
                f"{projection.module}: shape {shape} differs from the other experts' {shapes[projection.name]}"
            )
        names = experts.setdefault(projection.expert, set())
        if projection.name in names:
            raise CheckpointError(f"{projection.module}: stored twice")
        names.add(projection.name)
    if not experts:
        raise CheckpointError(f"{layer}: has tensors of no experts; download it again")
    absent = sorted(set(range(max(experts) + 1)) - set(experts))
    if absent:
        raise CheckpointError(f"{layer}: experts {absent[:8]} are missing of {max(experts) + 1}; download it again")
    for expert, names in experts.items():
        if names != set(shapes):
            raise CheckpointError(f"{layer}.{expert}: lacks {sorted(set(shapes) - names)}; download it again")


def _tied(layers: dict[str, list[Projection]]) -> list[str]:
    """Layers that repeat another one's weights byte for byte under the second name of a tied pair."""
    copies = []
    for layer in layers:
        for alias, kept in TIED_PREFIXES:
            original = layer.replace(alias, kept, 1)
            if alias in layer and original in layers and _same_weights(layers[layer], layers[original]):
                copies.append(layer)
                break
    return copies


def _same_weights(first: list[Projection], second: list[Projection]) -> bool:
    pairs = {(p.expert, p.name): p.ref for p in first}
    others = {(p.expert, p.name): p.ref for p in second}
    if pairs.keys() != others.keys():
        return False
    compared = set()
    for key, ref in pairs.items():
        other = others[key]
        if (ref.name, other.name) in compared:
            continue
        compared.add((ref.name, other.name))
        if ref.spec.shape != other.shape or ref.dtype != other.dtype:
            return False
        if any(mine != theirs for (_, mine), (_, theirs) in zip(ref.chunks(), other.chunks(), strict=True)):
            return False
    return True
