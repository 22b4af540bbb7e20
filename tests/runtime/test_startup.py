"""The start-up timeline: phases without gaps, and a front that hears of them."""

from __future__ import annotations

import time

from minserve.runtime import startup
from minserve.runtime.startup import Timeline, process_age


def test_phases_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr(startup, "process_age", lambda: 2.0)
    told = []
    before = time.monotonic()
    timeline = Timeline(told.append, "import")
    after = time.monotonic()
    timeline.begin("load")
    time.sleep(0.02)
    timeline.begin("kv cache")
    end = time.monotonic()
    seconds = timeline.finish()
    assert list(seconds) == ["import", "load", "kv cache"]
    assert seconds["import"] >= 2.0
    assert seconds["load"] >= 0.02
    assert 2.0 + end - after <= sum(seconds.values()) + 1e-6
    assert sum(seconds.values()) - 1e-6 <= 2.0 + time.monotonic() - before
    assert [message.phase for message in told] == ["load", "kv cache"]


def test_progress_is_told_but_not_too_often():
    told = []
    timeline = Timeline(told.append, "import")
    timeline.begin("load")
    for step in range(1000):
        timeline.progress(step / 999)
    assert told[0].fraction == 0.0
    assert told[-1].fraction == 1.0
    assert len(told) < 10
    assert {message.phase for message in told} == {"load"}


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    timeline = Timeline(lambda _: None, "import")
    timeline.begin("load")
    timeline.progress(1.0, "1.0 of 1.0 GB, 2.50 GB/s")
    seconds = timeline.finish()
    timeline.stop()
    shown = capsys.readouterr().err
    assert "load" in shown
    assert "2.50 GB/s" in shown
    assert list(seconds) == ["import", "load"]


def test_the_age_of_this_process_grows():
    age = process_age()
    time.sleep(0.05)
    assert 0 < age < process_age()
