"""The linear-attention kernels compiled, without a GPU, for the capabilities they are made for."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_ext.ops.linear_attention.triton.backend import GLUON_VERSIONS
from vllm_ext.ops.linear_attention.triton.prepare_gdn import prepare_gdn_kernel
from vllm_ext.ops.linear_attention.triton.prepare_kda import prepare_kda_kernel
from vllm_ext.ops.linear_attention.triton.recurrence import recurrence_kernel
from vllm_ext.ops.linear_attention.triton.segments import compose_kernel

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

COMMON = {"K": 128, "PACKED": True}
STATE = {"V": 128, "V_FIRST": True}
FP32 = ("factors", "decays", "g", "initial_state", "final_state", "carries")
NARROW = ("q", "k", "v", "beta", "inverse", "scores", "keys", "queries", "tails", "o")
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prepare_gdn": (prepare_gdn_kernel, {"NORMALISE": True}),
    "prepare_kda": (prepare_kda_kernel, {"NORMALISE": True}),
    "recurrence": (
        recurrence_kernel,
        {**STATE, "BV": 64, "KDA": False, "TRANSITION": False, "STAGES": 3, "tails": None, "carries": None},
    ),
    "transition": (recurrence_kernel, {**STATE, "BV": 64, "KDA": True, "TRANSITION": True, "STAGES": 3}),
    "compose": (compose_kernel, {"V": 128, "BV": 16}),
}


def compile_kernel(name: str, capability: int, narrow: str = "bf16") -> Any:
    kernel, constants = KERNELS[name]
    taken = {key: value for key, value in COMMON.items() if key in kernel.arg_names} | constants
    pointers = {"cu_seqlens": "*i32", **dict.fromkeys(FP32, "*fp32"), **dict.fromkeys(NARROW, f"*{narrow}")}
    pointers["inverse"] = "*fp16"
    signature = {
        arg: "constexpr" if arg in taken else pointers.get(arg, "fp32" if arg == "scale" else "i32")
        for arg in kernel.arg_names
    }
    places = {arg: (place,) for place, arg in enumerate(kernel.arg_names)}
    aligned = [arg for arg in kernel.arg_names if signature[arg].startswith("*") or re.match("[qkv]_", arg)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[arg]: value for arg, value in taken.items()},
        attrs={places[arg]: [["tt.divisibility", 16]] for arg in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", list(KERNELS))
def test_linear_attention_kernels_compile_without_atomics(name: str, capability: int) -> None:
    """Equal inputs must give equal bits, so nothing may be added up in the order in which programs happen to run."""
    ptx = compile_kernel(name, capability).asm["ptx"]
    assert "mma" in ptx
    assert not re.search(r"\batom\.|\bred\.", ptx)


def test_the_state_stays_in_registers_from_product_to_product() -> None:
    """The recurrence's time is the chain of its products: through shared memory each link costs a store and a barrier.

    Every tensor-core product of the loop takes its left operand from registers, and is waited for within the iteration
    (Triton 3.6 once let products run on while their operands were overwritten).
    """
    ir = compile_kernel("recurrence", 90).asm["ttgir"]
    loop = max(re.findall(r"scf\.for.*?scf\.yield", ir, re.S), key=lambda body: body.count("warp_group_dot "))
    dots = re.findall(r"ttng\.warp_group_dot [^\n]*: (\S+)", loop)
    assert len(dots) == 5
    assert all(operand.startswith("tensor<") for operand in dots)
    assert re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", loop)[-1] == "0"


GLUON = pytest.mark.skipif(not triton.__version__.startswith(GLUON_VERSIONS), reason="Gluon of another version")


def descriptor(dtype: str, *block: int, swizzle: bool = True) -> str:
    """A tile's type."""
    from triton.experimental.gluon import language as gl

    element = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    layout = layout if swizzle else gl.NVMMASharedLayout(0, 32, 2)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compile_for_hopper(kernel: Any, types: dict[str, str], taken: dict[str, Any], warps: int, **options: int) -> Any:
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    types = {"scale": "fp32", "cu_seqlens": "*i32", **types}
    aligned = [name for name in names if types.get(name, "")[:1] == "*" or re.match("[qkg]_", name)]
    source = GluonASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in taken else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in taken.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})


def compile_recurrence(
    groups: int, transition: bool, kda: bool = False, states: bool = True, scored: bool = False
) -> Any:
    """states: the copy engine brings initial ones, as it does for no transition; scored: it makes the scores itself."""
    from vllm_ext.ops.linear_attention.triton.launch_hopper import TRANSITION_REGISTERS, stages
    from vllm_ext.ops.linear_attention.triton.recurrence_hopper import recurrence_hopper_kernel

    keys, square = descriptor("bf16", 64, 128), descriptor("bf16", 64, 64)
    types = {"k": keys, "q": keys, "tails": keys, **dict.fromkeys(("v", "o", "scores"), square)}
    types["inverse"] = descriptor("fp16", 64, 64)
    types |= {"factors": descriptor("fp32", 1, 128 if kda else 256, swizzle=False), "o_pointer": "*bf16"}
    types |= dict.fromkeys(("initial_state", "carries", "final_state"), "*fp32")
    taken = {"K": 128, "V": 128, "GROUPS": groups, "KDA": kda, "TRANSITION": transition, "V_FIRST": True}
    taken |= {"PACKED": True, "STAGES": stages(128, groups, kda), "PART": False}
    if not transition:
        taken["carries"] = None
        del types["carries"]
    if states and not transition:
        types["states"] = descriptor("fp32", 64, 128)
    else:
        taken["states"] = None
    if scored:
        taken["scores"] = None
        del types["scores"]
    options = {"maxnreg": TRANSITION_REGISTERS} if transition and groups == 1 else {}
    return compile_for_hopper(recurrence_hopper_kernel, types, taken, 4, **options)


@GLUON
@pytest.mark.parametrize(
    ("groups", "transition", "scored"),
    [(1, False, False), (1, True, False), (2, False, False), (2, True, False), (2, False, True)],
)
def test_products_of_the_hopper_recurrence_stay_in_flight(transition: bool, groups: int, scored: bool) -> None:
    """The assembler once waited for each of the kernel's 44 products before the next, with a note nobody reads: an
    accumulator was touched while another product was in flight. A wait in every few products is what the code asks for;
    one more is the assembler's, and stood between a chunk's first product and what is to be done meanwhile.
    """
    compiled = compile_recurrence(groups, transition, scored=scored)
    products = len(re.findall("wgmma.mma_async", compiled.asm["ptx"]))
    assert products == groups * (16 if transition else 28) + 8 * scored
    sass = compiled.asm["sass"]
    assert len(re.findall("HGMMA", sass)) == products
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= (3 if transition else 5) * groups + scored
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= (12 if scored else 8)
    assert before_the_correction(compiled.asm["ptx"]) == groups * [0]
    # One fence a chunk waited for a group's products; what is left is of a sequence's end, of barriers, of who fetches
    # and who makes scores.
    assert len(re.findall("fence.proxy.async", compiled.asm["ptx"])) == groups + (1 if transition else 2) + scored


@GLUON
@pytest.mark.parametrize(
    ("groups", "transition", "kda", "states", "scored"),
    [
        (1, False, False, True, False),
        (1, False, False, False, False),
        (1, True, False, False, False),
        (2, False, False, True, False),
        (2, False, False, False, False),
        (2, False, False, True, True),
        (2, False, False, False, True),
        (2, True, False, False, False),
        (1, False, True, True, False),
        (1, True, True, False, False),
        (2, False, True, False, False),
    ],
)
def test_barriers_of_the_hopper_recurrence_lie_in_no_tile(
    groups: int, transition: bool, kda: bool, states: bool, scored: bool
) -> None:
    """The compiler takes a barrier's memory for free where no group of warps asks for it: two once lay, initialised, in
    the first keys.
    """
    from vllm_ext.ops.linear_attention.triton.launch_hopper import stages

    ptx = compile_recurrence(groups, transition, kda, states, scored).asm["ptx"]
    offsets = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    places = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    at = [int(offsets.get(register, 0)) for register in places]
    squares = (1 if transition else 2) * 8192 + groups * 8192
    stage = (1 if transition else 2) * 16384 + (16384 + 512 if kda else 1024) + squares
    assert len(at) >= (3 if scored else 2) * stages(128, groups, kda)
    assert len(set(at)) == len(at)
    assert min(at) >= stages(128, groups, kda) * stage


@GLUON
def test_scores_are_whole_before_the_recurrence_takes_them() -> None:
    """Of the four warps that make them one thread arrives: its own writes alone would be there, and not for the tensor
    cores. On torch, where a group of warps is a thread, none of this shows.
    """
    ptx = compile_recurrence(2, False, scored=True).asm["ptx"]
    steps = "wgmma.mma_async|wgmma.wait_group.sync.aligned 0|stmatrix[^ ]*|fence.proxy.async|bar.sync|mbarrier.arrive"
    found = re.findall(steps, ptx)
    # The groups that carry the state store outputs transposed.
    stores = [at for at, step in enumerate(found) if step.startswith("stmatrix") and ".trans" not in step]
    assert stores == list(range(stores[0], stores[0] + 4))
    assert found[stores[0] - 2 : stores[0]] == ["wgmma.mma_async", "wgmma.wait_group.sync.aligned 0"]
    assert found[stores[-1] + 1 :][:3] == ["fence.proxy.async", "bar.sync", "mbarrier.arrive"]


def before_the_correction(ptx: str) -> list[int]:
    """Barriers of a group of warps between its wait for a chunk's first product and the product that depends on it:
    Triton puts one there if an `mbarrier.arrive` came before, and every warp then waits for the others.
    """
    found = []
    for text in re.split(r"wgmma\.wait_group\.sync\.aligned 0;", ptx):
        head, product, _ = text.partition("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16")
        if product:
            found.append(head.count("bar.sync"))
    return found


@GLUON
@pytest.mark.parametrize(
    ("name", "heads"),
    [("gdn", 1), ("gdn", 2), ("without scores", 1), ("without scores", 2), ("kda", 1), ("inverse", 1), ("inverse", 2)],
)
def test_what_prepares_chunks_on_hopper_keeps_to_its_registers(name: str, heads: int) -> None:
    """KDA's preparation once spilled 2.4 KiB a thread and took eight times the recurrence's time for it."""
    from vllm_ext.ops.linear_attention.triton.inverse_hopper import invert_hopper_kernel
    from vllm_ext.ops.linear_attention.triton.launch_hopper import REGISTERS
    from vllm_ext.ops.linear_attention.triton.prepare_gdn_hopper import prepare_gdn_hopper_kernel
    from vllm_ext.ops.linear_attention.triton.prepare_kda_hopper import prepare_kda_hopper_kernel

    keys, square = descriptor("bf16", 64, 128), descriptor("bf16", 64, 64)
    common = {"g": "*fp32", "beta": "*bf16", "factors": "*fp32", "decays": "*fp32"}
    half = descriptor("fp16", 64, 64)
    pointers = {**dict.fromkeys(NARROW, "*bf16"), "coupling": half, "scores": square}
    tiles = {"q": keys, "k": keys, "inverse": half, "scores": square, "coupling": half}
    kernel, types, warps = {
        "gdn": (prepare_gdn_hopper_kernel, {**tiles, **common}, 4),
        "without scores": (prepare_gdn_hopper_kernel, {**tiles, **common}, 4),
        "kda": (prepare_kda_hopper_kernel, {**pointers, **common}, 8),
        "inverse": (invert_hopper_kernel, {**tiles, **common}, 4),
    }[name]
    taken = {"K": 128, "NORMALISE": False, "PACKED": True, "HEADS": heads, "HEADS_A_KEY": 4}
    if name == "without scores":
        taken["scores"], name = None, "gdn"
        del types["scores"]
    taken = {key: value for key, value in taken.items() if key in kernel.arg_names}
    compiled = compile_for_hopper(kernel, types, taken, warps, maxnreg=REGISTERS[name, heads])
    sass = compiled.asm["sass"]
    assert "HGMMA" in sass
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= 60
    assert not re.search(r"\batom\.|\bred\.", compiled.asm["ptx"])
