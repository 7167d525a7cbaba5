"""A call's layout on the cores: the launch tables the binding takes, from the planner, and the padding of its gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch

from vllm_ext.ha_npu import make_plan
from vllm_ext.ha_npu.chips import load_chip
from vllm_ext.ops.linear_attention.ascend_sim.tasks import (
    CHUNK,
    PHASES,
    Blocks,
    Task,
    make_tasks,
    planned_launches,
)


@dataclass(frozen=True)
class Layout:
    """Of one batch of sequence lengths, whatever its values.

    tasks     int32 [n, 8] on the CPU: token_begin, token_count, sequence, head, column_begin, column_count, gate_begin
    launches  int32 [L, 2 + blocks + 1] on the CPU: phase, number of blocks, first task of each block and the end
    source    int64 [P]: the token behind each padded gate, `num_tokens` where there is none
    """

    tasks: torch.Tensor
    launches: torch.Tensor
    source: torch.Tensor
    num_tokens: int
    on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens, HV, ...] to FP32 [HV, P, ...], contiguous: each sequence begins at a whole chunk, zeros fill up."""
        values = values.float()
        if self.source.shape[0] == self.num_tokens:
            return values.transpose(0, 1).contiguous()
        source = self.on_device.get(values.device)
        if source is None:
            source = self.on_device[values.device] = self.source.to(values.device)
        padded = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
        return padded.index_select(0, source).transpose(0, 1).contiguous()


@lru_cache(maxsize=256)
def layout(op: str, chip: str, bounds: tuple[int, ...], num_value_heads: int, key_dim: int, value_dim: int) -> Layout:
    """The layout of sequences [bounds[i], bounds[i + 1]): the planner's three tiers where it knows the shape (K = V,
    some tokens), else whole heads and halves dealt to the cores in turn. Cached: all layers of a step share it.
    """
    cores = load_chip(chip).cores
    launches: list[tuple[str, Blocks]]
    if key_dim != value_dim or bounds[-1] == 0:
        launches = [("whole", make_tasks(list(bounds), num_value_heads, value_dim, cores))]
    else:
        lengths = [end - begin for begin, end in pairwise(bounds)]
        plan = make_plan(
            op, chip=chip, num_heads=num_value_heads, num_tokens=bounds[-1], head_dim=value_dim, seq_lens=lengths
        )
        launches = planned_launches(plan.mapping, list(bounds), value_dim)
    tasks, table = launch_tables(launches)
    return Layout(tasks, table, padding_source(bounds), bounds[-1])


def launch_tables(launches: list[tuple[str, Blocks]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of `Layout` from (phase, blocks of tasks) one after another."""
    width = max(len(blocks) for _, blocks in launches)
    rows: list[list[int]] = []
    table = torch.zeros(len(launches), 2 + width + 1, dtype=torch.int32)
    for index, (phase, blocks) in enumerate(launches):
        starts = [len(rows)]
        for block in blocks:
            rows += [_row(task) for task in block]
            starts.append(len(rows))
        table[index, : 2 + len(starts)] = torch.tensor([PHASES[phase], len(blocks), *starts], dtype=torch.int32)
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 8), table


def _row(task: Task) -> list[int]:
    return [
        task.token_begin,
        task.token_count,
        task.sequence,
        task.head,
        task.column_begin,
        task.column_count,
        task.gate_begin,
        0,
    ]


def padding_source(bounds: tuple[int, ...]) -> torch.Tensor:
    """`Layout.source` of these sequences; at least one chunk long."""
    none = bounds[-1]
    parts = []
    for begin, end in pairwise(bounds):
        parts += [torch.arange(begin, end), torch.full((-(end - begin) % CHUNK,), none)]
    source = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return source if source.numel() else torch.full((CHUNK,), none)
