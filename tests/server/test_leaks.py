"""Bursts, cut streams, departures and readers that stop, in rounds: the same number of files after each, no page, no memory."""

from __future__ import annotations

from tools import leak_rounds
from tools.leak_rounds import Reading, Sizes


def test_rounds_of_bad_treatment_leave_nothing_behind() -> None:
    leak_rounds.allow_many_files()
    sizes = Sizes(burst=150, cut_streams=60, departures=60, slow_readers=5)
    readings = []
    with leak_rounds.serving(["--mock-engine", "200", "--max-num-seqs", "256", "--max-queued-requests", "100"]) as server:
        for _ in range(5):
            statuses = leak_rounds.round_of(server.port, sizes)
            assert set(statuses) <= {"200", "429"}
            assert sum(statuses.values()) == sizes.burst
            readings.append(server.settle())
        aborted = server.metric("aborts_total")
    assert leak_rounds.faults(readings) == []
    assert aborted >= 5 * sizes.cut_streams, "each cut stream was an abort, each normal end was none"
    assert aborted <= 5 * (sizes.cut_streams + sizes.departures + sizes.slow_readers)


def test_what_grows_is_found() -> None:
    calm = Reading(files=20, megabytes=100.0, engine_megabytes=50.0, pages=0.0, running=0.0)
    assert leak_rounds.faults([calm] * 5) == []
    assert leak_rounds.faults([calm, calm, calm, calm._replace(files=21)]) == ["open files grew from 20 to 21"]
    assert leak_rounds.faults([calm, calm, calm, calm._replace(megabytes=106.0)]) == [
        "memory of the front grew from 100 to 106 MB"
    ]
    grown = calm._replace(engine_megabytes=60.0)
    assert leak_rounds.faults([calm, calm, calm, grown]) == ["memory of the engine grew from 50 to 60 MB"]
    assert "requests still run" in leak_rounds.faults([calm._replace(running=1.0), calm, calm])[0]
