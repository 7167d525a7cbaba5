"""`vllm-ext bench negatives`: what was tried and does not pay, kept runnable: 2-bit experts, dense layers in 4 bits.

CUDA graphs on and off are arms of `bench steps`; the quality of 2-bit experts is a row of `quantizer_quality`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from vllm_ext.benchmarks.probes import check
from vllm_ext.benchmarks.registry import Benchmark

_SPREAD = (0x3, 0xC, 0x30, 0xC0)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options."""
    parser.add_argument("--tokens", type=int, default=256, help="rows (default: %(default)s)")


def expand_two_bits(codes: torch.Tensor) -> torch.Tensor:
    """uint8 of four 2-bit codes to the int16 word of four 4-bit codes that the kernels read."""
    wide = codes.to(torch.int32)
    spread = [(wide & mask) << (2 * place) for place, mask in enumerate(_SPREAD)]
    return (spread[0] | spread[1] | spread[2] | spread[3]).to(torch.int16)


def two_bit_experts(tokens: int, device: torch.device) -> dict[str, Any]:
    """Half the bytes in memory, expanded to the 4-bit kernel's words before each call, against 4 bits at rest."""
    from vllm_ext.benchmarks.moe_common import SHAPES, graph_milliseconds, random_experts, routings

    from vllm_ext.ops.moe import PreparedExperts, fused_moe_w4a16, prepare_experts

    shape = SHAPES["DiffusionGemma"]
    layers = [prepare_experts(*random_experts(shape, "float", device, seed=i), dtype=torch.bfloat16) for i in range(3)]
    names = [name for name in layers[0].tensors if name.endswith("_words")]
    packed = [
        {n: torch.randint(0, 256, p.tensors[n].shape, dtype=torch.uint8, device=device) for n in names} for p in layers
    ]
    expand = torch.compile(expand_two_bits, dynamic=True)
    x = torch.randn(tokens, shape.hidden, device=device).to(torch.bfloat16)
    given = routings(shape, tokens, 3, device)

    def four(index: int) -> torch.Tensor:
        return fused_moe_w4a16(x, layers[index], *given[index], activation=shape.activation)

    def two(index: int) -> torch.Tensor:
        tensors = {**layers[index].tensors, **{n: expand(packed[index][n]) for n in names}}
        experts = PreparedExperts(layers[index].meta, tensors)
        return fused_moe_w4a16(x, experts, *given[index], activation=shape.activation)

    times = [graph_milliseconds([lambda i=i, f=f: f(i) for i in range(3)]) for f in (four, two)]
    return {
        "tried": "experts in 2 bits (expanded before each call)",
        "instead_of": "4 bits",
        "ms": times[1],
        "instead_ms": times[0],
    }


def dense_four_bits(tokens: int, device: torch.device) -> dict[str, Any]:
    """DiffusionGemma's dense MLP as one 4-bit expert against three BF16 products."""
    from vllm_ext.benchmarks.moe_common import graph_milliseconds

    from vllm_ext.ops.fused import activation_and_mul
    from vllm_ext.ops.moe import fused_moe_w4a16, prepare_experts
    from vllm_ext.quantization import quantize_weight

    hidden, inner, count = 2816, 2112, 6
    x = torch.randn(tokens, hidden, device=device).to(torch.bfloat16)
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device=device)
    weights = torch.ones(tokens, 1, device=device)
    bf16 = [
        ((torch.randn(2 * inner, hidden, device=device) / hidden**0.5).bfloat16(),
         (torch.randn(hidden, inner, device=device) / inner**0.5).bfloat16())
        for _ in range(count)
    ]  # fmt: skip
    packed = [
        prepare_experts(quantize_weight(a[None], 128, method="minmax"), quantize_weight(b[None], 64, method="minmax"))
        for a, b in bf16
    ]

    def dense(index: int) -> torch.Tensor:
        gate_up, down = bf16[index]
        return F.linear(activation_and_mul(F.linear(x, gate_up), "gelu_tanh"), down)

    def four(index: int) -> torch.Tensor:
        return fused_moe_w4a16(x, packed[index], weights, ids, activation="gelu_tanh")

    times = [graph_milliseconds([lambda i=i, f=f: f(i) for i in range(count)]) for f in (dense, four)]
    return {"tried": "the dense MLP in 4 bits", "instead_of": "BF16 (cuBLAS)", "ms": times[1], "instead_ms": times[0]}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a try."""
    device = torch.device("cuda")
    rows = []
    for attempt in (two_bit_experts, dense_four_bits):
        row = {**attempt(args.tokens, device), "tokens": args.tokens}
        rows.append({**row, "ratio": row["instead_ms"] / row["ms"]})
        print(f"{rows[-1]['tried']}: {rows[-1]['ratio']:.2f}x", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One line a try."""
    lines = [f"{'tried':48} {'ms':>8} {'instead of':>16} {'ms':>8}  speed-up"]
    return "\n".join(
        [
            *lines,
            *(
                f"{r['tried']:48} {r['ms']:8.4f} {r['instead_of']:>16} {r['instead_ms']:8.4f} {r['ratio']:8.2f}x"
                for r in rows
            ),
        ]
    )


BENCHMARK = Benchmark(
    "negatives", "what does not pay, measured: 2-bit experts, dense layers in 4 bits", arguments, check, run, table
)
