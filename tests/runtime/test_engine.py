"""The engine's loop over a real socket, with the model that reads its prefix through the pages."""

from __future__ import annotations

import itertools
import json
import random
import socket
import statistics
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from runtime.front_double import FrontDouble
from runtime.prefix_model import PrefixModel, make_runner
from runtime.scripted import VOCAB, expected, make_limits, request
from waiting import PATIENCE

from minserve.messages import AbortRequests, Call, Fatal, FinishRequest, Shutdown, StepOutputs
from minserve.request import FinishReason
from minserve.runtime import engine as engine_module
from minserve.runtime.connection import FrontConnection
from minserve.runtime.controls import Controls
from minserve.runtime.engine import Engine
from minserve.runtime.grammar import Grammars
from minserve.runtime.model_runner import InFlight, ModelRunner
from minserve.runtime.scheduler import Scheduler


def prompt(length, seed=0):
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


class Running:
    """An engine in a thread, and the front's end of its socket."""

    def __init__(self, **limits):
        ours, theirs = socket.socketpair()
        self.front = FrontDouble(ours)
        self.limits = make_limits(**limits)
        self.model = PrefixModel()
        self.scheduler = Scheduler(self.limits)
        runner = make_runner(self.limits, self.model)
        self.connection = FrontConnection(theirs)
        grammars = Grammars(VOCAB)
        controls = Controls(self.scheduler, {"fixed": 1}, torch.device("cpu"), grammars)
        self.engine = Engine(self.connection, self.scheduler, runner, controls, grammars)
        self.raised = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.engine.run()
        except Exception as error:
            self.raised = error
        finally:
            self.connection.close()

    def check(self, *requests):
        self.front.finish(*(asked.id for asked in requests))
        for asked in requests:
            tokens, reason = expected(asked, self.limits.max_model_len)
            assert self.front.tokens(asked.id) == tokens
            assert self.front.reason(asked.id) is reason

    def hold_at(self, forward):
        """The loop will stand still in that forward (counted from now) until `self.model.go_on` is set."""
        self.model.held_at = self.model.forwards + forward

    def stop(self):
        self.model.go_on.set()
        self.front.connection.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def start():
    running = []

    def make(**limits):
        running.append(Running(**limits))
        return running[-1]

    yield make
    for one in running:
        one.stop()


def test_many_requests_at_once_each_as_if_alone(start):
    running = start(num_pages=40, max_num_seqs=6)
    requests = [request(i, prompt(2 + 2 * i, i % 5), 3 + i) for i in range(20)]
    for asked in requests:
        running.front.ask(asked)
    running.check(*requests)
    running.front.rest()
    first = running.front.outputs[3][0]
    assert first.queue_seconds is not None
    assert first.queue_seconds >= 0
    assert all(output.queue_seconds is None for output in running.front.outputs[3][1:])


def test_a_refused_request_is_answered_at_once_and_alone(start):
    running = start()
    good = request(1, prompt(5), 4)
    running.front.ask(good, request(2, [], 4), request(3, [VOCAB], 4), request(4, prompt(64), 4))
    running.check(good)
    running.front.finish(2, 3, 4)
    assert [running.front.reason(i) for i in (2, 3, 4)] == [FinishReason.ERROR] * 3


def test_an_idle_engine_speaks_every_second_and_computes_nothing(start):
    running = start()
    running.front.wait(lambda: len(running.front.messages) >= 6)
    gaps = [b - a for a, b in itertools.pairwise(running.front.heard_at)]
    assert 0.2 < statistics.median(gaps) < 1.0  # it sleeps in between; a machine that stands still spoils one or two gaps
    assert running.model.forwards == 0


def test_an_idle_engine_does_not_spin(start, monkeypatch):
    calls = []
    receive = FrontConnection.receive
    monkeypatch.setattr(FrontConnection, "receive", lambda self, timeout: (calls.append(timeout), receive(self, timeout))[1])
    began = time.monotonic()
    running = start()
    running.front.wait(lambda: len(running.front.messages) >= 3)
    assert len(calls) <= 2 + (time.monotonic() - began) / 0.25
    assert min(calls) > 0.2


def test_an_idle_engine_wakes_at_once(start):
    running = start()
    waits = []
    for index in range(1, 6):
        running.front.rest()
        began = time.monotonic()
        running.front.ask(request(index, prompt(3, index), 1))
        running.front.finish(index)
        waits.append(time.monotonic() - began)
    assert min(waits) < 0.25  # the heartbeat alone would take twice that


def test_what_comes_while_a_step_runs_is_in_the_next(monkeypatch):
    """Also after the engine told of the step before: the next is not made at once, where the device works by itself."""
    seconds = 0.4
    steps = []
    launch, result = ModelRunner.launch, InFlight.result

    def noted_launch(runner, step, **options):
        steps.append(step)
        return launch(runner, step, **options)

    def slow_result(in_flight):
        time.sleep(seconds)
        return msgspec.structs.replace(result(in_flight), seconds=seconds)

    monkeypatch.setattr(ModelRunner, "launch", noted_launch)
    monkeypatch.setattr(ModelRunner, "runs_behind_host", True)
    monkeypatch.setattr(InFlight, "result", slow_result)
    running = Running()
    try:
        first, asked = request(1, prompt(3), 6), request(2, prompt(4), 1)
        running.front.ask(first)
        running.front.wait(lambda: len(running.front.tokens(1)) == 3)
        time.sleep(seconds / 8)
        running.front.ask(asked)
        running.check(first, asked)
        carriers = [number for number, step in enumerate(steps, 1) if any(row.request_id == 2 for row in step.rows)]
        assert carriers == [5]  # the third step has told its token, and the fourth runs
    finally:
        running.stop()


def test_a_step_without_output_speaks_too(start):
    running = start(chunked_prefill_size=1, max_num_seqs=1)
    asked = request(1, prompt(40), 2)
    running.front.ask(asked)
    running.check(asked)
    steps = [m for m in running.front.messages if isinstance(m, StepOutputs) and not m.outputs and m.stats.num_running]
    assert len(steps) >= 39


def test_a_stuck_loop_is_silent(start):
    """A heartbeat from another thread would hide this."""
    running = start()
    running.hold_at(1)
    running.front.ask(request(1, prompt(3), 1))
    assert running.model.held.wait(PATIENCE)
    while not running.front.silent_for(0.3):
        pass  # what was said before
    assert running.front.silent_for(1.5)
    running.model.go_on.set()
    running.front.finish(1)


@pytest.mark.parametrize("after", [0, 1, 3, 9, 12])
def test_an_abort_in_a_long_prompt_leaves_no_page_behind(start, after):
    running = start(chunked_prefill_size=4)
    running.front.rest()
    running.hold_at(1 + after)
    running.front.ask(request(1, prompt(40), 20))
    assert running.model.held.wait(PATIENCE)
    running.front.send(AbortRequests([1]))
    running.model.go_on.set()
    running.front.rest()
    assert running.front.reason(1) is None
    after_abort = request(2, prompt(40), 5)
    running.front.ask(after_abort)
    running.check(after_abort)


def test_many_aborts_and_then_one_request(start):
    running = start(num_pages=64, max_num_seqs=8)
    for index in range(100):
        running.front.ask(request(index, prompt(20, index), 40))
        if index % 3 == 0:
            running.front.wait(lambda: bool(running.front.messages))
        running.front.send(AbortRequests([index]))
    running.front.rest()
    last = request(1000, prompt(11), 6)
    running.front.ask(last)
    running.check(last)
    running.front.rest()


def test_the_front_may_finish_a_request(start):
    running = start()
    running.hold_at(7)
    running.front.ask(request(1, prompt(5), 50))
    running.front.wait(lambda: len(running.front.tokens(1)) >= 4)
    running.front.send(FinishRequest(1, FinishReason.STOP, 4))
    running.model.go_on.set()
    running.front.rest()
    assert running.front.reason(1) is None
    assert len(running.front.tokens(1)) < 50
    running.front.send(FinishRequest(1, FinishReason.STOP, 4), AbortRequests([1]))
    again = request(2, prompt(5), 3)
    running.front.ask(again)
    running.check(again)


def test_two_long_requests_and_memory_for_one_and_a_half(start):
    for caching in (False, True):
        running = start(num_pages=24, enable_prefix_caching=caching)
        requests = [request(1, prompt(5, 1), 59), request(2, prompt(6, 2), 58)]
        running.front.ask(*requests)
        running.check(*requests)
        running.front.rest()
        assert running.front.stats.num_preemptions >= 1


def test_shutdown_ends_the_loop_even_with_work(start):
    running = start()
    running.front.ask(request(1, prompt(5), 50))
    running.front.send(Shutdown())
    running.front.wait_for_close()
    running.thread.join(PATIENCE)
    assert running.raised is None


def test_the_end_of_the_front_ends_the_loop(start):
    running = start()
    running.stop()
    assert type(running.raised).__name__ == "FrontGone"


def test_flush_and_server_info(start):
    running = start()
    asked = request(1, prompt(9), 2)
    running.front.ask(asked)
    running.check(asked)
    running.front.rest()
    info = running.front.call("server_info").result
    assert info["fixed"] == 1
    assert info["pages"] == {"total": 32, "used": 0, "cached": 2}
    assert info["stats"]["steps"] == running.front.stats.steps
    assert info["stats"]["mixed_steps"] == 1
    json.dumps(info)
    assert running.front.call("flush_cache").result == {"flushed_pages": 2, "used_pages": 0}
    assert running.front.call("flush_cache").result == {"flushed_pages": 0, "used_pages": 0}


def test_an_unknown_call_is_refused_and_the_engine_lives(start):
    running = start()
    assert "no call" in running.front.call("explode").error
    asked = request(1, prompt(3), 2)
    running.front.ask(asked)
    running.check(asked)


def test_a_profile_is_written_where_it_was_asked_for(start, tmp_path):
    running = start()
    assert "no profile" in running.front.call("stop_profile").error
    assert "must be a path" in running.front.call("start_profile", folder=7).error
    path = running.front.call("start_profile", folder=str(tmp_path / "new")).result["path"]
    assert "already" in running.front.call("start_profile").error
    assert running.front.call("server_info").result["profiling"]
    asked = request(1, prompt(3), 3)
    running.front.ask(asked)
    running.check(asked)
    assert running.front.call("stop_profile").result["path"] == path
    trace = json.loads(Path(path).read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_a_failing_forward_is_the_engines_end_with_a_last_word(monkeypatch):
    ours, theirs = socket.socketpair()
    front = FrontDouble(ours)
    limits = make_limits()
    model = PrefixModel()

    def fail(*_):
        raise RuntimeError("the device is on fire")

    model.forward = fail
    scheduler = Scheduler(limits)
    connection = FrontConnection(theirs)
    grammars = Grammars(VOCAB)
    controls = Controls(scheduler, {}, torch.device("cpu"), grammars)
    loop = Engine(connection, scheduler, make_runner(limits, model), controls, grammars)
    codes = []
    monkeypatch.setattr(engine_module, "start", lambda *_: loop)
    thread = threading.Thread(target=lambda: codes.append(engine_module.serve(connection)))
    thread.start()
    front.ask(request(1, prompt(3), 2))
    front.wait(lambda: any(isinstance(message, Fatal) for message in front.messages))
    thread.join(PATIENCE)
    connection.close()
    ours.close()
    assert codes == [1]
    assert "on fire" in front.messages[-1].message
    assert front.messages[-1].exit_code == 1


def test_calls_are_answered_between_steps(start):
    running = start()
    running.hold_at(5)
    asked = request(1, prompt(5), 40)
    running.front.ask(asked)
    running.front.wait(lambda: len(running.front.tokens(1)) >= 2)
    running.front.send(Call(9, "server_info"))
    running.model.go_on.set()
    running.check(asked)
    replies = [m for m in running.front.messages if getattr(m, "call_id", None) == 9]
    assert replies[0].result["stats"]["num_running"] == 1
