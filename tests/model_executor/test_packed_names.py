"""Names of packed experts that a model's own loader does not know, and packed experts that nobody announced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_ext.model_executor.packed_names import known_names, split_fused
from vllm_ext.quantization import compressed_tensors, quantize_weight

EXPERTS, HIDDEN, INTER = 3, 64, 32
LAYER = "model.layers.2.mlp.experts"


def per_expert() -> dict[str, torch.Tensor]:
    """A layer's packed experts as separate tensors, gate and up different."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for expert in range(EXPERTS):
        for part, shape in (
            ("gate_proj", (INTER, HIDDEN)),
            ("up_proj", (INTER, HIDDEN)),
            ("down_proj", (HIDDEN, INTER)),
        ):
            weight = quantize_weight(torch.randn(shape, generator=generator).bfloat16(), 32, zero_point="int")
            found |= compressed_tensors.to_tensors(f"{LAYER}.{expert}.{part}", weight)
    return found


@pytest.mark.parametrize("stem", ["gate_up_proj.weight", "w13"])
def test_fused_tensors_become_what_separate_ones_are(stem: str) -> None:
    """C04: shapes too, which a checkpoint with fused tensors states for all experts at once."""
    separate = per_expert()
    fused: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(2)}
    for role in ("packed", "scale", "zero_point"):
        rows = [
            torch.cat([separate[f"{LAYER}.{expert}.{part}.weight_{role}"] for part in ("gate_proj", "up_proj")])
            for expert in range(EXPERTS)
        ]
        fused[f"{LAYER}.{stem}_{role}"] = torch.stack(rows)
    fused[f"{LAYER}.{stem}_shape"] = torch.tensor([EXPERTS, 2 * INTER, HIDDEN])
    found = dict(split_fused(fused.items()))
    assert found.pop("model.norm.weight") is fused["model.norm.weight"]
    gate, up = ("w1", "w3") if stem == "w13" else ("gate_proj", "up_proj")
    renamed = {name.replace("gate_proj", gate).replace("up_proj", up): one for name, one in separate.items()}
    wanted = {name: one for name, one in renamed.items() if "down_proj" not in name}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.vllm
@pytest.mark.parametrize("name", [f"{LAYER}.0.gate_proj.weight_packed", f"{LAYER}.gate_up_proj.weight_packed"])
def test_packed_experts_without_a_quantization_config_are_named(name: str) -> None:
    """vLLM's loader said that the layer had no parameter 'w2_weight_packed', and nothing of config.json."""
    pytest.importorskip("vllm")
    from vllm_ext.model_executor.moe_method import AtLoadMoEMethod

    model: Any = torch.nn.Module()
    plain = [("model.norm.weight", torch.ones(2)), (name, torch.ones(2))]
    assert list(known_names(plain, model)) == plain, "not our model"
    model.experts = torch.nn.Module()
    model.experts.quant_method = AtLoadMoEMethod.__new__(AtLoadMoEMethod)
    assert list(known_names(plain[:1], model)) == plain[:1]
    with pytest.raises(ValueError, match=rf"{name}: the checkpoint's experts are packed already.*restore the config"):
        list(known_names(plain, model))
