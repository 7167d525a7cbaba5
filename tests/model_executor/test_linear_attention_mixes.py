"""Random request mixes through real vLLM: what ha_npu answers and leaves in the cache equals what vLLM's kernels do.

States of recurrent layers are where serving engines break: a second chunk that starts from zero or from a neighbour's
state, a prefix block with the state of another boundary, a slot that a preempted request left behind. Which of these a
schedule meets depends on how lengths, budgets and arrivals fall together, so they are drawn (`request_mixes`).
VLLM_EXT_REQUEST_MIXES=500 draws as many of each kind instead of a few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "DEBUG",
}
KDA_ENVIRONMENT = {"VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_MLA_DISABLE": "1"}
EXAMPLES = {"gdn": 45, "kda": 30, "olmo": 30, "tensor-parallel": 6, "kda-triton": 2}


def run(kind, folder, **environment):
    """What request_mix_runner found, and its log."""
    pytest.importorskip("vllm")
    asked = os.environ.get("VLLM_EXT_REQUEST_MIXES")
    examples = int(asked) if asked and kind in ("gdn", "kda", "olmo") else EXAMPLES[kind]
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("request_mix_runner.py")), kind, "result.json", str(examples)],
        env={**os.environ, **ENVIRONMENT, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240 + 4 * examples,
    )
    assert process.returncode == 0, process.stdout[-6000:]
    return json.loads((folder / "result.json").read_text()), process.stdout


@pytest.fixture(scope="module", params=["gdn", "kda", "olmo"])
def found(request, tmp_path_factory):
    environment = KDA_ENVIRONMENT if request.param == "kda" else {}
    return run(request.param, tmp_path_factory.mktemp(request.param), **environment)


def test_tokens_and_every_stored_state_equal_vllms_in_random_mixes(found):
    assert found[0]["disagreements"] == {}


def test_the_mixes_met_every_situation(found):
    """Otherwise agreement says nothing about it."""
    met = {name: entry["situations"] for name, entry in found[0]["configurations"].items()}
    for name, entry in found[0]["configurations"].items():
        assert entry["mixes"] >= 5, name
        assert met[name]["continued_chunks"] > 0
        assert entry["states_compared"] > 20
        assert entry["tokens_compared"] > 20
    assert met["prefix"]["prefix_hits"] > 0
    assert met["speculative"]["one_plus_num_spec"] > 0
    for situation in ("one_token", "preempting_mixes", "aborted"):
        assert sum(entry[situation] for entry in met.values()) > 0, situation


def test_the_comparison_notices_kernels_that_lose_or_swap_states(found):
    assert found[0]["noticed"]["forget_initial_state"] > 0
    assert found[0]["noticed"]["swap_initial_states"] > 0


def test_refused_sequence_ends_its_own_request_with_the_reason_and_leaves_no_cached_block(found):
    for name in ("plain", "prefix", "asynchronous"):
        assert found[0]["refusals"][name] == [], name


def test_refused_sequence_is_served_by_vllm_where_a_fallback_was_asked_for(found):
    assert found[0]["refusals"]["fallback"] == []
    assert "vLLM's own kernel takes over for this layer where that happens" in found[1]


def test_debug_log_names_kernel_states_and_mapping_once_a_layer(found):
    lines = [line for line in found[1].splitlines() if "prefill by vllm_ext backend" in line and "mapping: " in line]
    engines = 5  # with ha_npu
    assert len(lines) == 3 * engines
    assert all("torch.float32 states" in line and "the first choice on this device" in line for line in lines)


def test_two_ranks_agree_in_random_mixes_and_end_a_refused_request_alone(tmp_path):
    found, _ = run("tensor-parallel", tmp_path, VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert found["first_failures"] == []
    assert found["tokens_compared"] > 20
    assert found["states_compared"] > 20
    assert found["situations"]["preempting_mixes"] > 0
    assert found["refused"] == []


def test_triton_kernels_serve_as_the_definition_does(tmp_path):
    """What a GPU runs, under Triton's interpreter: layouts, slots and continuation are those of a GPU's calls."""
    pytest.importorskip("triton")
    found, log = run("kda-triton", tmp_path, **KDA_ENVIRONMENT, TRITON_INTERPRET="1")
    assert "model.layers.0.self_attn: kda prefill by vllm_ext backend triton" in log
    for name, entry in found.items():
        assert entry["first_failures"] == [], name
        assert entry["states_compared"] > 0, name
    assert found["plain"]["situations"]["continued_chunks"] > 0
