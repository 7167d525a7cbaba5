"""What the experts' benchmark and tuner share: shapes, random experts, routings, timing in a CUDA graph, ceilings."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_ext.ops.moe.experts import PreparedExperts
from vllm_ext.ops.moe.triton import backend
from vllm_ext.quantization import QuantizedWeight
from vllm_ext.quantization.weight import group_count


@dataclass(frozen=True)
class Shape:
    """One MoE layer: sizes, routing, the groups its weights are quantised in, whether both GEMMs add biases."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    group_w13: int
    group_w2: int
    activation: str
    bias: bool = False

    def layer_bytes(self, experts_hit: int) -> int:
        """Bytes of the experts hit: codes, and a 16-bit scale and zero point a group."""
        first = 2 * self.inter * (self.hidden / 2 + 4 * group_count(self.hidden, self.group_w13))
        second = self.hidden * (self.inter / 2 + 4 * group_count(self.inter, self.group_w2))
        return int(experts_hit * (first + second))

    def flops(self, tokens: int) -> int:
        """Multiply-adds of the three projections, counted twice."""
        return 2 * tokens * self.top_k * 3 * self.hidden * self.inter


def _by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


SHAPES = _by_name(
    Shape("DiffusionGemma", 2816, 704, 128, 8, 128, 64, "gelu_tanh"),
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 128, 128, "silu"),
    Shape("Qwen3.5-35B-A3B", 2048, 512, 256, 8, 128, 128, "silu"),
)

# Others that the tuner and the benchmark know by name.
FAMILIES = _by_name(
    Shape("Mixtral-8x7B", 4096, 14336, 8, 2, 128, 64, "silu"),
    Shape("DeepSeek-V2-Lite", 2048, 1408, 64, 6, 128, 64, "silu"),
    Shape("OLMoE-1B-7B", 2048, 1024, 64, 8, 128, 64, "silu"),
    Shape("GLM-4.5-Air", 4096, 1408, 128, 8, 128, 64, "silu"),
    Shape("Qwen3-235B-A22B", 4096, 1536, 128, 8, 128, 64, "silu"),
    Shape("Qwen3-Next-80B-A3B", 2048, 512, 512, 10, 128, 64, "silu"),
    Shape("Kimi-Linear-48B-A3B", 2304, 1024, 256, 8, 128, 64, "silu"),
    Shape("gpt-oss-20b", 2880, 2880, 32, 4, 128, 64, "swigluoai", bias=True),
)


def shape_of(text: str) -> Shape:
    """A shape by its name, or any by its numbers: hidden,intermediate,experts,top_k of a rank, then, unless they are
    128 and 64, the groups of both weights. Raises what argparse reports."""
    known = SHAPES | FAMILIES
    if text in known:
        return known[text]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (4, 6) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(known)}, or hidden,intermediate,experts,top_k[,group_w13,group_w2]; "
            f"got {text!r}"
        )
    hidden, inter, experts, top_k, group_w13, group_w2 = sizes if len(sizes) == 6 else (*sizes, 128, 64)
    return Shape(text, hidden, inter, experts, top_k, group_w13, group_w2, "silu")


def shape_name(text: str) -> str:
    """`text`, when it says a shape."""
    return shape_of(text).name


def random_weight(
    experts: int, rows: int, columns: int, group: int, zero: str | None, generator: torch.Generator
) -> QuantizedWeight:
    """A random 4-bit weight of unit gain on the generator's device; scales and float zero points BF16."""
    device = generator.device
    packed = torch.randint(
        0, 256, (experts, rows, -(-columns // 2)), dtype=torch.uint8, device=device, generator=generator
    )
    shape = (experts, rows, group_count(columns, group))
    scale = (torch.rand(shape, device=device, generator=generator) + 0.5) * (0.22 / columns**0.5)
    points = None
    if zero == "float":
        points = (torch.rand(shape, device=device, generator=generator) * 3 + 6).to(torch.bfloat16)
    elif zero == "int":
        points = torch.randint(6, 10, shape, dtype=torch.uint8, device=device, generator=generator)
    return QuantizedWeight(packed, scale.to(torch.bfloat16), points, group, torch.Size((experts, rows, columns)))


def random_experts(
    shape: Shape, zero: str | None, device: torch.device, experts: int | None = None, seed: int = 0
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """(w13, w2) of a shape, optionally with fewer experts."""
    generator = torch.Generator(device).manual_seed(seed)
    count = experts or shape.experts
    return (
        random_weight(count, 2 * shape.inter, shape.hidden, shape.group_w13, zero, generator),
        random_weight(count, shape.hidden, shape.inter, shape.group_w2, zero, generator),
    )


def random_biases(shape: Shape, device: torch.device, experts: int | None = None) -> dict[str, torch.Tensor]:
    """The biases of a shape that has them, by the names `prepare_experts` gives them."""
    generator, count = torch.Generator(device).manual_seed(7), experts or shape.experts
    rows = {"w13_bias": 2 * shape.inter, "w2_bias": shape.hidden} if shape.bias else {}
    return {
        name: torch.randn(count, size, device=device, generator=generator).to(torch.bfloat16)
        for name, size in rows.items()
    }


def prepare_triton(w13: QuantizedWeight, w2: QuantizedWeight, biases: dict[str, torch.Tensor]) -> PreparedExperts:
    """The Triton backend's own `prepare`, on any device, for BF16."""
    device = w13.packed.device
    return backend.prepare(w13, w2, biases.get("w13_bias"), biases.get("w2_bias"), device, torch.bfloat16)


def routings(shape: Shape, tokens: int, count: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` random top-k routings: (FP32 weights, int32 ids), each [tokens, top_k], weights summing to 1."""
    made = []
    for seed in range(count):
        generator = torch.Generator(device).manual_seed(1000 + seed)
        logits = torch.randn(tokens, shape.experts, device=device, generator=generator)
        weights, ids = torch.softmax(logits, -1).topk(shape.top_k, dim=-1)
        made.append(((weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32).contiguous()))
    return made


def graph_milliseconds(calls: Sequence[Callable[[], object]], replays: int = 10) -> float:
    """Median time of one call, all calls captured into one CUDA graph and replayed."""
    # What the calls read may still be under way on another stream.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second of a kernel that reads one large tensor and writes another, both counted.

    Not `copy_`: captured in a graph it becomes a transfer by the copy engine, which reached 2.7 TB/s where kernels
    reach 4.3.
    """
    source = torch.empty(1 << 29, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (graph_milliseconds([lambda: torch.neg(source, out=target)]) / 1e3)


def matrix_rate(device: torch.device) -> float:
    """FLOP per second of a large BF16 matrix product on random data."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (graph_milliseconds([lambda: left @ right] * 4) / 1e3)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in FP64; NaN when anything is NaN."""
    expected = reference.double()
    return ((out.double() - expected).norm() / expected.norm()).item()
