"""What a freshly loaded model is held to."""

from __future__ import annotations

import logging
import types
from typing import Any

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


@pytest.fixture
def loader() -> Any:
    """A wrapped loader that makes a model without experts, and the configuration it is called with."""
    pytest.importorskip("vllm")
    from vllm_ext.model_executor.hooks import wrap_load_model

    class BaseModelLoader:
        load_config = types.SimpleNamespace(load_format="auto")

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
            return torch.nn.Identity()

    wrap_load_model(types.SimpleNamespace(BaseModelLoader=BaseModelLoader))
    wrap_load_model(types.SimpleNamespace(BaseModelLoader=BaseModelLoader))
    return BaseModelLoader()


def served(quant_config: Any) -> Any:
    return types.SimpleNamespace(
        quant_config=quant_config,
        model_config="target",
        additional_config={},
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=1),
    )


@pytest.mark.vllm
@pytest.mark.parametrize("by_name", [True, False])
def test_served_model_is_checked_and_its_draft_is_not(loader: Any, by_name: bool) -> None:
    """A draft for speculation comes through the same loader with the same configuration, and has no experts."""
    config = served(W4A16GroupedConfig())
    with pytest.raises(ValueError, match="Identity has no routed experts"):
        loader.load_model(vllm_config=config, model_config="target") if by_name else loader.load_model(config, "target")
    assert isinstance(loader.load_model(vllm_config=config, model_config="draft"), torch.nn.Identity)
    assert isinstance(loader.load_model(served(None), "target"), torch.nn.Identity)
