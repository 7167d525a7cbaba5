"""Which core does what when a layer's prefill runs: the planner's three tiers, on the device at hand.

The planner knows its chips by name; an accelerator that is none of them is the nearest described one with the number of
cores it reports, so one rule schedules ten matrix cores and 132 multiprocessors.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_ext.ha_npu.chips import Chip, chip_names, load_chip
from vllm_ext.ha_npu.mapping import CHUNKS, COLUMNS, WHOLE, HeadMapping, map_heads
from vllm_ext.ha_npu.strategies import STRATEGIES, chunk_head_chunk
from vllm_ext.ha_npu.work import chunk_work
from vllm_ext.ops.linear_attention.problem import Problem

CHUNK_SIZE = 64


@dataclass(frozen=True)
class DeviceChip:
    """What the planner plans for: a chip description, and whether its core count was read from the device."""

    chip: Chip
    name: str
    measured_cores: bool


def device_chip(device: torch.device) -> DeviceChip | None:
    """The chip behind a device; None where nothing is mapped (a CPU's kernel takes all heads together)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return gpu_chip(properties.name, properties.multi_processor_count)
    if device.type == "npu":
        npu: Any = getattr(torch, "npu", None)  # torch_npu's
        # As for the kernels (`ops.linear_attention.npu.extension.chip_of`), the user may say which chip it is.
        override = os.environ.get("VLLM_EXT_ASCEND_CHIP")
        return None if npu is None else npu_chip(override or str(npu.get_device_name(device)))
    return None


def gpu_chip(name: str, multiprocessors: int) -> DeviceChip:
    """The described GPU with this number of multiprocessors as its cores."""
    return DeviceChip(replace(load_chip("h200"), cores=multiprocessors), name, True)


def npu_chip(name: str) -> DeviceChip | None:
    """The described NPU whose name (310p3) is the end of the device's ("Ascend310P3"); None for another."""
    known = next((chip for chip in chip_names() if name.lower().endswith(chip)), None)
    return None if known is None else DeviceChip(load_chip(known), name, False)


@functools.cache
def head_mapping(
    op: str, chip_name: str, cores: int, num_heads: int, head_dim: int, sequence_lengths: tuple[int, ...]
) -> HeadMapping:
    """The mapping of one prefill call on a described chip with this many cores.

    num_heads: heads that own a state; head_dim: its key and value size, a multiple of 16. Raises ValueError when a head
    does not fit the chip.
    """
    chip = replace(load_chip(chip_name), cores=cores)
    flow = STRATEGIES["ha-npu"](op, CHUNK_SIZE, head_dim, chip)
    work = chunk_work(flow, chunk_head_chunk(op, CHUNK_SIZE, head_dim, chip), chip)
    return map_heads(num_heads, cores, [-(-length // CHUNK_SIZE) for length in sequence_lengths], work)


def describe_mapping(problem: Problem, num_tokens: int, backend: str) -> str:
    """For a log: how one prompt of `num_tokens` tokens is laid on the device's cores by the kernel of `backend`."""
    device = device_chip(problem.device)
    if device is None:
        return "all heads and sequences together, one vectorised step a chunk (no cores to schedule on this device)"
    planned = _planned(problem, num_tokens, device)
    if backend == "triton":
        planned = f"{_of_triton_kernel(problem, num_tokens, device.chip.cores)}; the planner's model: {planned}"
    return f"{device.name}, {device.chip.cores} cores: one prompt of {num_tokens} tokens: {planned}"


def _planned(problem: Problem, num_tokens: int, device: DeviceChip) -> str:
    if problem.key_dim != problem.value_dim or problem.key_dim % 16:
        size = f"{problem.key_dim} x {problem.value_dim}"
        return f"not mapped, as it maps square states of a multiple of 16, and this is {size}"
    chip, heads = device.chip, problem.num_value_heads
    try:
        return summarise(head_mapping(problem.op, chip.name, chip.cores, heads, problem.key_dim, (num_tokens,)))
    except ValueError as error:
        return f"not mapped ({error})"


def _of_triton_kernel(problem: Problem, num_tokens: int, cores: int) -> str:
    from vllm_ext.ops.linear_attention.triton import backend
    from vllm_ext.ops.linear_attention.triton.chunks import Sizes
    from vllm_ext.ops.linear_attention.triton.padding import head_sizes

    key_dim, value_dim = head_sizes(problem.key_dim, problem.value_dim)
    sizes = Sizes(1, num_tokens, True, problem.num_heads, problem.num_value_heads, key_dim, value_dim)
    mapping = backend.map_call(problem.op, sizes, cores, backend.hopper_launches(problem.device, sizes))
    pieces = value_dim // mapping.block_columns
    named = f"{problem.num_value_heads} heads"
    if (key_dim, value_dim) != (problem.key_dim, problem.value_dim):
        named += f" (padded to {key_dim} x {value_dim})"
    text = f"{named} whole" if pieces == 1 else f"{named} in {pieces} parts by columns of the state"
    return text if mapping.segment_chunks is None else f"{text}, in segments of {mapping.segment_chunks} chunks"


def summarise(mapping: HeadMapping) -> str:
    """ "10 heads whole, 5 by columns of the state (2 parts), 1 chunk by chunk; .." """
    parts = sorted(set(mapping.column_parts.values()))
    tiers = (
        (WHOLE, "whole"),
        (COLUMNS, f"by columns of the state ({', '.join(map(str, parts))} parts)"),
        (CHUNKS, "chunk by chunk"),
    )
    counts = ", ".join(f"{len(mapping.tiers[tier])} {how}" for tier, how in tiers if mapping.tiers[tier])
    gain = 1 - mapping.makespan / mapping.head_only_makespan if mapping.head_only_makespan else 0.0
    return (
        f"of the heads {counts}; {mapping.idle_share:.0%} of core time idle, {gain:.0%} sooner than whole heads alone"
    )
