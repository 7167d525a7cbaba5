"""The progress bar of long work: how much, how fast, how long still."""

from __future__ import annotations

import io

import pytest

from vllm_ext.quantization import progress
from vllm_ext.quantization.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch):
    """The time, set by the test."""
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def test_a_line_tells_bytes_rate_and_time_left(now):
    """What was there before a resumed run counts as done, and not as speed."""
    bar = Progress("pack", 4_000_000_000, Terminal())
    bar.update(1_000_000_000)
    assert bar.line(1_000_000_000).endswith("0.0 MB/s  0:00 elapsed  ETA --:--")
    now[0] += 10
    line = bar.line(2_000_000_000)
    assert line.startswith("pack [############            ]  50%  2.0/4.0 GB  100.0 MB/s  0:10 elapsed  ETA 0:20")


def test_nothing_is_left_when_all_is_done(now):
    """Also where a resumed run had nothing to do."""
    stream = Terminal()
    bar = Progress("pack", 1000, stream)
    bar.update(1000)
    bar.finish(1000)
    assert "100%  1.0/1.0 kB" in stream.getvalue()
    assert "ETA 0:00" in stream.getvalue()


@pytest.mark.parametrize(("stream", "lines"), [(Terminal(), 50), (io.StringIO(), 1)])
def test_a_log_gets_a_line_now_and_then_and_a_terminal_one_that_moves(now, stream, lines):
    bar = Progress("pack", 1000, stream)
    for done in range(0, 1000, 10):
        bar.update(done)
        now[0] += 0.125
    written = stream.getvalue()
    assert written.count("pack [") == pytest.approx(lines, abs=1)
    assert written.count("\n") == (0 if stream.isatty() else lines)


def test_a_quiet_run_writes_nothing(now):
    stream = Terminal()
    bar = Progress("pack", 1000, stream, enabled=False)
    bar.update(0)
    now[0] += 60
    bar.update(500)
    bar.finish(1000)
    assert stream.getvalue() == ""


def test_clocks_show_hours_when_there_are_some():
    assert [clock(seconds) for seconds in (0, 61, 3599.6, 7325)] == ["0:00", "1:01", "1:00:00", "2:02:05"]
