"""vLLM's OLMo-hybrid and Ling 3.0 layers around our prefill, on the CPU.

A whole OLMo-hybrid model: `test_linear_attention_mixes`. Ling 3.0 has not been served as a whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["olmo", "bailing"])
def found(request, tiny_model, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp(request.param)
    runner = Path(__file__).with_name("other_layers_runner.py")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(runner), request.param, tiny_model("qwen3-next"), "result.json"],
        env={**os.environ, **environment, "VLLM_LOGGING_LEVEL": "DEBUG"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return json.loads((folder / "result.json").read_text()), process.stdout + process.stderr


def test_layer_prefills_a_prompt_and_stores_its_state(found):
    run, log = found
    assert run["prefill"] == "LayerPrefill"
    assert "prefill by vllm_ext backend cpu" in log
    assert run["whole"] < 1e-2  # the convolution's BF16 output rounds either way
    assert run["whole_state"] < 1e-2
    assert run["untouched"], "another request's slot was written"


def test_layer_continues_a_prompt_beside_other_requests(found):
    assert found[0]["pieces"] < 1e-3
    assert found[0]["pieces_state"] < 1e-2
