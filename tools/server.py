"""A `vllm serve` process that outlives the script that started it, found again through a state file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any

from progress import Heartbeat

HOST = "127.0.0.1"
READY_TIMEOUT = 600.0  # seconds
STOP_TIMEOUT = 20.0

# Never through a proxy: the server is on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """The server cannot be started, reached or used, with the reason."""


class Server:
    """One server, its log and its state in `folder`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.log = folder / "server.log"
        self._state = folder / "server.json"

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{HOST}:{self.port}"

    def state(self) -> dict[str, Any] | None:
        """pid, born and command of the server if it still runs, else None."""
        state = self._recorded()
        return state if state is not None and born(state["pid"]) == state["born"] else None

    def _recorded(self) -> dict[str, Any] | None:
        """What the last start wrote, whether that server still runs or not."""
        try:
            state: dict[str, Any] = json.loads(self._state.read_text(encoding="utf-8"))
            return state if {"pid", "born", "command"} <= set(state) else None
        except (OSError, ValueError, TypeError):
            return None

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start `command` in its own session, output to the log. Raises ServerError when the port is taken."""
        if not port_is_free(self.port):
            raise ServerError(
                f"port {self.port} is taken by another program; choose one: make demo PORT={self.port + 1}"
            )
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        state = {"pid": process.pid, "born": born(process.pid), "boot": boot_id(), "command": command}
        partial = self._state.with_suffix(".partial")
        partial.write_text(json.dumps(state) + "\n", encoding="utf-8")
        partial.replace(self._state)

    def wait_until_ready(self, timeout: float = READY_TIMEOUT) -> None:
        """Wait for the server to answer, showing its newest log line. Raises ServerError with the log's tail."""
        heartbeat = Heartbeat()
        try:
            while not self.ready():
                if self.state() is None:
                    raise ServerError(f"the server ended before it was ready. {self.log} ends with:\n{self.tail(25)}")
                if heartbeat.seconds > timeout:
                    raise ServerError(f"no answer after {timeout:.0f} s. {self.log} ends with:\n{self.tail(25)}")
                heartbeat.show(self.newest())
                time.sleep(0.5)
        finally:
            heartbeat.end()

    def ready(self) -> bool:
        """Whether the server answers."""
        try:
            with _opener.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def newest(self) -> str:
        """The newest message in the log, without its time and place; Python's own warnings are passed over."""
        messages = [line.partition("] ")[2] for line in self.tail(20).splitlines()]
        return next((message for message in reversed(messages) if message), "")

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        try:
            with self.log.open(encoding="utf-8", errors="replace") as log:
                return "".join(deque((line for line in log if line.strip()), lines)).rstrip()
        except OSError:
            return ""

    def post(self, path: str, body: dict[str, Any], timeout: float = 600.0) -> Any:
        """POST `body` as JSON and return the open response. Raises ServerError with the server's own message."""
        request = urllib.request.Request(
            f"{self.url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            return _opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            reason = error.read().decode("utf-8", "replace")
            raise ServerError(f"the server refused ({error.code}): {reason}") from None
        except OSError as error:
            raise ServerError(
                f"no connection to {self.url} ({error}); {self.log} ends with:\n{self.tail(10)}"
            ) from None

    def stop(self) -> bool:
        """End the server and everything it started; False when none of it runs.

        A server that was killed outright leaves its engine behind, in the process group that the server led.
        """
        state = self._recorded()
        if state is None or not (self.state() or is_orphaned_group(state)):
            self._state.unlink(missing_ok=True)
            return False
        pid = state["pid"]
        signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        while (self.state() or is_orphaned_group(state)) and time.monotonic() < deadline:
            time.sleep(0.2)
        signal_group(pid, signal.SIGKILL)
        self._state.unlink(missing_ok=True)
        return True


def born(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot, None if it is gone. Tells a reused pid apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    """Tells one run of the machine from another; process numbers start anew with each."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def is_orphaned_group(state: dict[str, Any]) -> bool:
    """Whether the group that a server led outlives it. While it does, the kernel gives its number to nobody else."""
    if state.get("boot") != boot_id() or born(state["pid"]) is not None:
        return False
    try:
        os.killpg(state["pid"], 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the process group that `pid` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
