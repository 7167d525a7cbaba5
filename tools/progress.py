"""A line that shows that long work lives: over itself on a terminal, every few seconds elsewhere."""

from __future__ import annotations

import sys
import time

INTERVAL = 10.0  # seconds between lines where the output is no terminal
WIDTH = 110


class Heartbeat:
    """Shows the seconds passed and the newest thing that happened."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = self._start
        self._terminal = sys.stdout.isatty()
        self._written = False

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self._start

    def show(self, newest: str) -> None:
        """Show progress if it is time to."""
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else INTERVAL):
            return
        self._shown = now
        text = f"    {self.seconds:4.0f} s  {newest}"[:WIDTH].rstrip()
        print(f"\r{text:<{WIDTH}}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)
        self._written = True

    def end(self) -> None:
        """Leave a terminal on a fresh line."""
        if self._terminal and self._written:
            print(f"\r{'':<{WIDTH}}\r", end="", flush=True)
