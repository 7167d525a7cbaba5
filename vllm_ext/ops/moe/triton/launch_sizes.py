"""Sizes of launches, on the host. Triton's own `cdiv` and `next_power_of_2` look for compile-time values first: eight
calls of them were an eighth of what a call of the experts takes there."""

from __future__ import annotations


def cdiv(count: int, size: int) -> int:
    """Pieces of `size` that hold `count`."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
