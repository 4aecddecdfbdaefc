"""How far a call has come: in a log, in a terminal and in a notebook."""

from __future__ import annotations

import sys

import pytest

from chatspace_lab.engine.observer import Progress
from chatspace_lab.session import bar as bars
from chatspace_lab.session import line as lines
from chatspace_lab.session.bar import Bar


class Clock:
    """Stands still until it is moved."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bars, "time", clock)
    monkeypatch.setattr(lines, "time", clock)
    return clock


def work(clock: Clock, seconds: float, *, first_after: float = 0.0) -> None:
    """Tick ten times a second while 256 requests are answered at an even pace."""
    progress = Progress()
    progress.expect(256)
    begun = clock.now
    with Bar("generate", progress) as bar:
        while clock.now - begun < seconds:
            clock.now += 0.1
            progress.tokens += 5
            past = clock.now - begun
            progress.done = 0 if past < first_after else int(256 * past / seconds)
            bar.tick()
        progress.done = 256


def test_a_log_gets_a_line_every_ten_seconds_and_the_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, 35.0, first_after=12.0)
    shown = capsys.readouterr()
    told = shown.err.splitlines()
    assert shown.out == ""
    assert len(told) == 4, told
    assert "256 requests under way · " in told[0]
    assert not any(" 0 of 256" in line or "\r" in line for line in told)
    assert " 256 of 256 requests · " in told[-1]


def test_a_log_hears_nothing_of_short_work(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, 8.0)
    assert capsys.readouterr().err == ""


def test_a_single_long_request_is_seen_to_go_on(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress()
    with Bar("ask", progress) as bar:
        bar.tick()  # the request has not begun
        progress.expect(1)
        for tokens in range(1, 101):
            clock.now += 0.1
            progress.tokens = tokens
            bar.tick()
            if clock.now < 104.9:
                assert capsys.readouterr().err == ""
    assert "ask · 96 tokens · 10 s" in capsys.readouterr().err


def test_a_terminal_is_as_it_was_before(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    work(clock, 8.0)
    shown = capsys.readouterr().err
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[2K")
    assert 8 < shown.count("generate ") < 40
