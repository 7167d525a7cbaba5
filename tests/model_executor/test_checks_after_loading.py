"""What a freshly loaded model is held to."""

from __future__ import annotations

import logging

import pytest
import torch

from vllm_ext.model_executor.quantization import W4A16GroupedConfig


def test_whole_model_without_routed_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Identity has no routed experts to quantise.*drop the flag"):
        W4A16GroupedConfig().check_loaded(torch.nn.Identity())


def test_pipeline_stage_of_dense_layers_is_let_through_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The first layers of DeepSeek-like models are dense: a stage that holds only those is no mistake."""
    logger = logging.getLogger("vllm.vllm_ext.quantization")
    logger.addHandler(caplog.handler)
    try:
        W4A16GroupedConfig().check_loaded(torch.nn.Identity(), whole=False)
    finally:
        logger.removeHandler(caplog.handler)
    assert "no routed experts in this pipeline stage" in caplog.text


@pytest.mark.parametrize("whole", [True, False])
def test_experts_that_got_no_weights_are_refused_in_any_stage(whole: bool) -> None:
    config = W4A16GroupedConfig()
    config.report.expected = {"layers.0.mlp.experts", "layers.1.mlp.experts"}
    config.report.add("layers.0.mlp.experts", 8, 16, 4)
    with pytest.raises(ValueError, match=r"1 of 2 layers.*first layers.1.mlp.experts"):
        config.check_loaded(torch.nn.Identity(), whole=whole)
