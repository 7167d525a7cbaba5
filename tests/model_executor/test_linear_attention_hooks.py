"""How a kernel shared by all layers of a process finds out which layer calls it."""

from __future__ import annotations

import gc
import threading
import types

import pytest

from vllm_ext import compat
from vllm_ext.model_executor import linear_attention_hooks as hooks


@pytest.fixture
def module():
    """A vLLM-like module: a kernel, and a layer class whose method leads to it."""
    module = types.SimpleNamespace()
    module.kernel = lambda a, b, c=0: ("stock", a, b, c)

    class Layer:
        def __init__(self, name, served):
            self.name = name
            if served:
                setattr(self, hooks._ATTRIBUTE, f"prefill of {name}")

        def prepare(self):
            return None

        def run(self, *args, inner=None, **kwargs):
            if inner is not None:
                inner.run(0, 0)
            return module.kernel(*args, **kwargs)

    module.Layer = Layer
    return module


def serve(prefill, stock, **kwargs):
    return prefill, kwargs


def test_only_layers_with_a_prefill_are_served_however_the_kernel_is_called(module):
    hooks._note_running(module.Layer, "run", encloses_call=True)
    hooks._serve_function(module, "kernel", serve)
    ours, theirs = module.Layer("a", True), module.Layer("b", False)
    assert ours.run(a=1, b=2) == ("prefill of a", {"a": 1, "b": 2})
    assert ours.run(1, 2, c=3) == ("prefill of a", {"a": 1, "b": 2, "c": 3})
    assert theirs.run(1, 2) == ("stock", 1, 2, 0)
    assert module.kernel(1, 2) == ("stock", 1, 2, 0)


def test_a_layer_inside_a_layer_does_not_take_over(module):
    hooks._note_running(module.Layer, "run", encloses_call=True)
    hooks._serve_function(module, "kernel", serve)
    assert module.Layer("a", True).run(1, 2, inner=module.Layer("b", False))[0] == "prefill of a"


def test_a_method_that_precedes_the_call_notes_the_layer_until_another_runs(module):
    """vLLM's CPU op is a function; the layer's last method before the kernel is what tells whose turn it is."""
    hooks._note_running(module.Layer, "prepare", encloses_call=False)
    hooks._serve_function(module, "kernel", serve)
    ours, theirs = module.Layer("a", True), module.Layer("b", False)
    ours.prepare()
    assert module.kernel(1, 2)[0] == "prefill of a"
    theirs.prepare()
    assert module.kernel(1, 2)[0] == "stock"
    ours.prepare()
    other_thread = []
    thread = threading.Thread(target=lambda: other_thread.append(module.kernel(1, 2)[0]))
    thread.start()
    thread.join()
    assert other_thread == ["stock"]


def test_a_finished_engine_is_not_kept_alive(module):
    hooks._note_running(module.Layer, "prepare", encloses_call=False)
    hooks._serve_function(module, "kernel", serve)
    layer = module.Layer("a", True)
    layer.prepare()
    del layer
    gc.collect()
    assert module.kernel(1, 2)[0] == "stock"


def test_hooking_twice_changes_nothing(module):
    for _ in range(2):
        hooks._note_running(module.Layer, "run", encloses_call=True)
        hooks._serve_function(module, "kernel", serve)
    kernel, run = module.kernel, module.Layer.run
    hooks._note_running(module.Layer, "run", encloses_call=True)
    hooks._serve_function(module, "kernel", serve)
    assert (module.kernel, module.Layer.run) == (kernel, run)


def test_a_replayed_graph_break_still_notes_its_layer(module, monkeypatch):
    """A captured graph replays the function inside vLLM's graph-break decorator, not what was put around it."""
    breakable = pytest.importorskip("vllm.compilation.breakable_cudagraph")
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    module.Layer.run = breakable.eager_break_during_capture(module.Layer.run)
    hooks._note_running(module.Layer, "run", encloses_call=True)
    hooks._serve_function(module, "kernel", serve)
    recorded = []
    capture = types.SimpleNamespace(_capturing=True, add_eager=recorded.append)
    monkeypatch.setattr(breakable.BreakableCUDAGraphCapture._tls, "active", capture, raising=False)
    layer = module.Layer("a", True)
    layer.run(1, 2)
    assert module.kernel(1, 2)[0] == "stock"
    assert [replay() for replay in recorded] == [("prefill of a", {"a": 1, "b": 2})]


def test_kda_step_size_is_taken_exactly_once():
    with pytest.raises(TypeError, match="beta or raw_beta"):
        compat.kda_beta()
