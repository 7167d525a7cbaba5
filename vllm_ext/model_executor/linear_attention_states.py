"""A request's first token starts from a state of zeros, also where vLLM takes it for a decode.

vLLM 0.23 tells decodes from prefills by their length. A first chunk of one token (a prompt of one, or what a budget
left over) then goes to the decode kernel, which continues from whatever its cache slot held last: the state of a
request that is gone. Later versions call it a prefill. The scheduler knows that nothing has been computed of the
request, whatever the batch looks like, so its slots are cleared before the step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_ext._wrapping import wrap_once
from vllm_ext.model_executor.linear_attention_hooks import is_served

_SERVES = "_vllm_ext_serves_states"


def hook_worker(module: Any) -> None:
    """`vllm.v1.worker.gpu_worker` (the CPU's worker derives from it): clear slots before each step."""

    @wrap_once(module.Worker, "execute_model")
    def cleared(execute: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Asked once, when the model is there: a step of an engine that ha_npu does not serve is not looked at.
        if not hasattr(self, _SERVES):
            setattr(self, _SERVES, any(map(is_served, _layers(self).values())))
        if getattr(self, _SERVES):
            clear_first_states(self, scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)


def _layers(worker: Any) -> dict[str, Any]:
    layers: dict[str, Any] = worker.vllm_config.compilation_config.static_forward_context
    return layers


def clear_first_states(worker: Any, scheduler_output: Any) -> None:
    """Zero the cache slots, in every layer that ha_npu serves, of requests whose first chunk is one token."""
    starting = list(first_single_tokens(scheduler_output))
    if not starting:
        return
    layers = _layers(worker)
    for index, group in enumerate(worker.model_runner.kv_cache_config.kv_cache_groups):
        slots = sorted({block for blocks in starting for block in blocks[index]})
        for name in group.layer_names:
            if slots and name in layers and is_served(layers[name]):
                for cache in layers[name].kv_cache:
                    cache[slots] = 0


def first_single_tokens(scheduler_output: Any) -> Iterator[tuple[list[int], ...]]:
    """The blocks, by cache group, of each request of which nothing was computed and one token is in this step."""
    lengths = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        if new.num_computed_tokens == 0 and lengths[new.req_id] == 1:
            yield new.block_ids
    # A preempted request is resumed from its first token, or from cached blocks.
    cached = scheduler_output.scheduled_cached_reqs
    for request, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        if computed == 0 and lengths[request] == 1 and blocks is not None:
            yield blocks
