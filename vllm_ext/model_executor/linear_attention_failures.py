"""A prefill that our kernel refuses ends its own request, not the engine.

Where it happens there is only a batch: the layer gives the sequences that failed a zero output and goes on. The worker
tells the scheduler which requests those were with the step's output; the scheduler finishes them with an error, and
forgets the cached blocks that they had begun to fill.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_ext._wrapping import wrap_once
from vllm_ext.model_executor.ascend.platform import is_ascend

_ATTRIBUTE = "_vllm_ext_failures"
REASON_MARK = "ha_npu prefill of the"
"""In the reason of every failed request, by which it is told from a stop string."""


class StepFailures:
    """What failed in the step under way: the batch's row of a request, and why. One worker runs in a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # dual-batch overlap runs two halves of a step in two threads
        self._failed: dict[int, str] = {}

    def add(self, row: int, message: str) -> None:
        """Note the first reason a row failed for."""
        with self._lock:
            self._failed.setdefault(row, message)

    def take(self) -> dict[int, str]:
        """What has been noted since it was last asked."""
        with self._lock:
            failed, self._failed = self._failed, {}
            return failed


STEP = StepFailures()


def rows_of_call(metadata: Any, num_sequences: int) -> list[int] | None:
    """The batch's row of each sequence in a layer's prefill call, from vLLM's GDN metadata; None if it does not tell.

    A call covers the batch without its speculative rows: all of it, or what follows the plain decodes.
    """
    bounds = getattr(metadata, "non_spec_query_start_loc", None)
    if bounds is None:
        return None
    mask = metadata.spec_sequence_masks
    total = len(bounds) - 1
    rows = list(range(total)) if mask is None else [row for row, spec in enumerate(mask.tolist()) if not spec]
    start = 0 if num_sequences == total else metadata.num_decodes
    called = rows[start : start + num_sequences]
    return called if len(called) == num_sequences else None


def rows_in_this_step(layer_name: str, num_sequences: int) -> list[int] | None:
    """The rows of the call that the layer is making; None outside a step that serves requests, or where nobody reads
    this rank's output (a pipeline stage that is not the last; vLLM-Ascend, whose worker and schedulers are its own).
    """
    from vllm.distributed import get_pp_group
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available() or not get_pp_group().is_last_rank or is_ascend():
        return None
    metadata = get_forward_context().attn_metadata
    return rows_of_call(metadata.get(layer_name), num_sequences) if isinstance(metadata, Mapping) else None


def is_reporting_rank() -> bool:
    """Whether the scheduler reads this rank's output."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_pp_group().is_last_rank) and get_tensor_model_parallel_rank() == 0


def hook_worker(module: Any) -> None:
    """`vllm.v1.worker.gpu_worker` (the CPU's worker derives from it): send what failed along with a step's output."""

    @wrap_once(module.Worker, "execute_model")
    def executed(execute: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        STEP.take()  # of a step that raised
        output = execute(self, *args, **kwargs)
        return output if output is None else _attach(output)

    @wrap_once(module.Worker, "sample_tokens")
    def sampled(sample: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return _attach(sample(self, *args, **kwargs))


def _attach(output: Any) -> Any:
    """The step's output with its failures by request; unchanged without any."""
    failed = STEP.take()
    if not failed or output is None:
        return output
    if hasattr(output, "get_output"):
        # An output still on its way from the device; only its end is looked at.
        get_output = output.get_output
        output.get_output = lambda: _with_failures(get_output(), failed)
        return output
    return _with_failures(output, failed)


def _with_failures(output: Any, failed: Mapping[int, str]) -> Any:
    output = copy.copy(output)  # vLLM shares one empty output among all steps
    by_request = {output.req_ids[row]: message for row, message in failed.items() if row < len(output.req_ids)}
    setattr(output, _ATTRIBUTE, by_request)
    return output


def hook_scheduler(module: Any) -> None:
    """`vllm.v1.core.sched.scheduler`: finish the requests that a step's output says failed."""

    @wrap_once(module.Scheduler, "update_from_output")
    def updated(update: Any, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = getattr(model_runner_output, _ATTRIBUTE, None)
        if not failed:
            return update(self, scheduler_output, model_runner_output)
        ended = _finish(self, scheduler_output, failed)
        outputs = update(self, scheduler_output, model_runner_output)
        for client, last in ended.items():
            if client in outputs:
                outputs[client].outputs.extend(last)
            else:
                outputs[client] = module.EngineCoreOutputs(outputs=last)
        return outputs


def _finish(scheduler: Any, scheduler_output: Any, failed: Mapping[str, str]) -> dict[int, list[Any]]:
    """Finish the failed requests and those that took over blocks from them; the last output of each, by client."""
    from vllm.logger import init_logger
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.request import RequestStatus

    logger = init_logger("vllm.vllm_ext.linear_attention")
    manager = scheduler.kv_cache_manager
    tainted = [
        blocks
        for request_id in failed
        for blocks in _blocks_written(scheduler, request_id, _computed_before(scheduler_output, request_id))
    ]
    reasons = dict(failed)
    for request in scheduler.running:
        if request.request_id not in failed and _holds_any(manager.get_block_ids(request.request_id), tainted):
            reasons[request.request_id] = (
                "it was about to continue from cached blocks of a request whose prefill failed in the same step: "
                + next(iter(failed.values()))
            )
    if tainted:
        manager.evict_blocks({block for _, ids in tainted for block in ids})
    ended: dict[int, list[Any]] = defaultdict(list)
    for request_id, message in reasons.items():
        request = scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            continue
        logger.error("request %s ends with an error: %s", request_id, message)
        scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        ended[request.client_index].append(
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=message,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
    return ended


def _computed_before(scheduler_output: Any, request_id: str) -> int:
    """How many of the request's tokens had been computed before this step."""
    for new in scheduler_output.scheduled_new_reqs:
        if new.req_id == request_id:
            return int(new.num_computed_tokens)
    cached = scheduler_output.scheduled_cached_reqs
    for cached_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if cached_id == request_id:
            return int(computed)
    return 0


def _blocks_written(scheduler: Any, request_id: str, computed: int) -> list[tuple[int, set[int]]]:
    """(cache group, blocks) of the request that hold anything after its first `computed` tokens."""
    request = scheduler.requests.get(request_id)
    if request is None or request.is_finished():
        return []
    null_block = scheduler.kv_cache_manager.block_pool.null_block.block_id
    groups = scheduler.kv_cache_config.kv_cache_groups
    written = []
    for index, blocks in enumerate(scheduler.kv_cache_manager.get_block_ids(request_id)):
        first = computed // groups[index].kv_cache_spec.block_size
        written.append((index, set(blocks[first:]) - {null_block}))
    return written


def _holds_any(blocks_by_group: Iterable[Iterable[int]], tainted: list[tuple[int, set[int]]]) -> bool:
    held = [set(blocks) for blocks in blocks_by_group]
    return any(held[group] & blocks for group, blocks in tainted)
