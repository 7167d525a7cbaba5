"""Checks of 4-bit experts inside vLLM-Ascend: its layers, routing, dispatch and combining, on `vllm_ascend_engine`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import npu_emulation
import pytest
import torch
from vllm_ascend_engine import (  # first: it makes the platform
    CONFIG,
    EXPERTS,
    GROUPS,
    HIDDEN,
    INTERMEDIATE,
    ON_310P,
    OPTIONS,
    TOP_K,
    engine_config,
    forward_context,
)

from vllm.config import set_current_vllm_config  # isort: skip
from vllm.platforms import current_platform

from vllm_ext.model_executor.quantization import W4A16GroupedConfig
from vllm_ext.quantization import Scheme, quantize_weight


def make_experts(prefix: str, config: Any = CONFIG, **options: Any) -> Any:
    """A layer of routed experts as a model builds it; vLLM-Ascend's class takes the place of vLLM's."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    with set_current_vllm_config(config):
        return FusedMoE(
            num_experts=EXPERTS,
            top_k=TOP_K,
            intermediate_size=INTERMEDIATE,
            renormalize=True,
            quant_config=config.quant_config,
            prefix=prefix,
            **{"hidden_size": HIDDEN, **options},
        )


def load_experts(layer: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Load 16-bit experts one projection after another, as a checkpoint brings them; what was loaded."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    loaded = {
        name: (torch.randn(EXPERTS, *shape, generator=generator, dtype=torch.float32) / shape[1] ** 0.5).half()
        for name, shape in shapes.items()
    }
    with set_current_vllm_config(CONFIG):
        for expert in range(EXPERTS):
            for shard, weights in loaded.items():
                name = "w2_weight" if shard == "w2" else "w13_weight"
                parameter = getattr(layer, name)
                parameter.weight_loader(
                    parameter, weights[expert], f"experts.{expert}.{shard}.weight", shard_id=shard, expert_id=expert
                )
    return loaded


def expected_experts(loaded: dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer in FP64 on the weights our scheme stores."""
    w13 = torch.cat((loaded["w1"], loaded["w3"]), dim=1)
    w13, w2 = (
        quantize_weight(w, g, method="hqq").dequantize(torch.float64)
        for w, g in ((w13, GROUPS["group_size_w13"]), (loaded["w2"], GROUPS["group_size_w2"]))
    )
    weights, ids = torch.softmax(logits.double(), -1).topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(TOP_K):
            expert = int(ids[token, slot])
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            out[token] += weights[token, slot] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def step(num_tokens: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [M, H] and router logits [M, experts]."""
    generator = torch.Generator().manual_seed(num_tokens)
    x, logits = (
        torch.randn(num_tokens, columns, generator=generator, dtype=torch.float32).half()
        for columns in (HIDDEN, num_experts)
    )
    return x, logits


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within FP16's rounding inside, out, and of the weights on the experts (2.4e-4 each), summed over some slots."""
    error = float((got.double() - expected).norm() / expected.norm())
    assert error <= 4e-3, error


def check_the_flag_passes_the_platforms_list() -> None:
    """vLLM asks the platform whether it supports the method; vLLM-Ascend's list holds its own only, and now ours."""
    assert current_platform.device_type == "npu"
    assert isinstance(CONFIG.quant_config, W4A16GroupedConfig)
    current_platform.verify_quantization("w4a16-grouped")
    with pytest.raises(ValueError, match="not supported"):
        current_platform.verify_quantization("awq")


def check_experts_load_quantise_and_run_in_vllm_ascends_layer() -> None:
    """Its class, set up twice as it does, loaded expert by expert, run through its routing, dispatch and combining."""
    layer = make_experts("model.layers.0.mlp.experts")
    assert type(layer).__name__ == ("AscendFusedMoE310" if ON_310P else "AscendFusedMoE"), type(layer)
    assert type(layer.quant_method).__name__ == "AscendAtLoadMoEMethod"
    assert layer.w13_weight.device.type == "meta", "16-bit experts must not be allocated"
    loaded = load_experts(layer)
    assert layer.w13_weight.dtype == (torch.uint8 if ON_310P else torch.int32), layer.w13_weight.dtype
    x, logits = step(7, EXPERTS)
    npu_emulation.calls.clear()
    with forward_context(7):
        got = layer.forward_impl(x.clone(), logits)
    assert_close(got, expected_experts(loaded, x, logits))
    assert len(npu_emulation.calls) == (0 if ON_310P else 2)
    assert all(call["antiquant"] for call in npu_emulation.calls)


def check_packed_experts_load_and_run_in_vllm_ascends_layer() -> None:
    """A checkpoint of `vllm-ext quantize` needs no flag, and gives what quantising at load gives."""
    from vllm_ext.quantization import packed

    scheme = Scheme(**GROUPS)
    config = engine_config(scheme.to_dict(), quantization=None, additional_config={"vllm_ext": {"moe_backend": "npu"}})
    layer = make_experts("model.layers.2.mlp.experts", config)
    assert type(layer.quant_method).__name__ == "AscendPackedMoEMethod"
    plain = make_experts("model.layers.3.mlp.experts")
    loaded = load_experts(plain)
    for expert in range(EXPERTS):
        for shard, weights in loaded.items():
            stored = scheme.quantize(weights[expert], "w2" if shard == "w2" else "w13")
            for name, tensor in packed.to_tensors("expert", stored).items():
                parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name.partition('.')[2]}")
                parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    x, logits = step(5, EXPERTS)
    with forward_context(5):
        assert torch.equal(layer.forward_impl(x.clone(), logits), plain.forward_impl(x.clone(), logits))


def check_expert_parallel_ranks_add_up() -> None:
    """vLLM-Ascend's dispatch sends a rank the tokens of its experts: two ranks' sums are the layer of all experts.

    310P's layer refuses expert parallelism itself.
    """
    if ON_310P:
        pytest.skip("310P's layer takes no expert parallelism")
    from vllm_ascend.ops.fused_moe import token_dispatcher

    layers = [make_experts(f"model.layers.{8 + rank}.mlp.experts") for rank in range(2)]
    loaded = [load_experts(layer, seed=rank) for rank, layer in enumerate(layers)]
    x, logits = step(9, 2 * EXPERTS)
    total = torch.zeros(x.shape, dtype=torch.float64)
    group = token_dispatcher.get_ep_group
    for rank, layer in enumerate(layers):
        expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        expert_map[EXPERTS * rank : EXPERTS * (rank + 1)] = torch.arange(EXPERTS, dtype=torch.int32)
        token_dispatcher.get_ep_group = lambda rank=rank: SimpleNamespace(rank_in_group=rank)
        try:
            with forward_context(9):
                result = layer.quant_method.apply(
                    layer=layer, x=x.clone(), router_logits=logits, top_k=TOP_K, renormalize=True,
                    num_experts=2 * EXPERTS, expert_map=expert_map,
                )  # fmt: skip
        finally:
            token_dispatcher.get_ep_group = group
        total += result.routed_out.double()
    whole = {name: torch.cat([part[name] for part in loaded]) for name in loaded[0]}
    assert_close(total, expected_experts(whole, x, logits))


def check_shared_experts_are_added_by_vllm_ascends_layer() -> None:
    """They stay its own: the layer returns them beside the routed experts' output."""
    shared = SharedExperts()
    layer = make_experts("model.layers.12.mlp.experts", shared_experts=shared)
    loaded = load_experts(layer)
    x, logits = step(5, EXPERTS)
    with forward_context(5):
        shared_out, routed = layer.shared_forward_impl(x.clone(), logits)
    assert torch.equal(shared_out, 3 * x)
    assert_close(routed, expected_experts(loaded, x, logits))


class SharedExperts(torch.nn.Module):
    """Three times its input, in the parts that vLLM-Ascend runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both parts."""
        return 3 * x

    def gate_up_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """First part."""
        return x, None

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        """Between them."""
        return x

    def down_proj(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Second part."""
        return 3 * x, None


def check_apply_takes_every_argument_vllm_ascend_passes() -> None:
    """Its own adapter's signature: the same names in the same order, so that keyword and positional calls both fit."""
    from vllm_ascend.quantization.method_adapters import AscendFusedMoEMethod

    from vllm_ext.model_executor.ascend.experts import AscendAtLoadMoEMethod

    theirs = inspect.signature(AscendFusedMoEMethod.apply).parameters
    ours = inspect.signature(AscendAtLoadMoEMethod.apply).parameters
    assert list(ours) == list(theirs)
    for name in theirs:
        assert ours[name].default == theirs[name].default, name


def check_linear_layers_and_ignored_experts_get_vllm_ascends_methods() -> None:
    """Everything but routed experts stays in 16 bits, by the methods that bring weights into the chip's own order."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm_ascend.ops.linear import AscendUnquantizedLinearMethod

    with set_current_vllm_config(CONFIG):
        linear = ReplicatedLinear(HIDDEN, HIDDEN, quant_config=CONFIG.quant_config, prefix="model.layers.0.mlp.gate")
    assert isinstance(linear.quant_method, AscendUnquantizedLinearMethod), type(linear.quant_method)
    ignoring = engine_config(additional_config={"vllm_ext": {**OPTIONS, "ignore": ["model.layers.5.mlp.experts"]}})
    layer = make_experts("model.layers.5.mlp.experts", ignoring)
    assert type(layer.quant_method).__name__.startswith("AscendUnquantizedFusedMoEMethod")


def check_what_its_path_cannot_compute_is_refused_with_the_remedy() -> None:
    """Other activations, clamped SwiGLU, biases: its W4A16 path ignores them; on a 310P we compute them ourselves."""
    from vllm_ext.model_executor.ascend.experts import make_method

    layer = make_experts("model.layers.7.mlp.experts")
    method = layer.quant_method
    for name, value in (("swiglu_limit", 7.0), ("activation", "gelu")):
        before = getattr(layer, name, 0)
        setattr(layer, name, value)
        if ON_310P:
            method.check_layer(layer)
        else:
            with pytest.raises(ValueError, match=r"layers\.7.*serve the model without"):
                method.check_layer(layer)
        setattr(layer, name, before)
    if not ON_310P:
        from vllm_ascend.ascend_config import get_ascend_config

        config = get_ascend_config()
        for owner, name, value, message in (
            (config, "enable_fused_mc2", 1, "unset enable_fused_mc2"),
            (config.eplb_config, "dynamic_eplb", True, "unset dynamic_eplb"),
            (config, "mix_placement", True, "unset mix_placement"),
            (layer.moe_config, "has_bias", True, "ignores the experts' biases"),
        ):
            before = getattr(owner, name)
            setattr(owner, name, value)
            with pytest.raises(ValueError, match=message):
                method.check_layer(layer)
            setattr(owner, name, before)
        method.check_layer(layer)
        with pytest.raises(ValueError, match=r"layers\.11.*multiple of 8.*got 60"):
            make_experts("model.layers.11.mlp.experts", hidden_size=60)
    with pytest.raises(ValueError, match="moe_backend 'triton' does not run under vLLM-Ascend"):
        make_method(layer, "x", Scheme(), SimpleNamespace(moe_backend="triton"), CONFIG.quant_config.report)


def check_a_310p_refuses_bf16_before_loading() -> None:
    """With the remedy, at the first layer that needs it; an A2 takes BF16."""
    layer = SimpleNamespace(moe_config=SimpleNamespace(in_dtype=torch.bfloat16))
    from vllm_ext.model_executor.ascend.platform import check_model_dtype

    if ON_310P:
        with pytest.raises(ValueError, match="--dtype float16"):
            check_model_dtype(layer.moe_config.in_dtype, "w4a16-grouped, layer x")
    else:
        check_model_dtype(layer.moe_config.in_dtype, "w4a16-grouped, layer x")
