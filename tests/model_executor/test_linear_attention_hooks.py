"""How a kernel shared by all layers of a process finds out which layer calls it."""

from __future__ import annotations

import gc
import threading
import types

import pytest
import torch

from vllm_ext import compat
from vllm_ext.model_executor import linear_attention
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


@pytest.mark.parametrize("own", [True, False])
def test_kimi_s_kernel_is_served_wherever_the_version_has_it(own, monkeypatch):
    """0.23's layer calls a function of its own module, later ones import it from the kernels' at each call."""
    layers, kernels = types.SimpleNamespace(), types.SimpleNamespace()
    (layers if own else kernels).chunk_kda_with_fused_gate = lambda q: ("stock", q)

    class KimiGatedDeltaNetAttention:
        def _forward(self, q):
            return (layers if own else kernels).chunk_kda_with_fused_gate(q=q)

    layers.KimiGatedDeltaNetAttention = KimiGatedDeltaNetAttention
    hooks.hook_kimi_layer(layers)
    if not own:
        hooks.hook_kda_kernels(kernels)
    monkeypatch.setattr(linear_attention, "kda_with_fused_gate", lambda prefill, stock, **call: (prefill, call))
    ours, theirs = (object.__new__(KimiGatedDeltaNetAttention) for _ in range(2))
    setattr(ours, hooks._ATTRIBUTE, "prefill")
    assert ours._forward(1) == ("prefill", {"q": 1})
    assert theirs._forward(1) == ("stock", 1)


def configuration(**options):
    return types.SimpleNamespace(additional_config={"vllm_ext": options})


@pytest.mark.parametrize(("options", "said"), [({"linear_attn_backend": "ha_npu"}, []), ({}, [("auto", "flashinfer")])])
def test_vllm_prepares_for_and_announces_its_own_kernel_only_where_it_calls_it(options, said):
    """Its metadata is cut and its kernels are compiled for the one it has chosen; on Hopper that is FlashInfer's."""
    announced = []
    module = types.SimpleNamespace(
        _resolve_gdn_prefill_backend=lambda config: ("auto", "flashinfer"),
        _log_gdn_backend_decision=lambda config, *choice: announced.append(choice),
    )
    for _ in range(2):
        hooks._prefer_triton(module)
    config = configuration(**options)
    choice = module._resolve_gdn_prefill_backend(config)
    module._log_gdn_backend_decision(config, *choice)
    assert choice == (("triton", "triton") if options else ("auto", "flashinfer"))
    assert announced == said


@pytest.mark.parametrize(
    ("kinds", "served", "options", "told"),
    [
        (["GDN_ATTN"], False, "ha_npu", "its linear-attention layers (Other) are of a kind it does not serve"),
        (["MAMBA2", None], False, "ha_npu", "it has no linear-attention (GDN or KDA) layer on this rank"),
        (["GDN_ATTN"], True, "ha_npu", None),
        (["GDN_ATTN"], False, None, None),
    ],
)
def test_a_model_that_ha_npu_does_not_serve_is_told_why(kinds, served, options, told, monkeypatch):
    logger = pytest.importorskip("vllm.logger")
    lines = []

    class Other(torch.nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.mamba_type = kind
            if served:
                setattr(self, hooks._ATTRIBUTE, "prefill")

    log = types.SimpleNamespace(warning_once=lambda text, *parts: lines.append(text % parts))
    monkeypatch.setattr(logger, "init_logger", lambda name: log)
    model = torch.nn.Sequential(*map(Other, kinds))
    hooks.warn_if_unserved(configuration(**({"linear_attn_backend": options} if options else {})), model)
    assert len(lines) == (0 if told is None else 1)
    if told is not None:
        assert lines[0].startswith("--attention-backend ha_npu has no effect on Sequential: ")
        assert told in lines[0]
