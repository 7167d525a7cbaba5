"""Fixtures of the quantisation tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoints as made
import torch


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Build the layout `kind` with `layers` layers, one shard a layer; returns its folder."""

    def build(
        kind: str = "per_expert", layers: int = 2, name: str = "src", dtype: torch.dtype = torch.bfloat16
    ) -> Path:
        config, make = made.LAYOUTS[kind]
        shards = [{**make(i, made.expert_weights(i, dtype)), **made.dense(i)} for i in range(layers)]
        shards[-1]["lm_head.weight"] = torch.randn(32, made.HIDDEN).bfloat16()
        return made.write_checkpoint(tmp_path / name, config, shards)

    return build
