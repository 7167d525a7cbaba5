"""What the launches for compute capability 9.0 give their kernels, which do not run here."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from vllm_ext.ops.linear_attention.sample import sample_operands, sample_state

PACKAGE = "vllm_ext.ops.linear_attention.triton"
HEADS, VALUE_HEADS = 2, 4


@pytest.mark.parametrize(("slots", "sequences"), [(1, 1), (9, 8), (5, 9), (136, 8), (2**20 + 5, 2**17), (2**22, 1)])
def test_the_grid_that_prepares_has_every_slot(slots: int, sequences: int) -> None:
    """Its second and third axes end at 65535, and places behind the last slot are few."""
    columns, each, layers = importlib.import_module(f"{PACKAGE}.launch_hopper").columns_of_slots(slots, sequences)
    assert max(columns, layers) < 2**16
    assert each <= layers <= each + 1
    assert slots <= columns * layers < slots + columns


class Kernel:
    """In a kernel's place: what it is launched with, by name."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.grid = names, tuple[int, ...]()
        self.given: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return lambda *operands, **constants: self.given.update(
            zip(self.names, operands, strict=False), count=len(operands), **constants
        )


def launched(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, Kernel]:
    launch = importlib.import_module(f"{PACKAGE}.launch_hopper")
    kernel = Kernel(getattr(launch, name).arg_names)
    monkeypatch.setattr(launch, name, kernel)
    return launch, kernel


def test_what_prepares_is_given_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, kernel = launched(monkeypatch, "prepare_gdn_hopper_kernel")
    x = sample_operands("gdn", 1, 330, HEADS, VALUE_HEADS, 64, 64)
    results = (torch.zeros(9, VALUE_HEADS, 64, 64).half(), torch.zeros(9, VALUE_HEADS, 64, 64).bfloat16(), None)
    q, k, g, beta = (x[name][0] for name in ("q", "k", "g", "beta"))
    counts, steps = (0.5, 4, 330, VALUE_HEADS, VALUE_HEADS // HEADS), tuple(range(10, 18))
    launch.prepare_gdn((36,), q, k, g, beta, None, results, counts, steps, {"K": 64, "NORMALISE": True}, 7)
    given = kernel.given
    assert kernel.names[given["count"]] == "K"
    assert kernel.grid == (VALUE_HEADS, 4, 3)
    wanted = {"scale": 0.5, "num_sequences": 4, "num_tokens": 330, "value_heads": VALUE_HEADS, "slots": 9, "each": 2}
    wanted |= {
        "first_slot": 7,
        "g_token": 12,
        "beta_token": 13,
        "g_head": 16,
        "beta_head": 17,
        "HEADS": 1,
        "maxnreg": 128,
        "launch_pdl": True,
    }
    assert {name: given[name] for name in wanted} == wanted
    # Many programs gain nothing by beginning before the launch before has ended.
    monkeypatch.setattr(launch, "_MOST_DEPENDENT", 35)
    launch.prepare_gdn((36,), q, k, g, beta, None, results, counts, steps, {"K": 64, "NORMALISE": True}, 7)
    assert kernel.given["launch_pdl"] is False


def test_initial_states_are_not_copied_for_the_copy_engine() -> None:
    """The recurrence asks for them while the launch before it runs, which a copy would be."""
    launch = importlib.import_module(f"{PACKAGE}.launch_hopper")
    states = sample_state(2, VALUE_HEADS, 128, 128)
    tiles = launch.state_tiles(states, True, 3)
    assert tiles.base.data_ptr() == states.data_ptr()
    assert (tiles.shape, tiles.block_shape) == ([2 * VALUE_HEADS * 128, 128], [64, 128])
    apart = torch.cat([torch.zeros(1), states.flatten()])[1:].view(states.shape)
    for given, v_first, count in (
        (states, False, 3),
        (states, True, 2),
        (states.bfloat16(), True, 3),
        (apart, True, 3),
    ):
        assert launch.state_tiles(given, v_first, count) is None


def test_two_heads_are_prepared_together_where_there_are_two() -> None:
    """Of three value heads of a key head the third would be prepared with another key head's first."""
    launch = importlib.import_module(f"{PACKAGE}.launch_hopper")
    assert [launch._together(heads, 10**6) for heads in (1, 2, 3, 4, 15)] == [1, 2, 1, 2, 1]
    assert launch._together(4, 64) == 1


@pytest.mark.parametrize("kind", ["steps of 520 bytes", "columns apart", "from 2 bytes on", "one row for all"])
def test_the_copy_engine_is_given_rows_that_it_takes(kind: str) -> None:
    """A contiguous view that begins between two 16-byte steps once met a bare assertion of Triton's."""
    descriptor = importlib.import_module(f"{PACKAGE}.hopper").descriptor
    x = torch.arange(64 * 260.0).bfloat16()
    views = {
        "steps of 520 bytes": x.view(64, 260)[:, 8:136],
        "columns apart": x[: 64 * 256].view(64, 256)[:, ::2],
        "from 2 bytes on": x[1:8193].view(64, 128),
        "one row for all": x[:128].expand(64, 128),
    }
    made = descriptor(views[kind], [64, 128])
    assert torch.equal(made.base, views[kind])
    assert made.strides == [128, 1]
    assert made.base.data_ptr() % 16 == 0


def test_the_copy_engine_reads_what_it_can_in_place() -> None:
    descriptor = importlib.import_module(f"{PACKAGE}.hopper").descriptor
    view = torch.zeros(64, 256, dtype=torch.bfloat16)[:, 8:136]
    assert descriptor(view, [64, 128]).base.data_ptr() == view.data_ptr()


@pytest.mark.parametrize(
    ("heads", "value_heads", "dims", "block", "segment_chunks", "normalise", "later"),
    [
        (16, 32, (128, 128), 128, None, False, True),
        (16, 16, (128, 256), 128, None, False, True),
        (8, 32, (128, 128), 128, None, False, False),
        (16, 32, (128, 128), 64, None, False, False),
        (16, 32, (64, 128), 128, None, False, False),
        (16, 32, (128, 64), 128, None, False, False),
        (16, 32, (128, 128), 128, 96, False, False),
        (16, 32, (128, 128), 128, None, True, False),
    ],
)
def test_the_recurrence_makes_the_scores_where_that_is_faster(
    heads: int,
    value_heads: int,
    dims: tuple[int, int],
    block: int,
    segment_chunks: int | None,
    normalise: bool,
    later: bool,
) -> None:
    """Programs of keys or of values of 64 have 64 columns whatever the planner says."""
    launch = importlib.import_module(f"{PACKAGE}.launch_hopper")
    sizes = importlib.import_module(f"{PACKAGE}.chunks").Sizes(4, 8192, True, heads, value_heads, *dims)
    mapping = importlib.import_module(f"{PACKAGE}.plan").Mapping("head", block, segment_chunks)
    assert launch.scores_later(mapping, sizes, normalise) == later


@pytest.mark.parametrize("later", [False, True])
def test_what_is_prepared_is_what_the_mapping_reads(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """Without a mapping there are scores, and so there are of KDA and of FP16, which other kernels prepare."""
    backend = importlib.import_module(f"{PACKAGE}.backend")
    call = importlib.import_module("vllm_ext.ops.linear_attention.problem").Call
    mapping = importlib.import_module(f"{PACKAGE}.plan").Mapping("head", 128, None)
    results: list[Any] = []
    asked: list[Any] = []
    launches = SimpleNamespace(
        scores_later=lambda *x: asked.append(x) or later,
        prepare_gdn=lambda *x: results.append(x[6]),
        prepare_kda=lambda *x: results.append(x[6]),
    )
    monkeypatch.setattr(backend, "hopper_launches", lambda *_: launches)
    monkeypatch.setattr(backend, "prepare_gdn_kernel", {(9 * VALUE_HEADS,): lambda *_, **__: None})
    sizes = importlib.import_module(f"{PACKAGE}.chunks").Sizes(4, 330, True, HEADS, VALUE_HEADS, 128, 128)
    bounds = torch.tensor([0, 70, 70, 200, 330], dtype=torch.int32)
    found = []
    for op, dtype, chosen in (
        ("gdn", "bf16", mapping),
        ("gdn", "bf16", None),
        ("gdn", "fp16", mapping),
        ("kda", "bf16", mapping),
    ):
        x = sample_operands(op, 1, 330, HEADS, VALUE_HEADS, 128, 128)
        if dtype == "fp16":
            x = {name: value.half() for name, value in x.items()}
        given = call(
            **x, scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
        )  # fmt: skip
        chunks = backend.prepare(given, op, sizes, bounds, None, chosen)
        found.append(chunks.scores is None)
    assert found == [later, False, False, False]
    assert asked == [(mapping, sizes, True)]
    assert [written[1] is None for written in results] == [later, False, False]


def test_without_scores_the_kernels_are_given_none_and_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, prepares = launched(monkeypatch, "prepare_gdn_hopper_kernel")
    _, recurs = launched(monkeypatch, "recurrence_hopper_kernel")
    chunks = importlib.import_module(f"{PACKAGE}.chunks")
    sizes = chunks.Sizes(1, 64, True, HEADS, VALUE_HEADS, 128, 128)
    x = {name: value[0] for name, value in sample_operands("gdn", 1, 64, HEADS, VALUE_HEADS, 128, 128).items()}
    inverse = torch.empty(2, VALUE_HEADS, 64, 64, dtype=torch.float16)
    factors = torch.empty(2, VALUE_HEADS, 4, 64)
    launch.prepare_gdn(
        (8,), x["q"], x["k"], x["g"], x["beta"], None, (inverse, None, factors), (0.25, 1, 64, VALUE_HEADS, 2),
        tuple(range(8)), {"K": 128}, 0,
    )  # fmt: skip
    prepared = chunks.Chunks(x["q"], x["k"], None, inverse, None, factors)
    call = SimpleNamespace(scale=0.25, state_v_first=True)
    launch.recur(
        call, False, sizes, 128, None, prepared, x["v"], None, None, x["v"][None], None, 1, 1, None, False
    )  # fmt: skip
    assert prepares.given["scores"] is None
    assert recurs.given["scores"] is None
    assert prepares.given["scale"] == recurs.given["scale"] == 0.25
    assert recurs.given["GROUPS"] == 2


def test_what_is_prepared_is_for_the_mapping_that_carries_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = importlib.import_module(f"{PACKAGE}.backend")
    mapping = importlib.import_module(f"{PACKAGE}.plan").Mapping("head", 128, None)
    given: list[Any] = []
    monkeypatch.setattr(backend, "prepare", lambda *x: given.append(x[5]))
    monkeypatch.setattr(backend, "recur", lambda *x: given.append(x[3]))
    call = importlib.import_module("vllm_ext.ops.linear_attention.problem").Call(
        **sample_operands("gdn", 1, 64, HEADS, VALUE_HEADS, 128, 128), scale=1.0, initial_state=None,
        output_final_state=False, cu_seqlens=None, use_qk_l2norm_in_kernel=False, state_v_first=True,
    )  # fmt: skip
    backend.run(call, "gdn", mapping)
    assert given == [mapping, mapping]
