"""What a freshly loaded model is held to."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_ext.model_executor.quantization import W4A16GroupedConfig


def test_whole_model_without_routed_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Identity has no routed experts to quantise.*drop the flag"):
        W4A16GroupedConfig().check_loaded(torch.nn.Identity())


def test_pipeline_stage_of_dense_layers_is_let_through_with_a_warning(vllm_log: pytest.LogCaptureFixture) -> None:
    """The first layers of DeepSeek-like models are dense: a stage that holds only those is no mistake."""
    W4A16GroupedConfig().check_loaded(torch.nn.Identity(), whole=False)
    assert "no routed experts in this pipeline stage" in vllm_log.text


def test_summary_counts_experts_layers_and_bytes() -> None:
    """C07: the one line by which a user sees that nothing stayed in 16 bits."""
    report = W4A16GroupedConfig().report
    assert not report.complete, "nothing was to be quantised"
    report.expected = {"a", "b"}
    report.add("a", 8, 3 << 20, 1 << 20)
    assert not report.complete
    report.add("b", 8, 5 << 20, 1 << 20)
    assert report.complete
    assert report.summary("triton") == (
        "w4a16-grouped: 16 routed experts in 2 layers, 8.0 MiB in 16 bits -> 2.0 MiB in 4 bits (25.0%), backend triton"
    )


@pytest.mark.parametrize("whole", [True, False])
def test_experts_that_got_no_weights_are_refused_in_any_stage(whole: bool) -> None:
    config = W4A16GroupedConfig()
    config.report.expected = {"layers.0.mlp.experts", "layers.1.mlp.experts"}
    config.report.add("layers.0.mlp.experts", 8, 16, 4)
    with pytest.raises(ValueError, match=r"1 of 2 layers.*first layers.1.mlp.experts"):
        config.check_loaded(torch.nn.Identity(), whole=whole)


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog, which vLLM's own handler keeps records from."""
    logger = logging.getLogger("vllm.vllm_ext.quantization")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_ignore_pattern_that_matches_nothing_is_told(vllm_log: pytest.LogCaptureFixture) -> None:
    """A typing error left the layer in 4 bits without a word."""
    config = W4A16GroupedConfig()
    config.report.expected = {"model.layers.1.mlp.experts"}
    config.report.ignored = {"model.layers.0.mlp.experts"}
    config.report.add("model.layers.1.mlp.experts", 8, 16, 4)
    config.ignore = ("layers.0", "layers.7", "re:.*layers.1.*")
    config.check_loaded(torch.nn.Identity())
    assert "ignore ['layers.7'] matches no layer of routed experts, such as model.layers.0" in vllm_log.text
    vllm_log.clear()
    config.check_loaded(torch.nn.Identity(), whole=False)  # another stage may have it
    assert not vllm_log.records


@pytest.mark.vllm
def test_ignore_patterns_are_read_in_the_checkpoints_names_and_in_vllms() -> None:
    """vLLM names some models' modules otherwise than their checkpoint does, and users write what they see in files."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."})
    config = W4A16GroupedConfig(dense=types.SimpleNamespace(apply_vllm_mapper=lambda given: seen.append(given)))
    seen: list[Any] = []
    name = "language_model.model.layers.3.mlp.experts"
    checkpoints, ours = ("model.language_model.layers.3.mlp.experts",), ("language_model.model.layers.3",)
    assert not config._is_ignored(name, checkpoints)
    config.apply_vllm_mapper(mapper)
    assert config._is_ignored(name, checkpoints)
    assert config._is_ignored(name, ours)
    assert not config._is_ignored(name, ("model.language_model.layers.4.mlp.experts",))
    assert seen == [mapper], "vLLM's configuration of the dense layers has to know the names too"


@pytest.mark.vllm
@pytest.mark.parametrize(("method", "told"), [(None, "in 16 bits"), ("fp8", "as fp8"), ("w4a16-grouped", None)])
def test_scheme_options_without_the_method_are_told(vllm_log: Any, method: str | None, told: str | None) -> None:
    """--additional-config with group sizes and no --quantization served BF16 and said nothing."""
    pytest.importorskip("vllm")
    from vllm_ext.model_executor.engine_args import warn_of_unused_options

    options = {"vllm_ext": {"group_size_w13": 32, "batch_invariant": True}}
    quant_config = types.SimpleNamespace(get_name=lambda: method) if method else None
    warn_of_unused_options(types.SimpleNamespace(additional_config=options, quant_config=quant_config))
    if told is None:
        assert not vllm_log.records
    else:
        assert (
            f"options group_size_w13 have no effect without --quantization w4a16-grouped; the model is served {told}"
            in (vllm_log.text)
        )


@pytest.mark.vllm
@pytest.mark.parametrize("given", [{}, {"linear_attn_backend": "ha_npu"}])
def test_option_of_linear_attention_without_ha_npu_is_told(vllm_log: Any, given: dict[str, str]) -> None:
    pytest.importorskip("vllm")
    from vllm_ext.model_executor.engine_args import warn_of_unused_options

    options = {"vllm_ext": {"on_kernel_error": "fallback", **given}}
    warn_of_unused_options(types.SimpleNamespace(additional_config=options, quant_config=None))
    told = "on_kernel_error has no effect without --attention-backend ha_npu" in vllm_log.text
    assert told is not bool(given)
    assert len({record.getMessage() for record in vllm_log.records}) == (0 if given else 1)


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
    stage = served(W4A16GroupedConfig())
    stage.parallel_config.pipeline_parallel_size = 2
    assert isinstance(loader.load_model(stage, "target"), torch.nn.Identity), "a stage of dense layers"
    assert isinstance(loader.load_model(served(None), "target"), torch.nn.Identity)
