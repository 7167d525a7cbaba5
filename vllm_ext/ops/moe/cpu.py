"""4-bit experts on CPUs. Sums run in a fixed order: no index_add_, no atomics.

Two layouts, told apart by w13's dimensions:
grouped  [E, rows, bytes]: slots are sorted by expert, one pair of matrix products per expert that has rows.
joined   [rows, bytes]: all experts side by side as one matrix each, for layers whose tokens use nearly every expert.
"""

from __future__ import annotations

from functools import cache

import torch

from vllm_ext.ops.moe import cpu_native
from vllm_ext.ops.moe.activation import apply_activation
from vllm_ext.ops.moe.cpu_int4 import DEQUANTIZE_ROWS, ROW_MULTIPLE, Columns, block_rows, matmul, pack, packed_block
from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta, PreparedExperts, experts_meta
from vllm_ext.ops.moe.routing import local_expert_ids
from vllm_ext.quantization import QuantizedWeight

NAME = "cpu"

# Bounds the temporaries of a long prefill.
_TOKENS_AT_ONCE = 4096
# torch spreads larger elementwise work over threads, at cuts that need not fall on whole vectors; the scalar code at a
# cut rounds exp and erf differently, so a row's bits would depend on where it stands.
_ELEMENTS_AT_ONCE = 32767


def usable(device: torch.device) -> tuple[bool, str]:
    """CPU tensors only, and only where PyTorch has the kernel and packs in a known order."""
    if device.type != "cpu":
        return False, f"runs on CPU tensors, not on {device.type!r}"
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return (
            False,
            f"PyTorch {torch.__version__} has no CPU int4 kernel (_weight_int4pack_mm_for_cpu); use 2.6 or later",
        )
    layout = packed_block()
    if layout is None:
        return False, f"PyTorch {torch.__version__} packs int4 weights in an order this version does not know"
    kernel, about = cpu_native.load()
    return True, about if kernel else f"PyTorch's int4 kernel; our faster one is not used: {about}"


@cache
def _plans(meta: ExpertsMeta) -> tuple[Columns, Columns]:
    """Columns of w13 and of w2. w2's are w13's output; whole vectors of them keep every row's bits independent."""
    return (
        Columns.plan(meta.hidden_size, meta.group_size_w13),
        Columns.plan(meta.intermediate_size, meta.group_size_w2, ROW_MULTIPLE),
    )


def prepare(
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    top_k: int | None = None,
) -> PreparedExperts:
    """Pack expert by expert; join the experts where a token uses at least three quarters of them."""
    meta = experts_meta(NAME, w13, w2, dtype)
    columns, intermediate = _plans(meta)
    parts: dict[str, list[torch.Tensor]] = {"w13": [], "w13_scales_zeros": [], "w2": [], "w2_scales_zeros": []}
    for expert in range(meta.num_experts):
        first = [
            pack(half, intermediate, columns, dtype)
            for half in _split_rows(_expert(w13, expert, device), 2 if meta.gated else 1)
        ]
        parts["w13"].append(torch.cat([codes for codes, _ in first]))
        parts["w13_scales_zeros"].append(torch.cat([both for _, both in first], dim=1))
        codes, both = pack(_expert(w2, expert, device), None, intermediate, dtype)
        parts["w2"].append(codes)
        parts["w2_scales_zeros"].append(both)
    tensors = {name: torch.stack(tensors) for name, tensors in parts.items()}
    if meta.num_experts == 1 or (top_k is not None and 4 * top_k >= 3 * meta.num_experts):
        tensors = _joined(tensors)
    if w13_bias is not None:
        halves = w13_bias.to(device).float().view(meta.num_experts, -1, meta.intermediate_size)
        tensors["w13_bias"] = intermediate.spread(halves).flatten(1)
    if w2_bias is not None:
        tensors["w2_bias"] = w2_bias.to(device).float()
    return PreparedExperts(meta, tensors)


def _expert(weight: QuantizedWeight, expert: int, device: torch.device) -> QuantizedWeight:
    zero = weight.zero_point
    return QuantizedWeight(
        weight.packed[expert],
        weight.scale[expert],
        None if zero is None else zero[expert],
        weight.group_size,
        weight.shape[1:],
    ).to(device)


def _split_rows(weight: QuantizedWeight, parts: int) -> list[QuantizedWeight]:
    rows = weight.shape[0] // parts
    zeros = [None] * parts if weight.zero_point is None else torch.split(weight.zero_point, rows)
    return [
        QuantizedWeight(packed, scale, zero, weight.group_size, torch.Size((rows, weight.shape[1])))
        for packed, scale, zero in zip(
            torch.split(weight.packed, rows), torch.split(weight.scale, rows), zeros, strict=True
        )
    ]


def _joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts side by side: w13 along its rows, w2 along its columns."""
    experts, rows, _ = tensors["w2"].shape
    blocks = tensors["w2"].view(experts, rows // block_rows(tensors["w2"]), -1)
    return {
        "w13": tensors["w13"].flatten(0, 1),
        "w13_scales_zeros": tensors["w13_scales_zeros"].transpose(0, 1).flatten(1, 2).contiguous(),
        "w2": blocks.transpose(0, 1).reshape(rows, -1),
        "w2_scales_zeros": tensors["w2_scales_zeros"].flatten(0, 1),
    }


def apply(
    hidden_states: torch.Tensor,
    experts: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """[M, H]. With our kernel, or with options.batch_invariant, a row's bits never depend on the other rows. With
    PyTorch's they do, through how many rows an expert gets: 64 or more are served by a faster product that rounds
    otherwise.
    """
    num_experts = experts.meta.num_experts
    ids = topk_ids if expert_map is None else local_expert_ids(topk_ids, expert_map, num_experts)
    lowest, highest = torch.aminmax(ids)
    if int(lowest) < 0 or int(highest) >= num_experts:
        # One more expert, num_experts, takes every slot that is not routed: -1 % (E + 1) is E.
        ids = ids.clamp(-1, num_experts).remainder_(num_experts + 1)
        lanes = num_experts + 1
    else:
        lanes = num_experts
    ids, weights, hidden_states = ids.long(), topk_weights.float(), hidden_states.contiguous()
    run = _apply_joined if experts.tensors["w13"].dim() == 2 else _apply_grouped
    if hidden_states.shape[0] <= _TOKENS_AT_ONCE:
        return run(hidden_states, experts, weights, ids, lanes, options)
    chunks = (torch.split(tensor, _TOKENS_AT_ONCE) for tensor in (hidden_states, weights, ids))
    return torch.cat([run(x, experts, part, local, lanes, options) for x, part, local in zip(*chunks, strict=True)])


def _activate(first: torch.Tensor, meta: ExpertsMeta, options: CallOptions) -> torch.Tensor:
    """[R, 2I'] or [R, I'] to FP32 [R, I']."""
    rows = max(1, _ELEMENTS_AT_ONCE // first.shape[1])
    if first.shape[0] <= rows:
        return apply_activation(first.float(), meta.gated, options)
    return torch.cat([apply_activation(part.float(), meta.gated, options) for part in torch.split(first, rows)])


def _apply_joined(
    x: torch.Tensor,
    experts: PreparedExperts,
    weights: torch.Tensor,
    ids: torch.Tensor,
    lanes: int,
    options: CallOptions,
) -> torch.Tensor:
    num_experts = experts.meta.num_experts
    if lanes > num_experts and x.shape[0] >= DEQUANTIZE_ROWS:
        # Rows of padding must not change which product the others get.
        rows = (ids < num_experts).any(1).nonzero().squeeze(1)
        if rows.shape[0] < x.shape[0]:
            out = torch.zeros_like(x)
            if rows.shape[0]:
                out[rows] = _apply_joined(x[rows], experts, weights[rows], ids[rows], lanes, options)
            return out
    if not options.apply_router_weight_on_input:
        return _joined_product(x, experts, _by_expert(weights, ids, num_experts, lanes), None, options).to(x.dtype)
    out = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(ids.shape[1]):
        routed = _by_expert(torch.ones_like(weights[:, :1]), ids[:, slot : slot + 1], num_experts, lanes)
        out += _joined_product(x, experts, routed, weights[:, slot : slot + 1], options)
    return out.to(x.dtype)


def _by_expert(weights: torch.Tensor, ids: torch.Tensor, num_experts: int, lanes: int) -> torch.Tensor:
    """FP32 [M, E]: the sum of a row's weights for each expert. A lane past the experts' takes what is not routed."""
    table = weights.new_zeros(ids.shape[0], lanes).scatter_add_(1, ids, weights)
    return table if lanes == num_experts else table[:, :num_experts]


def _joined_product(
    x: torch.Tensor,
    experts: PreparedExperts,
    weights_out: torch.Tensor,
    weights_in: torch.Tensor | None,
    options: CallOptions,
) -> torch.Tensor:
    """Every expert on every row, weighted by weights_out [M, E] (0: not routed); weights_in [M, 1] scales x's rows."""
    meta, tensors = experts.meta, experts.tensors
    columns, intermediate = _plans(meta)
    rows, num_experts = weights_out.shape
    invariant = options.batch_invariant
    first = matmul(columns.spread(x), tensors["w13"], tensors["w13_scales_zeros"], columns.kernel_group, invariant)
    if weights_in is not None:
        first = first.float() * weights_in
    if "w13_bias" in tensors:
        first = first.float() + tensors["w13_bias"].flatten()
    hidden = _activate(first.view(rows * num_experts, -1), meta, options).view(rows, num_experts, -1)
    hidden.mul_(weights_out.unsqueeze(2))
    if int(torch.count_nonzero(weights_out)) < weights_out.numel():
        # An expert that is not routed may overflow, and a row of padding may hold anything: 0 * inf is not 0.
        hidden.masked_fill_((weights_out == 0).unsqueeze(2), 0)
    hidden = hidden.to(x.dtype).view(rows, -1)
    second = matmul(hidden, tensors["w2"], tensors["w2_scales_zeros"], intermediate.kernel_group, invariant)
    if second.shape[1] > meta.hidden_size:
        second = second[:, : meta.hidden_size]
    if "w2_bias" in tensors:
        second = second.float()
        for expert, bias in enumerate(tensors["w2_bias"]):
            second = second + weights_out[:, expert : expert + 1] * bias
    return second


def _apply_grouped(
    x: torch.Tensor,
    experts: PreparedExperts,
    weights: torch.Tensor,
    ids: torch.Tensor,
    lanes: int,
    options: CallOptions,
) -> torch.Tensor:
    meta, tensors = experts.meta, experts.tensors
    columns, intermediate = _plans(meta)
    num_experts, (rows, top_k) = meta.num_experts, ids.shape
    expert_of_slot = ids.flatten()
    order = torch.argsort(expert_of_slot, stable=True)
    counts = torch.bincount(expert_of_slot, minlength=lanes).tolist()[:num_experts]
    routed = sum(counts)
    order = order[:routed]
    sorted_experts = expert_of_slot[order]
    gathered = x[order // top_k]
    if options.apply_router_weight_on_input:
        gathered = (gathered.float() * weights.flatten()[order].unsqueeze(1)).to(x.dtype)
        weights = torch.ones_like(weights)
    first = _by_rows(columns.spread(gathered), tensors, "w13", counts, columns.kernel_group, options)
    if "w13_bias" in tensors:
        first = first.float() + tensors["w13_bias"][sorted_experts]
    hidden = _activate(first, meta, options).to(x.dtype)
    second = _by_rows(hidden, tensors, "w2", counts, intermediate.kernel_group, options)[:, : meta.hidden_size]
    if "w2_bias" in tensors:
        second = second.float() + tensors["w2_bias"][sorted_experts]
    # Slots that are not routed read the zero row at the end, with weight 0.
    second = torch.cat((second, second.new_zeros(1, meta.hidden_size)))
    position = torch.full_like(expert_of_slot, routed)
    position[order] = torch.arange(routed, device=x.device)
    position = position.view(rows, top_k)
    if lanes > num_experts:
        weights = weights.masked_fill(ids == num_experts, 0)
    out = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(top_k):
        out += second[position[:, slot]].float() * weights[:, slot : slot + 1]
    return out.to(x.dtype)


def _by_rows(
    x: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    name: str,
    counts: list[int],
    kernel_group: int,
    options: CallOptions,
) -> torch.Tensor:
    """Rows of x, sorted by expert, each times its expert's matrix; counts[e] rows go to expert e."""
    packed, both = tensors[name], tensors[f"{name}_scales_zeros"]
    start, parts = 0, []
    for expert, count in enumerate(counts):
        if count:
            rows = x[start : start + count]
            parts.append(matmul(rows, packed[expert], both[expert], kernel_group, options.batch_invariant))
            start += count
    return torch.cat(parts) if parts else x.new_zeros(0, both.shape[2])
