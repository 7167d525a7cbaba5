"""Write a tiny random checkpoint, in most kinds a mixture of experts, that vLLM loads as it is; tokens are bytes.

    python examples/tiny_models.py qwen3-next tiny-gdn          # Gated DeltaNet + MoE (also: qwen3.5-moe)
    python examples/tiny_models.py kimi-linear tiny-kda         # Kimi Delta Attention + MLA + MoE
    python examples/tiny_models.py qwen3-moe tiny-moe           # full attention + MoE

Other kinds: qwen3.5 and olmo-hybrid (Gated DeltaNet, dense); mixtral, olmoe, deepseek-v2, glm4-moe, gemma4-moe,
gpt-oss.

The weights are random but not arbitrary: matrices keep activations near unit size, logits are spread enough that greedy
tokens do not hang on rounding, and the linear-attention heads forget at rates from slow to instant, as trained ones do.
Any field of config.json can be changed with --set, and the weights follow: --set num_experts=16 --set hidden_size=512
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_model_families import KINDS
from tiny_model_parts import BYTES, SPECIAL_TOKENS, Config, Weights


def write_tiny_model(kind: str, directory: Path | str, *, seed: int = 0, device: str = "cpu", **overrides: Any) -> Path:
    """Write the checkpoint; `overrides` replace fields of config.json, `device` is where numbers are drawn.

    Raises ValueError for a kind or a config field that does not exist, and for a directory that holds something else.
    """
    if kind not in KINDS:
        raise ValueError(f"tiny_models: no kind {kind!r}; choose one of {', '.join(KINDS)}")
    defaults, make_weights = KINDS[kind]
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise ValueError(f"tiny_models: {kind} has no config field {', '.join(unknown)}; it has {', '.join(defaults)}")
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").exists():
        raise ValueError(f"tiny_models: {directory} holds something other than a model; name an empty or new directory")
    config = {**defaults, **overrides}
    weights = Weights(seed, device)
    make_weights(weights, config)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "tokenizer.json", byte_tokenizer())
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True))
    _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})
    _write_json(directory / "config.json", config)
    return directory


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_tokenizer() -> Config:
    """tokenizer.json of a tokenizer whose token ids are the bytes of the text (byte-level BPE without merges)."""
    special = [
        {"id": BYTES + index, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {_printable(byte): byte for byte in range(BYTES)}, "merges": []},
    }


def _printable(byte: int) -> str:
    """The character by which byte-level BPE writes a byte: itself where printable, else one from 256 upwards."""

    def visible(value: int) -> bool:
        return 33 <= value <= 126 or (161 <= value <= 255 and value != 173)

    if visible(byte):
        return chr(byte)
    return chr(BYTES + sum(not visible(value) for value in range(byte)))


def _assignment(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: list[str]) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="tiny_models.py", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", type=_assignment, action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args(argv)
    try:
        directory = write_tiny_model(args.kind, args.directory, seed=args.seed, **dict(args.overrides))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    size = (directory / "model.safetensors").stat().st_size
    print(f"wrote {args.kind} to {directory} ({size / 2**20:.1f} MiB); tokens are bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
