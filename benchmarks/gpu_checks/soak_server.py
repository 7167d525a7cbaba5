"""`vllm serve` as `serve_soak` uses an engine: the same requests, over HTTP, against a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server with both of the plugin's flags, ready when made. Raises RuntimeError, with the end of its log."""

    def __init__(self, model: str, flags: list[str], log: Path, patience: float = 240) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "soak"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *flags]
        with log.open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},  # for memory on the device
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + patience
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > end:
                self.shutdown()
                raise RuntimeError(f"serve_soak: the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    async def generate(self, prompt: dict[str, list[int]], sampling: Any, name: str) -> AsyncIterator[Any]:
        """What `AsyncLLM.generate` gives, as far as the check reads it. Closing it early closes the connection."""
        import aiohttp
        from vllm.sampling_params import RequestOutputKind

        streamed = sampling.output_kind == RequestOutputKind.DELTA
        body = {
            "model": "soak",
            "prompt": prompt["prompt_token_ids"],
            "n": sampling.n,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "logprobs": sampling.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": streamed,
        }
        limit = aiohttp.ClientTimeout(total=300)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(f"{self.url}/v1/completions", json=body) as reply,
        ):
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {(await reply.text())[:500]}")
            if not streamed:
                yield _output(await reply.json())
                return
            async for line in reply.content:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    chunk = json.loads(text)
                    if "choices" not in chunk:
                        raise RuntimeError(f"{text[:500]}")
                    yield _output(chunk)

    async def collective_rpc(self, method: str) -> list[float]:
        """Call a method of each worker."""
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/collective_rpc", json={"method": method}) as reply,
        ):
            found: list[float] = [float(one) for one in (await reply.json())["results"]]
            return found

    def shutdown(self) -> None:
        """End the server, as Ctrl-C does; kill what is left of it."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            print("serve_soak: the server did not end in 30 s and was killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _output(document: dict[str, Any]) -> Any:
    """A reply's choices as vLLM's `RequestOutput` names them."""
    return types.SimpleNamespace(
        outputs=[
            types.SimpleNamespace(
                index=choice["index"],
                token_ids=choice.get("token_ids") or [],
                finish_reason=choice.get("finish_reason"),
                logprobs=_log_probs(choice.get("logprobs")),
            )
            for choice in document["choices"]
        ]
    )


def _log_probs(given: dict[str, Any] | None) -> list[dict[int, Any]] | None:
    """{token id: its log-probability} at each place."""
    if not given or not given.get("top_logprobs"):
        return None
    places = []
    for token, mine, top in zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True):
        values = {**(top or {}), token: mine}
        ids = {int(key.removeprefix("token_id:")): value for key, value in values.items()}
        places.append({key: types.SimpleNamespace(logprob=value) for key, value in ids.items()})
    return places
