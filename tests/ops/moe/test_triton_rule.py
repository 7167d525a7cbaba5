"""The rule that GPUs and shapes without a table are launched by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_samples import make_layer

from vllm_ext.ops.moe import ExpertsMeta
from vllm_ext.ops.moe.experts import CallOptions
from vllm_ext.ops.moe.triton import backend, choice, stream
from vllm_ext.ops.moe.triton.config import GemmConfig, LaunchConfig, load_table


def _meta(
    hidden: int, inter: int, experts: int, group_w2: int = 64, dtype: torch.dtype = torch.bfloat16
) -> ExpertsMeta:
    return ExpertsMeta("triton", experts, hidden, inter, 128, group_w2, True, "float", dtype)


@pytest.mark.parametrize(
    ("slots", "gate_up", "down"),
    [(1.5, 8, 8), (6, 8, 8), (12, 16, 16), (48, 32, 32), (72, 64, 64), (73, 128, 128)],
)  # fmt: skip
def test_so_many_slots_an_expert_are_the_last_of_their_blocks(slots: float, gate_up: int, down: int) -> None:
    """Six of DeepSeek-V2-Lite at 64 tokens are a cell that was searched."""
    sizes = choice.sizes_of(_meta(2048, 1408, 64))
    found = [
        choice._preferred(table, slots, size, 64)
        for table, size in zip((choice._GATE_UP, choice._DOWN), sizes, strict=True)
    ]
    assert [gemm.block_tokens for gemm in found if gemm] == [gate_up, down]


def _begins(choice_of: Any, until: int) -> set[int]:
    """The numbers of tokens at which what is chosen is another."""
    found = [choice_of(tokens) for tokens in range(1, until + 1)]
    return {number + 1 for number in range(1, until) if found[number] != found[number - 1]}


@pytest.mark.parametrize(
    ("experts", "top_k", "inter"),
    [(8, 2, 768), (64, 6, 768), (128, 8, 768), (256, 8, 768), (160, 6, 768), (512, 10, 768), (8, 2, 7168)],
)
def test_the_rule_changes_at_no_other_sizes_than_the_tables_do(experts: int, top_k: int, inter: int) -> None:
    """One at 3000 tokens, say, would be one more pair to compile, which no search has timed beside the one before."""
    rows = load_table("NVIDIA H200")
    by_table: set[int] = set()
    for key, of_shape in rows.items():
        _, _, count, each = (int(part[1:]) for part in key.split("_")[:4])
        by_table |= {round(float(slots) * count / each) for slots in of_shape}
    assert len(by_table) < 10
    meta = _meta(2048, inter, experts)
    begins = _begins(lambda tokens: choice.persistent(meta, tokens, top_k, experts), 20000)
    assert begins, "nothing is chosen by size"
    # Above every table's last row only where a search of a sparser shape would have one.
    assert begins - by_table <= {4 * max(by_table)}


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (64, 6), (128, 8), (256, 8)])
def test_pieces_are_those_of_the_experts_that_a_routing_hits(experts: int, top_k: int) -> None:
    """Down takes the most rows of which there are two and a half pieces for each of an H200's 132 multiprocessors,
    or the fewest rows; counted here over drawn routings, as a call's are."""
    generator = torch.Generator().manual_seed(0)
    decided: set[int] = set()
    for tokens in (8, 32, 64):
        if not 0.2 < tokens * top_k / experts <= 12:
            continue
        ids = torch.rand(64, tokens, experts, generator=generator).topk(top_k).indices.flatten(1)
        hit = sum(len(torch.unique(drawn)) for drawn in ids) / len(ids)
        for hidden in range(512, 8192, 256):
            pieces = {rows: hit * hidden / rows for rows in (256, 128, 64)}
            if any(abs(count / (2.5 * 132) - 1) < 0.03 for count in pieces.values()):
                continue  # too near for so many drawings
            expected = next((rows for rows, count in pieces.items() if count >= 2.5 * 132), 64)
            assert choice.persistent(_meta(hidden, 768, experts), tokens, top_k, experts).down.block_rows == expected
            decided.add(expected)
    assert len(decided) > 1


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (32, 4), (64, 6), (128, 8), (60, 4)])
def test_a_batch_half_of_padding_is_launched_as_without_it(experts: int, top_k: int) -> None:
    """Case C08, where twice the slots an expert are past a limit of the rule's: 1 and 2, 4 and 8, 8 and 16."""
    for meta in (_meta(2048, 1408, experts), _meta(2880, 704, experts), _meta(4096, 7168, experts)):
        for half in (8, 64):
            launches = {choice.persistent(meta, tokens, top_k, experts).down for tokens in range(half, 2 * half + 1)}
            assert len(launches) == 1


def test_no_wide_kernel_takes_more_sums_than_it_was_made_for() -> None:
    """It takes the zero points' term from them, 16 at a time, in code that is written out."""
    many = choice.wide(64, 256, 8, 1)
    for groups, takes in ((128, True), (160, False)):
        sizes = stream.Sizes(32 * groups, 2048, 64, 16, 32)
        assert sizes.covered(many)
        assert choice._suits(many, sizes) == takes


def test_a_ring_of_two_tiles_is_none() -> None:
    """A consumer holds one tile while it waits for the next."""
    gemm = choice.wide(128, 256, 8, 1)
    rooms = {count: stream._room(gemm, stream.Sizes(128 * count, 2048, 128, 32, 32)) for count in range(1, 100)}
    for room in (2, 3):
        count = next(count for count, found in rooms.items() if found == room)
        assert stream.Sizes(128 * count, 2048, 128, 32, 32).covered(gemm) == (room == 3)


def test_a_rank_counts_the_pieces_of_its_own_experts() -> None:
    """One of eight ranks: 64 experts hit are 512 pieces of 256 rows, and the rank's eight are 64."""
    whole, rank = _meta(2048, 768, 64), _meta(2048, 768, 8)
    assert [choice.persistent(meta, 32, 8, 64).down.block_rows for meta in (whole, rank)] == [256, 64]
    # Tiles, too, by slots over all ranks' experts.
    odd = _meta(2048, 88, 8)
    assert choice.persistent(odd, 64, 8, 64) == LaunchConfig(*[choice.portable(8).gate_up] * 2)


def test_tiles_beside_persistent_programs_change_at_powers_of_two_and_their_middles() -> None:
    found = [choice._step(tokens) for tokens in (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 3071, 3072, 4095, 4096)]
    assert found == [1, 1, 2, 3, 4, 4, 6, 6, 8, 8, 12, 2048, 3072, 3072, 4096]


def test_fp32_takes_one_configuration_and_a_batch_invariant_call_that_of_its_block() -> None:
    for tokens in (1, 64, 4096):
        assert choice.choose(_meta(2048, 768, 8, dtype=torch.float32), tokens, 2, 8, False, -1, False) == choice._FP32
        invariant = choice.choose(_meta(2048, 768, 8), tokens, 2, 8, True, -1, True)
        assert invariant.gate_up == invariant.down == GemmConfig(32, 128, 4, 3)


def test_sizes_without_weights_are_those_of_the_weights() -> None:
    """The rule knows a layer by its numbers alone, also where rows are padded."""
    for inter, groups in ((100, (32, 8)), (192, (128, 64)), (44, (64, 16))):
        layer = make_layer(experts=2, hidden=256, intermediate=inter, groups=groups)
        experts = backend.prepare(layer.w13, layer.w2, None, None, torch.device("cpu"), torch.bfloat16)
        assert choice.sizes_of(experts.meta) == backend.sizes(experts)
        assert [size.rows for size in choice.sizes_of(experts.meta)] == [
            experts.tensors[f"{name}_words"].shape[2] for name in ("w13", "w2")
        ]


def test_groups_that_planes_straddle_are_left_to_tiles_that_scale_sums_or_columns() -> None:
    """Tiles that scale codes need registers which a scale for every weight takes."""
    for group, operand in ((24, False), (32, True)):
        meta = replace(_meta(2048, 768, 8), group_size_w13=group, group_size_w2=group)
        launch = choice.persistent(meta, 4096, 2, 8)
        assert {launch.gate_up.scaling, launch.down.scaling} == {"operand" if operand else "sum"}


@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_chosen_is_told_the_call_and_replaced_where_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """A table's row is by shape alone, and was made without biases."""
    asked: list[tuple[Any, ...]] = []
    launched: list[LaunchConfig] = []
    row = LaunchConfig(choice.streamed(8, 64, 4, 4), choice.streamed(8, 64, 4, 4))
    monkeypatch.setattr(backend, "choose", lambda *call: asked.append(call) or row)
    monkeypatch.setattr(backend, "_launch", lambda launch, *call: launched.append(launch))
    monkeypatch.setattr(stream, "usable", lambda device: True)
    layer = make_layer(experts=2, hidden=256, intermediate=128, groups=(128, 128), bias=True)
    for biases in ({}, layer.biases):
        given = (biases.get("w13_bias"), biases.get("w2_bias"))
        experts = backend.prepare(layer.w13, layer.w2, *given, torch.device("cpu"), torch.bfloat16)
        x = torch.zeros(4, 256, dtype=torch.bfloat16)
        ids = SimpleNamespace(shape=(4, 2))
        backend.apply(x, experts, x, ids, None, CallOptions(batch_invariant=invariant))  # type: ignore[arg-type]
    assert [call[1:] for call in asked] == [(4, 2, 2, invariant, -1, plain) for plain in (True, False)]
    assert launched[0] == row
    assert launched[1] == LaunchConfig(GemmConfig(16, 128, 4, 3), GemmConfig(16, 128, 4, 3))


@pytest.mark.parametrize("plane", [16, 32])
def test_two_halves_are_not_taken_for_weights_of_one(plane: int) -> None:
    """64 columns of a rank, gate and up, in groups of 64: Triton 3.6 ended with "PassManager::run failed" on all six
    kernels of 256 rows over a weight of 128, so an engine did not start. Three halves are a tile and a half."""
    for gemm in (choice.wide(32, 256, 8, 2), choice.wide(64, 256, 8, 1), choice.wide(128, 256, 8, 1)):
        sizes = [stream.Sizes(2048, rows, 4 * plane, plane, 4 * plane) for rows in (128, 256, 384)]
        assert [size.covered(gemm) for size in sizes] == [False, True, True]
    assert stream.Sizes(2048, 128, 128, 32, 128).covered(choice.wide(128, 128, 8, 1))
    meta = ExpertsMeta("triton", 256, 2048, 64, 64, 64, True, "float", torch.bfloat16)
    assert choice.persistent(meta, 4096, 8, 256).gate_up == choice._OPERAND_TILES


def test_large_batches_of_sparse_models_take_large_blocks() -> None:
    """One slot a token over 512 experts are 8 an expert at 4096 tokens and 128 at 65536; the rule ended at 4096."""
    meta = ExpertsMeta("triton", 512, 2048, 1024, 128, 64, True, "float", torch.bfloat16)
    launches = [choice.persistent(meta, tokens, 1, 512) for tokens in (4096, 16383, 16384, 65536, 131072)]
    assert [launch.gate_up.block_tokens for launch in launches] == [16, 16, 32, 128, 128]
    assert [launch.down.block_tokens for launch in launches] == [16, 16, 32, 128, 128]


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 8), (8, 8), (64, 8), (256, 32), (1024, 64), (4096, 128)])
def test_the_rule_takes_persistent_programs_for_sizes_of_models(tokens: int, blocks: int) -> None:
    """Mixtral's second GEMM has 448 sums of 32 columns: at 128 slots they alone would take all shared memory."""
    for hidden, inter in ((2048, 1408), (4096, 1536), (2304, 1024), (2048, 768)):
        meta = ExpertsMeta("triton", 128, hidden, inter, 128, 64, True, "float", torch.bfloat16)
        launch = choice.persistent(meta, tokens, 8, 128)
        assert launch.down.programs
        assert launch.down.block_tokens == blocks
    mixtral = ExpertsMeta("triton", 8, 4096, 14336, 128, 64, True, "float", torch.bfloat16)
    first, second = choice.sizes_of(mixtral)
    many = choice.wide(128, 256, 8, 1)
    assert first.covered(many)
    assert not second.covered(many)
    launch = choice.persistent(mixtral, 4096, 2, 8)
    assert launch.gate_up.programs
    assert not launch.down.programs


def test_the_rule_leaves_no_multiprocessor_idle_where_few_experts_are_hit() -> None:
    """Seven of eight experts are 58 pieces of 256 rows, for 132 multiprocessors."""
    few = ExpertsMeta("triton", 8, 2048, 1408, 128, 64, True, "float", torch.bfloat16)
    many = replace(few, num_experts=64, hidden_size=4096)
    assert [choice.persistent(few, tokens, 2, 8).down.block_rows for tokens in (1, 8, 32)] == [64, 64, 64]
    assert choice.persistent(many, 256, 2, 64).down.block_rows == 256


@pytest.mark.parametrize(
    ("columns", "tokens", "down"),
    [
        (14336, 1, choice.streamed(8, 256, 4, 2, split=True)),
        (3584, 8, choice.streamed(8, 256, 4, 2, split=True)),
        (7168, 32, choice.streamed(16, 256, 4, 2, split=True)),
        (3584, 64, choice.streamed(16, 256, 4, 2, split=True)),
        (1792, 1, choice.streamed(8, 64, 4, 4)),
        (1792, 64, choice.wide(32, 256, 8, 2)),
        (3584, 256, choice.wide(64, 256, 8, 1)),
    ],
)
def test_few_long_pieces_are_shared(columns: int, tokens: int, down: GemmConfig) -> None:
    """Mixtral's second GEMM and a rank's: up to 52% faster than pieces of 64 rows, at 1792 columns up to 8% slower;
    past 24 slots an expert there are pieces enough."""
    meta = ExpertsMeta("triton", 8, 4096, columns, 128, 64, True, "float", torch.bfloat16)
    assert choice.persistent(meta, tokens, 2, 8).down == down


def test_pieces_are_shared_of_no_more_slots_and_no_other_rows_than_were_timed() -> None:
    """64 slots an expert are past the 24; of 4224 rows half a tile would be left, and such a weight is not covered."""
    few = _meta(1024, 3584, 8)
    assert [choice.persistent(few, tokens, 2, 8).down.split for tokens in (64, 256)] == [True, False]
    split = [choice.persistent(_meta(hidden, 7168, 8), 8, 2, 8).down.split for hidden in (4096, 4224)]
    assert split == [True, False]


@pytest.mark.parametrize(("tokens", "experts", "block"), [(64, 8, 16), (8, 16, 8), (32, 16, 8), (32, 8, 16)])
def test_pieces_are_shared_as_long_as_programs_would_idle(tokens: int, experts: int, block: int) -> None:
    """Where pieces alone give each program enough, sharing costs the way of sums through memory. Blocks are counted
    over drawn routings, as a call's are."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(64, tokens, experts, generator=generator).topk(2).indices.flatten(1)
    blocks = sum(float((-(-torch.bincount(drawn) // block)).sum()) for drawn in ids) / len(ids)
    decided = set()
    for hidden in range(1024, 16384, 256):
        pieces = blocks * hidden / 256
        if abs(pieces / (2.5 * 132) - 1) > 0.1:  # nearer than the rule reckons
            split = choice.persistent(_meta(hidden, 7168, experts), tokens, 2, experts).down.split
            assert split == (pieces < 2.5 * 132), hidden
            decided.add(split)
    assert decided == {False, True}


def test_the_rule_takes_larger_blocks_for_more_slots_an_expert() -> None:
    """Not larger than there are slots for: a block of 64 with one slot in it is 63 columns multiplied for nothing."""
    blocks = [choice.portable(slots).gate_up.block_tokens for slots in (0.06, 1, 8, 9, 24, 25, 100, 8192)]
    assert blocks == [16, 16, 16, 32, 32, 64, 64, 64]
    for slots in (1, 16, 100):
        launch = choice.portable(slots)
        assert launch.down == launch.gate_up
        assert not launch.down.programs
