"""Codes to tensor-core operands, in registers."""

# Triton's functions take tensors and compile-time values of any kind.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

# In BF16 the bits 0x4300 | q are exactly 128 + q, in FP16 0x6400 | q are 1024 + q: one lop3 makes two operands.
_BF16_EXPAND = tl.constexpr("""
{
.reg .b32 a, b, c;
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
}
""")
_FP16_EXPAND = tl.constexpr(_BF16_EXPAND.value.replace("0x43004300", "0x64006400"))
_BF16_SCALE = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
_FP16_SCALE = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


def code_offset(dtype_name: str, use_asm: bool) -> int:
    """What `expand` adds to every code."""
    return {"bfloat16": 128, "float16": 1024}.get(dtype_name, 0) if use_asm else 0


@triton.jit
def expand(words, dtype: tl.constexpr, ASM: tl.constexpr):
    """int16 words [R, P] to the four nibble planes [R, P]: codes plus `code_offset`, in `dtype` (FP32 without ASM)."""
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
def scale_codes(plane, scale, OFFSET: tl.constexpr, ASM: tl.constexpr):
    """scale * code [R, P], rounded once: (offset + code) * scale - offset * scale, where offset * scale is exact.

    scale [R, 1] or [R, P] in the plane's dtype.
    """
    scale = tl.broadcast_to(scale, plane.shape)
    if ASM and plane.dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(_BF16_SCALE, "=r,r,r,r", [plane, scale, scale * -OFFSET], tl.bfloat16, True, 2)
    elif ASM and plane.dtype == tl.float16:
        out = tl.inline_asm_elementwise(_FP16_SCALE, "=r,r,r,r", [plane, scale, scale * -OFFSET], tl.float16, True, 2)
    else:
        out = plane * scale
    return out
