from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tiny_model_families
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny_models.py"


@pytest.fixture(scope="module")
def tiny_models():
    spec = importlib.util.spec_from_file_location("tiny_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", sorted(tiny_model_families.KINDS))
def test_same_seed_gives_the_same_checkpoint_and_finite_weights(tiny_models, tmp_path, kind):
    first = load_file(tiny_models.write_tiny_model(kind, tmp_path / "a") / "model.safetensors")
    second = load_file(tiny_models.write_tiny_model(kind, tmp_path / "b") / "model.safetensors")
    other = load_file(tiny_models.write_tiny_model(kind, tmp_path / "c", seed=1) / "model.safetensors")
    assert first.keys() == second.keys() == other.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in first.values())


def test_changed_config_changes_the_weights_with_it(tiny_models, tmp_path):
    folder = tiny_models.write_tiny_model("qwen3-moe", tmp_path / "m", num_experts=3, moe_intermediate_size=96)
    weights = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["num_experts"] == 3
    assert weights["model.layers.0.mlp.experts.2.down_proj.weight"].shape == (256, 96)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" not in weights


def test_bad_requests_are_refused_and_leave_other_files_alone(tiny_models, tmp_path, capsys):
    with pytest.raises(ValueError, match="no config field num_expert;"):
        tiny_models.write_tiny_model("mixtral", tmp_path / "m", num_expert=3)
    with pytest.raises(ValueError, match="no kind 'mixtrel'"):
        tiny_models.write_tiny_model("mixtrel", tmp_path / "m")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert tiny_models.main(["mixtral", str(tmp_path / "full")]) == 2
    assert "something other than a model" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_token_ids_are_the_bytes_of_the_text(tiny_models, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_models.write_tiny_model("mixtral", tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Tōkyō\n\t\x7f\xad 1+1"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
