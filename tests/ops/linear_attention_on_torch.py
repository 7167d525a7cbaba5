"""Linear attention's kernels for compute capability 9.0 on torch instead of a GPU, launched as tests call them."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import gluon_on_torch
import pytest
import torch

from vllm_ext.ops.linear_attention import chunk_gated_delta_rule, chunk_kda
from vllm_ext.ops.linear_attention.triton.slots import slot_count

PACKAGE = "vllm_ext.ops.linear_attention.triton"
FUNCTIONS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
MODULES = (
    "hopper",
    "inverse_hopper",
    "prepare_gdn_hopper",
    "prepare_kda_hopper",
    "recurrence_feed_hopper",
    "recurrence_hopper",
)
HEADS, VALUE_HEADS = 2, 4
# BF16 operands are rounded to 2^-9 before each of about six products.
TOLERANCE = 5e-3


def interpreted(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the kernels and of their launches, by name, and the machine that runs them."""
    try:
        # The launches too, or they would import kernels that are being interpreted.
        launches, *modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in ("launch_hopper", *MODULES)]
    except ImportError as missing:
        pytest.skip(f"Gluon of another version: {missing}")
    machine = gluon_on_torch.Machine()
    gluon_on_torch.interpret(monkeypatch, machine, *modules)
    return SimpleNamespace(machine=machine, launch_hopper=launches, **dict(zip(MODULES, modules, strict=True)))


def tiles(x: torch.Tensor, rows: int = 64, columns: int = 64) -> gluon_on_torch.Tiles:
    return gluon_on_torch.Tiles(x.view(-1, x.shape[-1]), (rows, columns))


def prepare(
    kernels: Any,
    op: str,
    x: dict[str, torch.Tensor],
    bounds: torch.Tensor,
    normalise: bool,
    together: int = VALUE_HEADS // HEADS,
    part: range | None = None,
    later: bool = False,
) -> dict[str, Any]:
    """What the recurrence reads of every chunk; NaN where nothing was written. later: it makes the scores itself."""
    tokens, dim, count = x["q"].shape[1], x["q"].shape[-1], bounds.numel() - 1
    slots = slot_count(tokens, count, True, 64) if part is None else len(part)
    first = 0 if part is None else part.start

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.full((slots, VALUE_HEADS, *shape), float("nan"), dtype=dtype)

    q, k, g, beta = (x[name].flatten(0, 1) for name in ("q", "k", "g", "beta"))
    w = {"inverse": empty(64, 64, dtype=torch.float16), "scores": None if later else empty(64, 64)}
    counts = (dim**-0.5, count, tokens, VALUE_HEADS, VALUE_HEADS // HEADS)
    common = {"K": dim, "NORMALISE": normalise, "PACKED": True}
    machine, programs = kernels.machine, slots * VALUE_HEADS
    if op == "gdn":
        w |= {"queries": q.flatten(1), "keys": k.flatten(1), "factors": empty(256, dtype=torch.float32)}
        columns, each, layers = kernels.launch_hopper.columns_of_slots(slots, count)
        machine.run(
            kernels.prepare_gdn_hopper.prepare_gdn_hopper_kernel, (VALUE_HEADS // together, columns, layers),
            tiles(w["queries"], 64, dim), tiles(w["keys"], 64, dim), g, beta, bounds, tiles(w["inverse"]),
            None if later else tiles(w["scores"]), w["factors"], *counts[:4], slots, each, first, g.stride(0),
            beta.stride(0), g.stride(1), beta.stride(1), **common, HEADS=together, HEADS_A_KEY=counts[4],
        )  # fmt: skip
        return w
    w |= {"keys": empty(64, dim), "queries": empty(64, dim), "tails": empty(64, dim)}
    w["factors"] = empty(dim, dtype=torch.float32)
    steps = [x.stride(axis) for axis in (0, 1) for x in (q, k, g, beta)]
    machine.warps = dim // 16
    machine.run(
        kernels.prepare_kda_hopper.prepare_kda_hopper_kernel, programs, q, k, g, beta, bounds, tiles(w["inverse"]),
        tiles(w["scores"]), w["keys"], w["queries"], w["tails"], w["factors"], *counts, first, *steps, **common,
    )  # fmt: skip
    machine.warps = 4
    machine.run(
        kernels.inverse_hopper.invert_hopper_kernel, programs // together, tiles(w["inverse"]), tiles(w["inverse"]),
        beta, bounds, count, tokens, VALUE_HEADS, first, beta.stride(0), beta.stride(1), PACKED=True, HEADS=together,
    )  # fmt: skip
    return w


def recur(
    kernels: Any,
    op: str,
    x: dict[str, torch.Tensor],
    bounds: torch.Tensor,
    w: dict[str, Any],
    state: torch.Tensor | None,
    groups: int,
    segment_chunks: int | None,
    part: range | None = None,
    results: tuple[torch.Tensor, torch.Tensor] | None = None,
    stages: int = 2,
    state_v_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, dim, count = x["q"].shape[1], x["q"].shape[-1], bounds.numel() - 1
    columns = x["v"].shape[-1]
    length = segment_chunks or -(-tokens // 64)
    slots = slot_count(tokens, count, True, 64 * length)
    v = x["v"].flatten(0, 1).flatten(1)
    o, final = results or (
        torch.full_like(v, float("nan")),
        torch.full((count, VALUE_HEADS, *((columns, dim) if state_v_first else (dim, columns))), float("nan")),
    )  # fmt: skip
    carries = torch.full((slots, VALUE_HEADS, columns + dim, dim), float("nan")) if segment_chunks else None
    keys = [tiles(w[name], 64, dim) for name in ("keys", "queries", "tails" if op == "kda" else "keys")]
    copied = state is not None and state_v_first and stages > 2 and segment_chunks is None and part is None
    states = tiles(state, 64, dim) if copied and state is not None else None

    def launch(transition: bool) -> None:
        kernels.machine.run(
            kernels.recurrence_hopper.recurrence_hopper_kernel,
            (columns + dim if transition else columns) // (64 * groups) * VALUE_HEADS * slots,
            keys[0], keys[1], tiles(v), keys[2], tiles(w["inverse"]),
            None if w["scores"] is None else tiles(w["scores"]), tiles(w["factors"], 1, w["factors"].shape[-1]),
            tiles(o), states, state, carries, final, o, bounds,
            count, tokens, VALUE_HEADS, VALUE_HEADS // HEADS, length, *((part.start, part.stop) if part else (0, 0)),
            dim**-0.5, K=dim, V=columns, GROUPS=groups, KDA=op == "kda", TRANSITION=transition,
            V_FIRST=state_v_first, PACKED=True, STAGES=stages, PART=part is not None,
        )  # fmt: skip

    if carries is not None:
        launch(True)
        for n, begin in enumerate(bounds[:-1].tolist()):
            chunks = -(-(int(bounds[n + 1]) - begin) // 64)
            first = begin // (64 * length) + n
            for place in range(first + 1, first - (-chunks // length) - 1):
                carries[place, :, :columns] += carries[place - 1, :, :columns] @ carries[place, :, columns:]
    launch(False)
    return o, final
