"""Which calls of an expert layer are replayed. The graphs are stood in for by calls, which the GPU tests make real."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
from typing import Any

import pytest
import tiny_transformers as tiny
import torch

from vllm_ext.integrations import layer_graphs
from vllm_ext.integrations.layer_graphs import MAX_ROWS, LayerGraphs
from vllm_ext.integrations.transformers import quantize_experts


class Again:
    """Replays by calling, over whatever lies at the addresses it was captured with, as a graph does."""

    replays = 0

    def __init__(self, call: Any, tensors: list[torch.Tensor]) -> None:
        self.call = call
        self.places = [(t.data_ptr(), t.nbytes, t.dtype, t.shape) for t in tensors]

    def replay(self) -> None:
        Again.replays += 1
        *inputs, out = (
            torch.frombuffer((ctypes.c_char * nbytes).from_address(place), dtype=dtype).view(shape)
            for place, nbytes, dtype, shape in self.places
        )
        out.copy_(self.call(*inputs))


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(call: Any, inputs: Any, out: torch.Tensor, space: Any) -> Any:
        return Again(call, [*inputs, out])

    monkeypatch.setattr(layer_graphs, "_recordable", lambda x: type(x) is torch.Tensor)
    monkeypatch.setattr(layer_graphs, "_current_stream", lambda device: 0)
    monkeypatch.setattr(layer_graphs, "_on_device", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(layer_graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    Again.replays = 0


def arguments(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=generator)
    ids = torch.rand(rows, 8, generator=generator).topk(2).indices
    return x, ids, torch.rand(rows, 2, generator=generator)


@pytest.fixture
def experts() -> Any:
    model = tiny.diffusion_gemma()
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    return model.model.decoder.layers[0].experts


def test_the_third_call_of_a_shape_is_recorded_and_later_ones_replayed(experts: Any) -> None:
    """The default: `quantize_experts` without options."""
    kept = []
    for turn in range(6):
        given = arguments(16, turn)
        with torch.no_grad():
            kept.append((given, experts(*given), experts.computed(*given)))
    assert Again.replays == 1 + 3, "one to compare bits, then the fourth to the sixth call"
    # Compared at the end: a result must not lie in a buffer that the next replay fills.
    assert all(torch.equal(found, wanted) for _, found, wanted in kept)


def in_place(experts: Any) -> dict[Any, Any]:
    (recorded,) = experts.graphs.graphs.values()
    return recorded.in_place


@pytest.mark.parametrize("places", [1, 2, 9])
def test_addresses_that_return_are_read_and_written_in_place(
    experts: Any, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop's allocations repeat, perhaps with a period. What lies there differs from call to call."""
    sets = [(arguments(16), torch.empty(16, 64)) for _ in range(places)]
    with torch.no_grad():
        for turn in range(12 * places):
            given, out = sets[turn % places]
            monkeypatch.setattr(layer_graphs, "_output_like", lambda x, out=out: out)
            for tensor, fresh in zip(given, arguments(16, turn), strict=True):
                tensor.copy_(fresh)
            out.fill_(float("nan"))
            assert torch.equal(experts(*given), experts.computed(*given))
    assert len(in_place(experts)) == min(places, layer_graphs._PLACES)


def test_the_same_addresses_in_another_order_of_elements(experts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = arguments(16), torch.empty(16, 64)
    monkeypatch.setattr(layer_graphs, "_output_like", lambda x: out)
    with torch.no_grad():
        for _ in range(8):
            experts(*given)
        assert in_place(experts)
        other = given[1].view(2, 16).T
        assert other.data_ptr() == given[1].data_ptr()
        assert torch.equal(experts(given[0], other, given[2]), experts.computed(given[0], other, given[2]))


def test_a_replay_in_place_with_other_bits_is_never_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, given, out = LayerGraphs(), arguments(4), torch.empty(4, 64)
    monkeypatch.setattr(layer_graphs, "_output_like", lambda x: out)
    real = layer_graphs._capture

    def capture(call: Any, inputs: Any, out: torch.Tensor, space: Any) -> Any:
        wrong = inputs[0].data_ptr() == given[0].data_ptr()
        return real((lambda *tensors: call(*tensors) + 1) if wrong else call, inputs, out, space)

    monkeypatch.setattr(layer_graphs, "_capture", capture)
    for _ in range(9):
        assert torch.equal(graphs(lambda x, ids, weights: x * 2, (), *given), given[0] * 2)
    assert graphs.broken
    assert "a replay in place computed something else" in caplog.text


def test_changing_shapes_are_told_apart(experts: Any) -> None:
    """A prompt and a canvas alternate over the same layer."""
    with torch.no_grad():
        for turn in range(8):
            given = arguments((16, 40)[turn % 2], turn)
            assert torch.equal(experts(*given), experts.computed(*given))
    assert len(experts.graphs.graphs) == 2
    assert len({id(recorded.space) for recorded in experts.graphs.graphs.values()}) == 1


@pytest.mark.parametrize("wrong", ["columns", "rows", "weights"])
def test_calls_that_do_not_fit_are_refused_as_before(experts: Any, wrong: str) -> None:
    """A buffer would take what broadcasts to it; and one wrong call must not cost the layer its graphs."""
    x, ids, weights = arguments(16)
    with torch.no_grad():
        for _ in range(4):
            experts(x, ids, weights)
        bad = {
            "columns": (x[:, :1], ids, weights),
            "rows": (x, ids[:1], weights[:1]),
            "weights": (x, ids, weights[:, :1]),
        }[wrong]
        with pytest.raises(ValueError, match="must"):
            experts.routed(*bad)
        replays = Again.replays
        experts(x, ids, weights)
    assert Again.replays > replays
    assert not experts.graphs.broken


def test_many_shapes_take_bounded_memory() -> None:
    """A server sees prompts of every length."""
    graphs = LayerGraphs()
    for rows in [*range(1, 700), *([5] * 4), *range(10, 40)] * 3:
        graphs(lambda x, ids, weights: x + 1, (), *arguments(rows))
    assert len(graphs.graphs) <= layer_graphs._SHAPES
    assert len(graphs.seen) <= layer_graphs._COUNTED


def test_long_calls_and_empty_ones_are_not_recorded() -> None:
    graphs = LayerGraphs()
    for rows in [MAX_ROWS + 1, 0] * 4:
        graphs(lambda x, ids, weights: x + 1, (), *arguments(rows))
    assert not graphs.graphs
    assert not graphs.seen


def test_weights_elsewhere_are_not_read_from_old_graphs(experts: Any) -> None:
    """Hooks that offload put other tensors in a module's place without telling it."""
    with torch.no_grad():
        for _ in range(4):
            experts(*arguments(16))
        replays = Again.replays
        name = experts.tensor_names[-1]
        experts._buffers[name] = experts._buffers[name].clone().mul_(2)
        given = arguments(16, 1)
        assert torch.equal(experts(*given), experts.computed(*given))
    assert Again.replays == replays


def test_moved_modules_and_copies_start_anew(experts: Any) -> None:
    with torch.no_grad():
        for _ in range(4):
            experts(*arguments(16))
    assert experts.graphs.graphs
    assert not copy.deepcopy(experts).graphs.graphs
    experts.to(torch.device("cpu"))
    assert not experts.graphs.graphs


def test_what_is_not_a_number_is_no_reason_to_give_up() -> None:
    """Rows that pad a batch may hold anything."""
    graphs = LayerGraphs()
    x, ids, weights = arguments(4)
    x[1] = float("nan")
    for _ in range(4):
        graphs(lambda x, ids, weights: x * 2, (), x, ids, weights)
    assert graphs.graphs
    assert not graphs.broken


def test_a_replay_with_other_bits_is_never_used(caplog: pytest.LogCaptureFixture) -> None:
    graphs, calls = LayerGraphs(), []

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    for count in (1, 2, 3, 5, 6):  # the fourth was the replay that was compared
        assert torch.equal(graphs(call, (), *arguments(4)), arguments(4)[0] + count)
    assert graphs.broken
    assert caplog.text.count("the replay computed something else") == 1


def test_gradients_are_refused_however_often_a_shape_came(experts: Any) -> None:
    """In training mode a replay would take the place of the refusal, and its buffers would join the caller's graph."""
    for _ in range(4):
        with torch.no_grad():
            experts(*arguments(16))
    replays = Again.replays
    x, ids, weights = arguments(16)
    out = experts(x.requires_grad_(), ids, weights)
    with pytest.raises(RuntimeError, match="no backward"):
        out.sum().backward()
    experts(x.detach(), ids, weights.requires_grad_())
    assert Again.replays == replays
    assert not any(buffer.requires_grad for r in experts.graphs.graphs.values() for buffer in (r.x, r.weights, r.out))


def test_recorded_in_inference_mode_and_used_outside(experts: Any) -> None:
    """Tensors of inference mode must not be written to outside it."""
    with torch.inference_mode():
        for _ in range(4):
            experts(*arguments(16))
    given = arguments(16, 1)
    assert torch.equal(experts(*given), experts.computed(*given))
    assert Again.replays == 3


def test_buffers_go_with_the_last_graph(experts: Any) -> None:
    """A model that is deleted leaves nothing behind."""
    with torch.no_grad():
        for _ in range(4):
            experts(*arguments(16))
    assert len(layer_graphs._Space.shared) == 1
    experts.graphs.clear()
    gc.collect()
    assert not layer_graphs._Space.shared


def test_replay_can_be_switched_off_and_compiled_code_has_its_own_way() -> None:
    model = tiny.diffusion_gemma()
    quantize_experts(model, group_sizes=(16, 8), progress=False, replay=False)
    experts = model.model.decoder.layers[0].experts
    with torch.no_grad():
        for _ in range(4):
            experts(*arguments(16))
        assert not Again.replays
        experts.graphs = LayerGraphs()
        compiled = torch.compile(experts, backend="eager", fullgraph=True)
        for _ in range(4):
            assert torch.equal(compiled(*arguments(16)), experts.computed(*arguments(16)))
    assert not experts.graphs.seen
