"""`vllm-ext VERB ...`: each verb lives in its own module and is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module

from vllm_ext import __version__

VERBS = {
    "doctor": ("vllm_ext.doctor:main", "what is installed, which backends work, and why not"),
    "quantize": ("vllm_ext.quantization.cli:quantize_main", "pack a checkpoint's routed experts into 4 bits"),
    "inspect": ("vllm_ext.quantization.cli:inspect_main", "what a packed checkpoint holds"),
    "plan": ("vllm_ext.ha_npu.cli:main", "plan a linear-attention prefill for a chip"),
    "bench": ("vllm_ext.benchmarks.registry:main", "run a benchmark of the registry"),
}


def usage() -> str:
    """The list of verbs."""
    rows = "\n".join(f"  {verb:10}{text}" for verb, (_, text) in VERBS.items())
    return f"usage: vllm-ext VERB ...\n\n{rows}\n\n`vllm-ext VERB --help` tells a verb's options.\n"


def main(argv: list[str] | None = None) -> int:
    """Dispatch to a verb; 0 on success, 1 when it fails or lacks a package, 2 on a wrong command line."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"vllm-ext {__version__}")
        return 0
    if args[0] not in VERBS:
        print(f"vllm-ext: unknown verb {args[0]!r}\n\n{usage()}", end="", file=sys.stderr)
        return 2
    module, _, function = VERBS[args[0]][0].partition(":")
    try:
        return int(getattr(import_module(module), function)(args[1:]))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "vllm_ext"):
            raise
        print(
            f"vllm-ext {args[0]}: needs the Python package {missing!r}, which {sys.executable} does not have; install "
            "it there, or use the environment that vLLM is installed in",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
