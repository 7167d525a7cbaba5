"""Options that stand where nobody reads them are refused: vLLM takes any key of `additional_config` without a word."""

from __future__ import annotations

import types
from typing import Any

import pytest

from vllm_ext.model_executor.engine_args import check_ranks, move_quantization_config
from vllm_ext.options import Options, parse_options


@pytest.mark.parametrize("name", ["vllm-ext", "vllmext", "VLLM_EXT", "Vllm-Ext"])
def test_namespace_in_another_spelling_is_refused(name: str) -> None:
    """`{"vllm-ext": {"group_size_w13": 32}}` served the default groups and said nothing."""
    with pytest.raises(ValueError, match=rf"'{name}' is read by nobody there; .* under \"vllm_ext\""):
        parse_options({name: {"group_size_w13": 32}})


@pytest.mark.parametrize("key", ["group_size_w13", "group_size_w2", "linear_attn_backend", "on_kernel_error"])
def test_option_outside_the_namespace_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is read by nobody there"):
        parse_options({key: 32, "vllm_ext": {"group_size_w2": 32}})


@pytest.mark.parametrize("theirs", [{}, {"gdn_prefill_backend": "triton"}, {"ignore": []}, {"method": 1}, {"ext": {}}])
def test_keys_of_others_are_left_alone(theirs: dict[str, Any]) -> None:
    """The dictionary is shared: vLLM's own layers and other platforms' plugins read theirs from it."""
    assert parse_options(theirs) == Options()
    assert parse_options({**theirs, "vllm_ext": {"moe_backend": "cpu"}}) == Options(moe_backend="cpu")


@pytest.mark.parametrize("method", [None, "fp8"])
def test_schemes_options_without_the_method_name_the_flag_that_is_missing(method: str | None) -> None:
    """vLLM's own schema answers `Unexpected keyword argument`, which says nothing of --quantization."""
    given = types.SimpleNamespace(quantization=method, quantization_config={"group_size_w13": 32, "ignore": []})
    with pytest.raises(ValueError, match=r"'group_size_w13' belongs to w4a16-grouped.*add --quantization w4a16"):
        move_quantization_config(given)


@pytest.mark.parametrize("theirs", [None, "fp8", {"ignore": ["lm_head"]}, {"linear": "fp8", "moe": "fp8"}])
def test_vllms_own_quantization_config_stays(theirs: Any) -> None:
    given = types.SimpleNamespace(quantization="online", quantization_config=theirs)
    move_quantization_config(given)
    assert given.quantization_config == theirs


def configuration(
    size: Any, tensor: int, data: int = 1, *, by_expert: bool = False, method: str = "w4a16-grouped"
) -> Any:
    """What `check_ranks` reads of vLLM's configuration."""
    return types.SimpleNamespace(
        quant_config=types.SimpleNamespace(get_name=lambda: method),
        model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace(moe_intermediate_size=size)),
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=tensor, data_parallel_size=data, enable_expert_parallel=by_expert
        ),
    )


@pytest.mark.parametrize(("size", "tensor", "data"), [(99, 2, 1), (1408, 3, 1), (90, 2, 2)])
def test_ranks_that_cannot_share_an_expert_are_told_by_number(size: int, tensor: int, data: int) -> None:
    """vLLM said `AssertionError`, and nothing else, from each worker."""
    said = rf"{tensor * data} ranks \({tensor} by tensor, {data} by data\).* {size}; .*--enable-expert-parallel"
    with pytest.raises(ValueError, match=said):
        check_ranks(configuration(size, tensor, data))
    check_ranks(configuration(size, tensor, data, by_expert=True))
    check_ranks(configuration(size, tensor, data, method="fp8"))


@pytest.mark.parametrize(("size", "tensor"), [(1856, 8), (704, 2), (99, 1), (None, 7)])
def test_ranks_that_share_experts_evenly_are_let_through(size: int | None, tensor: int) -> None:
    """Groups need not divide a rank's part: 1856 over eight is 232."""
    check_ranks(configuration(size, tensor))
