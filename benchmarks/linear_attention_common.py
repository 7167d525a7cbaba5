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
# Tokens drawn; longer prompts repeat them, so that drawing 32768 tokens of 64 heads does not take minutes.
_DRAWN = 2048


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
        name: value.repeat(1, repeats, *[1] * (value.dim() - 2))[:, : row.tokens].contiguous()
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


def first_heads(row: Row, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The FP64 outputs and final states of the first key head's value heads, and how many these are."""
    group = row.value_heads // row.heads
    cut = {
        "q": call["q"][:, :, :1],
        "k": call["k"][:, :, :1],
        **{name: call[name][:, :, :group] for name in ("v", "g", "beta")},
        "initial_state": call["initial_state"][:, :group],
    }
    wide = {name: value.double() for name, value in cut.items()}
    o, state = FUNCTIONS[row.op](**{**call, **wide}, backend="cpu")
    assert state is not None
    return o, state, group


def errors(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor, int]) -> list[float]:
    """Relative errors of the outputs and of the final states, on the heads that were computed in FP64."""
    o, state, group = expected
    return [relative_error(result[0][:, :, :group], o), relative_error(result[1][:, :group], state)]
