"""Counts of what was quantised while a model loaded. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass
class QuantizationReport:
    """Layers whose routed experts are in 4 bits on this rank, with their bytes before and after."""

    expected: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    done: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    announced: int = 0  # layers; a speculative draft's come after the model's, by the same configuration

    def add(self, layer: str, experts: int, bytes_before: int, bytes_after: int) -> None:
        """Record one finished layer."""
        self.done[layer] = (experts, bytes_before, bytes_after)

    @property
    def complete(self) -> bool:
        """Whether every layer that was announced has been quantised."""
        return bool(self.expected) and self.expected <= set(self.done)

    def missing(self) -> list[str]:
        """Layers that were announced and never quantised."""
        return sorted(self.expected - set(self.done))

    def summary(self, backend: str) -> str:
        """One line: layers, experts, bytes before and after."""
        experts = sum(row[0] for row in self.done.values())
        before = sum(row[1] for row in self.done.values())
        after = sum(row[2] for row in self.done.values())
        return (
            f"w4a16-grouped: {experts} routed experts in {len(self.done)} layers, "
            f"{before / MIB:.1f} MiB in 16 bits -> {after / MIB:.1f} MiB in 4 bits ({after / max(before, 1):.1%}), "
            f"backend {backend}"
        )
