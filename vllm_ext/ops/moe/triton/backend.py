"""The Triton backend: prepare once, then four launches a call (align, gate and up, down, combine)."""

from __future__ import annotations

import functools

import torch
import triton.language as tl

from vllm_ext.ops.fused.device import on_its_device
from vllm_ext.ops.moe.experts import CallOptions, PreparedExperts, experts_meta
from vllm_ext.ops.moe.triton import replay, stream
from vllm_ext.ops.moe.triton.align import Alignment, TokenForm, align
from vllm_ext.ops.moe.triton.choice import choose
from vllm_ext.ops.moe.triton.combine import combine
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig
from vllm_ext.ops.moe.triton.dequant import CodeForm, code_form
from vllm_ext.ops.moe.triton.gemm import down_kernel, gate_up_kernel
from vllm_ext.ops.moe.triton.launch_sizes import cdiv
from vllm_ext.ops.moe.triton.layout import PLANES, interleave_rows, to_kernel_order
from vllm_ext.ops.moe.triton.pdl import dependent_launch
from vllm_ext.ops.triton_device import interpreting
from vllm_ext.ops.triton_device import usable as usable
from vllm_ext.quantization import QuantizedWeight

NAME = "triton"
_FACTOR_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def prepare(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> PreparedExperts:
    """Experts in kernel order (layout.py): w13 with gate and up rows interleaved, scales and zeros group by group."""
    meta = experts_meta(NAME, w13, w2, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight, bias, gated in (("w13", w13, w13_bias, meta.gated), ("w2", w2, w2_bias, False)):
        kernel = to_kernel_order(weight.to(device), gated, dtype)
        tensors[f"{name}_words"] = kernel.words
        tensors[f"{name}_factors"] = kernel.factors
        if bias is not None:
            tensors[f"{name}_bias"] = interleave_rows(bias.to(device), gated).contiguous()
    return PreparedExperts(meta, tensors)


def _factor_words(factors: torch.Tensor) -> tuple[torch.Tensor, tl.dtype]:
    """Scale and zero point as one word each, and their dtype."""
    word = torch.int32 if factors.dtype.itemsize == 2 else torch.int64
    return factors.view(word), _FACTOR_DTYPES[factors.dtype]


def _scaling(config: GemmConfig, group_size: int, plane: int) -> str:
    return config.scaling if group_size % plane == 0 else "column"


def _stages(config: GemmConfig, group_size: int, plane: int) -> int:
    """Tiles under way. With "column" scaling a tile brings a factor for every weight, 64 KiB for 128 rows: four do not
    fit an H200's shared memory, three not the 99 KiB that others have, and of FP32's, twice as wide, not two."""
    return min(config.num_stages - 1, 2) if _scaling(config, group_size, plane) == "column" else config.num_stages


def _form(config: GemmConfig, dtype: torch.dtype, group_size: int, plane: int) -> CodeForm:
    return code_form(dtype, _asm(dtype), _scaling(config, group_size, plane))


@functools.lru_cache(maxsize=8)
def _asm(dtype: torch.dtype) -> bool:
    return not interpreting() and torch.version.hip is None and dtype != torch.float32


@on_its_device
def apply(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """The layer's output [M, H] in hidden_states' dtype."""
    return replay.call(_choose_and_launch, hidden_states, experts, topk_weights, topk_ids, expert_map, options)


def _choose_and_launch(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    device = hidden_states.device
    index = device.index if device.type == "cuda" and device.index is not None else -1
    plain = _plain(experts, hidden_states, options)
    num_global = (expert_map.shape[0] if expert_map is not None else 0) or experts.meta.num_experts
    config = choose(experts.meta, *topk_ids.shape, num_global, options.batch_invariant, index, plain)
    config = _served(config, experts, plain)
    return _launch(config, hidden_states, experts, topk_weights, topk_ids, expert_map, options)


def run(
    config: LaunchConfig,
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """`apply` with a given configuration; what the tuner times."""
    config = served(config, experts, hidden_states, options)
    return _launch(config, hidden_states, experts, topk_weights, topk_ids, expert_map, options)


def _launch(
    config: LaunchConfig,
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    topk_ids = topk_ids.contiguous()
    topk_weights = topk_weights.contiguous()
    expert_map = expert_map.contiguous() if expert_map is not None else None
    aligned = align_call(config, x, topk_ids, expert_map, experts)
    inner, inner_sums = gate_up(config, experts, topk_weights, aligned, topk_ids.shape[1], options)
    slots = down(config, inner, inner_sums, experts, aligned)
    weight_here = not options.apply_router_weight_on_input
    return combine(slots, topk_ids, topk_weights, expert_map, experts.meta.num_experts, weight_here)


def served(
    config: LaunchConfig, experts: PreparedExperts, hidden_states: torch.Tensor, options: CallOptions
) -> LaunchConfig:
    """`config`, with the persistent kernels replaced where they cannot serve the call."""
    return _served(config, experts, _plain(experts, hidden_states, options))


def _plain(experts: PreparedExperts, hidden_states: torch.Tensor, options: CallOptions) -> bool:
    """Whether a call is one that the persistent kernels serve, in sizes that they cover."""
    return (
        experts.meta.gated
        and "w13_bias" not in experts.tensors
        and "w2_bias" not in experts.tensors
        and not options.apply_router_weight_on_input
        and hidden_states.dtype.itemsize == 2
        and hidden_states.stride(0) % 16 == 0
        and hidden_states.data_ptr() % 16 == 0
        and stream.usable(hidden_states.device)
    )


def _served(config: LaunchConfig, experts: PreparedExperts, plain: bool) -> LaunchConfig:
    if not (config.gate_up.programs or config.down.programs):
        return config
    first, second = sizes(experts)
    return LaunchConfig(_or_tiles(config.gate_up, plain, first), _or_tiles(config.down, plain, second))


def _or_tiles(gemm: GemmConfig, plain: bool, size: stream.Sizes) -> GemmConfig:
    if not gemm.programs:
        return gemm
    if plain:
        gemm = _for_tiles_of(gemm, PLANES * size.plane)
        if size.covered(gemm):
            return gemm
    if gemm.block_tokens > 32:
        return GemmConfig(64, 128, 4, 3, "operand", 168)
    return GemmConfig(max(16, gemm.block_tokens), 128, 4, 3)


def _for_tiles_of(gemm: GemmConfig, columns: int) -> GemmConfig:
    """A table's row for tiles of so many columns. Rows are by shape alone, and may have been made with groups of 128.

    In tiles of 64, those of groups of 64, the wide kernels take two halves of 128 rows and not one.
    """
    if columns == 64 and stream.wide(gemm) and gemm.block_rows == 128:
        return GemmConfig(gemm.block_tokens, 256, 8, gemm.num_stages, gemm.scaling, programs=1)
    return gemm


def sizes(experts: PreparedExperts) -> tuple[stream.Sizes, stream.Sizes]:
    """What the kernels must know about w13 and w2."""
    words, other = experts.tensors["w13_words"], experts.tensors["w2_words"]
    return stream.layer_sizes(experts.meta, (words.shape[3], other.shape[3]))


def _sparse(config: LaunchConfig) -> tuple[bool, bool]:
    """Whether each GEMM's blocks begin with one for every expert: gate and up's guess asks for it, down can take it."""
    gate_up, down = config.gate_up, config.down
    guess = gate_up.guess and gate_up.programs > 0 and not stream.wide(gate_up) and not gate_up.split
    takes = down.programs > 0 and not stream.wide(down) and not down.split
    return guess, guess and takes and gate_up.block_tokens == down.block_tokens


def align_call(
    config: LaunchConfig,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: PreparedExperts,
) -> Alignment:
    """The slots grouped by expert, and x as the first GEMM reads it."""
    meta = experts.meta
    plane = experts.tensors["w13_words"].shape[3]
    form = _form(config.gate_up, x.dtype, meta.group_size_w13, plane)
    token = TokenForm(stream.sum_width(meta.group_size_w13, plane), plane, form.activation_exponent, form.plane_step)
    blocks = (config.gate_up.block_tokens, config.down.block_tokens)
    num_flags = sum(stream.flag_count(gemm, x.device) for gemm in (config.gate_up, config.down))
    return align(x, topk_ids, expert_map, meta.num_experts, blocks, token, num_flags=num_flags, sparse=_sparse(config))


def gate_up(
    config: LaunchConfig,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    aligned: Alignment,
    top_k: int,
    options: CallOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activated first GEMM of every slot, in sorted order [S, I padded], and its sums [S, runs]."""
    meta, tensors, gemm, x = experts.meta, experts.tensors, config.gate_up, aligned.x
    words = tensors["w13_words"]
    factors, factor_dtype = _factor_words(tensors["w13_factors"])
    rows, plane = words.shape[2], words.shape[3]
    tiles = cdiv(rows, gemm.block_rows)
    stride = rows // 2 if meta.gated else rows
    sum_width = stream.inner_sum_width(meta.group_size_w2, tensors["w2_words"].shape[3])
    inner = torch.empty(aligned.sorted_slots.shape[0], stride, dtype=x.dtype, device=x.device)
    sums = torch.empty(inner.shape[0], cdiv(stride, sum_width), dtype=torch.float32, device=x.device)
    asm = _asm(x.dtype)
    form = _form(gemm, x.dtype, meta.group_size_w13, plane)
    plane_w2 = tensors["w2_words"].shape[3]
    out_form = _form(config.down, x.dtype, meta.group_size_w2, plane_w2)
    if gemm.programs:
        stream.launch(
            gemm, sizes(experts)[0], words, factors, factor_dtype, form, x, aligned.group_sums, aligned.sorted_slots,
            aligned.blocks, aligned.flags, inner, sums, top_k, options.activation, options.swiglu_alpha,
            options.swiglu_limit,
            (stride, sum_width, sums.shape[1], out_form.activation_exponent, out_form.plane_step, plane_w2),
            meta.num_experts if aligned.sparse[0] else 0,
        )  # fmt: skip
        return inner, sums
    replay.launch(
        gate_up_kernel,
        (aligned.blocks.shape[0] * cdiv(tiles, gemm.row_tiles),),
        x,
        words,
        factors,
        tensors.get("w13_bias"),
        aligned.group_sums,
        topk_weights,
        aligned.sorted_slots,
        aligned.blocks,
        inner,
        sums,
        x.stride(0),
        options.swiglu_alpha,
        options.swiglu_limit,
        TOP_K=top_k,
        SHAPE=(meta.hidden_size, rows, meta.group_size_w13, plane, stream.sum_width(meta.group_size_w13, plane)),
        FACTOR_DTYPE=factor_dtype,
        OUT_STRIDE=stride,
        OUT_SUM_WIDTH=sum_width,
        OUT_SUMS=sums.shape[1],
        OUT_EXPONENT=(out_form.activation_exponent, out_form.plane_step, plane_w2),
        ACTIVATION=options.activation,
        GATED=meta.gated,
        WEIGHT_ON_INPUT=options.apply_router_weight_on_input,
        SCALING=_scaling(gemm, meta.group_size_w13, plane),
        FORM=(form.offset, form.unit, form.activation_exponent, form.scale_exponent, form.plane_step),
        ASM=asm,
        BLOCK_TOKENS=gemm.block_tokens,
        BLOCK_ROWS=gemm.block_rows,
        STAGES=_stages(gemm, meta.group_size_w13, plane),
        UNROLL=gemm.unroll,
        ROW_TILES=gemm.row_tiles,
        PDL=dependent_launch(x.device),
        num_warps=gemm.num_warps,
        maxnreg=gemm.max_registers,
        launch_pdl=dependent_launch(x.device),
    )
    return inner, sums


def down(
    config: LaunchConfig, inner: torch.Tensor, sums: torch.Tensor, experts: PreparedExperts, aligned: Alignment
) -> torch.Tensor:
    """The second GEMM of every slot, by slot [S, H]; rows of slots that are not routed stay unwritten."""
    meta, tensors, gemm = experts.meta, experts.tensors, config.down
    words = tensors["w2_words"]
    factors, factor_dtype = _factor_words(tensors["w2_factors"])
    rows, plane = words.shape[2], words.shape[3]
    sum_width = stream.inner_sum_width(meta.group_size_w2, plane)
    out = torch.empty(inner.shape[0], meta.hidden_size, dtype=inner.dtype, device=inner.device)
    asm = _asm(inner.dtype)
    form = _form(gemm, inner.dtype, meta.group_size_w2, plane)
    if gemm.programs:
        stream.launch(
            gemm, sizes(experts)[1], words, factors, factor_dtype, form, inner, sums, aligned.sorted_slots,
            aligned.down_blocks, aligned.flags[stream.flag_count(config.gate_up, inner.device) :], out,
            sparse=-1 if aligned.sparse[1] else 0,
        )  # fmt: skip
        return out
    replay.launch(
        down_kernel,
        (aligned.down_blocks.shape[0] * cdiv(rows, gemm.block_rows * gemm.row_tiles),),
        inner,
        words,
        factors,
        tensors.get("w2_bias"),
        sums,
        aligned.sorted_slots,
        aligned.down_blocks,
        out,
        meta.num_experts,
        SHAPE=(meta.intermediate_size, rows, meta.group_size_w2, plane, sum_width),
        FACTOR_DTYPE=factor_dtype,
        X_STRIDE=inner.shape[1],
        X_SUMS=sums.shape[1],
        OUT_COLUMNS=meta.hidden_size,
        SCALING=_scaling(gemm, meta.group_size_w2, plane),
        FORM=(form.offset, form.unit, form.activation_exponent, form.scale_exponent, form.plane_step),
        ASM=asm,
        BLOCK_TOKENS=gemm.block_tokens,
        BLOCK_ROWS=gemm.block_rows,
        STAGES=_stages(gemm, meta.group_size_w2, plane),
        UNROLL=gemm.unroll,
        ROW_TILES=gemm.row_tiles,
        PDL=dependent_launch(inner.device),
        num_warps=gemm.num_warps,
        maxnreg=gemm.max_registers,
        launch_pdl=dependent_launch(inner.device),
    )
    return out
