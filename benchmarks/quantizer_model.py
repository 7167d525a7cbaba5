"""A small mixture-of-experts language model trained on the spot: weights never quantised before, to judge quantisers.

Byte-level, decoder-only, rotary attention, SwiGLU experts with top-2 softmax routing. The text is Python source and
documentation from the installed packages, split by file, so that held-out text is code the model has not seen.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
SUFFIXES = (".py", ".md", ".rst", ".txt", ".pyi")
HELD_OUT_EVERY = 20
FILE_LIMIT = 200_000


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its training. `seconds` bounds the training time; `steps` the number of steps."""

    hidden: int
    layers: int
    heads: int
    experts: int
    inter: int
    sequence: int
    batch: int
    steps: int
    seconds: float
    text_bytes: int
    top_k: int = 2
    learning_rate: float = 1e-3


FULL = Size(512, 6, 8, 16, 384, 512, 48, 4000, 140.0, 120_000_000)
SMOKE = Size(128, 2, 2, 4, 128, 64, 4, 4, 20.0, 400_000)
# What two CPU cores can train in a quarter of an hour.
CPU = Size(256, 4, 4, 8, 192, 128, 16, 2500, 1500.0, 20_000_000)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, T, H] to [B, T, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of [B, heads, T, D], halves paired."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Experts(nn.Module):
    """Routed SwiGLU experts: `gate_up` [E, 2I, H], `down` [E, H, I]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.top_k = size.top_k
        self.router = nn.Linear(size.hidden, size.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(size.experts, 2 * size.inter, size.hidden) * size.hidden**-0.5)
        self.down = nn.Parameter(
            torch.randn(size.experts, size.hidden, size.inter) * (size.inter * 2 * size.layers) ** -0.5
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] to [B, T, H]; leaves the load-balancing loss in `balance`."""
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        count = probabilities.shape[-1]
        share = functional.one_hot(chosen, count).float().mean((0, 1))
        self.balance = count * (share * probabilities.mean(0)).sum()
        out = torch.zeros_like(flat)
        for expert in range(count):
            rows, place = torch.where(chosen == expert)
            gate, up = functional.linear(flat[rows], self.gate_up[expert].to(flat.dtype)).chunk(2, -1)
            value = functional.linear(functional.silu(gate) * up, self.down[expert].to(flat.dtype))
            out = out.index_add(0, rows, (value * weights[rows, place, None]).to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    """Attention and experts, each behind an RMSNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.attention, self.experts = Attention(size), Experts(size)

    def forward(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, T, H] to [B, T, H]."""
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.experts(self.norm2(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, 256] of ids [B, T]."""
        half = self.size.hidden // self.size.heads // 2
        frequency = 10_000.0 ** (-torch.arange(half, device=ids.device) / half)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequency
        rotary = (angle.cos(), angle.sin())
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))

    def expert_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """("w13" or "w2", parameter [E, N, K]) of every layer."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield "w13", block.experts.gate_up
            yield "w2", block.experts.down

    def balance(self) -> torch.Tensor:
        """Mean load-balancing loss of the last forward pass."""
        return torch.stack([block.experts.balance for block in self.blocks if isinstance(block, Block)]).mean()


def corpus(limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes (uint8) of the installed packages' sources, in an order that does not depend on the
    file system; about `limit` bytes in all."""
    roots = {Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib", "platlib")}
    roots |= {Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    found: dict[str, Path] = {}
    for root in sorted(roots):
        if root.is_dir():
            for path in root.rglob("*"):
                if path.suffix in SUFFIXES and path.is_file():
                    found.setdefault(hashlib.sha256(str(path.relative_to(root)).encode()).hexdigest(), path)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    seen: set[bytes] = set()
    total = 0
    for digest in sorted(found):
        text = found[digest].read_bytes()[:FILE_LIMIT]
        content = hashlib.sha256(text).digest()
        if content in seen or not text:
            continue
        seen.add(content)
        parts[int(digest[:8], 16) % HELD_OUT_EVERY == 0].append(text)
        total += len(text)
        if total >= limit:
            break
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def train(size: Size, text: torch.Tensor, device: str) -> tuple[LanguageModel, list[float]]:
    """A model trained on `text`; returns it in FP32 with the loss (nats a byte) every 50 steps."""
    torch.manual_seed(0)
    model = LanguageModel(size).to(device)
    cuda = device.startswith("cuda")
    optimiser = torch.optim.AdamW(model.parameters(), size.learning_rate, (0.9, 0.95), weight_decay=0.1, fused=cuda)
    generator = torch.Generator().manual_seed(0)
    text = text.to(device)
    losses: list[float] = []
    start = time.monotonic()
    for step in range(size.steps):
        # The schedule follows whichever of steps and seconds runs out first.
        progress = max(step / size.steps, (time.monotonic() - start) / size.seconds)
        if progress >= 1:
            break
        rate = min(1.0, (step + 1) / 100) * (1 - progress * 0.97)
        for group in optimiser.param_groups:
            group["lr"] = size.learning_rate * rate
        begin = torch.randint(0, len(text) - size.sequence - 1, (size.batch,), generator=generator).to(device)
        rows = text[begin[:, None] + torch.arange(size.sequence + 1, device=device)].long()
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=cuda):
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        torch.autograd.backward(loss + 0.01 * model.balance())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0:
            losses.append(float(loss.detach()))
            print(
                f"\rtrain: step {step} of at most {size.steps}, {progress:.0%}, loss {losses[-1]:.3f} nats a byte",
                end="", file=sys.stderr, flush=True,
            )  # fmt: skip
    print(file=sys.stderr)
    return model.eval(), losses
