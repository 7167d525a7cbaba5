"""The perplexity benchmark: what it scores, what it puts into the model, what it reports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from vllm_ext.benchmarks import perplexity

VOCABULARY = 32


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A tiny random Mixtral in BF16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
    )
    return MixtralForCausalLM(config).eval()


def test_padding_changes_no_score(model: torch.nn.Module) -> None:
    """Texts of different lengths share a batch; the mean is over tokens, as if each had been read alone."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (3, 17, 9, 30)]
    total, count = 0.0, 0
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.inference_mode():
            scores = model(ids).logits[0, :-1].double().log_softmax(-1)
        total -= scores[torch.arange(len(sequence) - 1), ids[0, 1:]].sum().item()
        count += len(sequence) - 1
    seen = perplexity.perplexity(model, perplexity.batches(sequences, pad=0), "test")
    assert seen == pytest.approx(math.exp(total / count), rel=1e-5)


def test_batches_hold_every_token_once_and_stay_bounded() -> None:
    """A long text must not pull a batch over the limit of memory, nor may any text be lost."""
    sequences = [[7] * length for length in (5, 900, 3, 900, 900, 2048, 4000)]
    made = perplexity.batches(sequences, pad=0)
    assert sum(int((labels != perplexity.IGNORED).sum()) for _, labels in made) == sum(map(len, sequences))
    assert all(ids.numel() <= perplexity.BATCH_TOKENS or len(ids) == 1 for ids, _ in made)


def test_an_arm_replaces_the_experts_and_the_base_restores_them(model: torch.nn.Module) -> None:
    """Each arm starts from the original weights: errors of one must not add to the next."""
    weights = perplexity.expert_weights(model)
    assert len(weights) == 4
    originals = [parameter.detach().clone() for parameter, _ in weights]
    base = perplexity.apply_arm(perplexity.Arm("base"), weights, originals)
    stored = perplexity.apply_arm(perplexity.Arm("four", (32, 16)), weights, originals)
    assert stored < base / 2
    for (parameter, _), original in zip(weights, originals, strict=True):
        error = (parameter - original).abs().max() / original.abs().max()
        assert 0 < error < 0.2
    perplexity.apply_arm(perplexity.Arm("base"), weights, originals)
    assert all(torch.equal(p, o) for (p, _), o in zip(weights, originals, strict=True))


def test_a_model_without_routed_experts_is_refused() -> None:
    """Every arm would show BF16's perplexity."""
    with pytest.raises(ValueError, match="no fused routed experts"):
        perplexity.expert_weights(torch.nn.Linear(8, 8))


def test_measuring_one_row_again_keeps_the_others_of_the_same_texts() -> None:
    """A change of the quantiser touches some rows; those on fewer texts cannot stand in the same table."""
    stored = [{"name": "default", "tokens": 9}, {"name": "group 64", "tokens": 5}, {"name": "BF16", "tokens": 9}]
    fresh = [{"name": "default", "tokens": 9, "new": True}, {"name": "group 32", "tokens": 9}]
    merged = perplexity.merge(stored, fresh)
    assert [row["name"] for row in merged] == ["BF16", "group 32", "default"]
    assert merged[2]["new"]


def test_missing_model_names_the_command_that_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is not in the repository."""
    assert perplexity.main(["--model", str(tmp_path)]) == 1
    assert "examples/smollm2_as_moe.py" in capsys.readouterr().err


def test_readme_shows_the_stored_results() -> None:
    """Figures in README come from the results file, row by row."""
    results = json.loads(perplexity.RESULTS.read_text())
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert perplexity.markdown(results) in readme
    by_name = {row["name"]: row["perplexity"] for row in results["rows"]}
    assert by_name["group 32"] / by_name["BF16"] == pytest.approx(1, abs=0.003)
