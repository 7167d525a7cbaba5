"""Entry points that vLLM calls. Nothing heavy is imported: every change to vLLM waits for the module it concerns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from vllm_ext._import_hooks import when_imported

# Only loggers under "vllm." reach vLLM's handler.
logger = logging.getLogger("vllm.vllm_ext.plugin")

_registered = False


def register() -> None:
    """Make `--quantization w4a16-grouped` and `--attention-backend ha_npu` known to vLLM. Idempotent.

    Called by vLLM in every process (`vllm.general_plugins`). Where vLLM lacks what a feature needs, one line is logged
    and vLLM stays as it was.
    """
    global _registered
    if _registered:
        return
    _registered = True
    for module, function in _HOOKS:
        when_imported(module, _guarded(module, function))


def platform() -> None:
    """Register early and decline to be a platform (`vllm.platform_plugins`).

    `LLM(attention_config={"backend": "ha_npu"})` is validated before vLLM loads general plugins; platform plugins are
    asked when vLLM first needs its platform, which is earlier. Returning None leaves the choice of platform alone.
    """
    register()


def _guarded(module_name: str, function: str) -> Callable[[ModuleType], None]:
    def callback(module: ModuleType) -> None:
        target, _, name = function.partition(":")
        try:
            getattr(import_module(target), name)(module)
        except Exception as error:  # a plugin must never take vLLM down with it
            logger.warning("vllm_ext: %s is left as it was (%s: %s)", module_name, type(error).__name__, error)

    return callback


_LINEAR_ATTENTION = "vllm_ext.model_executor.linear_attention_hooks"
_HOOKS = (
    ("vllm.v1.attention.backends.registry", "vllm_ext.model_executor.attention_backend:add_backend_name"),
    ("vllm.engine.arg_utils", "vllm_ext.model_executor.engine_args:wrap_engine_args"),
    ("vllm.model_executor.layers.quantization", "vllm_ext.model_executor.hooks:register_quantization"),
    ("vllm._custom_ops", f"{_LINEAR_ATTENTION}:hook_cpu_kernels"),
    *(
        (f"vllm.model_executor.layers.mamba.gdn.{name}_gdn_linear_attn", f"{_LINEAR_ATTENTION}:hook_{name}_layer")
        for name in ("qwen", "olmo", "kimi")
    ),
    *(
        (f"vllm.models.kimi_k3.{vendor}.ops.third_party.kda", f"{_LINEAR_ATTENTION}:hook_kda_kernels")
        for vendor in ("nvidia", "amd")
    ),
    ("vllm.model_executor.models.bailing_moe_v3", f"{_LINEAR_ATTENTION}:hook_bailing_layer"),
    ("vllm.v1.worker.gpu_worker", "vllm_ext.model_executor.linear_attention_failures:hook_worker"),
    ("vllm.v1.worker.gpu_worker", "vllm_ext.model_executor.linear_attention_states:hook_worker"),
    ("vllm.v1.worker.gpu_worker", "vllm_ext.model_executor.warm_up:hook_worker"),
    ("vllm.v1.core.sched.scheduler", "vllm_ext.model_executor.linear_attention_failures:hook_scheduler"),
    ("vllm.v1.engine.output_processor", "vllm_ext.model_executor.linear_attention_replies:hook_output_processor"),
    *(
        (f"vllm.entrypoints.{server}.serving", "vllm_ext.model_executor.linear_attention_replies:hook_serving")
        for server in ("generate.base", "openai.engine")  # the second until 0.31
    ),
    (
        "vllm.entrypoints.generate.beam_search.offline",
        "vllm_ext.model_executor.linear_attention_replies:hook_beam_search",
    ),
    ("vllm.model_executor.model_loader.base_loader", "vllm_ext.model_executor.hooks:wrap_load_model"),
    ("vllm.lora.model_manager", "vllm_ext.model_executor.lora:leave_experts_out"),
    (
        "vllm.model_executor.model_loader.default_loader",
        "vllm_ext.model_executor.packed_names:wrap_get_all_weights",
    ),
    ("vllm_ascend.platform", "vllm_ext.model_executor.ascend.platform:allow_quantization"),
    ("vllm_ascend._310p.ops.fla.gdn_310", "vllm_ext.model_executor.ascend.gdn:hook_310p"),
    ("vllm_ascend.ops.gdn", "vllm_ext.model_executor.ascend.gdn:hook_a2"),
)
