"""What every worker of an engine that runs request mixes on a GPU does before it loads its model.

vLLM imports this module in each worker, in whatever process that is, for the sake of `WorkerExtension` (its option
`worker_extension_cls`); nothing else reaches a worker before its kernels are first run.
"""

from __future__ import annotations

from vllm_ext.benchmarks.engine_children import skip_autotuning

from vllm_ext import compat
from vllm_ext.model_executor import linear_attention_states


class WorkerExtension:
    """Adds nothing to the worker."""


def mend_vllm() -> None:
    """Start stock's requests of one token from zero as ha_npu's are: vLLM 0.23 continues what their slot held."""
    vars(linear_attention_states)["is_served"] = compat.is_linear_attention


skip_autotuning()
mend_vllm()
