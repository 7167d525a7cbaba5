"""The fused kernels as torch.compile hands them to Triton: every Python number is an FP64 argument there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_ext.ops.fused.triton import heads, rms_norm, vocabulary

NUMBERS = {"eps", "weight_offset", "softcap", "temperature"}
INTEGERS = {"HEADS", "OUTER_STRIDE", "INNER_STRIDE", "COLUMNS", "PIECE", "PIECES", "stride"}
INTEGERS |= {"length", "capacity", "angle_batch"}


def compiles(kernel, constants):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = dict.fromkeys(kernel.arg_names, "*bf16")
    kinds = (("i32", INTEGERS), ("fp64", NUMBERS), ("constexpr", constants))
    signature.update({name: kind for kind, names in kinds for name in names if name in signature})
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert "f64" not in made.asm["ttir"].split("{", 2)[2].replace("f64 to f32", ""), made.asm["ttir"]


compiles(
    rms_norm._rms_norm_kernel,
    {"COLUMNS": 64, "HAS_WEIGHT": True, "HAS_RESIDUAL": True, "ROUND_FIRST": False, "BLOCK": 64},
)
print("rms_norm")
compiles(heads._heads_kernel, {"ROWS": 6, "HEADS": 4, "KV_HEADS": 1, "SEPARATE": True, "HALF": 32})
print("heads")
compiles(vocabulary._pieces_kernel, {"HAS_CAP": True, "HAS_NOISE": False, "HAS_PROCESSED": False, "BLOCK": 128})
print("vocabulary")
"""


def test_numbers_may_be_fp64() -> None:
    """On the GPU transformers' compiled decoding failed in `rms_norm`: Triton's square root takes FP32 only."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.split() == ["rms_norm", "heads", "vocabulary"], done.stderr[-3000:]
