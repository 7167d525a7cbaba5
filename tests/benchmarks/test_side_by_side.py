"""benchmarks/gpu_checks/serve_engines.py: engines side by side, one of which may fail, hang or say the wrong thing."""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu_checks"


@pytest.fixture(scope="module")
def engines():
    sys.path.insert(0, str(SCRIPTS))
    import serve_engines

    return serve_engines


def answering(text: str, result: Path) -> None:
    print(text, flush=True)
    result.write_text(json.dumps({"text": text}))


def failing(result: Path) -> None:
    raise RuntimeError("no such engine")


def hanging(result: Path) -> None:
    time.sleep(600)


@pytest.mark.vllm
def test_one_engine_that_fails_or_hangs_costs_the_others_nothing(engines, tmp_path):
    pytest.importorskip("vllm")
    jobs = {
        "fails": (failing,),
        "hangs": (hanging,),
        "answers": (answering, "hello"),
        "says something else": (answering, "hello"),
    }
    seen = []
    args = argparse.Namespace(at_once=2, each=30, timeout=100)
    says = {"says something else": "goodbye"}
    engines.side_by_side(jobs, says, tmp_path, args, lambda answers: seen.append(dict(answers)))
    assert [len(answers) for answers in seen] == [1, 2, 3, 4]
    answers = seen[-1]
    assert "no such engine" in answers["fails"]["error"]
    assert "error" in answers["hangs"]
    assert answers["answers"] == {"text": "hello"}
    assert "does not say 'goodbye'" in answers["says something else"]["error"]


def test_engines_differ_where_the_mean_or_a_sure_token_does(engines):
    plain = {"log_probs": [-1.0, -2.0], "tokens": [[1, 2]], "margins": [[1.0, 0.1]]}
    assert engines.compare(plain, plain, 0.08)["ok"]
    assert engines.compare(plain, {**plain, "tokens": [[1, 3]]}, 0.08)["ok"]
    assert not engines.compare(plain, {**plain, "tokens": [[3, 2]]}, 0.08)["ok"]
    far = {**plain, "log_probs": [-1.0, -2.3]}
    assert not engines.compare(plain, far, 0.08)["ok"]
    assert engines.compare(plain, far, 0.25)["ok"]
    assert not engines.compare(plain, {"error": "late"}, 0.25)["ok"]


def answered(tokens: list[int], cached: int, log_probs: list[float] | None) -> types.SimpleNamespace:
    """An answer as vLLM gives it; without `log_probs`, to a request that did not ask for the prompt's."""
    entry = {token: types.SimpleNamespace(logprob=-float(token)) for token in (1, 2, 3)}
    asked = log_probs and [None, *({5: types.SimpleNamespace(logprob=one)} for one in log_probs)]
    return types.SimpleNamespace(
        prompt_token_ids=[5] * (1 + len(log_probs or ())),
        prompt_logprobs=asked,
        num_cached_tokens=cached,
        outputs=[types.SimpleNamespace(token_ids=tokens, logprobs=[entry] * len(tokens))],
    )


def test_what_is_compared_of_a_prefix_cache_came_through_it(engines):
    """A request for its prompt's log-probabilities does not read the cache: its tokens said nothing of it."""
    read = [answered([3, 3], 0, [-0.5, -0.25])]
    found = engines.through_the_cache([answered([1, 2], 48, None)], read)
    assert found == {"tokens": [[1, 2]], "margins": [[1.0, 1.0]], "log_probs": [-0.5, -0.25], "cached_tokens": 48}
    with pytest.raises(RuntimeError, match="no prompt was found in the prefix cache"):
        engines.through_the_cache([answered([1, 2], 0, None)], read)


def test_stacks_of_a_slow_engine_name_its_threads_and_leave_it_running(engines, capfd):
    """faulthandler's dump ended engines whose frames torch.compile had put in."""
    import threading

    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait, name="the slow one")
    thread.start()
    try:
        engines.engine_processes.print_stacks()
    finally:
        waiting.set()
        thread.join()
    said = capfd.readouterr().err
    assert "thread the slow one:" in said
    assert "waiting.wait" in said or "in wait" in said
    assert "test_stacks_of_a_slow_engine" in said


def test_a_speculation_that_drafts_or_accepts_nothing_is_none(engines):
    def metrics(drafted: int, accepted: int) -> list[types.SimpleNamespace]:
        values = {"draft": drafted, "accepted": accepted}
        counted = [
            types.SimpleNamespace(name=f"vllm:spec_decode_num_{one}_tokens", value=n) for one, n in values.items()
        ]
        return [types.SimpleNamespace(name="vllm:a_histogram"), *counted]

    assert engines.drafts_of(metrics(40, 12)) == {"drafts": {"draft": 40, "accepted": 12}}
    for none in (metrics(0, 0), metrics(40, 0), []):
        with pytest.raises(RuntimeError, match="tokens were drafted"):
            engines.drafts_of(none)


@pytest.mark.vllm
def test_an_adapter_that_moves_nothing_is_no_check_of_adapters(engines, monkeypatch):
    monkeypatch.setattr(engines, "write_adapter", lambda model, target: target)
    monkeypatch.setattr(engines, "sampling", lambda **asked: None)

    class Served:
        moved = 0.0

        def generate(self, asked, sampling, use_tqdm, lora_request=None):
            by = self.moved if lora_request else 0.0
            entry = {token: types.SimpleNamespace(logprob=-float(token) - by) for token in (3, 1, 2)}
            chosen = types.SimpleNamespace(token_ids=[1], logprobs=[entry])
            return [types.SimpleNamespace(prompt_logprobs=None, outputs=[chosen])]

    served = Served()
    with pytest.raises(RuntimeError, match=r"moves log-probabilities by 0\.000 only"):
        engines.through_an_adapter(served, Path("model"))
    served.moved = 0.75
    found = engines.through_an_adapter(served, Path("model"))
    assert found["log_probs"] == [-1.75, -2.75, -3.75], "in the order of the tokens"
    assert found["moved by the adapter"] == 0.75


def test_what_is_made_of_a_model_is_written_with_what_it_is_made_of(engines, tmp_path):
    """The merged model has the adapter in its attention, and nothing else of it changed."""
    import engine_models
    from safetensors.torch import load_file

    keys = {"qwen3 merged", "hybrid with a draft packed"}
    made = engine_models.write_models(keys, tmp_path)
    assert made.keys() == {*keys, "qwen3", "hybrid", "hybrid with a draft"}
    tensors = {key: load_file(Path(path) / "model.safetensors") for key, path in made.items()}
    changed = {n for n, one in tensors["qwen3"].items() if not one.equal(tensors["qwen3 merged"][n])}
    assert changed == {f"model.layers.{layer}.self_attn.{m}.weight" for layer in (0, 1) for m in ("q_proj", "v_proj")}
    adapter = load_file(engine_models.write_adapter(tmp_path / "qwen3", tmp_path / "a") / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    up, down = (adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "BA")
    moved = tensors["qwen3 merged"][f"{name}.weight"].double() - tensors["qwen3"][f"{name}.weight"].double()
    # The merged weights, near 1 in size, are rounded to BF16.
    assert (moved - 2 * up @ down).abs().max() < 2**-8
    draft = [name for name in tensors["hybrid with a draft packed"] if name.startswith("mtp.layers.0.mlp.experts.")]
    assert any(name.endswith("weight_packed") for name in draft)
    assert engine_models.options_of_model("hybrid with a draft packed") == engine_models.options_of_model("hybrid")
