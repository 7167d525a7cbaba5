"""Checks of the built binding beside real torch_npu: schemas, shapes, host checks, and both devices' results.

The stub's NPU memory is host memory and its kernels are the simulator's, so what runs here is everything of an NPU call
but the chip: torch_npu's dispatch, allocator, copies, stream and task queue, and our host code.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda, npu
from vllm_ext.ops.linear_attention.ascend_sim.prefill import run_prefill as simulate
from vllm_ext.ops.linear_attention.ascend_sim.tasks import chunk_head_chunk_launches, make_tasks
from vllm_ext.ops.linear_attention.npu import extension
from vllm_ext.ops.linear_attention.npu.launches import launch_tables, layout
from vllm_ext.ops.linear_attention.npu.prefill import load_simulator, run_prefill
from vllm_ext.ops.linear_attention.problem import Call, Problem
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

torch.set_num_threads(1)
assert torch_npu.__version__.startswith(torch.__version__.partition("+")[0])
assert extension.load() == "", extension.load()
load_simulator("310p3", 2)

OPS = torch.ops.vllm_ext
BOUNDS = (0, 65, 65, 130)  # a ragged tail, an empty sequence, and no chunk that is whole in both
HEADS, VALUE_HEADS = 2, 4


def make_call(op: str, *, size: int = 64, v_first: bool = False, state: bool = True, final: bool = True) -> Call:
    """A call with GQA, a ragged and an empty sequence."""
    sizes = (1, BOUNDS[-1], HEADS, VALUE_HEADS, size, size)
    x = sample_operands(op, *sizes, dtype=torch.float16, normalised=False, seed=3)
    initial = sample_state(len(BOUNDS) - 1, VALUE_HEADS, size, size).half() if state else None
    if initial is not None and v_first:
        initial = initial.transpose(-1, -2).contiguous()
    cu_seqlens = torch.tensor(BOUNDS)
    return Call(x["q"], x["k"], x["v"], x["g"], x["beta"], size**-0.5, initial, final, cu_seqlens, True, v_first)


def arguments(op: str, **changes: Any) -> dict[str, Any]:
    """The operator's arguments for `make_call(op)`, with some of them changed."""
    call = make_call(op)
    planned = layout(op, "310p3", BOUNDS, VALUE_HEADS, 64, 64)
    assert call.initial_state is not None
    return {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "g": planned.pad(call.g[0]),
        "beta": planned.pad(call.beta[0]),
        "initial_state": call.initial_state.float(),
        "tasks": planned.tasks,
        "launches": planned.launches,
        "scale": 0.125,
        "num_sequences": len(BOUNDS) - 1,
        "chip": "310p3",
        "output_final_state": True,
        "state_v_first": False,
        "normalise": True,
        "state_dtype": torch.float32,
        **changes,
    }


def operator(op: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The operator of "gdn" or "kda"."""
    return getattr(OPS, f"ascend_{op}_prefill")  # type: ignore[no-any-return]


def refused(message: str, op: str = "gdn", error: type[Exception] = ValueError, **changes: Any) -> None:
    """The operator refuses these changes with an error that says so."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        operator(op)(**arguments(op, **changes))
    assert f"ascend_{op}_prefill" in str(caught.value)


def check_schemas_are_registered_for_cpu_npu_and_tracing() -> None:
    """Each operator has one schema and a kernel for CPU, NPU and Meta; CPU is the simulator, not a fall-back."""
    for op in ("gdn", "kda"):
        name = f"vllm_ext::ascend_{op}_prefill"
        schema = operator(op).default._schema  # type: ignore[attr-defined]
        assert [argument.name for argument in schema.arguments] == list(arguments(op)), schema
        for key in ("CPU", "PrivateUse1", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
    assert extension.compiled_targets() == ("dav-2002", "dav-3002")


def check_cpu_tensors_run_the_simulator_through_the_host_code() -> None:
    """Same bits as backend ascend-sim, which calls the kernels without this host code, for both state orders."""
    for op, function in (("gdn", chunk_gated_delta_rule), ("kda", chunk_kda)):
        for v_first in (False, True):
            call = make_call(op, v_first=v_first)
            o, state = run_prefill(op, call, "310p1")
            expected, expected_state = function(
                call.q,
                call.k,
                call.v,
                call.g,
                call.beta,
                initial_state=call.initial_state,
                output_final_state=True,
                cu_seqlens=call.cu_seqlens,
                use_qk_l2norm_in_kernel=True,
                state_v_first=v_first,
                backend="ascend-sim",
            )
            assert torch.equal(o, expected), op
            assert state is not None
            assert torch.equal(state, expected_state), op
            assert torch.equal(state[1], call.initial_state[1].float()), "an empty sequence keeps its state"


def check_310b_blocks_get_memory_to_pass_operands_through() -> None:
    """A 310B has no way from UB to L1: each block needs scratch in global memory, also without chunk-head-chunk."""
    load_simulator("310b4", 2)
    for op in ("gdn", "kda"):
        call = make_call(op)
        o, state = run_prefill(op, call, "310b4")
        expected = simulate(op, call, chip="310b4")
        assert torch.equal(o, expected.o), op
        assert state is not None
        assert expected.final_state is not None
        assert torch.equal(state, expected.final_state), op


def check_npu_tensors_give_the_simulators_bits() -> None:
    """The compiled launch code behind torch_npu's dispatch, allocator and task queue: same bits as on CPU tensors."""
    for op in ("gdn", "kda"):
        here = arguments(op)
        results = operator(op)(**on_npu(here))
        torch.npu.synchronize()
        for result, expected in zip(results, operator(op)(**here), strict=True):
            assert result.device.type == "npu"
            assert torch.equal(result.cpu(), expected), op


def check_three_tier_launches_reach_the_npu() -> None:
    """A tail by chunk-head-chunk: four launches and their workspace, in order on one stream."""
    for op in ("gdn", "kda"):
        tasks, launches = three_launches()
        assert launches[:, 0].tolist() == [0, 1, 2, 3]
        here = arguments(op, tasks=tasks, launches=launches)
        expected = operator(op)(**here)
        for got, alone in zip(expected, operator(op)(**arguments(op)), strict=True):
            # The tiers sum in the same order; only where a state is read back in FP16 may the last bit differ.
            assert (got.float() - alone.float()).abs().max() <= 2e-2, op
        for result, wanted in zip(operator(op)(**on_npu(here)), expected, strict=True):
            assert torch.equal(result.cpu(), wanted), op


def check_shapes_for_tracing_follow_symbols() -> None:
    """torch.compile traces the operator with a dynamic number of tokens, without running it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = arguments("gdn")
    call = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    graph = make_fx(lambda x: OPS.ascend_gdn_prefill(**x, **call), tracing_mode="symbolic")(tensors)
    (node,) = [node for node in graph.graph.nodes if "ascend_gdn_prefill" in str(node.target)]
    o, state = node.meta["val"]
    assert o.dtype == torch.float16
    assert not isinstance(o.shape[1], int), "the number of tokens is a symbol"
    assert list(state.shape) == [3, VALUE_HEADS, 64, 64]
    assert state.dtype == torch.float32
    meta = {name: value.to("meta") for name, value in tensors.items()}
    o, state = OPS.ascend_gdn_prefill(**meta, **{**call, "output_final_state": False})
    assert o.shape == given["v"].shape
    assert state.numel() == 0


def check_host_refuses_wrong_shapes() -> None:
    """With the operand, the rule and the numbers."""
    given = arguments("gdn")
    refused("k must be", k=given["k"][:, :-1])
    refused("beta must be", beta=given["beta"][:, :-1].contiguous())
    refused("multiple of 64", beta=given["beta"][:, :100].contiguous())
    refused("g must be", "kda", g=given["g"])
    refused("K must be 64 or 128, got 32", q=given["q"][..., :32].contiguous(), k=given["k"][..., :32].contiguous())
    refused("initial_state must be", initial_state=given["initial_state"][:2])
    refused("value heads must be a multiple", q=given["q"].repeat(1, 1, 2, 1)[:, :, :3].contiguous())


def check_host_refuses_what_the_chip_cannot_read() -> None:
    """BF16, other devices, gaps between rows, and addresses off a multiple of 32 bytes."""
    given = arguments("gdn")
    refused("q must be Half", q=given["q"].bfloat16())
    refused("--dtype float16", q=given["q"].bfloat16())
    refused("g must be Float", g=given["g"].half())
    refused("states are kept in FP16 or FP32", state_dtype=torch.bfloat16)
    refused("must be contiguous", v=given["v"].transpose(1, 2).contiguous().transpose(1, 2))
    shifted = torch.empty(given["q"].numel() + 1, dtype=torch.float16)[1:].view(given["q"].shape)
    refused("begins 2 bytes behind a multiple of 32", q=shifted.copy_(given["q"]))
    refused("no kernels for chip", chip="910b4")


def check_host_refuses_a_table_that_leaves_the_tensors() -> None:
    """A launch table is data: reading or writing outside, twice or not everywhere is refused before anything runs."""
    tasks, launches = arguments("gdn")["tasks"], arguments("gdn")["launches"]

    def changed(column: int, value: int) -> torch.Tensor:
        other = tasks.clone()
        other[0, column] = value
        return other

    refused("lies outside 130 tokens", tasks=changed(1, 131))
    refused("lies outside", tasks=changed(3, VALUE_HEADS))
    refused("lies outside", tasks=changed(4, 8))
    refused("lies outside", tasks=changed(6, 192))
    refused("lies outside", tasks=changed(2, 3))
    twice = tasks.clone()
    twice[0] = twice[1]
    refused("twice", tasks=twice)
    last = tasks[:, 2] == 2
    overlapping, apart, sharing = tasks.clone(), tasks.clone(), tasks.clone()
    overlapping[last, 0] = 0
    apart[last, 0] += 1
    apart[last, 1] -= 1
    sharing[last, 6] = 0
    refused("one begins at token 0 and not 65", tasks=overlapping)
    refused("one begins at token 66 and not 65", tasks=apart)
    refused("two sequences share gates from 0", tasks=sharing)
    refused("cannot cover 4 heads of 4611686018427387904 sequences", num_sequences=2**62, initial_state=None)
    refused("belong to no launch", tasks=torch.cat((tasks, tasks[:1])))
    refused("has phase 7", launches=torch.cat((torch.full((1, 1), 7, dtype=torch.int32), launches[:1, 1:]), 1))
    refused("int32 matrices on the CPU", tasks=tasks.long())
    lonely = launches[:1].clone()
    lonely[0, 0] = 1
    refused("launches must be", launches=lonely)


def check_host_refuses_three_launches_that_do_not_fit_each_other() -> None:
    """Map, reduce and output hand chunks to one another: on an NPU a chunk that one of them leaves out is rubbish in
    the next, and nothing there would notice.
    """
    tasks, launches = three_launches()
    chunks = {phase: slice(*launches[phase, [2, 2 + int(launches[phase, 1])]].tolist()) for phase in (1, 3)}
    for phase in (1, 3):
        twice, outside = tasks.clone(), tasks.clone()
        twice[chunks[phase]][-1] = twice[chunks[phase]][0]
        outside[chunks[phase]][-1, 6] -= 64
        refused(f"phase {phase} has a chunk of head 3 twice", tasks=twice, launches=launches)
        refused("are not whole chunks of sequence 2", tasks=outside, launches=launches)
    other_head, half = tasks.clone(), tasks.clone()
    other_head[chunks[1]][:, 3] = 2
    refused("must cover the same chunks and columns", tasks=other_head, launches=launches)
    half[chunks[3]][:, 5] = 32
    refused("must cover the same chunks and columns", tasks=half, launches=launches)


def three_launches() -> tuple[torch.Tensor, torch.Tensor]:
    """Three heads whole, the fourth by chunk-head-chunk."""
    heads = [task for block in make_tasks(list(BOUNDS), VALUE_HEADS, 64, VALUE_HEADS * 3) for task in block]
    whole = [task for task in heads if task.head < 3 or not task.token_count]
    tail = [task for task in heads if task.head == 3 and task.token_count]
    return launch_tables([("whole", [whole]), *chunk_head_chunk_launches(tail, 2, 8)])


def check_a_target_that_was_not_compiled_is_named() -> None:
    """A chip whose kernels this build lacks: what to build with."""
    extension._chip_of.cache_clear()
    compiled = extension.compiled_targets
    extension.compiled_targets = lambda: ("dav-2002",)
    try:
        assert "VLLM_EXT_ASCEND_TARGETS=dav-3002" in extension._chip_of("Ascend310B4")[1]
    finally:
        extension.compiled_targets = compiled
        extension._chip_of.cache_clear()


def on_npu(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on the stub's NPU; its tables stay on the CPU, where the host code reads them."""
    return {
        name: value.to("npu") if isinstance(value, torch.Tensor) and name not in ("tasks", "launches") else value
        for name, value in call.items()
    }


def check_the_backend_says_what_it_serves() -> None:
    """On the stub's Ascend310P3 the backend is usable, takes FP16 and explains every refusal."""
    device = torch.device("npu", 0)
    assert npu.usable(device) == (True, ""), npu.usable(device)
    assert extension.chip_of(device) == ("310p3", "")
    assert "separate cores" in extension._chip_of("Ascend910B4")[1]
    assert "VLLM_EXT_ASCEND_CHIP" in extension._chip_of("Ascend950")[1]
    problem = Problem("gdn", 1, 0, 2, 4, 128, 128, 0, True, torch.bfloat16, torch.float16, device)
    served, reason = npu.supports(problem)
    assert not served
    assert "--dtype float16" in reason


def check_the_smoke_script_compares_and_reports() -> None:
    """`make ascend-check` on the stub: every prefill as the simulator computes it, and a row that says why experts
    fail, whose operators the stub lacks.
    """
    import ascend_smoke

    rows = [
        ascend_smoke.attempt(case, "prefill", ascend_smoke.prefill_row, torch.device("npu", 0))
        for case in ascend_smoke.PREFILLS
        if sum(case[1]) < 300
    ]
    assert [row.status for row in rows] == ["ok"] * 4, ascend_smoke.table(rows)
    assert all(row.equal_share == 1.0 and row.difference == 0.0 for row in rows), ascend_smoke.table(rows)
    failed = ascend_smoke.attempt(ascend_smoke.EXPERTS[0], "experts", ascend_smoke.experts_row, torch.device("npu", 0))
    assert failed.status == "FAILED"
    assert failed.reason
    text = ascend_smoke.table([*rows, failed])
    assert text.count("| ok |") == 4
    assert "experts: " in text


def check_no_triton_can_have_been_imported() -> None:
    """Everything above ran where importing Triton fails, as it does on a 310P."""
    with pytest.raises(ImportError):
        import triton  # noqa: F401


def check_a_failed_launch_is_an_error() -> None:
    """Not a result nobody computed: here the stand-in compiler's 310B kernels, which always fail.

    The last check: torch_npu's queue does not recover from an error. Its thread may report it one call late.
    """

    def run() -> None:
        OPS.ascend_gdn_prefill(**on_npu(arguments("gdn", chip="310b4")))
        for _ in range(100):
            torch.npu.synchronize()
            time.sleep(0.05)

    with pytest.raises(RuntimeError):
        run()
