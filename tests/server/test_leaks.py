"""Bursts, cut streams, departures and readers that stop, in rounds: the same number of files after each, no page, no memory."""

from __future__ import annotations

from tools import leak_rounds
from tools.launched import growth, serving
from tools.leak_rounds import RSS_ALLOWANCE, Sizes


def test_rounds_of_bad_treatment_leave_nothing_behind() -> None:
    leak_rounds.allow_many_files()
    sizes = Sizes(burst=150, cut_streams=60, departures=60, slow_readers=5)
    readings = []
    with serving(["--mock-engine", "200", "--max-num-seqs", "256", "--max-queued-requests", "100"]) as server:
        for _ in range(5):
            statuses = leak_rounds.round_of(server.port, sizes)
            assert set(statuses) <= {"200", "429"}
            assert sum(statuses.values()) == sizes.burst
            readings.append(server.settle())
        aborted = server.metric("aborts_total")
    assert growth(readings, RSS_ALLOWANCE) == []
    assert aborted >= 5 * sizes.cut_streams, "each cut stream was an abort, each normal end was none"
    assert aborted <= 5 * (sizes.cut_streams + sizes.departures + sizes.slow_readers)
