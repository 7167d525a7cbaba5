"""`torch.ops.vllm_ext.fused_moe_w4a16`: the layer as one opaque node, for graphs that vLLM compiles.

An operator's arguments are tensors and strings, so the experts travel as their tensors and one line of JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache

import torch

from vllm_ext.ops.moe.dispatch import apply_experts
from vllm_ext.ops.moe.experts import CallOptions, ExpertsMeta, PreparedExperts

_LIBRARY = torch.library.Library("vllm_ext", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "fused_moe_w4a16(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor[] tensors, str meta) -> Tensor"
)


def encode_call(experts: PreparedExperts, options: CallOptions) -> tuple[list[torch.Tensor], str]:
    """The op's `tensors` and `meta` arguments; make them once per layer, not per call."""
    meta = asdict(experts.meta)
    meta["dtype"] = str(experts.meta.dtype).removeprefix("torch.")
    document = {"experts": meta, "options": asdict(options), "tensors": list(experts.tensors)}
    return list(experts.tensors.values()), json.dumps(document, separators=(",", ":"))


@lru_cache(maxsize=4096)
def _decode(meta: str) -> tuple[ExpertsMeta, CallOptions, tuple[str, ...]]:
    document = json.loads(meta)
    fields = dict(document["experts"], dtype=getattr(torch, document["experts"]["dtype"]))
    return ExpertsMeta(**fields), CallOptions(**document["options"]), tuple(document["tensors"])


def _call(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    tensors: list[torch.Tensor],
    meta: str,
) -> torch.Tensor:
    experts_meta, options, names = _decode(meta)
    experts = PreparedExperts(experts_meta, dict(zip(names, tensors, strict=True)))
    return apply_experts(hidden_states, experts, topk_weights, topk_ids, expert_map, options)


def _call_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    tensors: list[torch.Tensor],
    meta: str,
) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


_LIBRARY.impl("fused_moe_w4a16", _call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("vllm_ext::fused_moe_w4a16", _call_fake, lib=_LIBRARY)


def call_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    tensors: list[torch.Tensor],
    meta: str,
) -> torch.Tensor:
    """The op where a graph is being traced, its implementation itself everywhere else.

    Boxing a list of tensors through torch's dispatcher costs some 14 us a call, a tenth of a small layer on a CPU.
    """
    run = fused_moe_w4a16_op if torch.compiler.is_compiling() else _call
    return run(hidden_states, topk_weights, topk_ids, expert_map, tensors, meta)


fused_moe_w4a16_op = torch.ops.vllm_ext.fused_moe_w4a16
