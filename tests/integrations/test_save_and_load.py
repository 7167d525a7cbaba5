"""`save_pretrained` writes a w4a16-grouped checkpoint, and `from_pretrained` reads one: ours and the packer's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import transformers
from safetensors.torch import load_file

from vllm_ext.integrations.hf_quantizer import match_layers
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.integrations.transformers import W4A16Config, quantize_experts
from vllm_ext.quantization import Scheme
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.pack import pack_checkpoint
from vllm_ext.quantization.packed_source import find_packed
from vllm_ext.quantization.tensor_file import CheckpointError

IDS = (torch.arange(24).view(1, 24) * 5) % 90
GROUPS = (16, 8)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def experts(model: Any) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe", "llama4"])
def test_a_saved_model_loads_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Codes, scales and zero points must survive the way to the disk and back; a bias must keep its order."""
    model = getattr(tiny, family)().bfloat16()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for one, two in zip(experts(model), experts(loaded), strict=True):
        for first, second in zip(one.quantized(), two.quantized(), strict=True):
            assert torch.equal(first.packed, second.packed)
            assert torch.equal(first.scale, second.scale)
            assert first.zero_point is not None
            assert second.zero_point is not None
            assert torch.equal(first.zero_point, second.zero_point)
    # The loaded model's rotary buffers are FP32, as from_pretrained keeps them.
    fresh = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(fresh))
    assert float((logits(loaded).float() - logits(model).float()).norm() / logits(model).float().norm()) < 0.05


def test_the_saved_checkpoint_is_the_packers_format_under_hub_names(tmp_path: Path) -> None:
    """vLLM and the packer's tools read checkpoints by the names model hubs use, not by transformers' module names."""
    model = tiny.mixtral().bfloat16()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight_packed" in names
    assert not any(name.endswith(("gate_up_proj", "down_proj")) for name in names)
    layers = find_packed(Checkpoint.open(tmp_path))
    assert [len(projections) for projections in layers.values()] == [12, 12]
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert Scheme.from_dict(config) == Scheme(group_size_w13=16, group_size_w2=8)


def test_a_checkpoint_of_the_packer_loads(tmp_path: Path) -> None:
    """`vllm-ext quantize` runs where there is no memory for the model; transformers must read what it wrote."""
    source, packed = tmp_path / "source", tmp_path / "packed"
    model = tiny.qwen3_moe().bfloat16()
    model.save_pretrained(source)
    pack_checkpoint(source, packed, Scheme(group_size_w13=16, group_size_w2=8), progress=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(packed).eval()
    stock = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    quantize_experts(stock, group_sizes=GROUPS, progress=False)
    assert torch.equal(logits(loaded), logits(stock))


def test_tied_experts_are_saved_once_and_tied_again(tmp_path: Path) -> None:
    model = tiny.diffusion_gemma(torch.bfloat16)
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if "weight_packed" in name]
    assert len(names) == 3 * 8 * 3
    assert not any("encoder" in name for name in names)
    loaded = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path).eval()
    for index, layer in enumerate(loaded.model.decoder.layers):
        assert isinstance(layer.experts, QuantizedExperts)
        assert loaded.model.encoder.language_model.layers[index].experts is layer.experts


def test_ignored_layers_are_saved_and_loaded_in_16_bits(tmp_path: Path) -> None:
    model = tiny.qwen3_moe().bfloat16()
    quantize_experts(model, ignore=["layers.0"], group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    kept, packed = (layer.mlp.experts for layer in loaded.model.layers)
    assert torch.equal(kept.gate_up_proj, model.model.layers[0].mlp.experts.gate_up_proj)
    assert isinstance(packed, QuantizedExperts)


def test_loading_says_nothing_of_unexpected_or_missing_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning about every expert would bury the one that matters."""
    model = tiny.mixtral().bfloat16()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        _, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert "experts" not in caplog.text


def test_16_bit_checkpoints_are_quantised_on_request(tmp_path: Path) -> None:
    model = tiny.mixtral().bfloat16()
    model.save_pretrained(tmp_path)
    options = W4A16Config(group_size_w13=16, group_size_w2=8, method="minmax")
    loaded = type(model).from_pretrained(tmp_path, quantization_config=options)
    assert len(experts(loaded)) == 2
    assert loaded.config.quantization_config.method == "minmax"


def test_a_missing_layer_and_wrong_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts: the checkpoint holds no packed"):
        match_layers(["model.layers.1.mlp.experts"], ["model.layers.0.mlp.experts"])
    model = tiny.mixtral().bfloat16()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(CheckpointError, match=r"holds \[4, 96, 64\].*asks for \[4, 80, 64\]"):
        type(model).from_pretrained(tmp_path)


def test_device_maps_and_their_hooks_are_kept(tmp_path: Path) -> None:
    """A model spread by a device_map moves its inputs with hooks on modules; replaced ones must have them too."""
    hooks = pytest.importorskip("accelerate.hooks")
    tiny.mixtral().bfloat16().save_pretrained(tmp_path / "source")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", device_map={"": "cpu"})
    for layer in model.model.layers:
        hooks.add_hook_to_module(layer.mlp.experts, hooks.AlignDevicesHook("cpu", io_same_device=True))
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    assert all(hasattr(layer.mlp.experts, "_hf_hook") for layer in model.model.layers)
    model.save_pretrained(tmp_path / "packed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map="auto")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("family", ["switch", "nllb"])
def test_what_could_not_be_loaded_again_is_not_saved(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that nobody can load looks like a saved model until the model is gone."""
    model = getattr(tiny, family)()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "model")
    assert "dictionaries of experts" in caplog.text
    assert not list(tmp_path.glob("model/*.safetensors"))
