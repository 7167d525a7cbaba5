"""Workers that take the first configuration of vLLM's Triton kernels: those of two ranks tuned for minutes.

vLLM imports this module in each worker, in whatever process that is, for the sake of `UntunedWorker` (its option
`worker_extension_cls`); nothing else reaches a worker before its kernels are first run.
"""

from __future__ import annotations

from vllm_ext.benchmarks.engine_children import skip_autotuning


class UntunedWorker:
    """Adds nothing to the worker."""


skip_autotuning()
