"""Random request mixes through real vLLM on the CPU, stock beside ha_npu; started by `test_linear_attention_mixes`.

    python request_mix_runner.py gdn|kda|olmo RESULT.json EXAMPLES
    python request_mix_runner.py kda-triton|tensor-parallel RESULT.json EXAMPLES

RESULT holds what a property-based search found (the smallest mix that disagrees, if any), how far apart the engines
were, which situations came up, and whether wrong kernels are noticed and refused sequences end as they should.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]
NUM_SPEC = 2
BLOCK = 64  # lengths go around multiples of it where the cache has no smaller block
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 64,
}
# Every expert serves every token: where two experts tie, rounding would swap them, and move a log-probability by 0.7.
# With few chosen, the whole models are compared on a GPU (gpu_checks/linear_attention_serving).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn": (
        "qwen3-next",
        {
            **SIZES,
            "num_experts_per_tok": 4,
            "head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # Every layer linear: vLLM's MLA does not run on a CPU.
    "kda": (
        "kimi-linear",
        {
            **SIZES,
            "num_experts_per_token": 4,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
        },
    ),
    # Dense; keys and values of unequal size, states that may change their sign.
    "olmo": (
        "olmo-hybrid",
        {
            "hidden_size": 128,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
        },
    ),
}
KDA_LAYERS = {"kda_layers": [1, 2, 3], "full_attn_layers": [], "num_heads": 2, "head_dim": 64}
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "async_scheduling": False,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix": {"enable_prefix_caching": True},
    "speculative": {
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": NUM_SPEC,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    },
}
# The first layer sees equal inputs in both engines: its state is held to what the kernels round (vLLM's GDN multiplies
# in BF16; KDA's and OLMo-hybrid's kernels are stood in for by the FP64 definition, whose outputs round differently in
# one element of thousands, and with OLMo-hybrid's steps of up to 2 roundings need not fade: 3e-6 seen).
# Behind it the inputs differ by that. A state that is another request's, or stale, is off by 1 or more.
STATE_TOLERANCES = {
    "gdn": (1e-2, 4e-2, 6e-2),
    "kda": (2e-6, 2e-2, 3e-2),
    "olmo": (1e-5, 2e-2, 3e-2),
    "kda-triton": (2e-3, 2e-2, 3e-2),
}
LOG_PROB_TOLERANCE = {"gdn": 0.15, "kda": 0.1, "olmo": 0.1, "kda-triton": 0.1}


def write_model(kind: str, folder: Path, lower_bound: float | None = None, **changes: int) -> str:
    """The tiny checkpoint of a kind with `changes`; lower_bound: of the KDA gate, which makes it the safe one."""
    from tiny_models import write_tiny_model

    name, overrides = MODELS[kind]
    if kind == "kda":
        bound = {} if lower_bound is None else {"gate_lower_bound": lower_bound}
        overrides = {**overrides, "linear_attn_config": {**KDA_LAYERS, "short_conv_kernel_size": 4, **bound}}
    return str(write_tiny_model(name, folder / f"{kind}{lower_bound}", **{**overrides, **changes}))


def mend_vllm() -> None:
    """Two faults of vLLM 0.32's CPU build that both engines would trip over.

    Its second search for Triton kernels to replace stumbles over what other packages have loaded meanwhile; and its
    decode refuses the slot of a request that decodes alone under speculation, as a column of the block table.
    """
    import vllm._custom_ops as ops
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    decode = ops.fused_sigmoid_gating_delta_rule_update_cpu

    def decode_with_dense_slots(*, initial_state_indices: Any, **kwargs: Any) -> Any:
        slots = initial_state_indices.new_tensor(initial_state_indices.tolist())
        return decode(initial_state_indices=slots, **kwargs)

    ops.fused_sigmoid_gating_delta_rule_update_cpu = decode_with_dense_slots


def start(model: str, **options: Any) -> Any:
    """An engine that runs mixes."""
    from vllm import LLM
    from vllm_ext.benchmarks.request_mixes import MixEngine

    # With asynchronous scheduling the next step may have run when the states of one are read.
    return MixEngine(LLM(model=model, **{**OPTIONS, **options}), read_states=not options.get("async_scheduling"))


class Mixes:
    """The pairs of engines of one kind of model, and what comparing them has found so far."""

    def __init__(self, kind: str, folder: Path, tolerances: str = "", **options: Any) -> None:
        """options: of every engine; tolerances: the key of those to use, the kind itself by default."""
        from vllm_ext.benchmarks import request_mix_comparison as comparing

        tolerances = tolerances or kind
        self.tolerance = comparing.Tolerance(STATE_TOLERANCES[tolerances], LOG_PROB_TOLERANCE[tolerances])
        self.comparisons = {name: comparing.Comparison() for name in CONFIGURATIONS}
        self.seen: dict[str, list[Any]] = {name: [] for name in CONFIGURATIONS}
        self.model = write_model(kind, folder)
        safe = write_model(kind, folder, lower_bound=-5.0) if kind == "kda" else self.model
        models = {"plain": self.model, "prefix": safe, "speculative": self.model}
        self.pairs = {}
        for name, own in CONFIGURATIONS.items():
            both = {**own, **options}
            self.pairs[name] = (start(models[name], **both), start(models[name], attention_backend="ha_npu", **both))

    def draw(self, name: str, integer: Any) -> Any:
        """A mix for the configuration: with prefix caching vLLM cuts at blocks, so a step must hold one."""
        from vllm_ext.benchmarks.request_mixes import draw_mix

        stock = self.pairs[name][0]
        aligned = stock.cache_mode == "align"
        block = stock.mamba_block_size() if aligned else BLOCK
        # 16: five requests and their drafts, none of which vLLM may cut away (see `MixEngine._propose`).
        least = block if aligned else 16 if stock.num_spec else 8
        return draw_mix(integer, block=block, num_spec=stock.num_spec, least_budget=least)

    def compare(self, name: str, mix: Any) -> list[str]:
        """What is wrong with the mix's answers."""
        from vllm_ext.benchmarks.request_mix_comparison import Comparison

        stock, ours = self.pairs[name]
        known = self.pairs["plain"][0].run(mix) if stock.num_spec else None
        one, other = stock.run(mix, known=known), ours.run(mix, known=known)
        self.seen[name].append((mix, other))
        self.comparisons[name].add(one, other, self.tolerance)
        found = Comparison()
        found.add(one, other, self.tolerance)
        return found.failures


def search(mixes: Mixes, name: str, examples: int) -> str | None:
    """Draw `examples` mixes for a configuration; the smallest one that disagrees, in words, or None."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    smallest: list[str] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.data())
    def agree(data: Any) -> None:
        mix = mixes.draw(name, lambda low, high: data.draw(st.integers(low, high)))
        wrong = mixes.compare(name, mix)
        if wrong:
            smallest[:] = [f"{mix.describe()}: {'; '.join(wrong)}"]
        assert not wrong

    try:
        agree()
    except AssertionError:
        return smallest[0]
    return None


def refusals(mixes: Mixes) -> dict[str, list[str]]:
    """What is wrong with how refused sequences end, by configuration, under asynchronous scheduling (a step that
    continues the failed request is then under way), and with a fallback asked for.
    """
    from vllm_ext.benchmarks import request_mix_comparison as comparing
    from vllm_ext.benchmarks import request_mix_faults as faults

    wrong = {name: faults.check_refusal(mixes.pairs[name][1], mixes.tolerance) for name in ("plain", "prefix")}
    wrong["prefix"] += faults.check_refused_block(mixes.pairs["prefix"][1])
    ahead = start(mixes.model, attention_backend="ha_npu", async_scheduling=True, **CONFIGURATIONS["prefix"])
    wrong["asynchronous"] = faults.check_refusal(ahead, mixes.tolerance)
    fallback = start(
        mixes.model,
        attention_backend="ha_npu",
        additional_config={"vllm_ext": {"on_kernel_error": "fallback"}},
        **CONFIGURATIONS["plain"],
    )
    mix, comparison = faults.refused_mix(fallback), comparing.Comparison()
    with faults.wrong_kernel(fallback, faults.refuse):
        comparison.add(mixes.pairs["plain"][0].run(mix), fallback.run(mix), mixes.tolerance)
    wrong["fallback"] = comparison.failures
    return wrong


def one_kind(kind: str, folder: Path, examples: int) -> dict[str, Any]:
    """Everything about one kind of model."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    mend_vllm()
    if kind == "kda":
        import kda_on_cpu

        kda_on_cpu.install()
    elif kind == "olmo":
        import olmo_on_cpu

        olmo_on_cpu.install()
    from vllm_ext.benchmarks.request_mix_faults import wrong_kernels_noticed
    from vllm_ext.benchmarks.request_mixes import situations

    began = time.monotonic()
    mixes = Mixes(kind, folder)
    shares = [
        examples // len(CONFIGURATIONS) + (n < examples % len(CONFIGURATIONS)) for n in range(len(CONFIGURATIONS))
    ]
    disagreements = {name: search(mixes, name, share) for name, share in zip(CONFIGURATIONS, shares, strict=True)}
    return {
        "disagreements": {name: found for name, found in disagreements.items() if found},
        "configurations": {
            name: {
                "mixes": len(mixes.seen[name]),
                "situations": situations(mixes.seen[name], NUM_SPEC if name == "speculative" else 0),
                **mixes.comparisons[name].summary(),
            }
            for name in CONFIGURATIONS
        },
        "tolerances": {"states_by_layer": STATE_TOLERANCES[kind], "log_prob": LOG_PROB_TOLERANCE[kind]},
        "noticed": wrong_kernels_noticed(*mixes.pairs["plain"], mixes.tolerance),
        "refusals": refusals(mixes),
        "seconds": round(time.monotonic() - began, 1),
    }


def interpreted(folder: Path, examples: int) -> dict[str, Any]:
    """KDA by our Triton kernels under Triton's interpreter, `examples` mixes of each configuration.

    In FP16, because the interpreter takes BF16 for whole numbers; so not GDN, for which vLLM's CPU build wants BF16.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    mend_vllm()
    import kda_on_cpu
    from vllm_ext.benchmarks.request_mixes import situations

    from vllm_ext.ops.linear_attention import dispatch

    kda_on_cpu.install()
    dispatch._AUTO["cpu"] = ("triton",)
    mixes = Mixes("kda", folder, "kda-triton", dtype="float16")
    for name in CONFIGURATIONS:
        for seed in range(0, 2 * examples, 2):  # the odd ones' prompts are long for an interpreter
            mixes.compare(name, mixes.draw(name, random.Random(seed).randint))
    return {
        name: {"situations": situations(mixes.seen[name]), **comparison.summary()}
        for name, comparison in mixes.comparisons.items()
    }


def tensor_parallel(folder: Path, examples: int) -> dict[str, Any]:
    """Two ranks, with prefix caching: stock and ha_npu, one engine after the other, and a refusal at last."""
    from vllm_ext.benchmarks import request_mix_comparison as comparing
    from vllm_ext.benchmarks import request_mix_faults as faults
    from vllm_ext.benchmarks import request_mixes as rm

    tolerance = comparing.Tolerance(STATE_TOLERANCES["gdn"], LOG_PROB_TOLERANCE["gdn"])
    model = write_model("gdn", folder, linear_num_key_heads=2, linear_num_value_heads=4)
    options = {**CONFIGURATIONS["prefix"], "tensor_parallel_size": 2}
    answers: dict[str, list[Any]] = {}
    refused: list[str] = []
    for name, flag in (("stock", {}), ("ha_npu", {"attention_backend": "ha_npu"})):
        engine = start(model, **options, **flag)
        block = engine.mamba_block_size()
        drawn = [rm.draw_mix(random.Random(seed).randint, block=block, least_budget=block) for seed in range(examples)]
        answers[name] = [engine.run(mix) for mix in drawn]
        if name == "ha_npu":
            refused = faults.check_refusal(engine, tolerance)
        engine.engine.engine_core.shutdown()
    comparison = comparing.Comparison()
    for one, other in zip(answers["stock"], answers["ha_npu"], strict=True):
        comparison.add(one, other, tolerance)
    seen = list(zip(drawn, answers["ha_npu"], strict=True))
    return {
        "mixes": examples,
        "situations": rm.situations(seen),
        **comparison.summary(),
        "refused": refused,
    }


def main(kind: str, result: str, examples: str) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"tensor-parallel": tensor_parallel, "kda-triton": interpreted}.get(kind, partial(one_kind, kind))
        found = run(Path(folder), int(examples))
    Path(result).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
