"""How the Triton backend chooses its launch configuration, and when it says that it cannot run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from moe_samples import make_layer

from vllm_ext.ops.moe import ExpertsMeta, backend_status, dispatch
from vllm_ext.ops.moe.dispatch import select_backend
from vllm_ext.ops.moe.experts import CallOptions
from vllm_ext.ops.moe.triton import backend, choice, config, launch_sizes, pdl, stream
from vllm_ext.ops.moe.triton.layout import plane_width, to_kernel_order

META = ExpertsMeta("triton", 128, 2816, 704, 128, 64, True, "float", torch.bfloat16)
TABLES = sorted((Path(config.__file__).parent / "configs").glob("*.json"))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if device 0 were the GPU the shipped table was made on."""
    monkeypatch.setattr(choice, "_device_name", lambda index: "NVIDIA H200")
    choice.choose.cache_clear()


def test_shipped_tables_hold_configurations_that_can_be_launched() -> None:
    """A table's rows are read at every call: a bad one would fail in the middle of serving."""
    assert TABLES
    for path in TABLES:
        for rows in json.loads(path.read_text(encoding="utf-8"))["shapes"].values():
            assert rows
            for key, entry in rows.items():
                assert float(key) > 0
                launch = config.LaunchConfig.from_json(entry)
                assert config.LaunchConfig.from_json(launch.to_json()) == launch
                for gemm in (launch.gate_up, launch.down):
                    assert gemm.block_tokens in (8, 16, 32, 64, 128)
                    assert gemm.block_rows % 64 == 0
                    assert gemm.scaling in ("sum", "operand")
                    assert gemm.unroll >= 1
                    assert gemm.row_tiles >= 1


def assert_accepted(launch: config.LaunchConfig, meta: ExpertsMeta) -> None:
    """A plain call on capability 9.0 is launched with `launch` (wide halves as tiles of 64 columns need them), and its
    programs fit on a multiprocessor together."""
    for gemm, sizes in zip((launch.gate_up, launch.down), choice.sizes_of(meta), strict=True):
        assert gemm.block_tokens in (8, 16, 32, 64, 128)
        if not gemm.programs:
            assert gemm.block_tokens >= 16
            continue
        served = backend._for_tiles_of(gemm, 4 * sizes.plane)
        assert backend._or_tiles(gemm, True, sizes) == served
        threads = (served.num_warps + 4) * 32 * served.programs
        assert threads * stream.registers(served) <= 1 << 16
        assert threads <= 2048
        assert stream.registers(served) >= 64
        assert stream.stages(served, sizes) >= 3


def test_every_row_of_a_table_is_one_that_the_kernels_accept() -> None:
    """A row that `served` replaces is a time that was never measured. Rows are for the groups that their key names, or
    those the quantiser takes by default."""
    for path in TABLES:
        for key, rows in json.loads(path.read_text(encoding="utf-8"))["shapes"].items():
            sizes = re.fullmatch(r"H(\d+)_I(\d+)_E(\d+)_K(\d+)(?:_G(\d+)_(\d+))?", key)
            assert sizes, key
            hidden, inter, experts, _, group_w13, group_w2 = (int(n) if n else 0 for n in sizes.groups())
            groups = (group_w13 or 128, group_w2 or 64)
            meta = ExpertsMeta("triton", experts, hidden, inter, *groups, True, "float", torch.bfloat16)
            for entry in rows.values():
                assert_accepted(config.LaunchConfig.from_json(entry), meta)


@pytest.mark.parametrize(("tokens", "half"), [(16, 8), (128, 64)])
def test_a_batch_half_of_padding_is_launched_as_without_it(tokens: int, half: int) -> None:
    """No routed row's bits may depend on rows of -1 beside it (case C08): both sizes lie in one row of every table."""
    for path in TABLES:
        for shape, rows in json.loads(path.read_text(encoding="utf-8"))["shapes"].items():
            experts, top_k = (int(re.search(rf"_{letter}(\d+)", shape)[1]) for letter in "EK")
            assert choice.row(rows, tokens * top_k / experts) == choice.row(rows, half * top_k / experts)


def test_streaming_kernels_are_left_where_they_cannot_serve() -> None:
    """A table is made without biases and on one GPU; the same row must run with biases and on another device."""
    layer = make_layer(experts=2, hidden=256, intermediate=128, groups=(128, 128))
    experts = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), torch.bfloat16)
    streamed = config.GemmConfig(8, 64, 4, 12, programs=4)
    asked = config.LaunchConfig(streamed, streamed)
    got = backend.served(asked, experts, layer.x, CallOptions())
    assert not got.gate_up.programs
    assert not got.down.programs
    assert got.gate_up.block_tokens == got.down.block_tokens == 16
    many = config.GemmConfig(64, 128, 8, 12, programs=2)
    got = backend.served(config.LaunchConfig(many, many), experts, layer.x, CallOptions())
    assert not got.gate_up.programs
    assert got.gate_up.scaling == got.down.scaling == "operand"
    tiles = choice.portable(4)
    assert backend.served(tiles, experts, layer.x, CallOptions()) == tiles


@pytest.mark.parametrize(
    "what", ["served", "no gate", "bias of w13", "bias of w2", "weight on input", "FP32", "address", "stride", "device"]
)
def test_streaming_kernels_serve_only_what_they_were_made_for(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """They know no biases, no experts without a gate, no weights on the input, and copy 16 bytes at a time."""
    monkeypatch.setattr(stream, "usable", lambda device: what != "device")
    layer = make_layer(experts=2, hidden=256, intermediate=128, groups=(128, 128), gated=what != "no gate", bias=True)
    biases = [layer.biases[f"{name}_bias"] if what == f"bias of {name}" else None for name in ("w13", "w2")]
    experts = backend.prepare(layer.w13, layer.w2, *biases, torch.device("cpu"), torch.bfloat16)
    wide = torch.zeros(4, 264 if what == "stride" else 272, dtype=torch.float32 if what == "FP32" else torch.bfloat16)
    x = wide[:, 1:257] if what == "address" else wide[:, :256]
    streamed = config.GemmConfig(8, 64, 4, 12, programs=4)
    options = CallOptions(apply_router_weight_on_input=what == "weight on input")
    got = backend.served(config.LaunchConfig(streamed, streamed), experts, x, options)
    assert [bool(gemm.programs) for gemm in (got.gate_up, got.down)] == [what == "served"] * 2


@pytest.mark.parametrize("groups", [(64, 64), (128, 128), (32, 32)])
def test_wide_kernels_serve_groups_of_64_with_two_halves(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[int, int]
) -> None:
    """A table's row was made with groups of 128, where one half of 128 rows may be the fastest; tiles of 64 columns
    need two. Groups of 32 have no tile that lies within them."""
    monkeypatch.setattr(stream, "usable", lambda device: True)
    layer = make_layer(experts=2, hidden=256, intermediate=128, groups=groups)
    experts = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), torch.bfloat16)
    half = config.GemmConfig(128, 128, 8, 24, "operand", programs=1)
    got = backend.served(config.LaunchConfig(half, half), experts, layer.x.bfloat16(), CallOptions())
    expected = {64: 256, 128: 128, 32: 128}[groups[0]]
    assert got.gate_up.block_rows == got.down.block_rows == expected
    assert bool(got.gate_up.programs) == bool(got.down.programs) == (groups[0] != 32)
    assert got.gate_up.block_tokens == (64 if groups[0] == 32 else 128)


@pytest.mark.parametrize(("tokens", "rows", "warps", "programs"), [(8, 64, 4, 4), (16, 128, 8, 2), (32, 128, 8, 2)])
def test_streaming_programs_fit_on_a_multiprocessor(tokens: int, rows: int, warps: int, programs: int) -> None:
    """Registers and shared memory of `programs` programs; fewer would leave the persistent grid waiting for a place."""
    gemm = config.GemmConfig(tokens, rows, warps, 12, programs=programs)
    sizes = stream.Sizes(2816, 1408, 128, 32, 128)
    assert sizes.covered(gemm)
    assert not sizes.covered(config.GemmConfig(8, 256, 8, 12, programs=2))
    assert not stream.Sizes(704, 2816, 64, 32, 32).covered(gemm)
    assert gemm.programs * (gemm.num_warps + 4) * 32 * stream.registers(gemm) <= 1 << 16
    assert stream.registers(gemm) % 8 == 0  # they are given out by eight
    ring = stream.stages(gemm, sizes) * (gemm.block_rows * 68 + gemm.block_tokens * 260)
    assert 0 < ring * gemm.programs < 227 << 10


def test_what_programs_compute_together_has_one_length() -> None:
    """Programs that share a piece's K tiles add up whole blocks; the wide kernels' halves have 128 rows."""
    few = config.GemmConfig(16, 128, 4, 12, programs=3)
    assert stream.short_tokens(few) == 8
    assert stream.short_tokens(replace(few, split=True)) == 16
    wide = config.GemmConfig(32, 256, 8, 24, "operand", programs=2)
    assert stream.Sizes(768, 2048 + 128, 128, 32, 32).covered(wide)
    assert not stream.Sizes(768, 2048 + 64, 128, 32, 32).covered(wide)


@pytest.mark.parametrize(
    ("version", "capability", "usable"),
    [("3.6.0", (9, 0), True), ("3.10.1+git7", (9, 0), True), ("3.5.1", (9, 0), False), ("3.6.0", (10, 0), False),
     ("3.6.0", (8, 9), False)],
)  # fmt: skip
def test_persistent_kernels_want_hopper_and_a_triton_that_compiles_them(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int], usable: bool
) -> None:
    """Triton 3.5 imports them and fails when they are compiled, at the first call: the portable ones it compiles."""
    monkeypatch.setattr(stream.triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    stream.usable.cache_clear()
    assert stream.usable(torch.device("cuda", 0)) == usable
    assert not stream.usable(torch.device("cpu"))
    stream.usable.cache_clear()


@pytest.mark.parametrize(("columns", "group"), [(2048, 128), (768, 64), (2816, 64), (704, 64), (768, 192), (512, 256)])
def test_tiles_lie_within_groups_where_a_plane_width_allows_it(columns: int, group: int) -> None:
    """Groups of 64, the default of the second GEMM, lay in tiles of 128 columns, which the persistent kernels refuse:
    Qwen3-30B's engine ran it in 20 us instead of 15 at batch 1, and in 73 instead of 58 at 64."""
    plane = plane_width(columns, group)
    assert group % (4 * plane) == 0
    assert columns % (4 * plane) == 0
    assert stream.Sizes(columns, 2048, group, plane, 32).covered(config.GemmConfig(8, 64, 4, 12, programs=4))


@pytest.mark.parametrize(("columns", "group"), [(704, 128), (192, 128), (2880, 128), (320, 256)])
def test_a_shorter_last_group_is_left_to_tiles(columns: int, group: int) -> None:
    """Tiles of 64 columns cover 704, but 704 is five groups of 128 and a half, and the producers count five an expert:
    from the second expert on they took other groups' scales, and down's error was 0.49 without a word."""
    plane = plane_width(columns, group)
    sizes = stream.Sizes(columns, 2048, group, plane, 32)
    for gemm in (choice.streamed(8, 64, 4, 4), choice.wide(128, 256, 8, 1)):
        assert not sizes.covered(gemm)
        assert replace(sizes, columns=4 * group).covered(gemm)


@pytest.mark.parametrize(("group", "plane"), [(32, 32), (16, 16), (96, 32), (24, 32), (8, 32)])
def test_narrower_groups_are_straddled_by_tiles_but_not_by_planes(group: int, plane: int) -> None:
    assert plane_width(512, group) == plane


def test_scales_wider_than_the_activations_are_narrowed() -> None:
    """The persistent kernels read a scale and a zero point as one word of 32 bits."""
    layer = make_layer(experts=2, hidden=64, intermediate=32, groups=(32, 32), dtype=torch.float16)
    weight = replace(layer.w13, scale=layer.w13.scale.float(), zero_point=layer.w13.zero_point.float())
    for dtype, stored in ((torch.float16, torch.float16), (torch.float32, torch.float32)):
        assert to_kernel_order(weight, True, dtype).factors.dtype == stored
    assert to_kernel_order(layer.w13, True, torch.float32).factors.dtype == torch.float16


def test_a_tuned_shape_takes_the_row_below_its_slots_an_expert(h200: None) -> None:
    rows = config.load_table("NVIDIA H200")[config.shape_key(META, 128, 8)]
    keys = sorted(rows, key=float)
    for key in keys:
        tokens = round(float(key) * META.num_experts / 8)
        assert choice.choose(META, tokens, 8, 128, False, 0, True) == config.LaunchConfig.from_json(rows[key])
    found = [choice.row({"2": None, "0.5": None, "16": None}, slots) for slots in (0.1, 2, 15.9, 15.99, 16)]
    assert found == ["0.5", "2", "2", "16", "16"]
    above = config.LaunchConfig.from_json(rows[keys[-1]])
    assert choice.choose(META, 131072, 8, 128, False, 0, True) == above


def test_a_rank_that_holds_some_experts_takes_the_rows_of_all(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are spread over all ranks' experts: counted over one rank's they were twice as many as there are, and a
    table that holds the model knew nothing of its halves."""
    whole, half = META, replace(META, num_experts=64)
    for tokens in (1, 32, 64, 512, 1024, 2048):
        chosen = choice.choose(half, tokens, 8, 128, False, 0, True)
        assert chosen == choice.choose(whole, tokens, 8, 128, False, 0, True)
    asked: list[int] = []

    def choose(meta: Any, tokens: int, top_k: int, num_global: int, *others: Any) -> config.LaunchConfig:
        asked.append(num_global)
        return choice.portable(1)

    monkeypatch.setattr(backend, "choose", choose)
    monkeypatch.setattr(backend, "_plain", lambda *call: False)
    monkeypatch.setattr(backend, "_launch", lambda *call: None)
    experts, ids = SimpleNamespace(meta=half), torch.zeros(4, 8, dtype=torch.int32)
    for expert_map in (torch.zeros(128, dtype=torch.int32), None):
        backend.apply(torch.zeros(4, 2816), experts, None, ids, expert_map, CallOptions())
    assert asked == [128, 64]
    unknown = replace(META, intermediate_size=1408, num_experts=30)
    assert choice.choose(unknown, 64, 4, 60, False, 0, True) == choice.persistent(unknown, 64, 4, 60)
    assert choice.choose(unknown, 256, 4, 60, False, 0, False) == choice.portable(256 * 4 / 60)
    assert choice.persistent(unknown, 64, 4, 60) != choice.persistent(unknown, 64, 4, 30)


def test_rows_for_group_sizes_go_before_the_shapes(h200: None) -> None:
    """Groups of 64, the default when quantising at load: with the row for groups of 128 Qwen3's layer took 0.173 ms at
    256 tokens, where 0.126 are to be had."""
    by_128 = ExpertsMeta("triton", 128, 2048, 768, 128, 128, True, "float", torch.bfloat16)
    by_64 = replace(by_128, group_size_w2=64)
    chosen = choice.choose(by_64, 256, 8, 128, False, 0, True)
    assert chosen.down == config.GemmConfig(32, 256, 8, 24, "operand", programs=2)
    assert chosen.down != choice.choose(by_128, 256, 8, 128, False, 0, True).down
    for tokens in (1, 64, 4096):
        one, other = (choice.choose(meta, tokens, 8, 128, False, 0, True) for meta in (by_64, by_128))
        assert one == other


def test_small_kernels_ask_once_for_all_memory_as_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMMs were placed only when align's and combine's programs had left: 1 to 4 us a layer up to 64 tokens."""
    asked: list[tuple[int | None, int, int]] = []

    def attribute(function: Any, number: int, value: int) -> int:
        asked.append((function.value, number, value))
        return 0

    monkeypatch.setattr(pdl.ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=attribute))
    monkeypatch.setattr(pdl, "_carved", set())
    pdl.carve_shared_memory(None)  # the interpreter's launches return nothing
    for function in (0x1230, 0x1230, 0x4560):
        pdl.carve_shared_memory(SimpleNamespace(function=function))
    assert asked == [(0x1230, 9, 100), (0x4560, 9, 100)]


@pytest.mark.parametrize("plain", [False, True])
def test_a_shape_without_a_table_takes_a_rule(h200: None, plain: bool) -> None:
    """The one with persistent kernels where those serve the call: models that nobody had tuned ran 1.1 to 1.65 times
    slower. With biases, say, the portable one."""
    unknown = ExpertsMeta("triton", 60, 2048, 1408, 128, 64, True, "float", torch.bfloat16)
    for tokens in (1, 100, 5000):
        rule = choice.persistent(unknown, tokens, 4, 60) if plain else choice.portable(tokens * 4 / 60)
        assert choice.choose(unknown, tokens, 4, 60, False, 0, plain) == rule
        assert bool(rule.down.programs) == plain


SIZES = st.integers(1, 64).map(lambda count: count * 64) | st.integers(1, 400).map(lambda count: count * 8)


@given(SIZES, SIZES, st.sampled_from((32, 64, 96, 128, 256)), st.sampled_from((16, 32, 64, 128)),
       st.integers(1, 512), st.integers(1, 16), st.integers(1, 131072))  # fmt: skip
def test_the_rule_asks_for_nothing_that_would_be_replaced_or_not_fit(
    hidden: int, inter: int, group_w13: int, group_w2: int, experts: int, top_k: int, tokens: int
) -> None:
    """Whole tiles, whole groups, a ring of three tiles at least, registers for every program; and one configuration
    from 8 tokens to 16 and from 64 to 128, so that a batch half of padding is launched as without it (C08)."""
    meta = ExpertsMeta("triton", experts, hidden, inter, group_w13, group_w2, True, "float", torch.bfloat16)
    launch = choice.persistent(meta, tokens, top_k, experts)
    assert_accepted(launch, meta)
    for size in (8, 64):
        one, other = (choice.persistent(meta, count, top_k, experts) for count in (size, 2 * size))
        for gemm, half in ((one.gate_up, other.gate_up), (one.down, other.down)):
            assert gemm == half or not (gemm.programs or half.programs)


def test_a_gpu_without_a_table_takes_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_device_name", lambda index: "NVIDIA A10")
    choice.choose.cache_clear()
    assert choice.choose(META, 64, 8, 128, False, 0, False) == choice.portable(4)
    choice.choose.cache_clear()


def test_a_batch_invariant_call_is_launched_alike_at_every_size(h200: None) -> None:
    assert len({choice.choose(META, tokens, 8, 128, True, 0, True) for tokens in (1, 8, 64, 4096, 131072)}) == 1


@pytest.mark.parametrize(("capability", "found"), [((7, 5), "reference"), ((8, 0), "triton"), ((12, 0), "triton")])
def test_auto_takes_the_kernels_on_a_gpu_that_runs_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], found: str
) -> None:
    """And says, once, why it does not on an older one."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    dispatch._auto.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [select_backend("auto", torch.device("cuda", 0)) for _ in range(2)] == [found] * 2
    dispatch._auto.cache_clear()
    reasons = [record.message for record in caplog.records]
    assert len(reasons) == (found == "reference")
    assert all("compute capability (7, 5) is below (8, 0)" in reason for reason in reasons)


def test_a_layer_is_launched_on_the_gpu_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which a model spread over several GPUs never changes."""
    current = [0]

    @contextmanager
    def there(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", there)
    monkeypatch.setattr(choice, "_device_name", lambda index: "NVIDIA A10")
    monkeypatch.setattr(backend, "_plain", lambda *arguments: False)
    monkeypatch.setattr(backend, "_launch", lambda *arguments: current[-1])
    for index in (0, 1):
        device = torch.device("cuda", index)
        x = SimpleNamespace(is_cuda=True, device=device, get_device=lambda device=device: device.index)
        assert backend.apply(x, SimpleNamespace(meta=META), None, torch.zeros(4, 2), None, CallOptions()) == index
    assert current == [0]


def test_a_machine_without_cuda_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher falls back with this reason, and raises it when Triton is asked for by name."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    usable, reason = backend.usable(torch.device("cpu"))
    assert not usable
    assert "CUDA" in reason
    with pytest.raises(RuntimeError, match="CUDA"):
        select_backend("triton", torch.device("cpu"))
    assert "triton" in [name for name, _, _ in backend_status()]


def test_sizes_of_launches_are_those_of_triton():
    import triton

    for count in (*range(1, 70), 127, 128, 129, 8191, 65536, 65537):
        assert launch_sizes.next_power_of_2(count) == triton.next_power_of_2(count)
        for size in (1, 3, 16, 128, 1000):
            assert launch_sizes.cdiv(count, size) == triton.cdiv(count, size)
            assert launch_sizes.cdiv(0, size) == 0
