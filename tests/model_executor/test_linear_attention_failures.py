"""How a refused sequence finds its request: rows of a batch, a step's output, the scheduler's books."""

from __future__ import annotations

import types

import pytest
import torch

from vllm_ext.model_executor import linear_attention_failures as failures
from vllm_ext.model_executor import linear_attention_prefill as prefill_module
from vllm_ext.model_executor.linear_attention import GatedDeltaRulePrefill
from vllm_ext.model_executor.linear_attention_prefill import LayerPrefill
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state


def metadata(lengths, num_decodes, spec=None):
    """What vLLM's builder leaves of a batch: offsets of the rows that are not speculative, and the mask of those."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    mask = None if spec is None else torch.tensor(spec)
    return types.SimpleNamespace(non_spec_query_start_loc=bounds, num_decodes=num_decodes, spec_sequence_masks=mask)


@pytest.mark.parametrize(
    ("batch", "sequences", "rows"),
    [
        (metadata([5, 6], 0), 2, [0, 1]),  # prefills alone
        (metadata([1, 1, 5, 6], 2), 2, [2, 3]),  # decodes split off in front
        (metadata([1, 1, 5, 6], 2), 4, [0, 1, 2, 3]),  # a layer whose kernel takes the decodes along
        (metadata([1, 5, 0, 0], 1), 1, [1]),  # rows of padding behind
        (metadata([5, 1], 0, [True, False, True, False]), 2, [1, 3]),  # drafts under check left out
    ],
)
def test_rows_of_a_call_follow_from_the_metadata(batch, sequences, rows):
    assert failures.rows_of_call(batch, sequences) == rows


def test_a_call_that_the_metadata_does_not_explain_has_no_rows():
    assert failures.rows_of_call(metadata([5], 0), 3) is None
    assert failures.rows_of_call(types.SimpleNamespace(), 1) is None


@pytest.fixture
def call():
    operands = sample_operands("gdn", 1, 200, 2, 4, 32, 32)
    bounds = torch.tensor([0, 70, 70, 71, 200], dtype=torch.int32)
    return {**operands, "initial_state": sample_state(4, 4, 32, 32), "output_final_state": True, "cu_seqlens": bounds}


def refusing(length):
    """The operator, except that it takes no call with a sequence of this length."""
    right = prefill_module.chunk_gated_delta_rule

    def operator(**call):
        if length in call["cu_seqlens"].diff().tolist():
            raise ValueError("refused for a test")
        return right(**call)

    return operator


def must_not_run(**kwargs):
    raise AssertionError("vLLM's kernel was called")


def test_sequences_beside_a_refused_one_are_answered_as_ever(call, monkeypatch):
    op = GatedDeltaRulePrefill(LayerPrefill("model.layers.4", "gdn"), must_not_run)
    o, state = op(**call)
    monkeypatch.setattr("vllm_ext.model_executor.linear_attention.chunk_gated_delta_rule", refusing(70))
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: [3, 4, 5, 6])
    failures.STEP.take()
    contained, contained_state = op(**call)
    failed = failures.STEP.take()
    assert list(failed) == [3]
    for part in ("model.layers.4", "gated delta rule", "refused for a test", "on_kernel_error"):
        assert part in failed[3]
    assert bool((contained[:, :70] == 0).all())
    torch.testing.assert_close(contained[:, 70:], o[:, 70:])
    torch.testing.assert_close(contained_state[1:], state[1:])
    torch.testing.assert_close(contained_state[1], call["initial_state"][1])  # an empty sequence keeps its state


@pytest.mark.parametrize("fallback", [True, False])
def test_a_layer_warns_once_however_often_its_kernel_refuses(call, monkeypatch, fallback):
    """Two layers, each called twice: a log of a line a step would bury what else happens."""
    monkeypatch.setattr("vllm_ext.model_executor.linear_attention.chunk_gated_delta_rule", refusing(70))
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: [0, 1, 2, 3])
    warnings = []
    monkeypatch.setattr(prefill_module.logger, "warning", lambda text, *parts: warnings.append(text % parts))
    for layer in ("model.layers.4", "model.layers.5"):
        op = GatedDeltaRulePrefill(LayerPrefill(layer, "gdn", fallback), lambda **call: (call["v"], None))
        for _ in range(2):
            op(**call)
    failures.STEP.take()
    assert [line.partition(":")[0] for line in warnings] == ["model.layers.4", "model.layers.5"]
    told = "vLLM's own kernel takes over" if fallback else "only the requests concerned end"
    assert all("refused for a test" in line and told in line for line in warnings)


def test_a_gate_that_lets_states_grow_ends_its_own_request(call, monkeypatch):
    """What a broken checkpoint would make: no shape is wrong, and the operator refuses the values of one sequence."""
    call["g"][:, 100, 1] = 0.25
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: [0, 1, 2, 3])
    failures.STEP.take()
    o, state = GatedDeltaRulePrefill(LayerPrefill("model.layers.4", "gdn"), must_not_run)(**call)
    failed = failures.STEP.take()
    assert list(failed) == [3]
    for part in ("model.layers.4", "gated delta rule", "g must be at most 0", "0.25", "on_kernel_error"):
        assert part in failed[3]
    assert bool((o[:, 71:] == 0).all())
    assert bool((o[:, :71] != 0).any())
    assert bool((state[[0, 2]] != 0).any())


def test_a_call_nobody_can_report_is_an_error(call, monkeypatch):
    """Outside a step, or on a pipeline stage whose output is not read: going on would answer wrongly in silence."""
    monkeypatch.setattr("vllm_ext.model_executor.linear_attention.chunk_gated_delta_rule", refusing(70))
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: None)
    with pytest.raises(RuntimeError, match=r"model.layers.4.*refused for a test"):
        GatedDeltaRulePrefill(LayerPrefill("model.layers.4", "gdn"), must_not_run)(**call)


@pytest.mark.parametrize("calls", [1, 2], ids=["lost at once", "lost in a sequence alone"])
def test_a_lost_device_is_not_asked_for_the_sequences_that_are_left(call, monkeypatch, calls):
    lengths = []

    def operator(**given):
        lengths.append(given["cu_seqlens"].diff().tolist())
        raise RuntimeError("CUDA error: lost" if len(lengths) == calls else "refused for a test")

    monkeypatch.setattr("vllm_ext.model_executor.linear_attention.chunk_gated_delta_rule", operator)
    monkeypatch.setattr(prefill_module, "rows_in_this_step", lambda layer, sequences: [0, 1, 2, 3])
    failures.STEP.take()
    with pytest.raises(RuntimeError, match=r"model.layers.4.*on_kernel_error"):
        GatedDeltaRulePrefill(LayerPrefill("model.layers.4", "gdn"), must_not_run)(**call)
    assert lengths == [[70, 0, 1, 129], [70]][:calls]


@pytest.mark.parametrize(
    ("error", "reporting", "fatal"),
    [
        (ValueError("a shape"), False, False),
        (torch.OutOfMemoryError("on this rank"), True, False),
        (torch.OutOfMemoryError("on this rank"), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, True),
        (getattr(torch, "AcceleratorError", torch.OutOfMemoryError)("lost"), False, True),
    ],
)
def test_only_a_lost_device_or_what_one_rank_alone_knows_ends_the_engine(error, reporting, fatal, monkeypatch):
    monkeypatch.setattr(prefill_module, "is_reporting_rank", lambda: reporting)
    assert prefill_module._is_fatal(error) is fatal


class Output:
    def __init__(self, req_ids):
        self.req_ids = req_ids


def worker_class(run):
    """A vLLM-like worker whose step calls `run` and answers at once, or through `sample_tokens`."""

    class Worker:
        def execute_model(self, output):
            run()
            return output

        def sample_tokens(self, output):
            return output

    failures.hook_worker(types.SimpleNamespace(Worker=Worker))
    return Worker()


def test_a_step_sends_what_failed_by_request_without_touching_vllms_shared_output():
    shared = Output(["a", "b", "c"])
    worker = worker_class(lambda: failures.STEP.add(1, "why"))
    sent = worker.execute_model(shared)
    assert getattr(sent, failures._ATTRIBUTE) == {"b": "why"}
    assert not hasattr(shared, failures._ATTRIBUTE)
    assert worker_class(lambda: None).execute_model(shared) is shared


def test_a_row_of_padding_is_nobodys_failure():
    def run():
        for row in (0, 2):
            failures.STEP.add(row, "why")

    assert getattr(worker_class(run).execute_model(Output(["a", "b"])), failures._ATTRIBUTE) == {"a": "why"}


@pytest.mark.parametrize(("last_stage", "rank", "reporting"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_the_scheduler_reads_the_first_rank_of_the_last_stage(last_stage, rank, reporting, monkeypatch):
    distributed = pytest.importorskip("vllm.distributed")
    monkeypatch.setattr(distributed, "get_pp_group", lambda: types.SimpleNamespace(is_last_rank=last_stage))
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_rank", lambda: rank)
    assert failures.is_reporting_rank() is reporting


def test_failures_of_a_step_that_raised_are_not_held_against_the_next_ones_requests():
    steps = iter([True, False])

    def run():
        if next(steps):
            failures.STEP.add(0, "why")
            raise RuntimeError("lost on the way")

    worker = worker_class(run)
    with pytest.raises(RuntimeError, match="lost on the way"):
        worker.execute_model(Output(["a"]))
    assert not hasattr(worker.execute_model(Output(["b"])), failures._ATTRIBUTE)


def test_a_request_is_told_what_it_failed_of_first():
    """Layers behind the one that failed compute on zeros, and may fail of that."""
    noted = failures.StepFailures()
    for row, message in ((1, "layer 0"), (0, "layer 1"), (1, "layer 2")):
        noted.add(row, message)
    assert noted.take() == {1: "layer 0", 0: "layer 1"}
    assert noted.take() == {}


def test_a_step_that_is_sampled_apart_sends_its_failures_then():
    worker = worker_class(lambda: failures.STEP.add(0, "why"))
    assert worker.execute_model(None) is None
    assert getattr(worker.sample_tokens(Output(["a"])), failures._ATTRIBUTE) == {"a": "why"}


def test_an_output_still_on_its_way_brings_its_failures_along():
    class Later:
        def get_output(self):
            return Output(["a", "b"])

    worker = worker_class(lambda: failures.STEP.add(1, "why"))
    assert getattr(worker.execute_model(Later()).get_output(), failures._ATTRIBUTE) == {"b": "why"}


def test_blocks_a_failed_request_began_to_fill_are_found_by_what_was_computed_before():
    spec = types.SimpleNamespace(block_size=16)
    manager = types.SimpleNamespace(
        block_pool=types.SimpleNamespace(null_block=types.SimpleNamespace(block_id=0)),
        get_block_ids=lambda request_id: ([3, 4, 5], [0, 0, 7]),
    )
    scheduler = types.SimpleNamespace(
        requests={"a": types.SimpleNamespace(is_finished=lambda: False)},
        kv_cache_manager=manager,
        kv_cache_config=types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(kv_cache_spec=spec)] * 2),
    )
    written = failures._blocks_written(scheduler, "a", 16)
    assert written == [(0, {4, 5}), (1, {7})]
    assert failures._holds_any(([3], [7]), written)
    assert not failures._holds_any(([3, 7], [0]), written), "block numbers of two groups are not the same block"
    assert failures._blocks_written(scheduler, "gone", 16) == []


def test_what_a_request_had_computed_is_read_from_the_step_that_failed():
    """The scheduler's own count has moved on by then."""
    new = [types.SimpleNamespace(req_id="a", num_computed_tokens=64)]
    cached = types.SimpleNamespace(req_ids=["b", "c"], num_computed_tokens=[16, 32])
    step = types.SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    assert [failures._computed_before(step, name) for name in "abc?"] == [64, 16, 32, 0]


class Request:
    """What the hook asks of vLLM's: clients are the front ends of a server."""

    def __init__(self, request_id, client):
        self.request_id, self.client_index, self.trace_headers, self.finished = request_id, client, None, False

    def is_finished(self):
        return self.finished

    def take_events(self):
        return None


class Scheduler:
    """A vLLM-like scheduler of requests that hold blocks of one cache group, 16 tokens each."""

    def __init__(self, blocks, clients):
        self.running = [Request(name, clients[name]) for name in blocks]
        self.requests = {request.request_id: request for request in self.running}
        self.evicted, self.finished = set(), []
        null = types.SimpleNamespace(block_id=0)
        self.kv_cache_manager = types.SimpleNamespace(
            block_pool=types.SimpleNamespace(null_block=null),
            get_block_ids=lambda name: (blocks[name],),
            evict_blocks=self.evicted.update,
        )
        group = types.SimpleNamespace(kv_cache_spec=types.SimpleNamespace(block_size=16))
        self.kv_cache_config = types.SimpleNamespace(kv_cache_groups=[group])

    def finish_requests(self, name, status):
        self.finished.append((name, status.name))
        self.requests[name].finished = True

    def update_from_output(self, scheduler_output, model_runner_output):
        return {0: types.SimpleNamespace(outputs=["of a request that goes on"])}


def test_a_failed_request_ends_with_whoever_took_over_its_blocks_and_each_client_is_told():
    """`a` failed in its second block; `b`, of another client, holds that block; `c` shares only the first."""
    pytest.importorskip("vllm")
    module = types.SimpleNamespace(
        Scheduler=type("Scheduler", (Scheduler,), {"update_from_output": Scheduler.update_from_output}),
        EngineCoreOutputs=lambda outputs: types.SimpleNamespace(outputs=outputs),
    )
    for _ in range(2):
        failures.hook_scheduler(module)
    blocks = {"a": [3, 4, 0], "b": [3, 4], "c": [3, 5], "gone": [6]}
    scheduler = module.Scheduler(blocks, {"a": 0, "b": 1, "c": 0, "gone": 0})
    scheduler.requests["gone"].finished = True
    scheduler.running.pop()
    new = [types.SimpleNamespace(req_id=name, num_computed_tokens=16) for name in blocks]
    none = types.SimpleNamespace(req_ids=[], num_computed_tokens=[])
    step = types.SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=none)
    fine = types.SimpleNamespace()
    assert scheduler.update_from_output(step, fine)[0].outputs == ["of a request that goes on"]
    failed = types.SimpleNamespace(**{failures._ATTRIBUTE: {"a": "why", "gone": "aborted meanwhile"}})
    outputs = scheduler.update_from_output(step, failed)
    assert scheduler.evicted == {4}
    assert scheduler.finished == [("a", "FINISHED_ERROR"), ("b", "FINISHED_ERROR")]
    assert outputs[0].outputs[0] == "of a request that goes on"
    (to_first,), (to_second,) = outputs[0].outputs[1:], outputs[1].outputs
    assert (to_first.request_id, to_first.stop_reason) == ("a", "why")
    assert to_second.request_id == "b"
    assert to_second.stop_reason.startswith("it was about to continue from cached blocks")
    assert to_second.stop_reason.endswith(": why")
    assert {str(last.finish_reason) for last in (to_first, to_second)} == {"error"}


@pytest.mark.parametrize(
    ("serving", "last_stage", "device", "rows"),
    [(True, True, "cuda", [0, 1]), (False, True, "cuda", None), (True, False, "cuda", None), (True, True, "npu", None)],
)
def test_rows_are_known_only_where_somebody_reads_the_output(serving, last_stage, device, rows, monkeypatch):
    """Elsewhere a zero output would go on into an answer."""
    forward_context = pytest.importorskip("vllm.forward_context")
    from vllm import distributed, platforms

    context = types.SimpleNamespace(attn_metadata={"layer": metadata([5, 6], 0)})
    monkeypatch.setattr(forward_context, "is_forward_context_available", lambda: serving)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    monkeypatch.setattr(distributed, "get_pp_group", lambda: types.SimpleNamespace(is_last_rank=last_stage))
    monkeypatch.setattr(platforms, "_current_platform", types.SimpleNamespace(device_type=device))
    assert failures.rows_in_this_step("layer", 2) == rows
    assert failures.rows_in_this_step("another layer", 2) is None
