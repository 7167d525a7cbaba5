"""The in-memory form of a 4-bit weight: packed codes, group scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = 16
SYMMETRIC_ZERO = 8


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


def check_group_size(group_size: object) -> None:
    """Raise ValueError unless `group_size` is a positive multiple of 8."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size <= 0 or group_size % 8:
        raise ValueError(f"group_size must be a positive multiple of 8, got {group_size!r}")


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., N, K] in 4 bits: value = scale * (code - zero_point), one scale per row and group of columns.

    packed      uint8 [..., N, ceil(K/2)], low nibble first, plain column order
    scale       floating [..., N, ceil(K/group_size)]
    zero_point  None (symmetric: the zero is code 8), uint8 ("int") or floating ("float"), same shape as scale
    group_size  columns per group; the last group may be shorter
    shape       the shape of the weight that was quantised

    Raises ValueError when the tensors' shapes or dtypes do not belong together.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    group_size: int
    shape: torch.Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", torch.Size(self.shape))
        check_group_size(self.group_size)
        if len(self.shape) < 2:
            raise ValueError(f"QuantizedWeight: shape must be [..., N, K], got {tuple(self.shape)}")
        lead, columns = self.shape[:-1], self.shape[-1]
        self._expect("packed", self.packed, (*lead, -(-columns // 2)))
        self._expect("scale", self.scale, (*lead, group_count(columns, self.group_size)))
        if self.packed.dtype != torch.uint8 or not self.scale.is_floating_point():
            raise ValueError(
                f"QuantizedWeight: packed must be uint8 and scale floating, got {self.packed.dtype}, {self.scale.dtype}"
            )
        if self.zero_point is not None:
            self._expect("zero_point", self.zero_point, tuple(self.scale.shape))
            if self.zero_point.dtype != torch.uint8 and not self.zero_point.is_floating_point():
                raise ValueError(f"QuantizedWeight: zero_point must be uint8 or floating, got {self.zero_point.dtype}")

    def _expect(self, field: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"QuantizedWeight: {field} of a weight {tuple(self.shape)} in groups of {self.group_size} must be "
                f"{tuple(shape)}, got {tuple(tensor.shape)}"
            )

    @property
    def symmetric(self) -> bool:
        """True when the weight has no zero points and code 8 stands for zero."""
        return self.zero_point is None

    @property
    def zero_point_kind(self) -> str | None:
        """ "float", "int", or None when symmetric."""
        if self.zero_point is None:
            return None
        return "int" if self.zero_point.dtype == torch.uint8 else "float"

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
        """The weight [..., N, K] in `dtype`, computed in FP32 (FP64 when asked for), saturating in FP16."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        zero = SYMMETRIC_ZERO if self.zero_point is None else self._expand(self.zero_point.to(compute))
        value = self._expand(self.scale.to(compute)) * (self.codes().to(compute) - zero)
        if dtype == torch.float16:
            # A scale rounded to 16 bits can carry the largest FP16 weight past the format's end.
            limit = torch.finfo(dtype).max
            value = value.clamp_(-limit, limit)
        return value.to(dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on `device`."""
        zero = None if self.zero_point is None else self.zero_point.to(device)
        return QuantizedWeight(self.packed.to(device), self.scale.to(device), zero, self.group_size, self.shape)
