"""`quantize_experts` on whole models: what changes, what does not, and every way experts are called."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from tiny_families import write_back
from torch import nn

from vllm_ext.integrations.expert_layouts import expert_children, weight_parameters
from vllm_ext.integrations.quantized_experts import QuantizedExperts
from vllm_ext.integrations.transformers import find_experts, quantize_experts

IDS = (torch.arange(40).view(2, 20) * 7) % 90
GROUPS = (16, 8)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    seq2seq = getattr(model.config, "is_encoder_decoder", False)
    with torch.no_grad():
        out = model(input_ids=ids, **({"decoder_input_ids": ids[:, :9]} if seq2seq else {}))
    return out.logits


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, _, parameter in weight_parameters(module)]


def give_dequantised(stock: Any, quantised: Any) -> None:
    """Put the dequantised weights of a quantised model into a 16-bit copy of what it was."""
    for name, module in find_experts(stock).items():
        new = quantised.get_submodule(name)
        experts = next(part for part in new.modules() if isinstance(part, QuantizedExperts))
        w13, w2 = (weight.dequantize(torch.float32) for weight in experts.quantized())
        if hasattr(module, "input_linear"):
            module.input_linear.weight.data.copy_(w13)
            module.output_linear.weight.data.copy_(w2)
        elif isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            for index, (_, expert) in enumerate(expert_children(module)):
                linears = [part for part in expert.children() if isinstance(part, nn.Linear)]
                parts = [*w13[index].split([m.out_features for m in linears[:-1]]), w2[index]]
                for linear, part in zip(linears, parts, strict=True):
                    linear.weight.data.copy_(part)
        elif hasattr(module, "fc1"):
            module.fc1.weight.data.copy_(w13.transpose(1, 2))
            module.fc2.weight.data.copy_(w2.transpose(1, 2))
        elif type(module).__name__ == "Llama4TextExperts":
            module.gate_up_proj.data.copy_(w13.transpose(1, 2))
            module.down_proj.data.copy_(w2.transpose(1, 2))
        else:
            write_back(module, w13, w2)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "jetmoe", "aria", "switch", "nllb"])
def test_logits_are_those_of_the_dequantised_weights(family: str) -> None:
    """Called with routing, sorted by expert, one by one, by a dictionary of modules: the whole forward must agree."""
    model = getattr(tiny, family)()
    stock = copy.deepcopy(model)
    before = logits(model)
    report = quantize_experts(model, group_sizes=GROUPS, progress=False)
    give_dequantised(stock, model)
    wanted, found = logits(stock), logits(model)
    changed = difference(wanted, before)
    assert difference(found, wanted) < min(1e-2, changed / 3), (difference(found, wanted), changed)
    assert report.bytes_before == sum(p.nbytes for m in find_experts(stock).values() for p in matrices(m))
    # ReLU has no kernel: Switch and NLLB hold 4 bits and dequantise an expert for its rows.
    runs = {layer.runs for layer in report.layers}
    assert runs == ({"dequantised"} if family in ("switch", "nllb") else {"kernel"})


def test_a_list_of_experts_keeps_its_parents_loop() -> None:
    """Remote code and older families hold experts as modules and loop over them."""
    block = tiny.seeded(tiny.ListedExperts())
    stock = copy.deepcopy(block)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    quantize_experts(block, group_sizes=GROUPS, progress=False)
    give_dequantised(stock, block)
    with torch.no_grad():
        assert difference(block(x), stock(x)) < 1e-2
    assert len(block.experts) == 4


def test_layers_are_freed_one_by_one() -> None:
    """The whole model in both precisions at once is what a machine that needs 4 bits cannot hold (C19)."""
    model = tiny.mixtral()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    alive: list[tuple[bool, bool]] = []
    watched = [weakref.ref(experts.gate_up_proj) for experts in (first, second)]
    del first, second
    original = QuantizedExperts.__init__

    def spying(self: Any, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        alive.append(tuple(reference() is not None for reference in watched))
        original(self, *args, **kwargs)

    QuantizedExperts.__init__ = spying
    try:
        quantize_experts(model, progress=False)
    finally:
        QuantizedExperts.__init__ = original
    assert alive[1] == (False, True)


def test_tied_experts_are_packed_once_and_stay_tied() -> None:
    """DiffusionGemma's encoder and decoder share 42 GB of experts; packed twice they would take twice the memory."""
    model = tiny.diffusion_gemma()
    report = quantize_experts(model, group_sizes=GROUPS, progress=False)
    assert len(report.layers) == 3
    for index in range(3):
        decoder = model.model.decoder.layers[index].experts
        assert model.model.encoder.language_model.layers[index].experts is decoder
    assert all(layer.name.startswith("model.decoder") and len(layer.tied) == 1 for layer in report.layers)


def test_ignored_layers_stay_and_are_reported() -> None:
    """Patterns match components: "layers.1" is not "layers.11", and a wrong one must not pass in silence (C23)."""
    model = tiny.qwen3_moe()
    report = quantize_experts(model, ignore=["layers.1"], progress=False)
    assert report.ignored == ["model.layers.1.mlp.experts"]
    assert not isinstance(model.model.layers[1].mlp.experts, QuantizedExperts)
    assert "left in 16 bits (ignore): model.layers.1.mlp.experts" in str(report)


def test_routers_and_dense_parts_are_left_alone() -> None:
    """C06: a quantised router sends tokens to the wrong experts."""
    model = tiny.qwen3_moe()
    before = {name: parameter.clone() for name, parameter in model.named_parameters() if "experts" not in name}
    quantize_experts(model, progress=False)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_model_without_experts_is_refused() -> None:
    """C07: experts silently left in 16 bits look like success."""
    with pytest.raises(ValueError, match="has no routed experts in a known layout"):
        quantize_experts(nn.Sequential(nn.Linear(8, 8)))
    model = tiny.mixtral()
    with pytest.raises(ValueError, match="all 2 expert layers are ignored"):
        quantize_experts(model, ignore=["experts"])
    quantize_experts(model, progress=False)
    with pytest.raises(ValueError, match="already in 4 bits"):
        quantize_experts(model)


def test_generation_with_a_static_cache_equals_generation_without() -> None:
    model = tiny.mixtral()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    dynamic = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, cache_implementation="static", disable_compile=True, **options), dynamic)


def test_the_forward_compiles_as_one_graph() -> None:
    """The experts must be one operator to torch.compile, not a graph break a layer."""
    model = tiny.mixtral()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    wanted = logits(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(input_ids=IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_adapters_on_attention_work_and_adapters_on_experts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.mixtral(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    with_adapter = copy.deepcopy(model)
    report = quantize_experts(model, group_sizes=GROUPS, progress=False)
    assert len(report.layers) == 2
    give_dequantised(with_adapter, model)
    assert difference(logits(model), logits(with_adapter)) < 1e-2
    on_experts = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj"], target_modules=[])
    with pytest.raises(ValueError, match="carries an adapter"):
        quantize_experts(peft.get_peft_model(tiny.mixtral(), on_experts), progress=False)


def test_offloaded_experts_are_refused_with_a_way_out() -> None:
    """Quantising what accelerate keeps on disk would quantise nothing."""
    model = tiny.mixtral()
    model.model.layers[1].mlp.experts.to("meta")
    with pytest.raises(ValueError, match="is not in memory"):
        quantize_experts(model, progress=False)
    assert model.model.layers[0].mlp.experts.gate_up_proj is not None, "nothing may be lost on bad input"


def test_a_list_without_an_activation_is_refused_before_anything_changes() -> None:
    """Half a model in 4 bits would be worse than none: what cannot be read is found first."""
    blocks = nn.Sequential(tiny.ListedExperts(), tiny.ListedExperts())
    for expert in blocks[1].experts:
        del expert.act_fn
    with pytest.raises(ValueError, match=r"has no activation among .* leave 1\.experts out"):
        quantize_experts(blocks, progress=False)
    assert not any(isinstance(module, QuantizedExperts) for module in blocks.modules())
    quantize_experts(blocks, ignore=["1"], progress=False)


def test_one_string_is_one_pattern() -> None:
    """Taken letter by letter it would match nothing, or everything."""
    report = quantize_experts(tiny.mixtral(), ignore="layers.1", progress=False)
    assert report.ignored == ["model.layers.1.mlp.experts"]


def test_what_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="must be a loaded torch module, got str"):
        quantize_experts("a/name")


@pytest.mark.parametrize("sizes", [(128,), 128, (128, 64, 3)])
def test_group_sizes_are_two_numbers(sizes: Any) -> None:
    with pytest.raises(ValueError, match="group_sizes must be two numbers"):
        quantize_experts(tiny.mixtral(), group_sizes=sizes, progress=False)


def test_layers_left_out_can_follow_with_the_same_options_only() -> None:
    """A second call with other groups gave a checkpoint whose config.json contradicted half of its tensors."""
    model = tiny.mixtral()
    quantize_experts(model, group_sizes=GROUPS, ignore=["layers.1"], progress=False)
    with pytest.raises(ValueError, match="one scheme"):
        quantize_experts(model, group_sizes=(32, 32), progress=False)
    assert not isinstance(model.model.layers[1].mlp.experts, QuantizedExperts)
    report = quantize_experts(model, group_sizes=GROUPS, ignore=["layers.0"], progress=False)
    assert [layer.name for layer in report.layers] == ["model.layers.1.mlp.experts"]
    assert model.config.quantization_config.scheme.ignore == (), "no layer is left in 16 bits"


@pytest.mark.parametrize("source", ["rows", "weights"])
def test_a_backward_is_refused_whatever_it_comes_through(source: str) -> None:
    """Kernels keep no graph: a router trained over them would get no gradient, and nobody would be told."""
    model = tiny.mixtral()
    quantize_experts(model, group_sizes=GROUPS, progress=False)
    given = {"rows": torch.randn(4, 64), "weights": torch.rand(4, 2)}
    given[source].requires_grad_()
    out = model.model.layers[0].mlp.experts(given["rows"], torch.tensor([[0, 1]] * 4), given["weights"])
    with pytest.raises(RuntimeError, match="have no backward"):
        out.sum().backward()


def test_a_backward_through_a_list_of_experts_is_refused() -> None:
    block = nn.Sequential(tiny.ListedExperts())
    quantize_experts(block, group_sizes=GROUPS, progress=False)
    with pytest.raises(RuntimeError, match="have no backward"):
        block(torch.randn(4, 64, requires_grad=True)).sum().backward()
