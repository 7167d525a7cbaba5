"""Codes to tensor-core operands, in registers."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# An exponent field of 0 or 1 makes a float linear in its bits: BF16 bits b < 256 are b * 2^-133. So a nibble needs no
# more than a mask where it lies in the low byte, and one shift serves two nibbles; those at bit 4 count 16 times.
# Products with activations near 1 would fall out of FP32's range, so the activations are brought up by a power of two,
# the ones that meet a nibble at bit 4 by 16 times less (`activation_exponent`).
_BF16_EXPAND = tl.constexpr("""
{
.reg .b32 high;
shr.u32 high, $4, 8;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, $4, 0x00F000F0;
and.b32 $2, high, 0x000F000F;
and.b32 $3, high, 0x00F000F0;
}
""")
# Two of the planes alone, the lower or the upper.
_BF16_EXPAND_LOW = tl.constexpr("and.b32 $0, $2, 0x000F000F; and.b32 $1, $2, 0x00F000F0;")
_BF16_EXPAND_HIGH = tl.constexpr(
    "{ .reg .b32 high; shr.u32 high, $2, 8; and.b32 $0, high, 0x000F000F; and.b32 $1, high, 0x00F000F0; }"
)
_BF16_UNIT = 133
_BF16_SCALE_EXPONENT = 100
# FP16 has no such range. There the bits 0x6400 | q are exactly 1024 + q: one lop3 after a shift.
_FP16_EXPAND = tl.constexpr("""
{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x64006400, 0xEA;
}
""")
_FP16_EXPAND_LOW = tl.constexpr("""
{
.reg .b32 a;
shr.u32 a, $2, 4;
lop3.b32 $0, $2, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x64006400, 0xEA;
}
""")
_FP16_EXPAND_HIGH = tl.constexpr("""
{
.reg .b32 a, b;
shr.u32 a, $2, 8;
shr.u32 b, $2, 12;
lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;
}
""")
_FP16_OFFSET = tl.constexpr(1024)
_BF16_FMA = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
# 0xE408 is -(1024 + 8): what the codes are offset by, and their middle.
_FP16_ADD_MULTIPLY = tl.constexpr(
    "{ .reg .b32 middle; mov.b32 middle, 0xE408E408; add.rn.f16x2 $0, $1, middle; mul.rn.f16x2 $0, $0, $2; }"
)
# The middle of the codes, taken away where scales multiply codes.
CENTER = tl.constexpr(8.0)


@dataclass(frozen=True)
class CodeForm:
    """How codes reach the tensor core: as (code + offset) * 2^-unit, against activations times 2^activation_exponent.

    scale_exponent  the scales' own power of two where they multiply the codes ("operand" and "column" scaling)
    plane_step      how much less activations on the odd nibble planes are scaled, as a power of two
    """

    offset: int
    unit: int
    activation_exponent: int
    scale_exponent: int
    plane_step: int


def code_form(dtype: torch.dtype, asm: bool, scaling: str) -> CodeForm:
    """The form for activations of `dtype`; plain codes without the assembly."""
    if asm and dtype == torch.bfloat16:
        if scaling == "sum":
            return CodeForm(0, _BF16_UNIT, 70, 0, 4)
        return CodeForm(0, _BF16_UNIT, _BF16_UNIT - _BF16_SCALE_EXPONENT, _BF16_SCALE_EXPONENT, 4)
    if asm and dtype == torch.float16:
        return CodeForm(_FP16_OFFSET.value, 0, 0, 0, 0)
    return CodeForm(0, 0, 0, 0, 0)


@triton.jit
def expand(words, dtype: tl.constexpr, ASM: tl.constexpr):
    """int16 words [R, P] to the four nibble planes [R, P] in `CodeForm`, in `dtype` (FP32 without ASM)."""
    if ASM and dtype == tl.bfloat16:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _BF16_EXPAND, "=r,=r,=r,=r,r", [words], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    elif ASM and dtype == tl.float16:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _FP16_EXPAND, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        p0 = (words & 0xF).to(dtype)
        p1 = ((words >> 4) & 0xF).to(dtype)
        p2 = ((words >> 8) & 0xF).to(dtype)
        p3 = ((words >> 12) & 0xF).to(dtype)
    return p0, p1, p2, p3


@triton.jit
def expand_pair(words, HIGH: tl.constexpr, dtype: tl.constexpr):
    """The lower or the upper two of `expand`'s planes, with the assembly."""
    if dtype == tl.bfloat16:
        bf16: tl.constexpr = _BF16_EXPAND_HIGH if HIGH else _BF16_EXPAND_LOW
        p0, p1 = tl.inline_asm_elementwise(bf16, "=r,=r,r", [words], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        fp16: tl.constexpr = _FP16_EXPAND_HIGH if HIGH else _FP16_EXPAND_LOW
        p0, p1 = tl.inline_asm_elementwise(fp16, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    return p0, p1


@triton.jit
def scale_codes(
    plane, scale, TIMES: tl.constexpr, OFFSET: tl.constexpr, SCALE_EXPONENT: tl.constexpr, ASM: tl.constexpr
):
    """scale * (code - 8) [R, P], rounded once to the plane's dtype.

    The plane holds TIMES * (code + offset) * 2^-unit; scale [R, 1] or [R, P] in FP32. Taking the middle of the codes
    away first halves the rounding error, and what is left of a zero point, z - 8, is small.
    """
    if ASM and plane.dtype == tl.bfloat16:
        # One fused multiply-add: 8 * scale is exact.
        factor = tl.broadcast_to((scale * 2.0**SCALE_EXPONENT).to(plane.dtype), plane.shape)
        middle = tl.broadcast_to(
            (scale * (-CENTER * TIMES * 2.0 ** (SCALE_EXPONENT - 133))).to(plane.dtype), plane.shape
        )
        out = tl.inline_asm_elementwise(_BF16_FMA, "=r,r,r,r", [plane, factor, middle], tl.bfloat16, True, 2)
    elif ASM and plane.dtype == tl.float16:
        factor = tl.broadcast_to(scale.to(plane.dtype), plane.shape)
        tl.static_assert(OFFSET == _FP16_OFFSET)
        out = tl.inline_asm_elementwise(_FP16_ADD_MULTIPLY, "=r,r,r", [plane, factor], tl.float16, True, 2)
    else:
        out = (plane - CENTER) * scale
    return out


@triton.jit
def unpack_factors(word, dtype: tl.constexpr):
    """(scale, zero point) in FP32, from words that hold both in `dtype`."""
    if dtype == tl.bfloat16:
        scale = (word << 16).to(tl.float32, bitcast=True)
        zero = (word & -65536).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        scale = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = word.to(tl.int32).to(tl.float32, bitcast=True)
        zero = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return scale, zero


@triton.jit
def settle(acc, ASM: tl.constexpr):
    """The same accumulators, after the tensor core has written them.

    Without a use of a product in its own iteration, Triton 3.6 lets it run on into the next iteration, which already
    overwrites the registers that the tensor core reads its left operand from (triton-lang/triton issue 9433; seen here
    as results that change from run to run). The use costs a wait and no instruction.
    """
    if ASM:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, True, 1)
    return acc


@triton.jit
def scale_activations(value, column, EXPONENT: tl.constexpr, STEP: tl.constexpr, PLANE: tl.constexpr):
    """FP32 activations times their power of two, by the nibble plane that each column meets. Exact."""
    if EXPONENT != 0:
        odd = (column // PLANE) % 2 == 1
        value *= tl.where(odd, 2.0 ** (EXPONENT - STEP), 2.0**EXPONENT)
    return value
