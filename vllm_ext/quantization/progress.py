"""A progress bar for long work: bytes, rate and time left, on one line of a terminal or now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR = 24
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


class Progress:
    """Shows how many of `total` bytes are done. `update` may be called as often as one likes."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self.label = label
        self.total = max(total, 1)
        self.stream = stream or sys.stderr
        self.enabled = enabled
        self._terminal = self.stream.isatty()
        self._start = time.monotonic()
        self._shown = self._start
        self._first: int | None = None
        self._most = 0

    def due(self) -> bool:
        """Whether `update` would show anything: asked first where counting the bytes costs time."""
        if self._first is None:
            return True
        return self.enabled and time.monotonic() - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS)

    def update(self, done: int) -> None:
        """Show `done` bytes, unless the last line is too young. The first call says what was done before this run."""
        if self._first is None:
            self._first = done
        elif self.due():
            self._shown = time.monotonic()
            self._show(done)

    def finish(self, done: int) -> None:
        """Show the last line."""
        if self._first is None:
            self._first = 0
        if self.enabled:
            self._show(done)
            if self._terminal:
                print(file=self.stream)

    def line(self, done: int) -> str:
        """The line for `done` bytes."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = max(done - (self._first or 0), 0) / elapsed
        left = (self.total - done) / rate if rate > 0 else 0.0 if done >= self.total else float("inf")
        share = min(done / self.total, 1.0)
        bar = "#" * round(share * BAR)
        eta = "--:--" if left == float("inf") else clock(left)
        unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if self.total >= u), (1e3, "kB"))
        return (
            f"{self.label} [{bar:<{BAR}}] {share:4.0%}  {done / unit:.1f}/{self.total / unit:.1f} {name}  "
            f"{rate / 1e6:.1f} MB/s  {clock(elapsed)} elapsed  ETA {eta}"
        )

    def _show(self, done: int) -> None:
        # Counted in several processes, a file that is just finished may be missing from one count.
        self._most = max(self._most, done)
        start, end = ("\r", "\x1b[K") if self._terminal else ("", "\n")
        self.stream.write(f"{start}{self.line(self._most)}{end}")
        self.stream.flush()


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
