"""The in-memory form of a 4-bit weight: packed codes, group scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = 16


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [..., N, K] in 0..15 into uint8 [..., N, ceil(K/2)], the even column in the low nibble.

    An odd K leaves the last high nibble zero.
    """
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Undo `pack_nibbles`: uint8 [..., N, ceil(columns/2)] to uint8 codes [..., N, columns]."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return codes[..., :columns]


def group_count(columns: int, group_size: int) -> int:
    """Number of groups along K, a short last group included."""
    return -(-columns // group_size)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., N, K] in 4 bits: value = scale * (code - zero_point), one scale per row and group of columns.

    packed      uint8 [..., N, ceil(K/2)], low nibble first, plain column order
    scale       floating [..., N, ceil(K/group_size)]
    zero_point  None (symmetric: the zero is code 8), uint8 ("int") or floating ("float"), same shape as scale
    group_size  columns per group; the last group may be shorter
    shape       the shape of the weight that was quantised
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group_size: int
    shape: torch.Size

    @property
    def symmetric(self) -> bool:
        """True when the weight has no zero points and code 8 stands for zero."""
        return self.zero_point is None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their metadata."""
        zero = 0 if self.zero_point is None else self.zero_point.nbytes
        return self.packed.nbytes + self.scale.nbytes + zero

    def codes(self) -> torch.Tensor:
        """The codes, uint8 [..., N, K]."""
        return unpack_nibbles(self.packed, self.shape[-1])

    def _expand(self, per_group: torch.Tensor) -> torch.Tensor:
        return per_group.repeat_interleave(self.group_size, dim=-1)[..., : self.shape[-1]]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [..., N, K] in `dtype`, computed in FP32 (FP64 when asked for)."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        zero = 8 if self.zero_point is None else self._expand(self.zero_point.to(compute))
        return (self._expand(self.scale.to(compute)) * (self.codes().to(compute) - zero)).to(dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on `device`."""
        zero = None if self.zero_point is None else self.zero_point.to(device)
        return QuantizedWeight(self.packed.to(device), self.scale.to(device), zero, self.group_size, self.shape)
