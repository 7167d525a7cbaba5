"""Which cache slots are cleared before a step, and in which layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_ext.model_executor.linear_attention_states import clear_first_states, hook_worker


def layer(served: bool) -> SimpleNamespace:
    cache = (torch.ones(6, 3, 4), torch.ones(6, 2, 2, 2))
    return SimpleNamespace(kv_cache=cache, **({"_vllm_ext_prefill": object()} if served else {}))


@pytest.fixture
def worker() -> SimpleNamespace:
    layers = {"linear.0": layer(True), "linear.1": layer(True), "full.0": layer(False)}
    groups = [SimpleNamespace(layer_names=["full.0"]), SimpleNamespace(layer_names=["linear.0", "linear.1"])]
    return SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
        model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups)),
        layers=layers,
    )


def step(new=(), cached=()) -> SimpleNamespace:
    """A scheduler's output: (request, computed, scheduled, blocks by group)."""
    return SimpleNamespace(
        num_scheduled_tokens={name: scheduled for name, _, scheduled, _ in (*new, *cached)},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)
            for name, computed, _, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[computed for _, computed, *_ in cached],
            new_block_ids=[blocks for *_, blocks in cached],
        ),
    )


def cleared(worker: SimpleNamespace, name: str) -> list[int]:
    flat = [cache.flatten(1) for cache in worker.layers[name].kv_cache]
    slots = [[slot for slot in range(6) if not part[slot].any()] for part in flat]
    assert slots[0] == slots[1], "the convolution's state and the recurrence's"
    assert all(set(part.unique().tolist()) <= {0.0, 1.0} for part in flat)
    return slots[0]


@pytest.mark.parametrize(
    ("output", "slots"),
    [
        (step(new=[("a", 0, 1, ([9], [2]))]), [2]),
        (step(new=[("a", 0, 1, ([9], [2, 3, 4]))]), [2, 3, 4]),  # slots of speculative tokens
        (step(new=[("a", 0, 1, ([9], [2])), ("b", 0, 40, ([8], [3])), ("c", 0, 1, ([7], [5]))]), [2, 5]),
        (step(new=[("a", 64, 1, ([9], [2]))]), []),  # a prefix hit
        (step(new=[("a", 0, 2, ([9], [2]))]), []),
        (step(cached=[("a", 0, 1, ([9], [4])), ("b", 17, 1, None)]), [4]),  # resumed; a decode
        (step(cached=[("a", 17, 1, ([9], [4]))]), []),  # a decode that needs a block
        (step(), []),
    ],
)
def test_slots_of_first_single_tokens_and_no_others_are_zeroed(worker, output, slots):
    clear_first_states(worker, output)
    assert cleared(worker, "linear.0") == cleared(worker, "linear.1") == slots
    assert cleared(worker, "full.0") == []


def test_slots_are_clear_before_the_step_runs(worker):
    class Worker:
        vllm_config, model_runner = worker.vllm_config, worker.model_runner

        def execute_model(self, scheduler_output, extra=None):
            return cleared(worker, "linear.0"), extra

    module = SimpleNamespace(Worker=Worker)
    hook_worker(module)
    hook_worker(module)
    assert Worker().execute_model(step(new=[("a", 0, 1, ([9], [2]))]), extra=3) == ([2], 3)


def test_an_engine_without_ha_npu_does_not_look_at_its_steps(worker):
    class Worker:
        vllm_config, model_runner = worker.vllm_config, worker.model_runner

        def execute_model(self, scheduler_output):
            return "answered"

    for name in ("linear.0", "linear.1"):
        worker.layers[name] = layer(False)
    hook_worker(SimpleNamespace(Worker=Worker))
    assert Worker().execute_model(object()) == "answered"
