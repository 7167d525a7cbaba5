"""Arms of an A/B on one loaded model: 16-bit experts, none, or 4-bit ones, each with any parts of the kit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm_ext.benchmarks.registry import CheckFailed

from vllm_ext.integrations.expert_layouts import weight_parameters
from vllm_ext.integrations.expert_modules import find_experts
from vllm_ext.integrations.layer_graphs import LayerGraphs
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.integrations.transformers import Acceleration, Report, accelerate_generate, quantize_experts


@dataclass(frozen=True)
class Arm:
    """experts: "bf16", "w4" or "free" (they return zeros, which bounds what any expert kernel can bring).

    replay: 4-bit experts called eagerly replay from graphs of their own, as is the default; otherwise they are launched
    kernel by kernel.
    """

    name: str
    experts: str = "bf16"
    norms: bool = False
    projections: bool = False
    fused_layers: bool = False
    capture: bool = False
    sampler: bool = False
    encoder: bool = False
    replay: bool = True

    @property
    def patched(self) -> bool:
        """Whether anything but the experts differs from the stock model."""
        return self.norms or self.projections or self.fused_layers or self.capture or self.sampler

    @property
    def needs_cuda(self) -> bool:
        """Whether CUDA graphs are all that tells it from an arm without them: elsewhere its name would be wrong."""
        return self.capture and not (self.norms or self.projections or self.fused_layers or self.sampler)


STOCK = Arm("stock")
EXPERTS = Arm("experts", "w4")
KIT = Arm("kit", "w4", norms=True, projections=True, fused_layers=True, capture=True, sampler=True)
ARMS = {
    arm.name: arm
    for arm in (
        STOCK,
        Arm("free", "free"),
        EXPERTS,
        replace(EXPERTS, name="experts-launched", replay=False),
        Arm("stock-captured", capture=True),
        Arm("free-captured", "free", capture=True),
        Arm("experts-captured", "w4", capture=True),
        KIT,
        replace(KIT, name="kit-encoder", encoder=True),
        replace(KIT, name="kit-bf16", experts="bf16"),
        replace(KIT, name="kit-no-capture", capture=False),
        replace(KIT, name="kit-no-sampler", sampler=False),
        replace(KIT, name="kit-no-layers", fused_layers=False),
        replace(KIT, name="kit-no-norms", fused_layers=False, norms=False),
        replace(KIT, name="kit-no-projections", fused_layers=False, projections=False),
    )
}


def runnable(names: Sequence[str]) -> list[str]:
    """The arms that are on this machine what they are called: without CUDA nothing is captured."""
    return [name for name in names if torch.cuda.is_available() or not ARMS[name].needs_cuda]


def check_runnable(names: Sequence[str]) -> None:
    """Raises CheckFailed naming the arms that are not `runnable`."""
    unable = [name for name in names if name not in runnable(names)]
    if unable:
        raise CheckFailed(f"{', '.join(unable)}: CUDA graphs need a CUDA device, and torch sees none")


def check_counts(**counts: int | None) -> None:
    """Raises CheckFailed naming an option that is below 1; None is an option left to its default."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise CheckFailed(f"--{name.replace('_', '-')} must be at least 1, got {count}")


class FreeExperts(nn.Module):
    """Experts that cost nothing."""

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(hidden_states)


class Switch:
    """Turns one loaded model into any arm and back. Both sets of experts stay in memory, so arms can take turns."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.original = find_experts(model)
        self.parameters = {name: weight_parameters(module) for name, module in self.original.items()}
        self.quantized: dict[str, nn.Module] = {}
        self.graphs: dict[int, LayerGraphs] = {}
        self.report: Report | None = None
        self.acceleration: Acceleration | None = None

    def _place(self, modules: dict[str, nn.Module]) -> None:
        for name, module in modules.items():
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, module)

    def _restore(self) -> None:
        for parameters in self.parameters.values():
            for owner, key, parameter in parameters:
                owner._parameters[key] = parameter
        self._place(self.original)

    def to(self, arm: Arm) -> None:
        """Make the model `arm`."""
        if self.acceleration is not None:
            self.acceleration.undo()
            self.acceleration = None
        if arm.experts == "w4" and not self.quantized:
            self._restore()
            self.report = quantize_experts(self.model, progress=False)
            self.quantized = {name: self.model.get_submodule(name) for name in self.original}
        if arm.experts == "w4":
            self._place(self.quantized)
            for module in self.quantized.values():
                for part in module.modules():
                    if isinstance(part, QuantizedExperts):
                        # Kept from turn to turn: recording is paid once, as it is by a user.
                        part.graphs = self.graphs.setdefault(id(part), LayerGraphs()) if arm.replay else None
        elif arm.experts == "free":
            self._place({name: FreeExperts() for name in self.original})
        else:
            self._restore()
        if arm.patched:
            self.acceleration = accelerate_generate(
                self.model, experts=False, norms=arm.norms, projections=arm.projections, fused_layers=arm.fused_layers,
                capture=arm.capture, sampler=arm.sampler, encoder=arm.encoder, progress=False,
            )  # fmt: skip

    @property
    def experts_bytes(self) -> tuple[int, int]:
        """Bytes of the experts in 16 and in 4 bits, tied ones once."""
        unique = {p.data_ptr(): p.nbytes for ps in self.parameters.values() for _, _, p in ps}
        packed = sum(layer.bytes_after for layer in self.report.layers) if self.report else 0
        return sum(unique.values()), packed
