"""4-bit matrices on CPUs: packed once, multiplied by our AVX-512 kernel or by PyTorch's `_weight_int4pack_mm_for_cpu`.

Both kernels compute x @ W^T with W = (q - 8) * scale + zero, for groups that divide K and are 32, 64, 128 or 256
columns long, and both add up over K in one order whatever the number of rows, so a row's bits never depend on the other
rows. Every other group size and every remainder is brought into that form when the weights are packed: columns are
padded (and meet zeros of x), scales repeated.

The kernel is chosen when a matrix is packed and is told by the dtype of the codes: int16 ours, uint8 PyTorch's.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from vllm_ext.ops.moe import cpu_native
from vllm_ext.quantization import QuantizedWeight

ROW_MULTIPLE = 64
_COLUMN_MULTIPLE = 32
_KERNEL_GROUPS = (256, 128, 64, 32)
_ZERO_CODE = 8
# From this many rows on, unpacking the matrix once and multiplying in BF16 is faster than PyTorch's kernel, which
# unpacks it again for every four rows (measured with AVX-512: break-even near 45 rows).
DEQUANTIZE_ROWS = 64


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Columns:
    """Where the columns of a matrix stand once every group is as long as the kernel wants it.

    count     columns of the matrix; group_size of its quantisation (at most count)
    stride    from one group's first column to the next one's, a multiple of 32
    width     columns the kernel sees; kernel_group divides both stride and width
    """

    count: int
    group_size: int
    stride: int
    width: int
    kernel_group: int

    @classmethod
    def plan(cls, count: int, group_size: int, multiple: int = _COLUMN_MULTIPLE) -> Columns:
        """Pad as little as the kernel allows; `multiple` asks for a width that it divides."""
        group_size = min(group_size, count)
        stride = round_up(group_size, _COLUMN_MULTIPLE)
        groups = -(-count // group_size)
        width = round_up(count if stride == group_size else groups * stride, multiple)
        if groups == 1:
            stride = width
        kernel_group = next(size for size in _KERNEL_GROUPS if stride % size == 0 and width % size == 0)
        return cls(count, group_size, stride, width, kernel_group)

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., count] to [..., width], zeros in the padding; the tensor itself where nothing is padded."""
        if self.width == self.count:
            return tensor
        if self.stride != self.group_size and self.count > self.group_size:
            groups = -(-self.count // self.group_size)
            tensor = F.pad(tensor, (0, groups * self.group_size - self.count))
            tensor = tensor.view(*tensor.shape[:-1], groups, self.group_size)
            tensor = F.pad(tensor, (0, self.stride - self.group_size)).flatten(-2)
        return F.pad(tensor, (0, self.width - tensor.shape[-1]))

    def spread_groups(self, per_group: torch.Tensor) -> torch.Tensor:
        """Scales or zeros [..., groups] to [..., width / kernel_group]."""
        starts = torch.arange(0, self.width, self.kernel_group, device=per_group.device)
        return per_group[..., (starts // self.stride).clamp(max=per_group.shape[-1] - 1)]


@cache
def packed_block() -> tuple[int, bool] | None:
    """(rows a block, halves) of PyTorch's packing on this CPU, or None where it is neither of the known ones.

    Packed codes are [N / block, K, block / 2] bytes. With halves, a byte holds rows b and b + block/2 of its block,
    else rows 2b and 2b + 1. PyTorch does not document the order, so it is looked up by packing known codes.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    codes = torch.randint(0, 16, (ROW_MULTIPLE, 32), dtype=torch.int32, generator=generator, device="cpu")
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    for block in (64, 32, 16):
        for halves in (True, False):
            if torch.equal(_unpack(packed, 32, block, halves), codes.T.to(torch.int8) - _ZERO_CODE):
                return block, halves
    return None


def _unpack(packed: torch.Tensor, columns: int, block: int, halves: bool) -> torch.Tensor:
    """Signed codes q - 8, int8 [K, N], from one packed matrix."""
    # Flipping each nibble's top bit turns q into the two's complement of q - 8; the shifts then extend its sign.
    flipped = packed.view(torch.uint8).bitwise_xor(0x88).view(torch.int8).view(-1, columns, block // 2)
    low, high = (flipped << 4) >> 4, flipped >> 4
    codes = torch.empty(columns, flipped.shape[0], block, dtype=torch.int8, device=packed.device)
    by_block = codes.permute(1, 0, 2)
    if halves:
        by_block[..., : block // 2], by_block[..., block // 2 :] = low, high
    else:
        by_block[..., 0::2], by_block[..., 1::2] = low, high
    return codes.view(columns, -1)


def pack(weight: QuantizedWeight, rows: Columns | None, columns: Columns, dtype: torch.dtype) -> list[torch.Tensor]:
    """One matrix [N, K] as [codes, scales_and_zeros]: N' * K' / 2 bytes and `dtype` [K'/kernel_group, N', 2].

    rows   where its rows shall stand (the columns of the matrix that comes next); None: only padded at the end.
    Rows that are padding have scale and zero 0.
    """
    scale = weight.scale.float()
    zero = torch.zeros_like(scale) if weight.zero_point is None else scale * (_ZERO_CODE - weight.zero_point.float())
    both = torch.stack([columns.spread_groups(scale), columns.spread_groups(zero)], dim=-1).permute(1, 2, 0)
    codes = columns.spread(weight.codes())
    if rows is not None:
        both, codes = rows.spread(both), rows.spread(codes.T).T
    padding = round_up(codes.shape[0], ROW_MULTIPLE) - codes.shape[0]
    codes = F.pad(codes, (0, 0, 0, padding)).contiguous()
    both = F.pad(both, (0, padding)).to(dtype).transpose(1, 2).contiguous()
    if dtype == torch.bfloat16 and cpu_native.load()[0]:
        return [cpu_native.pack_codes(codes), both]
    return [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1), both]


def block_rows(packed: torch.Tensor) -> int:
    """Rows that a packed matrix keeps together."""
    if packed.dtype == torch.int16:
        return cpu_native.BLOCK
    layout = packed_block()
    assert layout is not None
    return layout[0]


def dequantize(
    packed: torch.Tensor, scales_and_zeros: torch.Tensor, kernel_group: int, dtype: torch.dtype
) -> torch.Tensor:
    """The transposed matrix [K', N'] in `dtype`, from PyTorch's packing."""
    layout = packed_block()
    assert layout is not None
    columns = packed.shape[1] * 2
    weight = _unpack(packed, columns, *layout).to(dtype).view(columns // kernel_group, kernel_group, -1)
    scale, zero = scales_and_zeros.to(dtype).permute(2, 0, 1).contiguous().unsqueeze(2)
    return torch.addcmul(zero, weight, scale, out=weight).view(columns, -1)


def matmul(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    kernel_group: int,
    batch_invariant: bool,
) -> torch.Tensor:
    """x [M, K'], contiguous, times the matrix: [M, N'], in FP32 or, from PyTorch's BF16 products, in BF16."""
    if packed.dtype == torch.int16:
        return cpu_native.int4_matmul(x, packed, scales_and_zeros, kernel_group)
    dtype = x.dtype
    if batch_invariant or x.shape[0] < _dequantize_rows(dtype):
        return torch.ops.aten._weight_int4pack_mm_for_cpu.default(x, packed, kernel_group, scales_and_zeros)
    compute = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return x.to(compute) @ dequantize(packed, scales_and_zeros, kernel_group, compute)


@cache
def _dequantize_rows(dtype: torch.dtype) -> int:
    # On x86 the kernel has vector code for BF16 only; its scalar loop is slower than unpacking even for one row.
    vectorised = dtype == torch.bfloat16 or platform.machine() in ("aarch64", "arm64")
    return DEQUANTIZE_ROWS if vectorised else 1
