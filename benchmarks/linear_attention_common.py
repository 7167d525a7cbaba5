"""What the linear-attention benchmark is made of: rows, operands, FP64 checks, floors."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
HEAD_DIM = 128
CHUNK = 64
# Tokens drawn; longer prompts repeat them, so that drawing 32768 tokens of 64 heads does not take minutes. Every turn
# begins at another one: were they the same, a kernel that took one sequence's chunks for another's would be right.
_DRAWN = 2048
_ROLLED = 137


@dataclass(frozen=True)
class Row:
    """One measurement: op "gdn" or "kda", key and value heads, and the lengths of the packed sequences."""

    op: str
    heads: int
    value_heads: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def shape(self) -> str:
        """1x2048, 2048x4 or 28672+4096."""
        if len(self.lengths) == 1:
            return f"1x{self.lengths[0]}"
        if len(set(self.lengths)) == 1:
            return f"{self.lengths[0]}x{len(self.lengths)}"
        return "+".join(map(str, self.lengths))

    @property
    def name(self) -> str:
        return f"{self.op} {self.heads}/{self.value_heads} {self.shape}"

    def flops(self) -> float:
        """Multiply-adds counted twice of the chunked form (HA-NPU paper, section 2), inversion left out."""
        chunks = sum(-(-length // CHUNK) for length in self.lengths)
        products = 2 * CHUNK * CHUNK * HEAD_DIM * 2  # K K^T and Q K^T, once a key head; decayed per value head in KDA
        owners = self.value_heads if self.op == "kda" else self.heads
        state = 3 * 2 * CHUNK * HEAD_DIM * HEAD_DIM  # K S, Q S, the update
        local = 2 * 2 * CHUNK * CHUNK * HEAD_DIM  # the inverse and the scores times V
        return float(chunks) * (products * owners + (state + local) * self.value_heads)

    def bytes(self) -> float:
        """Every operand read once, every result written once."""
        token = 2 * (2 * self.heads + 2 * self.value_heads) * HEAD_DIM + 2 * self.value_heads
        gate = 4 * self.value_heads * (HEAD_DIM if self.op == "kda" else 1)
        states = 2 * 4 * len(self.lengths) * self.value_heads * HEAD_DIM * HEAD_DIM
        return float(self.tokens) * (token + gate) + states


@functools.lru_cache(maxsize=8)
def _drawn(op: str, heads: int, value_heads: int, device: str) -> dict[str, torch.Tensor]:
    return sample_operands(op, 1, _DRAWN, heads, value_heads, HEAD_DIM, HEAD_DIM, device=device)


def make_call(row: Row, device: torch.device | str = "cuda") -> dict[str, Any]:
    """Keyword arguments of the operator for a row: BF16, normalised q and k, FP32 gates and states, V-first."""
    x = _drawn(row.op, row.heads, row.value_heads, str(device))
    repeats = -(-row.tokens // _DRAWN)
    operands = {
        name: torch.cat([value.roll(_ROLLED * turn, 1) for turn in range(repeats)], 1)[:, : row.tokens].contiguous()
        for name, value in x.items()
    }
    bounds = torch.tensor([0, *torch.tensor(row.lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    state = sample_state(len(row.lengths), row.value_heads, HEAD_DIM, HEAD_DIM).transpose(-1, -2).contiguous()
    return {
        **operands,
        "scale": HEAD_DIM**-0.5,
        "initial_state": state.to(device),
        "output_final_state": True,
        "cu_seqlens": bounds,
        "state_v_first": True,
    }


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected|| in FP64; NaN where anything is NaN."""
    wide = expected.double()
    return ((got.double() - wide).norm() / wide.norm()).item()


Expected = tuple[torch.Tensor, torch.Tensor, list[int]]


def end_heads(row: Row, call: dict[str, Any]) -> Expected:
    """The FP64 outputs and final states of the first and of the last key head's value heads, and which these are."""
    group = row.value_heads // row.heads
    key_heads = sorted({0, row.heads - 1})
    heads = [key_head * group + place for key_head in key_heads for place in range(group)]
    cut = {
        **{name: call[name][:, :, key_heads] for name in ("q", "k")},
        **{name: call[name][:, :, heads] for name in ("v", "g", "beta")},
        "initial_state": call["initial_state"][:, heads],
    }
    wide = {name: value.double() for name, value in cut.items()}
    o, state = FUNCTIONS[row.op](**{**call, **wide}, backend="cpu")
    assert state is not None
    return o, state, heads


def errors(result: tuple[torch.Tensor, torch.Tensor], expected: Expected) -> list[float]:
    """Relative errors of the outputs and of the final states, on the heads that were computed in FP64."""
    o, state, heads = expected
    return [relative_error(result[0][:, :, heads], o), relative_error(result[1][:, heads], state)]
