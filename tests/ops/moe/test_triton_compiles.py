"""The Triton kernels compiled, without a GPU, for the capabilities they are made for: what interpreting cannot show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu_checks"))

import _every_reader
import _sanitizer_reports
import products_in_flight
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from vllm_ext.ops.moe import ExpertsMeta
from vllm_ext.ops.moe.triton import align, align_kernels, backend, choice, stream
from vllm_ext.ops.moe.triton.choice import choose
from vllm_ext.ops.moe.triton.config import GemmConfig
from vllm_ext.ops.moe.triton.dequant import code_form
from vllm_ext.ops.moe.triton.gemm import down_kernel

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

gluon_runtime = pytest.importorskip("triton.experimental.gluon._runtime")

TYPES = {
    torch.bfloat16: ("*bf16", tl.bfloat16),
    torch.float16: ("*fp16", tl.float16),
    torch.float32: ("*fp32", tl.float32),
}


def compile_down(capability: int, dtype: torch.dtype, gemm: GemmConfig, group: int = 128) -> Any:
    """down_kernel for Qwen3-30B-A3B's second GEMM."""
    pointer, factor_dtype = TYPES[dtype]
    asm = dtype != torch.float32
    scaling, width = backend._scaling(gemm, group, 32), stream.inner_sum_width(group, 32)
    form = code_form(dtype, asm, scaling)
    pointers = dict.fromkeys(("x", "out"), pointer) | {
        "words": "*i16",
        "factors": "*i32" if asm else "*i64",
        "group_sums": "*fp32",
        "sorted_slots": "*i32",
        "blocks": "*i32",
    }
    constants = {
        "bias": None,
        "SHAPE": (768, 2048, group, 32, width),
        "FACTOR_DTYPE": factor_dtype,
        "X_STRIDE": 768,
        "X_SUMS": 768 // width,
        "OUT_COLUMNS": 2048,
        "SCALING": scaling,
        "FORM": (form.offset, form.unit, form.activation_exponent, form.scale_exponent, form.plane_step),
        "ASM": asm,
        "BLOCK_TOKENS": gemm.block_tokens,
        "BLOCK_ROWS": gemm.block_rows,
        "STAGES": backend._stages(gemm, group, 32),
        "UNROLL": 1,
        "ROW_TILES": 1,
        "PDL": capability >= 90,
    }
    return compile_kernel(down_kernel, capability, pointers, constants, gemm.num_warps)


def compile_kernel(
    kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], num_warps: int
) -> Any:
    """A kernel with arguments of these kinds, all pointers at multiples of 16 bytes; the others are int32."""
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else pointers.get(n, "i32") for n in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items() if name in places},
        attrs={places[name]: [["tt.divisibility", 16]] for name in pointers if name in places},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", ["sum", "operand"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_each_capability(capability: int, scaling: str, dtype: torch.dtype) -> None:
    """Hopper must get wgmma with the weights in registers, Ampere mma; the codes are masked, not converted."""
    ptx = compile_down(capability, dtype, GemmConfig(32, 64, 4, 3, scaling)).asm["ptx"]
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx
    assert ("0x00F000F0" if dtype == torch.bfloat16 else "0x64006400") in ptx
    assert "cvt.rn.bf16.s" not in ptx
    assert not re.search(r"\batom\.|\bred\.", ptx)


@pytest.mark.parametrize("scaling", ["sum", "operand"])
def test_no_product_is_in_flight_when_its_operand_is_overwritten(scaling: str) -> None:
    """FP16 results at 4096 tokens changed from run to run: a wgmma was still reading registers of the tile before.

    Every loop that multiplies must wait for all of its products within the iteration.
    """
    ir = compile_down(90, torch.float16, GemmConfig(64, 128, 4, 3, scaling)).asm["ttgir"]
    loops = [body for body in re.findall(r"scf\.for.*?scf\.yield", ir, re.S) if "warp_group_dot " in body]
    assert loops
    for body in loops:
        waits = re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", body)
        assert waits
        assert waits[-1] == "0"


@pytest.mark.parametrize("capability", [80, 86, 120])
def test_what_is_launched_without_a_table_fits_every_gpu(capability: int) -> None:
    """Capabilities 8.6, 8.9 and 12.0 have 99 KiB of shared memory a program; tiles in FP32 are twice as large."""
    for dtype in TYPES:
        meta = ExpertsMeta("triton", 8, 2048, 768, 128, 128, True, "float", dtype)
        for gemm in {choose(meta, tokens, 2, 8, False, -1, False).down for tokens in (4, 64, 4096)}:
            assert compile_down(capability, dtype, gemm).metadata.shared <= 99 << 10, (dtype, gemm)


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_groups_that_planes_straddle_fit_every_gpu(capability: int) -> None:
    """A factor for every weight: four tiles of 128 rows under way, which the rule asks for on Hopper, were 248 KiB of
    227. Three were 160, and three or four of 64 rows 104 and 120: an A100's 163 held them, 99 did not."""
    some = next(gemm for gemm in choice._DOWN[3][1] if not gemm.programs)
    for gemm in (some, *{choice.portable(slots).down for slots in (1, 16, 100)}):
        for dtype in (torch.bfloat16, torch.float16):
            assert compile_down(capability, dtype, gemm, 24).metadata.shared <= 99 << 10, gemm
    assert compile_down(capability, torch.float32, choice._FP32.down, 24).metadata.shared <= 99 << 10


SUMMED = re.compile(r'"tt.reduce"\(%\w+\) <\{axis = 1.*?tensor<(\d+)x(\d+)xf32, (#\w+)>\)', re.S)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("columns", "sum_width"), [(256, 128), (576, 64), (1024, 128), (2816, 128)])
def test_a_tokens_sums_are_added_alike_for_any_number_of_slots(
    columns: int, sum_width: int, dtype: torch.dtype
) -> None:
    """How a sum's columns lie over threads is the order they are added in: with twice the warps for one token, rows of
    up to 1024 columns were added in another order between 513 and 1024 slots, batch-invariant or not."""
    pointers = dict.fromkeys(("x", "scaled"), TYPES[dtype][0]) | {"group_sums": "*fp32", "x_stride": "i32"}
    pointers |= dict.fromkeys(
        ("topk_ids", "expert_map", "sorted_slots", "blocks", "other_blocks", "flags", "counts"), "*i32"
    )
    sums = -(-columns // sum_width)
    constants = {
        "HAS_MAP": False,
        "BLOCK_TOKENS": 32,
        "OTHER_BLOCK_TOKENS": 32,
        "BINS": 8,
        "STEP": 256,
        "TOKEN": (columns, sum_width, sums, triton.next_power_of_2(sums), 0, 0, 32),
        "PDL": True,
    }
    launches = [(align_kernels.align_kernel, align.one_launch_shape(slots)) for slots in (1, 600, 1500, 8192)]
    launches.append((align_kernels.count_kernel, (0, align._TOKEN_WARPS, 1)))
    found = set()
    for kernel, (chunk, warps, tokens) in launches:
        more = {"CHUNK": chunk, "TOKENS": tokens} if chunk else {}
        ir = compile_kernel(kernel, 90, pointers, constants | more, warps).asm["ttgir"]
        ((rows, width, layout),) = SUMMED.findall(ir)
        assert int(rows) == tokens * triton.next_power_of_2(sums)
        (text,) = re.findall(rf"{layout} = #ttg\.blocked<\{{(.*?)\}}>", ir)
        across = re.findall(r"(\w+) = \[\d+, (\d+)\]", text)
        found.add((width, tuple(across[:3])))
    assert len(found) == 1, found


STREAMED = {
    "few": GemmConfig(8, 64, 4, 12, programs=4, split=True),
    "more rows": GemmConfig(8, 256, 8, 12, programs=2),
    "four warps": GemmConfig(16, 128, 4, 12, programs=3),
    "some": GemmConfig(32, 128, 4, 12, programs=2),
    "words apart": GemmConfig(8, 128, 4, 12, programs=4, apart=True),
    "wide, some": GemmConfig(64, 128, 4, 24, "operand", programs=2),
    "wide, many": GemmConfig(128, 256, 8, 24, "operand", programs=1),
}


def compile_streamed(gemm: GemmConfig, dtype: torch.dtype) -> Any:
    """The down projection of Qwen3-30B-A3B as `stream.launch` asks for it."""
    from triton.experimental.gluon import language as gl

    from vllm_ext.ops.moe.triton.stream_kernel import stream_kernel
    from vllm_ext.ops.moe.triton.wide_kernel import wide_kernel

    kernel = wide_kernel if stream.wide(gemm) else stream_kernel
    pointer, factor_dtype = TYPES[dtype]
    sizes = stream.Sizes(768, 2048, 128, 32, 32)
    form = code_form(dtype, True, gemm.scaling)
    words, factors = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(0, 32, 1)
    kinds = {
        "words": f"tensordesc<i16[{gemm.block_rows // 2}, 64],{words!r}>",
        "factors_tiles": f"tensordesc<i32[{gemm.block_rows}],{factors!r}>",
        "alpha": "fp32",
        "limit": "fp32",
        "x_stride": "i32",
    }
    kinds |= dict.fromkeys(("x", "out"), pointer) | dict.fromkeys(("group_sums", "out_sums", "partials"), "*fp32")
    kinds |= dict.fromkeys(("factors", "sorted_slots", "blocks", "flags"), "*i32")
    constants = {
        "GATE_UP": False,
        "TOP_K": 1,
        "ACTIVATION": "silu",
        "SPLIT": gemm.split,
        "SHAPE": stream.kernel_shape(gemm, sizes, dtype, factor_dtype, form, 24),
        "EPILOGUE": (),
        "PRODUCER": stream.producer(gemm),
    }
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in kinds.items() if name in places and (kind[0] == "*" or name == "x_stride")]
    source = gluon_runtime.GluonASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={places[name]: value for name, value in constants.items() if name in places},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": gemm.num_warps, "maxnreg": stream.registers(gemm)}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streaming_kernels_compile_and_fit(kind: str, dtype: torch.dtype) -> None:
    """Bulk copies into a ring that fits beside the other programs, products of registers with it, and no atomics."""
    sizes, form = stream.Sizes(768, 2048, 128, 32, 32), code_form(dtype, True, STREAMED[kind].scaling)
    # vLLM 0.23 sets a hook once it serves, for which Triton writes a kernel's constants as JSON: an engine that met a
    # kernel it had not compiled yet ended with "Object of type dtype is not JSON serializable".
    json.dumps(stream.kernel_shape(STREAMED[kind], sizes, dtype, TYPES[dtype][1], form, 24))
    compiled = compile_streamed(STREAMED[kind], dtype)
    ptx = compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert "wgmma.mma_async" in ptx
    assert not re.search(r"\batom\.|\bred\.", ptx)
    assert (compiled.metadata.shared + 1024) * STREAMED[kind].programs <= 228 << 10


@pytest.mark.parametrize("kind", STREAMED)
def test_products_run_beside_one_another(kind: str, tmp_path: Path) -> None:
    """Where registers are short, ptxas waits for every product before the next, and only says so when asked."""
    source = tmp_path / "kernel.ptx"
    source.write_text(compile_streamed(STREAMED[kind], torch.bfloat16).asm["ptx"], encoding="utf-8")
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.bin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "Used " in said
    assert "serialized" not in said


# A loop that a persistent kernel once had: R60 to R63 are expanded anew while the product before reads them.
OVERWRITTEN = """
.L_x_1:
        /*0000*/                   LOP3.LUT R60, R22, 0xf000f, RZ, 0xc0, !PT ;
        /*0010*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0020*/                   HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR8], R24, gsb0 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize("kind", STREAMED)
def test_no_operand_is_overwritten_while_it_is_read(kind: str, tmp_path: Path) -> None:
    """A product's operand lives until the product has ended, which no compiler checks; one that was renamed at a loop's
    end was copied, and its registers were filled anew: results that changed from run to run, one of them infinite."""
    code = products_in_flight.disassemble(compile_streamed(STREAMED[kind], torch.bfloat16).asm["cubin"], tmp_path)
    assert sum("HGMMA" in line for line in code) >= 8
    assert products_in_flight.overwritten(code) == []


def test_an_overwritten_operand_is_found() -> None:
    """With the wait before the expansion there is none."""
    lines = OVERWRITTEN.splitlines()
    assert len(products_in_flight.overwritten(lines)) == 1
    assert products_in_flight.overwritten([lines[0], lines[1], lines[3], lines[2], *lines[4:]]) == []


@pytest.mark.parametrize("kind", STREAMED)
def test_work_is_handed_to_warps_across_a_barrier_of_all(kind: str, tmp_path: Path) -> None:
    """Racecheck reports the bytes by which Triton tells warps what to run, written before that barrier and read after
    it. `moe_sanitizer.py` lets such a report pass where machine code is like this; a change of Triton's shows here."""
    code = products_in_flight.disassemble(compile_streamed(STREAMED[kind], torch.bfloat16).asm["cubin"], tmp_path)
    handed = _sanitizer_reports.hand_over(code)
    assert handed is not None
    assert len(handed.writes) == 2
    assert len(handed.reads) == 1
    assert len(handed.bytes_touched) == 4


@pytest.mark.parametrize("kind", [kind for kind in STREAMED if not stream.wide(STREAMED[kind])])
def test_one_thread_gives_a_stage_back_after_all_have_read_it(kind: str, tmp_path: Path) -> None:
    """One arrives for all, so the barrier before it must come after every read. Racecheck takes such a stage for one
    that others may still read; `moe_sanitizer.py` has every thread arrive, which must stay possible."""
    ptx = compile_streamed(STREAMED[kind], torch.bfloat16).asm["ptx"]
    arrival = "mbarrier.arrive.shared::cta.b64 _,"
    before = re.findall(rf"bar\.sync\s+0, \d+;((?:(?!bar\.sync)[\s\S])*?)@%p\d+ {re.escape(arrival)}", ptx)
    assert len(before) == ptx.count(arrival)
    assert before
    assert not any(re.search(r"ld\.shared|ldmatrix|wgmma", text) for text in before)
    source = tmp_path / "kernel.ptx"
    source.write_text(_every_reader.every_reader_arrives(ptx), encoding="utf-8")
    assert f", {32 * STREAMED[kind].num_warps};" in source.read_text(encoding="utf-8")
    command = [get_ptxas(90).path, "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.bin")]
    subprocess.run(command, check=True)
