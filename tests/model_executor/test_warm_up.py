"""Kernels are compiled while an engine starts: which sizes are run then, and on what."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
from experts_layer import EXPERTS, HIDDEN, experts_layer

from vllm_ext.model_executor import warm_up


@pytest.mark.parametrize(
    ("largest", "captured", "top_k", "sizes"),
    [
        (8192, 512, 8, [513, 768, 1024, 1025, 1536, 2048, 2049, 3072, 4096, 4097, 6144, 8192]),
        (64, 0, 1, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
        (3000, 256, 6, [341, 342, 384, 512, 682, 683, 768, 1024, 1365, 1366, 1536, 2048, 2730, 2731, 3000]),
        (256, 256, 10, [256]),
        (48, 0, 6, [1, 2, 3, 4, 6, 8, 12, 16, 21, 22, 24, 32, 42, 43, 48]),
    ],
)
def test_what_vllm_does_not_run_itself_and_other_kernels_serve(largest, captured, top_k, sizes):
    """Configurations change at powers of two and their middles; sorts between 2048, 4096, ... slots and one more: of
    six a token, 4096 are 682 tokens and two thirds."""
    assert warm_up.step_sizes(largest, captured, top_k) == sizes


def sorted_by(slots):
    """What the kernels that sort so many slots are compiled for, beside the blocks of both GEMMs."""
    from vllm_ext.ops.moe.triton import align
    from vllm_ext.ops.moe.triton.launch_sizes import next_power_of_2

    if slots <= align._ONE_LAUNCH_SLOTS:
        return align.one_launch_shape(slots)
    return next_power_of_2(align.chunks_of(slots)[1])


def test_the_first_change_of_the_sort_is_where_it_is_said_to_be():
    """The number stands in two files, since this one must not import Triton."""
    pytest.importorskip("triton")
    fewest = warm_up._FEWEST_SLOTS
    assert sorted_by(1) == sorted_by(fewest) != sorted_by(fewest + 1)


def never_run_ahead(launched, top_k, captured, largest=8192):
    """Steps that reach kernels which no size run ahead does, by `launched` for a number of tokens."""

    def kernels(tokens):
        return launched(tokens), sorted_by(tokens * top_k)

    # Up to `captured` vLLM pads to sizes that it runs, in steps of 8 or 16.
    padded = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, captured + 1, 16)) if size <= captured]
    run = {kernels(size) for size in [*warm_up.step_sizes(largest, captured, top_k), *padded]}
    return [tokens for tokens in range(captured + 1, largest + 1) if kernels(tokens) not in run]


@pytest.mark.parametrize("captured", [0, 512])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 1), (72, 2), (256, 8), (32, 4), (60, 4), (160, 6), (512, 10)])
@pytest.mark.parametrize("intermediate", [88, 352, 704, 7168])
def test_no_step_is_launched_as_none_of_these_sizes_is(intermediate, experts, top_k, captured):
    """88 and 352 columns are left to tiles, for which the rule counted every token: steps of 3073 to 4095 tokens, one
    slot each over 128 experts, were launched as no size run ahead, and two kernels compiled on the first request. So
    were steps of 641 to 682 tokens, six slots each over 160 experts, sorted."""
    pytest.importorskip("triton")
    from vllm_ext.ops.moe import ExpertsMeta
    from vllm_ext.ops.moe.triton import choice

    meta = ExpertsMeta("triton", experts, 2048, intermediate, 128, 64, True, "float", torch.bfloat16)
    for plain in (True, False):
        launched = functools.partial(choice.rule, meta, top_k=top_k, num_global=experts, plain=plain)
        assert not never_run_ahead(launched, top_k, captured)


@pytest.mark.parametrize("captured", [0, 512])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "top_k"),
    [(2048, 512, 512, 10), (2048, 1408, 64, 6), (2816, 704, 128, 8), (4096, 14336, 8, 2)],
)
def test_no_step_is_launched_by_a_table_as_none_of_these_sizes_is(
    hidden, intermediate, experts, top_k, captured, monkeypatch
):
    """Qwen3-Next's steps of 820 to 1023 tokens were alone in being sorted in three launches for its row of 256."""
    pytest.importorskip("triton")
    from vllm_ext.ops.moe import ExpertsMeta
    from vllm_ext.ops.moe.triton import choice

    monkeypatch.setattr(choice, "_device_name", lambda index: "NVIDIA H200")
    meta = ExpertsMeta("triton", experts, hidden, intermediate, 128, 64, True, "float", torch.bfloat16)

    def launched(tokens):
        return choice.choose(meta, tokens, top_k, experts, False, 0, True)

    assert len({launched(tokens) for tokens in range(1, 8193)}) > 4
    assert not never_run_ahead(launched, top_k, captured)


def configuration(*, eager=False, mode="FULL_AND_PIECEWISE", ranks=1):
    compilation = types.SimpleNamespace(
        cudagraph_mode=types.SimpleNamespace(name=mode), max_cudagraph_capture_size=0 if mode == "NONE" else 512
    )
    return types.SimpleNamespace(
        compilation_config=compilation,
        model_config=types.SimpleNamespace(enforce_eager=eager),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=types.SimpleNamespace(data_parallel_size=ranks),
    )


def test_what_is_captured_and_what_arrives_at_once():
    assert warm_up.captured_up_to(configuration()) == 512
    assert warm_up.captured_up_to(configuration(eager=True)) == 0
    assert warm_up.captured_up_to(configuration(mode="NONE")) == 0
    assert warm_up.largest_step(configuration(ranks=2)) == 4096


@pytest.fixture
def layer():
    """A layer with 4-bit experts on the CPU, taken for one whose kernels are compiled on the first call."""
    pytest.importorskip("vllm")
    return experts_layer("reference")


@pytest.mark.vllm
def test_one_layer_of_a_kind_runs_every_size(layer, monkeypatch):
    assert not layer.quant_method.compiles_on_call
    calls = []
    apply = type(layer.quant_method).apply

    def noted(self, layer, x, topk_weights, topk_ids, *rest):
        calls.append((tuple(x.shape), x.dtype, tuple(topk_ids.shape), topk_ids.dtype, topk_ids.unique().tolist()))
        return apply(self, layer, x, topk_weights, topk_ids, *rest)

    monkeypatch.setattr(type(layer.quant_method), "apply", noted)
    warm_up.warm_up_experts(torch.nn.ModuleList([layer]), 8, 2)
    assert not calls
    layer.quant_method.compiles_on_call = True
    alike = experts_layer("reference")
    alike.quant_method.compiles_on_call = True
    warm_up.warm_up_experts(torch.nn.ModuleList([layer, alike, torch.nn.Linear(2, 2)]), 8, 2)
    ids = (torch.int32, list(range(EXPERTS)))
    assert calls == [((n, HIDDEN), torch.bfloat16, (n, 2), *ids) for n in (3, 4, 6, 8)]


@pytest.mark.vllm
def test_kernels_that_an_interpreter_runs_are_not_run_ahead(monkeypatch):
    """Triton's interpreter compiles nothing, and takes minutes for what a device does in seconds."""
    pytest.importorskip("vllm")
    from vllm_ext.model_executor import moe_method

    def as_triton(*weights, prepare=moe_method.prepare_experts, **options):
        experts = prepare(*weights, **options)
        return dataclasses.replace(experts, meta=dataclasses.replace(experts.meta, backend="triton"))

    monkeypatch.setattr(moe_method, "prepare_experts", as_triton)
    assert not experts_layer("reference").quant_method.compiles_on_call


@pytest.mark.vllm
def test_worker_warms_up_after_its_own_kernels(layer):
    pytest.importorskip("vllm")
    done = []
    layer.quant_method.compiles_on_call = True
    layer.quant_method.run_idle = lambda _, tokens: done.append(tokens)
    layer.top_k = 6
    module = types.SimpleNamespace(kernel_warmup=lambda worker: done.append("vLLM"))
    warm_up.hook_worker(module)
    warm_up.hook_worker(module)
    worker = types.SimpleNamespace(vllm_config=configuration(), get_model=lambda: torch.nn.ModuleList([layer]))
    module.kernel_warmup(worker)
    assert done == ["vLLM", 682, 683, 768, 1024, 1365, 1366, 1536, 2048]


@pytest.mark.vllm
def test_supported_vllm_calls_what_is_hooked():
    """The hook replaces a name in vLLM's worker module; looked up elsewhere, nothing would be compiled early."""
    pytest.importorskip("vllm")
    import inspect

    import vllm.v1.worker.gpu_worker as gpu_worker

    assert "kernel_warmup" in inspect.unwrap(gpu_worker.Worker.compile_or_warm_up_model).__code__.co_names
    assert next(iter(inspect.signature(gpu_worker.kernel_warmup).parameters)) == "worker"
