"""How the Triton backend chooses its launch configuration, and when it says that it cannot run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moe_samples import make_layer

from vllm_ext.ops.moe import ExpertsMeta, backend_status
from vllm_ext.ops.moe.dispatch import select_backend
from vllm_ext.ops.moe.experts import CallOptions
from vllm_ext.ops.moe.triton import backend, config, launch_sizes, stream
from vllm_ext.ops.moe.triton.layout import plane_width

META = ExpertsMeta("triton", 128, 2816, 704, 128, 64, True, "float", torch.bfloat16)
TABLES = sorted((Path(config.__file__).parent / "configs").glob("*.json"))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if device 0 were the GPU the shipped table was made on."""
    monkeypatch.setattr(config, "_device_name", lambda index: "NVIDIA H200")
    config.choose.cache_clear()


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


@pytest.mark.parametrize(("tokens", "half"), [(16, 8), (128, 64)])
def test_a_batch_half_of_padding_is_launched_as_without_it(tokens: int, half: int) -> None:
    """No routed row's bits may depend on rows of -1 beside it (case C08): both sizes lie in one row of every table."""
    for path in TABLES:
        for shape, rows in json.loads(path.read_text(encoding="utf-8"))["shapes"].items():
            experts, top_k = (int(re.search(rf"_{letter}(\d+)", shape)[1]) for letter in "EK")
            assert config.row(rows, tokens * top_k / experts) == config.row(rows, half * top_k / experts)


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
    tiles = config.rule(4)
    assert backend.served(tiles, experts, layer.x, CallOptions()) == tiles


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
    ring = stream.stages(gemm, sizes) * (gemm.block_rows * 68 + gemm.block_tokens * 260)
    assert 0 < ring * gemm.programs < 227 << 10


@pytest.mark.parametrize(
    ("columns", "group"), [(2048, 128), (768, 64), (2816, 64), (704, 64), (704, 128), (768, 192), (512, 256)]
)
def test_tiles_lie_within_groups_where_a_plane_width_allows_it(columns: int, group: int) -> None:
    """Groups of 64, the default of the second GEMM, lay in tiles of 128 columns, which the persistent kernels refuse:
    Qwen3-30B's engine ran it in 20 us instead of 15 at batch 1, and in 73 instead of 58 at 64."""
    plane = plane_width(columns, group)
    assert group % (4 * plane) == 0
    assert columns % (4 * plane) == 0
    assert stream.Sizes(columns, 2048, group, plane, 32).covered(config.GemmConfig(8, 64, 4, 12, programs=4))


@pytest.mark.parametrize(("group", "plane"), [(32, 32), (16, 16), (96, 32), (24, 32), (8, 32)])
def test_narrower_groups_are_straddled_by_tiles_but_not_by_planes(group: int, plane: int) -> None:
    assert plane_width(512, group) == plane


def test_a_tuned_shape_takes_the_row_below_its_slots_an_expert(h200: None) -> None:
    rows = config.load_table("NVIDIA H200")[config.shape_key(META, 8)]
    keys = sorted(rows, key=float)
    for key in keys:
        tokens = round(float(key) * META.num_experts / 8)
        assert config.choose(META, tokens, 8, False, 0) == config.LaunchConfig.from_json(rows[key])
    above = config.LaunchConfig.from_json(rows[keys[-1]])
    assert config.choose(META, 131072, 8, False, 0) == above


def test_a_shape_without_a_table_takes_the_rule(h200: None) -> None:
    unknown = ExpertsMeta("triton", 60, 2048, 1408, 128, 64, True, "float", torch.bfloat16)
    for tokens in (1, 100, 5000):
        assert config.choose(unknown, tokens, 4, False, 0) == config.rule(tokens * 4 / 60)


def test_a_batch_invariant_call_is_launched_alike_at_every_size(h200: None) -> None:
    assert len({config.choose(META, tokens, 8, True, 0) for tokens in (1, 8, 64, 4096, 131072)}) == 1


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
