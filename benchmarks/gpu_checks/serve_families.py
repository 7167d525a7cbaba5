"""Every model family at the full size of its layers, on one GPU: 4-bit experts beside BF16 in the same process.

    python benchmarks/gpu_checks/serve_families.py [--only mixtral ...] [--out FILE]

Two to four layers of each family, with random weights that both engines draw alike; the second quantises them while it
loads. Prompt log-probabilities must be near BF16's: quantising random weights moves them by a tenth to a half,
computing something else by 2. FILE is written after every family; the last line printed is JSON; exit status 0 when all
agree. --tiny takes the small sizes of examples/tiny_models.py instead, for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_engines import Answer, add_limits, side_by_side

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (5, 64, 130, 600)
FAR_FROM_BF16 = 1.0
# vLLM's first choice for Gated DeltaNet on a Hopper GPU is compiled at run time, by a package that may not be there.
GDN_OPTIONS = {"gdn_prefill_backend": "triton"}
PUBLISHED_WITH_VISION = ("qwen3.5-moe",)
GDN = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 2}


def sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, inter: int, **other: Any) -> dict[str, Any]:
    """Fields that most families name alike."""
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {"hidden_size": hidden, **attention, "moe_intermediate_size": inter, **other}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """`fields` but for some."""
    return {key: value for key, value in fields.items() if key not in names}


def top(experts: int, top_k: int) -> dict[str, int]:
    """Experts, and how many a token goes to."""
    return {"num_experts": experts, "num_experts_per_tok": top_k}


# Published sizes of: Mixtral-8x7B, Qwen3-30B-A3B, Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, OLMoE-1B-7B, DeepSeek-V2-Lite,
# GLM-4.5-Air, Gemma-4-26B-A4B, gpt-oss-20b, Kimi-Linear-48B-A3B.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4-moe": sizes(2816, 16, 8, 256, 704, num_experts=128, top_k_experts=8, intermediate_size=2112)
    | {"global_head_dim": 256},
    "gpt-oss": without(sizes(2880, 64, 8, 64, 0, num_local_experts=32, num_experts_per_tok=4), "moe_intermediate_size")
    | {"intermediate_size": 2880},
    "qwen3-next": sizes(2048, 16, 2, 256, 512, **top(512, 10), **GDN, shared_expert_intermediate_size=512),
    "qwen3.5-moe": sizes(2048, 16, 2, 256, 512, **top(256, 8), **GDN, shared_expert_intermediate_size=512),
    "mixtral": without(sizes(4096, 32, 8, 128, 0, num_local_experts=8), "moe_intermediate_size")
    | {"intermediate_size": 14336},
    "olmoe": without(sizes(2048, 16, 16, 128, 0, **top(64, 8)), "moe_intermediate_size") | {"intermediate_size": 1024},
    "glm4-moe": sizes(4096, 96, 8, 128, 1408, n_routed_experts=128, num_experts_per_tok=8, intermediate_size=10944),
    "deepseek-v2": without(sizes(2048, 16, 16, 0, 1408, n_routed_experts=64, num_experts_per_tok=6), "head_dim")
    | {"n_shared_experts": 2, "intermediate_size": 10944},
    "qwen3-moe": sizes(2048, 32, 4, 128, 768, **top(128, 8)),
    "kimi-linear": without(sizes(2304, 32, 32, 0, 1024, num_experts=256, num_experts_per_token=8), "head_dim")
    | {"intermediate_size": 9216, "num_hidden_layers": 4},
}


def config_of(kind: str, tiny: bool) -> dict[str, Any]:
    """config.json of a family, two layers of it unless it says otherwise."""
    from vllm_ext.benchmarks.serve_checkpoints import families

    config: dict[str, Any] = {**families()[kind][0], "num_hidden_layers": 2, **({} if tiny else FAMILIES[kind])}
    if kind == "kimi-linear" and not tiny:
        config["linear_attn_config"] = {**config["linear_attn_config"], "num_heads": 32}
    return config


def published(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A language model's config as its published checkpoint has it, one level down beside a vision tower, and vLLM's
    options for text alone. vLLM 0.23 knows Qwen3.5 in no other form."""
    text = without(config, "architectures")
    rotary = int(config["head_dim"] * config["partial_rotary_factor"]) // 2
    sections = [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3]
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": config["partial_rotary_factor"],
        "mrope_section": sections,
        "mrope_interleaved": True,
    }
    every = config["full_attention_interval"]
    kinds = ("linear_attention", "full_attention")
    text["layer_types"] = [kinds[(index + 1) % every == 0] for index in range(config["num_hidden_layers"])]
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 64}
    found = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "torch_dtype": config["torch_dtype"],
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": config["hidden_size"]},
        **{f"{name}_token_id": 250 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))},
    }
    return found, {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def child(kind: str, tiny: bool, folder: Path, result: Path) -> None:
    """One family's process: log-probabilities of BF16, and in 4 bits."""
    os.environ["VLLM_CACHE_ROOT"] = str(folder / f"cache-{kind}")
    sys.path.insert(0, str(ROOT))
    import torch

    from vllm_ext.plugin import register

    register()
    from vllm import LLM, SamplingParams
    from vllm_ext.benchmarks.engine_children import skip_autotuning
    from vllm_ext.benchmarks.serve_engine import DRAWN, EXTENSION

    skip_autotuning()
    config = config_of(kind, tiny)
    written, options = published(config) if kind in PUBLISHED_WITH_VISION else (config, {})
    model = folder / kind
    model.mkdir()
    (model / "config.json").write_text(json.dumps(written))
    generator = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(0, 256, (n,), generator=generator).tolist()} for n in LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    found: Answer = {"model": config, "log_probs": {}, "seconds": {}}
    kept = []  # vLLM 0.32 takes the second engine's process groups down with the first engine
    for name, quantization in (("BF16", None), ("w4a16-grouped", "w4a16-grouped")):
        begin = time.monotonic()
        llm = LLM(
            model=str(model),
            quantization=quantization,
            load_format=DRAWN,
            model_loader_extra_config={
                "kind": kind,
                "config": config,
                "seed": 0,
                "group": None,
                "nested": kind in PUBLISHED_WITH_VISION,
            },
            worker_extension_cls=EXTENSION,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            enforce_eager=True,
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=1 << 30,
            **options,
            **(GDN_OPTIONS if "linear_num_key_heads" in config else {}),
        )
        kept.append(llm)
        log_probs = []
        for output in llm.generate(prompts, sampling, use_tqdm=False):
            pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
            log_probs += [entry[token].logprob for token, entry in pairs]
        found["log_probs"][name] = log_probs
        found["seconds"][name] = round(time.monotonic() - begin, 1)
    result.write_text(json.dumps(found))


def judge(answer: Answer) -> dict[str, Any]:
    """Mean distance of the two engines' log-probabilities, and whether that is what quantising does."""
    if "error" in answer:
        return {"ok": False, "error": answer["error"]}
    pairs = zip(*answer["log_probs"].values(), strict=True)
    gaps = [abs(mine - plain) for plain, mine in pairs]
    mean = sum(gaps) / len(gaps)
    return {"ok": 0 < mean < FAR_FROM_BF16, "mean": mean, "seconds": answer["seconds"]}


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--tiny", action="store_true")
    add_limits(parser)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from vllm_ext.benchmarks.registry import describe_run

    result: dict[str, Any] = {"ok": False, "families": {}, "run": describe_run()}

    def record(answers: dict[str, Answer]) -> None:
        result["families"] = {name: judge(answer) for name, answer in answers.items()}
        result["ok"] = len(answers) == len(args.only) and all(row["ok"] for row in result["families"].values())
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        jobs = {kind: (child, kind, args.tiny, Path(folder)) for kind in args.only}
        side_by_side(jobs, {}, Path(folder), args, record)
    print(json.dumps(result["families"]))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
