"""The registry of benchmarks: nothing wrong is timed, and results say where they come from."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from vllm_ext.benchmarks import registry
from vllm_ext.benchmarks.registry import Benchmark, CheckFailed, main, run_benchmark


def _benchmark(check, run=lambda args: [{"size": args.size, "us": 1.5}]) -> Benchmark:
    return Benchmark(
        name="two-words",
        help="for the test",
        arguments=lambda parser: parser.add_argument("--size", type=int, default=3),
        check=check,
        run=run,
        table=lambda rows: f"{len(rows)} row",
    )


def test_what_fails_its_check_is_not_timed(tmp_path, capsys) -> None:
    def check(args: argparse.Namespace) -> None:
        raise CheckFailed(f"size {args.size}: error 0.5, allowed 0.1")

    def run(args: argparse.Namespace) -> list:
        raise AssertionError("timed")

    output = tmp_path / "results.json"
    assert run_benchmark(_benchmark(check, run), ["--output", str(output)]) == 1
    assert "not timed, the check failed: size 3: error 0.5, allowed 0.1" in capsys.readouterr().err
    assert not output.exists()


def test_results_carry_machine_versions_date_and_options(tmp_path, capsys) -> None:
    output = tmp_path / "made" / "results.json"
    assert run_benchmark(_benchmark(lambda args: None), ["--size", "7", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert document["benchmark"] == "two-words"
    assert document["rows"] == [{"size": 7, "us": 1.5}]
    assert document["options"] == {"size": 7}
    assert {"cpu", "cores", "gpus", "python", "packages", "date", "commit"} <= set(document["run"])
    assert document["run"]["packages"]["torch"]
    assert "1 row" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]


def test_a_failed_write_leaves_the_old_results(tmp_path) -> None:
    output = tmp_path / "results.json"
    output.write_text('{"rows": []}')
    with pytest.raises(TypeError):
        registry.write_json(output, {"rows": [object()]})
    assert output.read_text() == '{"rows": []}'
    assert list(tmp_path.iterdir()) == [output]


def test_every_registered_benchmark_exists_and_is_callable() -> None:
    for name, (target, text) in registry.BENCHMARKS.items():
        module, _, attribute = target.partition(":")
        pytest.importorskip("triton")
        found = getattr(import_module(module), attribute)
        assert text
        assert callable(found) or found.name == name


def test_the_list_and_a_wrong_name(capsys) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert main(["moe-gpu"]) == 2
    captured = capsys.readouterr()
    assert "moe-cpu" in captured.out
    assert "unknown benchmark 'moe-gpu'" in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["linear-attention", "moe", "negatives", "probes", "roofline", "tune-moe"])
def test_what_measures_a_gpu_says_in_a_line_that_there_is_none(name: str, capsys) -> None:
    """Two of them ended in a traceback."""
    pytest.importorskip("triton")
    options = ["--shape", "2048,768,128,8"] if name == "tune-moe" else []
    assert main([name, *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-ext bench {name}: ")
    assert "torch sees" in line


def test_the_cpu_experts_benchmark_runs_small(tmp_path) -> None:
    """vLLM's BF16 kernel and ours, checked and timed on a tiny shape; the numbers mean nothing here."""
    pytest.importorskip("vllm")
    pytest.importorskip("matplotlib")
    from vllm_ext.benchmarks import moe_cpu

    output = tmp_path / "moe_cpu.json"
    small = moe_cpu.Shape(64, 32, 4, 4, (32, 32), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe_cpu.SHAPES, "smollm2-g32", small)
        argv = ["--shape", "smollm2-g32", "--tokens", "1", "9", "--rounds", "3", "--output", str(output)]
        assert main(["moe-cpu", *argv]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["tokens"], row["weights"]) for row in rows] == [(1, "rotated"), (1, "hot"), (9, "rotated")]
    assert all(row[f"{arm}_us"] > 0 for row in rows for arm in ("vllm_bf16", "ours", "ours_pytorch_kernel"))
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_kernel_fails_the_cpu_experts_check() -> None:
    pytest.importorskip("vllm")
    from vllm_ext.benchmarks import moe_cpu

    from vllm_ext.ops.moe import cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(moe_cpu.SHAPES, "smollm2-g32", moe_cpu.Shape(64, 32, 4, 4, (32, 32), 1))
        right = cpu.matmul
        patch.setattr(cpu, "matmul", lambda *args: right(*args) * 1.02)
        with pytest.raises(CheckFailed, match="smollm2-g32, ours, M=1: relative error"):
            moe_cpu.check(argparse.Namespace(shape=["smollm2-g32"]))


def test_results_go_beside_the_benchmarks_by_default(tmp_path, monkeypatch) -> None:
    assert Path(registry.__file__).parent / "results" == registry.RESULTS
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    assert run_benchmark(_benchmark(lambda args: None), []) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["two_words.json"]


def test_a_run_with_other_options_does_not_replace_the_recorded_results(tmp_path, monkeypatch, capsys) -> None:
    """`bench ascend-traffic --quick` once left an eighth of the lengths where the documents' figures had been."""
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    recorded = tmp_path / "two_words.json"
    recorded.write_text("the whole run")
    assert run_benchmark(_benchmark(lambda args: None), ["--size", "1"]) == 0
    assert recorded.read_text() == "the whole run"
    other = tmp_path / "two_words_partial.json"
    assert json.loads(other.read_text())["options"] == {"size": 1}
    assert f"Wrote {other}" in capsys.readouterr().out
