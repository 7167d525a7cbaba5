"""Launching the persistent GEMMs (`stream_kernel.py`, `wide_kernel.py`): which calls they serve, and with what.

A configuration asks for them with `programs`, the persistent programs of a multiprocessor. They serve gated experts
without biases on compute capability 9.0, in sizes that whole tiles cover; everything else is served by `gemm.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ext.ops.moe.experts import ExpertsMeta
from vllm_ext.ops.moe.triton import replay
from vllm_ext.ops.moe.triton.config import GemmConfig
from vllm_ext.ops.moe.triton.dequant import CodeForm
from vllm_ext.ops.moe.triton.layout import PLANES, padded_rows

CAPABILITY = (9, 0)
_TRITON = (3, 6)  # takes groups of warps as the kernels name them
_WARP_LANES = 32
_REGISTERS = 1 << 16
_SHARED_MEMORY = 227 << 10
_PRODUCER_WARPS = 4  # registers are given out to four
_PRODUCER_REGISTERS = 40
_HALF, _COLUMNS = 128, 64  # of one product of `wide_kernel.py`
_MANY_TOKENS = 64
# 128 bytes: with lines of 32, as planes of 16 have them, layers took 3 to 6% longer.
_LINE_WORDS = 64
# A consumer holds one tile while it waits for the next; with no more than that the copies would wait for it.
_LEAST_STAGES = 3
# Of a tile of 64 rows, gate and up.
_LEAST_COLUMNS = 32
_SHORT = {16: 8, 32: 16, 64: 16, 128: 32}


def wide(gemm: GemmConfig) -> bool:
    """Whether a configuration asks for `wide_kernel.py`."""
    return gemm.programs > 0 and gemm.scaling == "operand"


@dataclass(frozen=True)
class Sizes:
    """One GEMM: columns K, rows, group size, plane width, columns of one sum of the activations."""

    columns: int
    rows: int
    group: int
    plane: int
    sum_width: int

    def covered(self, gemm: GemmConfig) -> bool:
        """Whether whole tiles cover the weight, in whole groups, and shared memory holds a ring of them."""
        tile = PLANES * self.plane
        # A shorter last group would have no place in the factors as the producers find them.
        whole = self.group % tile == 0 and self.columns % self.group == 0 and _room(gemm, self) >= _LEAST_STAGES
        if wide(gemm):
            halves = gemm.block_rows // _HALF
            # Triton 3.6 cannot compile two halves of which no block has the second.
            fits = (halves == 2 and self.rows > _HALF) or (halves == 1 and tile == 2 * _COLUMNS)
            return whole and self.rows % _HALF == 0 and fits
        return whole and self.rows % gemm.block_rows == 0


def sum_width(group_size: int, plane: int) -> int:
    """Columns of one partial sum of x: a power of two that divides the group, at most a K tile."""
    return min(group_size & -group_size, PLANES * plane)


def inner_sum_width(group_size: int, plane: int) -> int:
    """The same for the second GEMM, within the least rows of a tile of the first: equal bits in every configuration."""
    return min(sum_width(group_size, plane), _LEAST_COLUMNS)


@functools.lru_cache(maxsize=64)
def layer_sizes(meta: ExpertsMeta, planes: tuple[int, int]) -> tuple[Sizes, Sizes]:
    """Both GEMMs of a layer whose weights are laid out in planes of so many columns."""
    width, rows = sum_width(meta.group_size_w13, planes[0]), padded_rows(meta.intermediate_size, meta.gated)
    first = Sizes(meta.hidden_size, rows, meta.group_size_w13, planes[0], width)
    width = inner_sum_width(meta.group_size_w2, planes[1])
    return first, Sizes(meta.intermediate_size, meta.hidden_size, meta.group_size_w2, planes[1], width)


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def flag_count(gemm: GemmConfig, device: torch.device) -> int:
    """Flags that the programs of one GEMM need, all zero when it begins."""
    return _multiprocessors(device) * gemm.programs if gemm.split else 0


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@functools.lru_cache(maxsize=16)
def usable(device: torch.device) -> bool:
    """Whether the kernels can run on `device`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) != CAPABILITY or _triton_version() < _TRITON:
        return False
    try:
        import vllm_ext.ops.moe.triton.wide_kernel  # noqa: F401
    except ImportError:
        return False
    return True


def registers(gemm: GemmConfig) -> int:
    """Registers of a thread, so that `programs` fit on a multiprocessor."""
    threads = (gemm.num_warps + _PRODUCER_WARPS) * _WARP_LANES * gemm.programs
    return min(_REGISTERS // threads // 8 * 8, 232)


def producer(gemm: GemmConfig) -> tuple[int, int]:
    """The producer's warps, one for every 16 rows of activations, and the registers of a thread."""
    if gemm.block_tokens >= _MANY_TOKENS:
        return _PRODUCER_WARPS, 48 if gemm.block_tokens == _MANY_TOKENS else 64
    return max(1, gemm.block_tokens // 16), _PRODUCER_REGISTERS


def short_tokens(gemm: GemmConfig) -> int:
    """Slots of the shorter product, for blocks that hold no more; as many as a block's when there is none."""
    crowded = wide(gemm) and gemm.programs > 1 and gemm.num_warps > 4 and gemm.block_rows * gemm.block_tokens > 4096
    if gemm.split or crowded:
        return gemm.block_tokens
    return _SHORT.get(gemm.block_tokens, gemm.block_tokens)


def product_rows(gemm: GemmConfig) -> int:
    """Rows of one product: half of the block's wherever that leaves each warp its 16."""
    half = gemm.block_rows // 2
    fits = gemm.block_tokens <= 16 or gemm.programs == 1 or gemm.num_warps == 4
    return half if half >= 16 * gemm.num_warps and fits else gemm.block_rows


def _room(gemm: GemmConfig, sizes: Sizes) -> int:
    """Tiles that a program's part of the shared memory holds."""
    tile = PLANES * sizes.plane
    stage = gemm.block_rows * (tile // 2 + 4) + gemm.block_tokens * tile * 2 + 16 + 8 * gemm.apart
    rest = gemm.block_rows * gemm.block_tokens + 1024
    if wide(gemm):
        rest = 6144 + -(-sizes.columns // sizes.sum_width // 16) * gemm.block_tokens * 64
    else:
        stage += gemm.block_tokens * tile // sizes.sum_width * 4
    return (_SHARED_MEMORY // gemm.programs - 1024 - rest) // stage


def stages(gemm: GemmConfig, sizes: Sizes) -> int:
    """Tiles in the ring: what the configuration asks for, or as many as shared memory holds."""
    return min(gemm.num_stages, _room(gemm, sizes))


@functools.lru_cache(maxsize=1)
def _layouts() -> tuple[Any, Any, Any]:
    """The descriptors' type, and the layouts of words and of factors: a seventh of a call's time on the host."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, gl.NVMMASharedLayout(2 * _LINE_WORDS, 16, 2), gl.NVMMASharedLayout(0, 32, 1)


def _descriptors(words: torch.Tensor, factors: torch.Tensor, block_rows: int) -> tuple[Any, Any]:
    descriptor, of_words, of_factors = _layouts()
    lines, copied = words.numel() // _LINE_WORDS, block_rows * words.shape[-1] // _LINE_WORDS
    tiles = descriptor(words, [lines, _LINE_WORDS], [_LINE_WORDS, 1], [copied, _LINE_WORDS], of_words)
    return tiles, descriptor(factors, [factors.numel()], [1], [block_rows], of_factors)


def kernel_shape(
    gemm: GemmConfig,
    sizes: Sizes,
    dtype: torch.dtype,
    factor_dtype: tl.dtype,
    form: CodeForm,
    sums_stride: int,
    sparse: int = 0,
) -> tuple[Any, ...]:
    """SHAPE of the kernels; `stream_kernel` explains it."""
    tile = (sizes.columns, sizes.rows, sizes.group, sizes.plane, sizes.sum_width, gemm.block_rows, gemm.block_tokens)
    # Names: vLLM watches what is compiled while it serves by a hook for which Triton writes the arguments as JSON.
    operand = "bf16" if dtype == torch.bfloat16 else "fp16"
    exponent = form.unit - form.activation_exponent
    shape = (*tile, stages(gemm, sizes), operand, factor_dtype.name, form.offset, exponent, sums_stride)
    return (
        *shape,
        form.scale_exponent,
        2**form.plane_step,
        short_tokens(gemm),
        product_rows(gemm),
        _LINE_WORDS,
        sparse,
        gemm.apart,
    )


def launch(
    gemm: GemmConfig,
    sizes: Sizes,
    words: torch.Tensor,
    factors: torch.Tensor,
    factor_dtype: tl.dtype,
    form: CodeForm,
    x: torch.Tensor,
    group_sums: torch.Tensor,
    sorted_slots: torch.Tensor,
    blocks: torch.Tensor,
    flags: torch.Tensor,
    out: torch.Tensor,
    out_sums: torch.Tensor | None = None,
    top_k: int = 1,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    epilogue: tuple[int, ...] = (),
    sparse: int = 0,
) -> None:
    """Run one GEMM: gate and up with `out_sums` given, else down. `epilogue` is explained in `stream_kernel`."""
    kernel: Any
    if wide(gemm):
        from vllm_ext.ops.moe.triton.wide_kernel import wide_kernel as kernel
    else:
        from vllm_ext.ops.moe.triton.stream_kernel import stream_kernel as kernel
    if not sizes.covered(gemm):
        raise ValueError(f"stream.launch: {sizes} is not covered by whole tiles of {gemm.block_rows} rows")
    tiles, factor_tiles = _descriptors(words, factors, gemm.block_rows)
    programs = _multiprocessors(x.device) * gemm.programs
    extra: tuple[torch.Tensor, ...] = (group_sums, flags)
    if gemm.split:
        size = gemm.block_rows * gemm.block_tokens
        extra = (torch.empty(programs, size, dtype=torch.float32, device=x.device), flags)
    else:
        programs = min(programs, blocks.shape[0] * -(-sizes.rows // gemm.block_rows))
    replay.launch(
        kernel,
        (programs,),
        tiles,
        factor_tiles,
        factors,
        x,
        x.stride(0),
        group_sums,
        sorted_slots,
        blocks,
        out,
        out_sums if out_sums is not None else group_sums,
        *(() if wide(gemm) else extra),
        alpha,
        limit,
        GATE_UP=out_sums is not None,
        TOP_K=top_k,
        ACTIVATION=activation,
        SHAPE=kernel_shape(gemm, sizes, x.dtype, factor_dtype, form, group_sums.shape[1], sparse),
        EPILOGUE=epilogue,
        PRODUCER=producer(gemm),
        num_warps=gemm.num_warps,
        maxnreg=registers(gemm),
        launch_pdl=True,
        **({} if wide(gemm) else {"SPLIT": gemm.split}),
    )
