"""Every family's experts in 4 bits compute what their dequantised weights give, through the quantised weights (C22)."""

from __future__ import annotations

import copy

import pytest
import tiny_families as tiny
import torch
from torch import nn

from vllm_ext.integrations.transformers import quantize_experts

FAMILIES = tiny.families()


def holder(experts: nn.Module) -> nn.Module:
    layer = nn.Module()
    layer.experts = experts
    return layer


def test_all_decorated_families_are_here() -> None:
    """A family that transformers adds must be tested without anyone thinking of it."""
    assert len(FAMILIES) > 55
    assert {name for _, name in FAMILIES} >= {"MixtralExperts", "GptOssExperts", "NemotronHExperts"}


@pytest.mark.parametrize(("module_name", "class_name"), FAMILIES, ids=[name for _, name in FAMILIES])
def test_forward_uses_the_new_weights(module_name: str, class_name: str) -> None:
    """A module left with its original forward, or read in the wrong layout, would pass a test of shapes."""
    experts = tiny.make_experts(module_name, class_name)
    x, ids, weights = tiny.inputs()
    stock = copy.deepcopy(experts)
    with torch.no_grad():
        before = stock(x, ids, weights)
    model = holder(experts)
    report = quantize_experts(model, group_sizes=(16, 8), progress=False)
    (layer,) = report.layers
    assert (layer.experts, layer.hidden_size, layer.intermediate_size) == (tiny.EXPERTS, tiny.HIDDEN, tiny.INTER)
    assert not [n for n, _ in experts.named_parameters() if "bias" not in n], "16-bit weights are still held"
    tiny.write_back(stock, *(weight.dequantize(torch.float32) for weight in model.experts.quantized()))
    with torch.no_grad():
        wanted, found = stock(x, ids, weights), model.experts(x, ids, weights)
    assert found.shape == wanted.shape
    # The CPU kernel may hold activations in BF16 where torch's int4 product does.
    error = float((found - wanted).norm() / wanted.norm())
    changed = float((wanted - before).norm() / before.norm())
    assert error < 1e-2 < 3 * changed, (error, changed)
    assert error < changed / 3
    # `write_back` undoes what reading did: a gate taken for an up projection shows against the first weights only.
    assert changed < 0.4
    with torch.no_grad():
        for buffer in model.experts.buffers():
            if buffer.dtype in (torch.uint8, torch.int16, torch.int32):
                buffer.zero_()
        assert float((model.experts(x, ids, weights) - found).norm() / found.norm()) > 0.1, "the weights are not used"


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "DeepseekV4Experts"])
def test_a_foreign_expert_adds_nothing(name: str) -> None:
    """Hugging Face's expert parallelism marks experts of other ranks with index == num_experts."""
    experts = tiny.make_experts(*next(family for family in FAMILIES if family[1] == name))
    model = holder(experts)
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    x, ids, weights = tiny.inputs()
    foreign, absent = ids.clone(), weights.clone()
    foreign[2, 1], absent[2, 1] = tiny.EXPERTS, 0.0
    with torch.no_grad():
        torch.testing.assert_close(
            model.experts(x, foreign, weights), model.experts(x, ids, absent), rtol=1e-5, atol=1e-5
        )
    assert foreign[2, 1] == tiny.EXPERTS


def test_identity_experts_hand_their_input_through() -> None:
    """LongCat-Flash: every index from the number of experts on, the first one included, returns the row itself."""
    experts = tiny.make_experts(*next(family for family in FAMILIES if family[1] == "LongcatFlashExperts"))
    stock, model = copy.deepcopy(experts), holder(experts)
    quantize_experts(model, group_sizes=(16, 8), progress=False)
    tiny.write_back(stock, *(weight.dequantize(torch.float32) for weight in model.experts.quantized()))
    x, ids, weights = tiny.inputs()
    ids[1, 0], ids[3, 1] = tiny.EXPERTS, tiny.EXPERTS + 1
    with torch.no_grad():
        wanted, found = stock(x, ids, weights), model.experts(x, ids, weights)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2


def test_training_through_the_experts_is_refused_with_the_reason() -> None:
    """A gradient that silently vanishes would train an adapter below the experts on nothing."""
    model = holder(tiny.make_experts(*next(f for f in FAMILIES if f[1] == "MixtralExperts")))
    quantize_experts(model, progress=False)
    x, ids, weights = tiny.inputs()
    out = model.experts(x.requires_grad_(), ids, weights)
    with pytest.raises(RuntimeError, match="have no backward"):
        out.sum().backward()
