"""The kernels' inline assembly in Triton's interpreter, which has none: what a GPU computes, step by step.

With it the operands that reach the tensor core are the GPU's own bits. Casts to BF16 round to the nearest as hardware
does, where the interpreter truncates; products of 16-bit operands are added up in FP64.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_STATEMENT = re.compile(r"(\w+)\.?([\w.]*) (.*)")


def _halves(register: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(register.view(np.int16).copy()).view(dtype).double()


def _step(name: str, kind: str, a: list[np.ndarray]) -> np.ndarray:
    if name == "mov":
        return a[0]
    if name == "shr":
        return a[0] >> a[1]
    if name == "and":
        return a[0] & a[1]
    if name == "lop3":
        assert int(a[3][0]) == 0xEA, "only (a & b) | c is known"
        return (a[0] & a[1]) | a[2]
    dtype = torch.bfloat16 if "bf16x2" in kind else torch.float16
    assert kind in ("rn.f16x2", "rn.bf16x2"), (name, kind)
    x = [_halves(register, dtype) for register in a]
    exact = {"add": lambda: x[0] + x[1], "mul": lambda: x[0] * x[1], "fma": lambda: x[0] * x[1] + x[2]}[name]()
    return exact.to(dtype).view(torch.int16).numpy().view(np.uint32)


def run_assembly(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """The outputs ($0 on) of a block of PTX for inputs (numbered after them), all uint32 [n]."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def read(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        return np.full_like(inputs[0], int(operand, 0))

    for line in re.split(r"[;{}\n]", text):
        statement = line.strip()
        if not statement or statement.startswith(".reg"):
            continue
        match = _STATEMENT.fullmatch(statement)
        assert match, statement
        target, *operands = [operand.strip() for operand in match[3].split(",")]
        registers[target] = _step(match[1], match[2], [read(operand) for operand in operands])
    return [registers[f"${i}"] for i in range(outputs)]


class _Results(list):  # type: ignore[type-arg]
    def get_result(self, index: int) -> TensorHandle:
        return self[index]


def _inline_assembly(
    self: Any, text: str, constraints: str, values: list[TensorHandle], types: list[Any], pure: bool, pack: int
) -> _Results:
    shape = values[0].data.shape
    assert values[0].data.itemsize * pack == 4, "registers of 32 bits"
    inputs = [np.ascontiguousarray(value.data).reshape(-1).view(np.uint32) for value in values]
    found = _Results()
    for register, kind in zip(run_assembly(text, inputs, len(types)), types, strict=True):
        stored = {tl.bfloat16: np.uint16, tl.float16: np.float16, tl.float32: np.float32}[kind.scalar]
        found.append(TensorHandle(register.view(stored).reshape(shape), kind.scalar))
    return found


def _float(handle: TensorHandle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: Any) -> TensorHandle:
    return TensorHandle((np.matmul(_float(a), _float(b)) + d.data).astype(np.float32), d.dtype.scalar)


def emulate(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """The backend's kernels as for a GPU."""
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def rounded(source: TensorHandle) -> TensorHandle:
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16), tl.bfloat16)

    def to_bf16(source: TensorHandle, target: Any) -> bool:
        return source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16

    def cast_impl(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        return rounded(source) if to_bf16(source, target) else cast(self, source, target)

    def create_fp_to_fp(self: Any, source: TensorHandle, target: Any, mode: Any) -> TensorHandle:
        return rounded(source) if to_bf16(source, target) else convert(self, source, target, mode)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", _inline_assembly)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(backend, "_asm", lambda dtype: dtype != torch.float32)
