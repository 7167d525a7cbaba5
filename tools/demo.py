"""Serve a real trained mixture-of-experts model with 4-bit experts through stock vLLM and ask it a question.

    make demo                                    # or: make demo QUESTION="What do bees make?" PORT=8010
    make demo-stop

Builds `.demo/smollm2-moe` once, starts `vllm serve` on 127.0.0.1 unless it runs already, asks over HTTP and leaves the
server running. Runs inside `.venv`, which `tools/setup_venv.py` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from server import HOST, Server, ServerError

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_QUESTION = "What is the capital of Japan?"
DEFAULT_PORT = 8000
MODEL_NAME = "smollm2-moe"
MAX_ANSWER_TOKENS = 128
OPTIONS = {"vllm_ext": {"group_size_w13": 32, "group_size_w2": 32}}
SUMMARY = re.compile(
    r"w4a16-grouped: (?P<experts>\d+) routed experts in (?P<layers>\d+) layers, "
    r"(?P<before>[\d.]+) MiB in 16 bits -> (?P<after>[\d.]+) MiB in 4 bits"
)


def build_model(model: Path) -> None:
    """Write the model unless it is there. Raises ServerError when the conversion fails."""
    if (model / "config.json").is_file():
        return
    script = ROOT / "examples" / "smollm2_as_moe.py"
    if subprocess.run([sys.executable, str(script), str(model)], check=False).returncode:
        raise ServerError("the model could not be built: see the message above")


def serve_command(model: Path, port: int) -> list[str]:
    """The `vllm serve` command line of the demo. Eager: compiling would take longer than the answer."""
    return [
        str(Path(sys.executable).parent / "vllm"),
        *("serve", str(model), "--served-model-name", MODEL_NAME),
        *("--quantization", "w4a16-grouped", "--attention-backend", "ha_npu"),
        *("--additional-config", json.dumps(OPTIONS)),
        *("--host", HOST, "--port", str(port)),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"),
    ]


def serve_environment() -> dict[str, str]:
    """The server's environment: offline, one GiB of KV cache, and every plugin that is installed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environment.pop("VLLM_PLUGINS", None)
    return environment


def ensure_running(server: Server, model: Path) -> None:
    """Start the server, or find the one that an earlier run left; returns when it answers."""
    command = serve_command(model, server.port)
    state = server.state()
    if state is not None and state["command"] != command:
        print("The running server was started with other options: restarting it", flush=True)
        server.stop()
        state = None
    if state is not None:
        print(f"Using the server that runs already at {server.url}", flush=True)
    else:
        if server.stop():
            print("Ended what a killed server had left behind", flush=True)
        print(f"Starting the server (log: {server.log}):\n  {shlex.join(command)}", flush=True)
        server.start(command, serve_environment())
    start = time.monotonic()
    try:
        server.wait_until_ready()
    except KeyboardInterrupt:
        server.stop()
        raise
    if state is None:
        print(f"Ready after {time.monotonic() - start:.0f} s", flush=True)


def ask(server: Server, question: str) -> Iterator[str]:
    """The pieces of the answer as they are generated (greedy)."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    with server.post("/v1/chat/completions", body) as response:
        yield from pieces(response)


def pieces(lines: Iterable[bytes]) -> Iterator[str]:
    """The texts inside a stream of server-sent events. Raises ServerError on an error event or a cut stream."""
    for line in lines:
        field, _, value = line.decode("utf-8").strip().partition(":")
        if field != "data":
            continue
        if value.strip() == "[DONE]":
            return
        event = json.loads(value)
        if "error" in event:
            raise ServerError(f"the server reported an error: {event['error']}")
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
    raise ServerError("the server broke off its answer; make demo starts it again")


def experts_summary(log: str) -> str:
    """What the plugin logged about the experts, as a sentence; says so when the line is missing."""
    found = SUMMARY.search(log)
    if found is None:
        return "Experts: the server's log has no line about them (is the plugin loaded?)"
    before, after = float(found["before"]), float(found["after"])
    return (
        f"Experts: {found['experts']} in {found['layers']} layers, "
        f"{before:.1f} MiB in 16 bits before, {after:.1f} MiB in 4 bits after ({before / after:.2f} times smaller)"
    )


def run(folder: Path, port: int, question: str) -> None:
    """The whole demo."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / MODEL_NAME
    build_model(model)
    server = Server(folder, port)
    ensure_running(server, model)
    print(f"\nQuestion: {question}\nAnswer:   ", end="", flush=True)
    for piece in ask(server, question):
        print(piece, end="", flush=True)
    print(f"\n\n{experts_summary(server.log.read_text(encoding='utf-8', errors='replace'))}")
    print("This model has no linear attention, so ha_npu leaves it as it is.")
    print(f"The server goes on at {server.url} (OpenAI API, model {MODEL_NAME!r}); `make demo-stop` ends it.")


def port_number(text: str) -> int:
    """A port a server can listen on."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, got {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Serve a small real model with 4-bit experts and ask it a question.")
    parser.add_argument("--question", default=os.environ.get("DEMO_QUESTION") or DEFAULT_QUESTION)
    parser.add_argument("--port", type=port_number, default=DEFAULT_PORT)
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="where the model, log and state lie")
    parser.add_argument("--stop", action="store_true", help="end the server that an earlier run left")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    try:
        if args.stop:
            stopped = Server(folder, args.port).stop()
            print("The server has ended." if stopped else "No server of this demo is running.")
        else:
            run(folder, args.port, args.question)
    except (ServerError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
