"""`vllm-ext bench serve`: its figures, its refusal to time wrong arms, and the checkpoints it serves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_ext.benchmarks import serve, serve_arms, serve_checkpoints, serve_report
from vllm_ext.benchmarks.serve_checkpoints import (
    BF16,
    PACKED,
    SHAPES,
    ServedShape,
    config_of,
    write_checkpoints,
    write_configs,
)
from vllm_ext.benchmarks.serve_engine import EngineProcess, cores_apart, import_vllm_once

from vllm_ext.quantization import compressed_tensors, quantize_weight
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import find_experts
from vllm_ext.quantization.packed_source import find_packed

# BF16's tokens per second on the H200 by batch size, and the share of its decoding steps that experts take.
MEASURED = {1: (514, 0.20), 8: (3273, 0.66), 64: (12942, 0.73), 256: (27374, 0.43)}


def rows_of(rates):
    """Rows of `summarise` from {(cell, arm): rates of each round}; cells are batch sizes."""
    batches = list(dict.fromkeys(batch for batch, _ in rates))
    names = list(dict.fromkeys(arm for _, arm in rates))
    plan = [{"cell": f"batch {b}", "batch": b, "inputs": 128, "outputs": 128} for b in batches]
    count = len(next(iter(rates.values())))
    rounds = [
        {f"batch {b}": {arm: {"rate": rates[b, arm][number], "distinct": 1.0} for arm in names} for b in batches}
        for number in range(count)
    ]
    return serve.summarise(plan, rounds, names)


def test_ratio_is_the_median_over_rounds_not_the_ratio_of_medians():
    """A machine that slows down in the middle favours no arm."""
    rows = rows_of({(1, "BF16"): [100.0, 50.0, 10.0], (1, "w4a16-grouped"): [150.0, 100.0, 30.0]})
    ours = next(row for row in rows if row["arm"] == "w4a16-grouped")
    assert ours["tokens_per_second"] == 100.0
    assert ours["times BF16"] == 2.0


def test_experts_share_of_the_measured_time_and_the_bound_it_sets():
    """The share is that of decoding steps, and a little more: prompts are read in large steps, full of experts."""
    rates = {(batch, arm): [rate] for batch, (rate, _) in MEASURED.items() for arm in ("BF16", "w4a16-grouped")}
    rows = serve_report.add_bounds(rows_of(rates), SHAPES["Qwen3-30B-A3B"], layers=12)
    for row in rows:
        decoding = MEASURED[row["batch"]][1]
        assert decoding - 0.03 < row["experts_share"] < decoding + 0.1
        if row["arm"] == "BF16":
            assert row["bound"] == pytest.approx(1.0)
        else:
            assert 1.0 < row["bound"] < row["bound_free_experts"] == pytest.approx(1 / (1 - row["experts_share"]))


def test_experts_time_is_that_of_the_prompts_steps_and_the_outputs():
    times = {("BF16", 1): 1.0, ("BF16", 3): 2.0, ("BF16", 5): 4.0}
    row = {"batch": 3, "inputs": 4, "outputs": 11}
    # 12 prompt tokens in steps of 10 and 2, then 10 steps of 3 tokens; 10 tokens are twice those of the largest size.
    assert serve_report.experts_milliseconds(times, "BF16", row, 10) == pytest.approx(8.0 + 1.5 + 10 * 2.0)
    assert serve_report.experts_milliseconds(times, "BF16", {**row, "outputs": 1}, 12) == pytest.approx(4.0 * 12 / 5)


def test_table_and_chart_show_every_cell(tmp_path):
    rates = {(batch, arm): [rate] for batch, (rate, _) in MEASURED.items() for arm in ("BF16", "w4a16-grouped")}
    rows = serve_report.add_bounds(rows_of(rates), SHAPES["Qwen3-30B-A3B"], layers=12)
    document = {
        "rows": rows,
        "options": {"shape": "Qwen3-30B-A3B", "layers": 12},
        "failed": {"Marlin, packed": "no GPU"},
    }
    text = serve_report.table(document)
    assert all(f"| batch {batch} |" in text for batch in MEASURED)
    assert "failed: Marlin, packed: no GPU" in text
    serve_report.chart(document, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_arm_that_failed_on_the_way_keeps_its_rounds(tmp_path):
    """An engine that died in the fifth round took the four before it along, and the table of the others too."""
    plan = [{"cell": f"batch {b}", "batch": b, "inputs": 128, "outputs": 128} for b in (1, 8)]

    def timed(**rates):
        return {arm: {"rate": rate, "distinct": 1.0} for arm, rate in rates.items()}

    rounds = [
        {"batch 1": timed(BF16=10.0, ours=30.0), "batch 8": timed(BF16=100.0)},
        {"batch 1": timed(BF16=20.0), "batch 8": timed(BF16=200.0)},
    ]
    rows = serve.summarise(plan, rounds, ["BF16", "ours", "never started"])
    assert [(row["cell"], row["arm"], row["samples"]) for row in rows] == [
        ("batch 1", "BF16", [10.0, 20.0]),
        ("batch 1", "ours", [30.0]),
        ("batch 8", "BF16", [100.0, 200.0]),
    ]
    assert rows[1]["times BF16"] == 3.0
    assert "times ours" not in rows[2]
    options = {"shape": "tiny", "layers": 12}
    text = serve_report.table({"rows": rows, "options": options})
    assert [line.split("|")[1:5] for line in text.splitlines()[2:]] == [
        [" batch 1 ", " 15 ", " 30 ", " 3.00x "],
        [" batch 8 ", " 150 ", "  ", "  "],
    ]
    serve_report.chart({"rows": rows, "options": options}, tmp_path / "chart.png")


def test_arms_near_bf16_whose_bits_are_shared_pass():
    near = {"BF16": [-1.0, -2.0], "w4a16-grouped": [-1.1, -2.1]}
    twins = {"w4a16-grouped, packed": [-1.1, -2.2], "Marlin, packed": [-1.1, -2.21]}
    gaps, wrong = serve.check({**near, **twins}, 256)
    assert not wrong
    assert gaps["w4a16-grouped / BF16"] == pytest.approx(0.1)
    assert gaps["w4a16-grouped, packed / Marlin, packed"] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("arm", "values", "refused", "says"),
    [
        ("w4a16-grouped", [-3.0, -4.0], "w4a16-grouped", "w4a16-grouped / BF16: log-probabilities 2.00 nats"),
        ("Marlin, packed", [-0.5, -1.5], "w4a16-grouped, packed", "the same bits are 0.6"),
        ("w4a16-grouped", [float("nan"), -2.0], "w4a16-grouped", "w4a16-grouped / BF16"),
    ],
)
def test_arm_that_computes_something_else_is_not_timed(arm, values, refused, says):
    right = {"BF16": [-1.0, -2.0], "w4a16-grouped, packed": [-1.1, -2.1], "Marlin, packed": [-1.1, -2.1]}
    _, wrong = serve.check({**right, arm: values}, 256)
    assert list(wrong) == [refused]
    assert says in wrong[refused]


def test_runs_of_other_depths_keep_results_of_their_own(tmp_path):
    for depth in ([], ["--layers", "3"]):
        assert serve.main(["--shape", "tiny", "--arms", "--output-dir", str(tmp_path), *depth]) == 0
    found = {path.name: json.loads(path.read_text())["options"]["layers"] for path in tmp_path.glob("*.json")}
    assert found == {"serve_tiny.json": 12, "serve_tiny_3_layers.json": 3}


def test_how_far_from_bf16_is_too_far_can_be_said():
    """Thirty layers of a model that amplifies roundings may be further from BF16 than the default, and right."""
    log_probs = {"BF16": [-1.0, -2.0], "w4a16-grouped": [-2.2, -3.2]}
    assert list(serve.check(log_probs, 8)[1]) == ["w4a16-grouped"]
    assert not serve.check(log_probs, 8, far=1.6)[1]


def test_of_two_arms_with_the_same_bits_the_plugins_is_refused_in_any_order():
    """Named first, Marlin was dropped for what the plugin computed, and the wrong arm was timed."""
    log_probs = {"Marlin, packed": [-1.1, -2.1], "w4a16-grouped, packed": [-0.5, -1.5], "BF16": [-1.0, -2.0]}
    assert list(serve.check(log_probs, 8)[1]) == ["w4a16-grouped, packed"]
    del log_probs["BF16"]
    assert list(serve.check({**log_probs, "w4a16-grouped, packed": [-4.1, -5.1]}, 8)[1]) == ["w4a16-grouped, packed"]
    assert not serve.check(log_probs, 8)[1]


DECODED = {"batches": [1, 256], "input_tokens": 128, "output_tokens": 128, "decoded_tokens": 8, "far": 1.0}


class Scoring:
    """An engine whose log-probabilities are right but in steps of `wrong_at` tokens, and in decoding at that batch."""

    def __init__(self, wrong_at=None, apart=2.0):
        self.wrong_at, self.apart, self.closed = wrong_at, apart, False
        self.log = Path("nowhere.log")

    def ask(self, op, timeout, *, seed, length=0, count=0, **request):
        if op == "decode":
            assert request == {"batch": request["batch"], "inputs": 128, "outputs": 8, "looked_at": 4}
            return {"gap": self.apart if request["batch"] == self.wrong_at else 0.01}
        assert op == "score"
        return {"log_probs": [-3.0 if length == self.wrong_at else -1.0] * (count * (length - 1))}

    def close(self, timeout):
        self.closed = True


def test_arm_is_checked_in_steps_as_decoding_has_them(tmp_path):
    """Other kernels serve 8 tokens than 256; a prompt of 256 alone would not notice a wrong one."""
    engines = {"BF16": Scoring(), "w4a16-grouped": Scoring(wrong_at=8)}
    document = {"options": {"shape": "tiny"}, "failed": {}}
    made = serve_arms.Serving(SHAPES["tiny"], tmp_path / "out.json", document, dict(engines))
    serve.check_arms(made, 256)
    assert list(made.engines) == ["BF16"]
    assert engines["w4a16-grouped"].closed
    assert "check failed in steps of 8 tokens" in document["failed"]["w4a16-grouped"]
    assert list(document["gaps"]) == ["steps of 8", "steps of 64", "steps of 256"]
    assert document["gaps"]["steps of 8"] == {"w4a16-grouped / BF16": 2.0}


def decoding_checked(folder, engines):
    document = {"options": {"shape": "tiny"}, "failed": {}, "gaps": {}}
    made = serve_arms.Serving(SHAPES["tiny"], folder / "out.json", document, dict(engines))
    serve.check_decoding(made, argparse.Namespace(**DECODED))
    assert made.engines.keys() == engines.keys() - document["failed"].keys()
    return document


@pytest.mark.parametrize(("bf16", "refused"), [(0.01, True), (0.2, False), (float("nan"), True)])
def test_decoding_may_be_as_far_from_reading_as_the_models_own_roundings_take_it(tmp_path, bf16, refused):
    """Random weights amplify roundings more the deeper a model is; in BF16 as in 4 bits."""
    engines = {"BF16": Scoring(256, bf16), "w4a16-grouped": Scoring(256, 0.5)}
    assert ("w4a16-grouped" in decoding_checked(tmp_path, engines)["failed"]) is refused


def test_arm_that_decodes_something_else_than_it_reads_is_not_timed(tmp_path):
    """Prompts run neither the graphs of decoding nor the kernels of 1 and 256 tokens, which are what is timed."""
    document = decoding_checked(tmp_path, {"BF16": Scoring(), "w4a16-grouped": Scoring(wrong_at=256)})
    assert list(document["failed"]) == ["w4a16-grouped"]
    assert "decoding at batch 256 is 2.00 nats a token from what it reads" in document["failed"]["w4a16-grouped"]
    assert document["gaps"] == {
        "decoding at batch 1, from reading": {"BF16": 0.01, "w4a16-grouped": 0.01},
        "decoding at batch 256, from reading": {"BF16": 0.01, "w4a16-grouped": 2.0},
    }


def test_arms_that_were_compared_with_nothing_are_named(tmp_path):
    """Without BF16 an arm was timed unchecked, and nothing said so."""
    document = {"options": {"shape": "tiny"}, "failed": {}}
    made = serve_arms.Serving(SHAPES["tiny"], tmp_path / "out.json", document, {"w4a16-grouped": Scoring()})
    serve.check_arms(made, 256)
    assert document["not compared"] == ["w4a16-grouped"]


@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma4-moe"])
def test_packed_checkpoint_is_the_bf16_one_rounded(tmp_path, kind):
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_experts": 3,
        "moe_intermediate_size": 64,
    }
    paths = write_checkpoints(ServedShape(kind, fields, group=32), 1, tmp_path)
    (exact,) = find_experts(Checkpoint.open(paths[BF16])).layers.values()
    (packed,) = find_packed(Checkpoint.open(paths[PACKED])).values()
    stored = {projection.module: projection.read().dequantize(torch.float32) for projection in packed}
    assert len(stored) == len(exact) == 9
    for projection in exact:
        weight = projection.read().float()
        error = (stored[projection.module] - weight).norm() / weight.norm()
        assert 0.02 < error < 0.15


def test_configurations_differ_by_their_quantization_alone(tmp_path):
    paths = write_configs(SHAPES["Gemma-4-26B-A4B"], 12, tmp_path)
    plain, packed = (json.loads((path / "config.json").read_text()) for path in paths.values())
    assert packed.pop("quantization_config")["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert plain == packed
    assert (plain["num_hidden_layers"], plain["hidden_size"], plain["moe_intermediate_size"]) == (12, 2816, 704)


@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma4-moe"])
def test_files_hold_what_is_drawn_whatever_the_batches(tmp_path, kind, monkeypatch):
    """Engines that draw their weights serve what engines that read checkpoints do: those of examples/tiny_models.py."""
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "head_dim": 32,
        "num_experts": 3,
        "moe_intermediate_size": 64,
    }
    shape = ServedShape(kind, fields, group=32)
    batches = []
    serve_checkpoints.draw(kind, config_of(shape, 1), 0, "cpu", batches.append)
    (drawn,) = batches
    monkeypatch.setattr(serve_checkpoints, "BATCH_BYTES", 20_000)
    paths = write_checkpoints(shape, 1, tmp_path)
    from tiny_models import write_tiny_model

    whole = write_tiny_model(kind, tmp_path / "whole", num_hidden_layers=1, **fields)
    for path, expected in (
        (paths[BF16], drawn),
        (paths[PACKED], serve_checkpoints.rounded(drawn, 32)),
        (whole, drawn),
    ):
        files = list(path.glob("*.safetensors"))
        assert (len(files) > 2) == (path != whole)
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["qwen3-moe", "gemma4-moe"])
def test_experts_rounded_together_have_the_bits_of_each_alone(kind):
    fields = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_experts": 3}
    shape = ServedShape(kind, {**fields, "moe_intermediate_size": 96}, group=32)
    batches = []
    serve_checkpoints.draw(kind, config_of(shape, 2), 0, "cpu", batches.append)
    (drawn,) = batches
    found = serve_checkpoints.rounded(drawn, 32)
    experts = [(name, tensor) for name, tensor in drawn.items() if ".experts." in name]
    expected = {name: tensor for name, tensor in drawn.items() if ".experts." not in name}
    for module, weight in (one for expert in experts for one in serve_checkpoints._projections(*expert)):
        alone = quantize_weight(weight, 32, symmetric=False, zero_point="int", method="minmax")
        expected |= compressed_tensors.to_tensors(module, alone)
    assert found.keys() == expected.keys()
    assert len(found) == len(drawn) - len(experts) + 4 * 2 * 3 * 3
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_prompts_are_timed_alone_and_at_once_and_fit():
    """Each is a request that the engine takes: not longer than its longest, and its keys and values find room."""
    args = argparse.Namespace(prefill=64, prompts=[512], batches=[1], input_tokens=8, output_tokens=8)
    args.checked_tokens, args.eager, args.attention_backend = 8, True, None
    config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    plan = {cell.pop("cell"): cell for cell in serve_arms.cells(args)}
    assert plan["prompt of 512"] == {"batch": 1, "inputs": 512, "outputs": 1}
    assert plan["4 prompts of 512"] == {"batch": 4, "inputs": 512, "outputs": 1}
    assert list(plan)[-1] == "prefill 64"
    options = serve_arms.engine_options(config, args)
    assert options["max_model_len"] > 512
    assert options["kv_cache_memory_bytes"] >= 4 * 512 * (2 * 2 * 4 * 64 * 2)


def test_kv_cache_holds_the_largest_batch():
    args = argparse.Namespace(prefill=512, prompts=[], batches=[1, 64], input_tokens=100, output_tokens=28)
    config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
    assert serve_arms.kv_cache_bytes(config, args) >= 64 * 128 * (2 * 2 * 4 * 64 * 2)


@pytest.mark.parametrize(
    ("gpus", "asked_for", "expected"),
    [(["H200"], [], ["one"]), ([], [], ["default"]), (["H200"], ["one", "three-v1"], ["one", "three-v1"])],
)
def test_a_layout_is_the_same_for_every_arm_and_recorded(tmp_path, monkeypatch, gpus, asked_for, expected):
    """A setting that one arm alone had would be measured as its kernels' doing."""
    asked = ["--arms", *serve_arms.ARMS, "--shape", "tiny", "--output-dir", str(tmp_path), "--workdir", str(tmp_path)]
    started = {}

    class Started:
        def __init__(self, context, name, spec, folder, environment, cache):
            started.setdefault(folder.name, {})[name] = (spec["options"], environment)

        def answer(self, timeout):
            raise RuntimeError("not to be timed")

        def close(self, timeout):
            pass

        log = tmp_path / "none.log"

    monkeypatch.setattr(serve_arms, "EngineProcess", Started)
    monkeypatch.setattr(serve, "import_vllm_once", lambda: None)
    monkeypatch.setattr(serve, "inspect_models", lambda *arguments: None)
    monkeypatch.setattr(serve, "describe_run", lambda: {"gpus": gpus})
    assert serve.main([*asked, *(["--layout", *asked_for] if asked_for else [])]) == 1
    assert started.keys() == {f"tiny_{layout}" for layout in expected}
    for layout in expected:
        suffix = f"_{layout}" if len(expected) > 1 else ""
        document = json.loads((tmp_path / f"serve_tiny{suffix}.json").read_text())
        cores = document["host"].pop("cores")
        assert document["host"] == serve_arms.LAYOUTS[layout]
        assert (cores is None) == (cores_apart() is None)
        arms = started[f"tiny_{layout}"]
        assert arms.keys() == serve_arms.ARMS.keys()
        for options, environment in arms.values():
            for one, given in ((options, "options"), (environment, "environment")):
                known = {key for other in serve_arms.LAYOUTS.values() for key in other[given]}
                assert {key: one[key] for key in known & one.keys()} == document["host"][given]


@pytest.mark.vllm
def test_engine_that_does_not_start_says_why(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    spec = {"model": str(tmp_path / "nothing"), "options": {}, "vocabulary": 256}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engine = EngineProcess(import_vllm_once(), "lost, arm", spec, tmp_path, {})
    try:
        with pytest.raises(RuntimeError, match=r"bench serve: the engine 'lost, arm': .*Error"):
            engine.answer(120)
    finally:
        engine.close()
